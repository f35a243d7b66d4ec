"""A stand-in for the module pynvml that answers from tests/recorded/<machine>/nvml.json.

An answer is the value itself, or an object that says how to make it: {"error": code},
{"struct": {…}}, {"structs": […]}, {"by": {"1,0": …}} by the arguments after the handle, {"bytes":
hex}, {"missing": true} for a function that this nvidia-ml-py lacks, {"mismatch": true} for one
that this driver lacks. A question that no recording answers is an error of the test.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

RECORDED = Path(__file__).parent / "recorded"
_NOT_FOUND = 6


class FakeNvml:
    """pynvml's face, over one recorded machine; `shut` counts how often the session was ended."""

    NVMLError = pynvml.NVMLError
    NVMLLibraryMismatchError = pynvml.NVMLLibraryMismatchError

    def __init__(self, machine: str) -> None:
        """Take the place of pynvml on a recorded machine."""
        self.recording = json.loads((RECORDED / machine / "nvml.json").read_text())
        self.asked: list[str] = []
        self.shut = 0

    @property
    def devices(self) -> list[dict[str, Any]]:
        devices: list[dict[str, Any]] = self.recording["devices"]
        return devices

    def nvmlInit(self) -> None:  # noqa: N802 - the name in pynvml
        if self.recording.get("init"):
            raise pynvml.NVMLError(self.recording["init"])

    def nvmlShutdown(self) -> None:  # noqa: N802 - the name in pynvml
        self.shut += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - the name in pynvml
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802 - as above
        return self._handle(self.devices[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:  # noqa: N802 - as above
        slices = [one for device in self.devices for one in device.get("slices", ()) if one]
        for one in (*self.devices, *slices):
            if one["calls"]["nvmlDeviceGetUUID"] == uuid:
                return self._handle(one)
        raise pynvml.NVMLError(_NOT_FOUND)

    def nvmlDeviceGetMigDeviceHandleByIndex(  # noqa: N802 - as above
        self, board: dict[str, Any], index: int
    ) -> dict[str, Any]:
        slices = board.get("slices", [])
        if index >= len(slices) or slices[index] is None:
            raise pynvml.NVMLError(_NOT_FOUND)
        one: dict[str, Any] = slices[index]
        return one

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(  # noqa: N802 - as above
        self, one: dict[str, Any]
    ) -> dict[str, Any]:
        return next(device for device in self.devices if one in device.get("slices", ()))

    def nvmlDeviceGetMemoryInfo(  # noqa: N802 - as above
        self, handle: dict[str, Any], version: int | None = None
    ) -> object:
        assert version in (None, pynvml.nvmlMemory_v2)
        return self._answer(handle, f"nvmlDeviceGetMemoryInfo{'_v2' if version else ''}", ())

    def nvmlDeviceGetGpuFabricInfoV(self, handle: dict[str, Any], info: Any) -> int:  # noqa: N802 - as above
        told = self._answer(handle, "nvmlDeviceGetGpuFabricInfoV", ())
        state, status = told if isinstance(told, list) else (told, 0)
        info._obj.state, info._obj.status = state, status  # noqa: SLF001 - ctypes.byref
        return 0

    def nvmlDeviceGetP2PStatus(  # noqa: N802 - as above
        self, handle: dict[str, Any], _other: dict[str, Any], index: int
    ) -> object:
        return self._answer(handle, "nvmlDeviceGetP2PStatus", (index,))

    def nvmlDeviceGetTopologyCommonAncestor(  # noqa: N802 - as above
        self, handle: dict[str, Any], _other: dict[str, Any]
    ) -> object:
        return self._answer(handle, "nvmlDeviceGetTopologyCommonAncestor", ())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Answer every other question from the recording."""
        if not name.startswith("nvml"):
            raise AttributeError(name)
        if name.startswith("nvmlSystem"):
            if self.recording["calls"].get(name) == {"missing": True}:
                raise AttributeError(name)
            return lambda: self._answer(self.recording, name, ())
        if any(device["calls"].get(name) == {"missing": True} for device in self.devices):
            raise AttributeError(name)
        return lambda handle, *arguments: self._answer(handle, name, arguments)

    def _handle(self, device: dict[str, Any]) -> dict[str, Any]:
        if "handle" in device:
            raise pynvml.NVMLError(device["handle"]["error"])
        return device

    def _answer(self, handle: dict[str, Any], name: str, arguments: tuple[int, ...]) -> object:
        self.asked.append(name)
        assert name in handle["calls"], f"the recording does not answer {name}"
        return make(handle["calls"][name], arguments)


def make(told: object, arguments: tuple[int, ...] = ()) -> object:
    if not isinstance(told, dict):
        return told
    kind, value = next(iter(told.items()))
    if kind == "error":
        raise pynvml.NVMLError(value)
    if kind == "mismatch":
        raise pynvml.NVMLLibraryMismatchError
    if kind == "by":
        return make(value[",".join(map(str, arguments))], arguments)
    if kind == "struct":
        return SimpleNamespace(**value)
    if kind == "structs":
        return [SimpleNamespace(**item) for item in value]
    assert kind == "bytes"
    return bytes.fromhex(value)
