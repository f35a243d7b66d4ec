"""NVML: one session, one choke point for every question, and what a refusal means.

A field that a device does not have is knowledge (`Known` with `absent`); one that cannot be read
for lack of permission, library or device is `Unknown` with the reason. Neither is ever 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cift_probe.evidence import Evidence, Known, Unknown, absent

# Return codes of NVML (nvml.h, nvmlReturn_t) and what they mean for a field.
_NOT_SUPPORTED = 3
_REASONS = {
    1: "NVML was not initialised",
    4: "no permission; on a MIG slice the parent's fields need root",
    6: "NVML does not know this device",
    9: "the NVIDIA driver is not loaded",
    12: "the NVML library (libnvidia-ml.so.1) was not found",
    13: "this driver's NVML lacks the function",
    15: "the GPU is lost: it has fallen off the bus or is inaccessible",
    17: "the GPU needs a reset",
    18: "library and driver have different versions; reboot after a driver update",
    999: "NVML reports an unknown error",
}
_NO_DRIVER = (9, 12)
_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers


class Nvml:
    """An open NVML session. `problem` is the reason why there is none, else empty."""

    def __init__(self, library: Any = None) -> None:
        """Open NVML; `library` stands in for the module pynvml."""
        if library is None:
            import pynvml as library
        self.library = library
        self.problem = ""
        self.problem_code = 0
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            self.problem_code = _code(error)
            self.problem = reason_of(error)

    def close(self) -> None:
        """End the session."""
        if not self.problem:
            self.library.nvmlShutdown()

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return NVML's raw answer; raises the library's NVMLError."""
        return getattr(self.library, function)(*arguments)

    def evidence(
        self,
        function: str,
        *arguments: Any,
        unit: str = "",
        read: Callable[[Any], Any] = lambda value: value,
    ) -> Evidence:
        """Return one answer as evidence, `read` turning NVML's value into ours."""
        source = f"NVML {function}"
        if self.problem:
            return Unknown(self.problem, source)
        try:
            value = read(self.ask(function, *arguments))
        except self.library.NVMLError as error:
            if _code(error) == _NOT_SUPPORTED:
                return absent("not supported by this device or its driver", source)
            return Unknown(reason_of(error), source)
        except (AttributeError, ValueError, TypeError) as error:
            # an old nvidia-ml-py without the function, or an answer of another shape
            return Unknown(f"nvidia-ml-py: {error}", source)
        return Known(value.decode() if isinstance(value, bytes) else value, unit, source)


@contextmanager
def open_nvml(library: Any = None) -> Iterator[Nvml]:
    """Open an NVML session for a block."""
    nvml = Nvml(library)
    try:
        yield nvml
    finally:
        nvml.close()


def reason_of(error: Any) -> str:
    """Return what an NVML error means, in words."""
    return _REASONS.get(_code(error), f"NVML: {error}")


def count_devices(nvml: Nvml, root: Path = Path("/")) -> Evidence:
    """Return the number of GPUs that NVML reports.

    Without a driver the bus is asked: no NVIDIA device there means 0; one there means that the
    driver is missing for it, and how many GPUs there are is Unknown.
    """
    if not nvml.problem:
        return nvml.evidence("nvmlDeviceGetCount", unit="1", read=int)
    if nvml.problem_code in _NO_DRIVER:
        on_bus = read_bus(root)
        if on_bus == 0:
            note = "no NVIDIA device on the PCI bus"
            return Known(0, "1", f"{root}sys/bus/pci/devices", note=note)
        if on_bus:
            reason = f"{on_bus} NVIDIA device(s) on the PCI bus, but {nvml.problem}"
            return Unknown(reason, "NVML nvmlInit")
    return Unknown(nvml.problem, "NVML nvmlInit")


def read_bus(root: Path = Path("/")) -> int | None:
    """Return the number of NVIDIA display devices on the PCI bus, or None where it is not told.

    WSL shows no PCI devices of the host, so nothing follows from their absence there.
    """
    if (root / "dev/dxg").exists():
        return None
    devices = root / "sys/bus/pci/devices"
    try:
        folders = list(devices.iterdir())
    except OSError:
        return None
    found = 0
    for folder in folders:
        try:
            vendor = (folder / "vendor").read_text().strip()
            kind = (folder / "class").read_text().strip()
        except OSError:
            continue
        found += vendor == _NVIDIA_VENDOR and kind.startswith(_DISPLAY_CLASSES)
    return found


def read_visible(nvml: Nvml, selection: str | None = None) -> list[str]:
    """Return the UUIDs of the devices that CUDA_VISIBLE_DEVICES shows, in its order.

    Integers count in PCI bus order (NVML's); the bench sets CUDA_DEVICE_ORDER so that CUDA agrees.
    As CUDA does, the list ends at the first entry that names no device.
    """
    if nvml.problem:
        return []
    uuids = []
    for index in range(int(nvml.ask("nvmlDeviceGetCount"))):
        try:
            handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
            uuids.append(_text(nvml.ask("nvmlDeviceGetUUID", handle)))
        except nvml.library.NVMLError:
            uuids.append("")  # a lost device keeps its place in the numbering
    text = os.environ.get("CUDA_VISIBLE_DEVICES") if selection is None else selection
    if text is None:
        return [uuid for uuid in uuids if uuid]
    return _selected(uuids, text)


def _selected(uuids: list[str], text: str) -> list[str]:
    chosen: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry.startswith("MIG-"):
            match = [entry]
        elif entry.isdecimal():
            match = uuids[int(entry) : int(entry) + 1]
        else:
            match = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
        if len(match) != 1 or not match[0] or match[0] in chosen:
            break
        chosen += match
    return chosen


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _code(error: Any) -> int:
    return int(getattr(error, "value", 999))
