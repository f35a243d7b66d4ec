"""NVML: one session, one choke point for every question, and what a refusal means.

A field that a device does not have is knowledge (`Known` with `absent`); one that cannot be read
for lack of permission, library or device is `Unknown` with the reason. Neither is ever 0.
Also which devices this process may see: NVML lists them all, in PCI bus order, and pays no heed
to CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from cift_probe.evidence import Evidence, Known, Unknown, absent

# Return codes of NVML (nvml.h, nvmlReturn_t) and what they mean for a field.
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
_FUNCTION_NOT_FOUND = 13
_UNKNOWN_ERROR = 999
_DOES_NOT_EXIST = (3, 22)  # not supported; a virtual GPU has no ECC
_REASONS = {
    1: "NVML was not initialised",
    4: "no permission; on a MIG slice the parent's fields need root",
    6: "NVML does not know this device",
    9: "the NVIDIA driver is not loaded",
    12: "the NVML library (libnvidia-ml.so.1) was not found",
    13: "this driver's NVML lacks the function",
    15: "the GPU is lost: it has fallen off the bus or is inaccessible",
    16: "the GPU needs a reset",
    17: "the operating system blocked the request, for instance by a device cgroup",
    18: "library and driver have different versions; reboot after a driver update",
    999: "NVML reports an unknown error; a container may have lost its access to the GPU",
}
# NVML's way to write "no value" into an unsigned number (nvml.h, NVML_VALUE_NOT_AVAILABLE)
_NO_VALUE = ((1 << 32) - 1, (1 << 64) - 1)
_MHZ = 1_000_000
# nvml.h, nvmlClocksEventReason*: bit and name
_THROTTLE = {
    0x1: "gpu idle",
    0x2: "applications clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake slowdown",
    0x100: "display clock setting",
}
_SM = 1  # nvmlClockType_t
_GPU = 0  # nvmlTemperatureSensors_t
_ORDER_PROGRAM = Path(__file__).with_name("stack") / "cuda_order.py"
_ORDER_DEADLINE_S = 30.0


class RefusedError(Exception):
    """NVML gave no answer: `code` is nvmlReturn_t."""

    def __init__(self, code: int, reason: str) -> None:
        """Keep code and reason."""
        super().__init__(reason)
        self.code = code


class Nvml:
    """An open NVML session. `problem` is the reason why there is none, else empty."""

    def __init__(self, library: Any = None) -> None:
        """Open NVML; `library` stands in for the module pynvml."""
        self.problem = ""
        self.problem_code = 0
        self.library: Any = library
        if library is None:
            try:
                import pynvml

                self.library = pynvml
            except ImportError:
                self.problem = "nvidia-ml-py, the package that reads NVML, is not installed"
                return
            except Exception as error:  # noqa: BLE001 - another package called pynvml may do anything
                self.problem = f"the module pynvml cannot be imported: {error}"
                return
        try:
            self.ask("nvmlInit")
        except RefusedError as error:
            self.problem, self.problem_code = str(error), error.code

    def close(self) -> None:
        """End the session."""
        if not self.problem:
            with suppress(RefusedError):  # a lost device may refuse even this
                self.ask("nvmlShutdown")

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return NVML's raw answer; raises RefusedError. Every call to the driver passes here."""
        if self.problem:
            raise RefusedError(self.problem_code, self.problem)
        called = getattr(self.library, function, None)
        if called is None:
            raise RefusedError(_FUNCTION_NOT_FOUND, f"nvidia-ml-py is too old: no {function}")
        mismatch = getattr(self.library, "NVMLLibraryMismatchError", self.library.NVMLError)
        try:
            return called(*arguments)
        except self.library.NVMLError as error:
            code = int(getattr(error, "value", _UNKNOWN_ERROR))
            raise RefusedError(code, _REASONS.get(code, f"NVML: {error}")) from error
        except (mismatch, TypeError) as error:
            # an old nvidia-ml-py takes fewer arguments than its successors
            raise RefusedError(_FUNCTION_NOT_FOUND, _REASONS[_FUNCTION_NOT_FOUND]) from error

    def evidence(
        self,
        function: str,
        *arguments: Any,
        unit: str = "",
        read: Callable[[Any], Any] = lambda value: value,
    ) -> Evidence:
        """Return one answer as evidence, `read` turning NVML's value into ours.

        `read` refuses an answer that is none with a ValueError, which makes it Unknown.
        """
        source = f"NVML {function}"
        try:
            answer = self.ask(function, *arguments)
        except RefusedError as error:
            if error.code in _DOES_NOT_EXIST:
                return absent("not supported by this device or its driver", source)
            return Unknown(str(error), source)
        except UnicodeDecodeError as error:  # a text that is none, from nvidia-ml-py's decoding
            return Unknown(f"NVML's answer cannot be read: {error}", source)
        try:
            return Known(read(answer), unit, source)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            return Unknown(f"NVML's answer cannot be read: {error}", source)


@contextmanager
def open_nvml(library: Any = None) -> Iterator[Nvml]:
    """Open an NVML session for a block."""
    nvml = Nvml(library)
    try:
        yield nvml
    finally:
        nvml.close()


def parse_text(answer: Any) -> str:
    """Return a text; raises ValueError when it is empty."""
    text = answer.decode() if isinstance(answer, bytes) else answer
    if not isinstance(text, str) or not text.strip():
        message = f"{answer!r} is no text"
        raise ValueError(message)
    return text.strip()


def parse_number(answer: Any) -> int:
    """Return a number; raises ValueError when it is negative or NVML's "no value"."""
    whole = isinstance(answer, int) and not isinstance(answer, bool)
    if not whole or answer < 0 or answer in _NO_VALUE:
        message = f"{answer!r} stands for no value"
        raise ValueError(message)
    return int(answer)


def parse_watt(answer: Any) -> float:
    """Return W from NVML's mW; raises ValueError."""
    return parse_number(answer) / 1000


def parse_hertz(answer: Any) -> int:
    """Return Hz from NVML's MHz; raises ValueError."""
    return parse_number(answer) * _MHZ


def parse_throttle(mask: Any) -> list[str]:
    """Return the names of the reasons that hold the clocks down; a bit without name is kept."""
    number = parse_number(mask)
    known = [name for bit, name in _THROTTLE.items() if number & bit]
    rest = number & ~sum(_THROTTLE)
    return known + ([f"unnamed reason {rest:#x}"] if rest else [])


def read_throttle(nvml: Nvml, handle: Any) -> Evidence:
    """Return why the clocks are held down; asks drivers before 535 by the function's old name."""
    found = nvml.evidence("nvmlDeviceGetCurrentClocksEventReasons", handle, read=parse_throttle)
    if isinstance(found, Known):
        return found
    former = nvml.evidence("nvmlDeviceGetCurrentClocksThrottleReasons", handle, read=parse_throttle)
    return former if isinstance(former, Known) else found


def read_sample(nvml: Nvml, uuid: str) -> dict[str, Evidence]:
    """Return what a fuse watches on one device: temperature, power, clock, throttling, memory."""
    try:
        handle = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
        board = read_board_handle(nvml, handle, uuid)
    except RefusedError as error:
        keys = ("temperature", "power.draw", "clock.sm", "throttle.reasons", "memory.used")
        return {f"device.{key}": Unknown(str(error), "NVML") for key in keys}
    ask = nvml.evidence
    return {
        "device.temperature": ask(
            "nvmlDeviceGetTemperature", board, _GPU, unit="degC", read=parse_number
        ),
        "device.power.draw": ask("nvmlDeviceGetPowerUsage", board, unit="W", read=parse_watt),
        "device.clock.sm": ask("nvmlDeviceGetClockInfo", board, _SM, unit="Hz", read=parse_hertz),
        "device.throttle.reasons": read_throttle(nvml, board),
        "device.memory.used": ask(
            "nvmlDeviceGetMemoryInfo", handle, unit="B", read=lambda told: parse_number(told.used)
        ),
    }


def read_board_handle(nvml: Nvml, handle: Any, uuid: str) -> Any:
    """Return the handle of the whole board: of a MIG slice its parent's; raises RefusedError."""
    if not uuid.startswith("MIG-"):
        return handle
    return nvml.ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)


class Slice(NamedTuple):
    """One MIG slice: its UUID, and the instances in the form that drivers before 470 named."""

    uuid: str
    instances: str


class Board(NamedTuple):
    """One GPU as NVML lists it; `uuid` is empty and `problem` the reason when it is silent."""

    uuid: str
    name: str = ""
    partitioned: bool = False
    slices: tuple[Slice, ...] = ()
    problem: str = ""


def read_boards(nvml: Nvml) -> list[Board]:
    """Return every GPU of the machine in PCI bus order; a lost one keeps its place.

    Raises RefusedError when NVML does not tell how many there are.
    """
    boards = []
    for index in range(parse_number(nvml.ask("nvmlDeviceGetCount"))):
        try:
            handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
            uuid = parse_text(nvml.ask("nvmlDeviceGetUUID", handle))
        except (RefusedError, ValueError) as error:
            boards.append(Board("", problem=str(error)))
            continue
        name = nvml.evidence("nvmlDeviceGetName", handle, read=parse_text)
        told = nvml.evidence("nvmlDeviceGetMigMode", handle, read=lambda modes: bool(modes[0]))
        slices = () if _is_off(told) else tuple(_slices(nvml, handle))
        partitioned = bool(slices) or (isinstance(told, Known) and told.value is True)
        named = str(name.value) if isinstance(name, Known) else ""
        boards.append(Board(uuid, named, partitioned, slices))
    return boards


def read_visible(nvml: Nvml, selection: str | None = None) -> list[str]:
    """Return the UUIDs of the devices that CUDA_VISIBLE_DEVICES shows, in its order.

    `selection` stands in for the variable. Without it, the order is that of the PCI bus. An
    integer in it counts in CUDA's order, which by default puts the fastest card first: where the
    cards differ, CUDA itself is asked for it.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES") if selection is None else selection
    try:
        boards = read_boards(nvml)
    except (RefusedError, ValueError):
        return []
    if text is None:
        return select([str(index) for index in range(len(boards)) if boards[index].uuid], boards)
    entries = parse_selection(text)
    order = None
    if any(entry.isdecimal() for entry in entries) and _mixed(boards):
        order = read_cuda_order()
    return select(entries, boards, order)


def parse_selection(text: str) -> list[str]:
    """Split CUDA_VISIBLE_DEVICES into integers, UUIDs and MIG names, up to the first that is none.

    Integers are read as by strtoul: leading digits count. A repeated entry hides every device.
    Sources: CUDA C++ programming guide, "CUDA environment variables"; for repeated entries and
    digits torch.cuda's own reading of the variable.

    >>> parse_selection("2,-1,3"), parse_selection("GPU-8932f9"), parse_selection("")
    (['2'], ['GPU-8932f9'], [])
    """
    entries: list[str] = []
    for part in text.split(","):
        entry = part.strip()
        number = re.match(r"\+?0*(\d+)", entry)
        if number:
            entry = number[1]
        elif not re.fullmatch(r"(GPU|MIG)-[0-9a-zA-Z/-]+", entry):
            break
        entries.append(entry)
    return entries if len(set(entries)) == len(entries) else []


def select(entries: list[str], boards: list[Board], order: list[str] | None = None) -> list[str]:
    """Return the UUIDs that entries of CUDA_VISIBLE_DEVICES name, up to the first that names none.

    `order` has the UUIDs in CUDA's order, if it is not NVML's. A board in MIG mode stands for its
    first slice, and then hides the other boards: CUDA lists one slice per process (NVIDIA's MIG
    user guide, "CUDA device enumeration"). Slices that are named stay, for a child sees one each.
    """
    ranked = [board.uuid for board in boards] if order is None else order
    chosen: list[str] = []
    for entry in entries:
        if entry.isdecimal():
            match = ranked[int(entry) : int(entry) + 1]
        elif entry.startswith("MIG-"):
            match = [s.uuid for b in boards for s in b.slices if _names(entry, s)]
        else:
            match = [board.uuid for board in boards if board.uuid.startswith(entry)]
        if len(match) != 1 or not match[0]:
            break
        chosen.append(match[0])
    chosen = chosen if len(set(chosen)) == len(chosen) else []
    return _unfold(chosen, {board.uuid: board for board in boards if board.partitioned})


def read_cuda_order() -> list[str] | None:
    """Return the UUIDs in CUDA's order, from a child process; None when CUDA does not tell."""
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return None
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "-I", str(_ORDER_PROGRAM)]
    try:
        told = subprocess.run(  # noqa: S603 - this interpreter, on a program of this package
            command, env=environment, capture_output=True, timeout=_ORDER_DEADLINE_S, check=True
        )
        return [str(uuid) for uuid in json.loads(told.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _names(entry: str, one: Slice) -> bool:
    return entry == one.instances or one.uuid.startswith(entry)


def _unfold(chosen: list[str], partitioned: Mapping[str, Board]) -> list[str]:
    for uuid in chosen:
        slices = partitioned[uuid].slices if uuid in partitioned else ()
        if slices:
            return [slices[0].uuid]
    return [uuid for uuid in chosen if uuid not in partitioned]


def _mixed(boards: list[Board]) -> bool:
    whole = not any(board.partitioned for board in boards)
    return whole and len({board.name for board in boards}) > 1


def _is_off(told: Evidence) -> bool:
    return isinstance(told, Known) and told.value is not True


def _slices(nvml: Nvml, handle: Any) -> Iterator[Slice]:
    try:
        most = parse_number(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle))
        parent = parse_text(nvml.ask("nvmlDeviceGetUUID", handle))
    except (RefusedError, ValueError):
        return
    for index in range(most):
        try:
            one = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            uuid = parse_text(nvml.ask("nvmlDeviceGetUUID", one))
        except (RefusedError, ValueError):
            continue  # no slice in this place
        asked = ("nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId")
        places = [nvml.evidence(name, one, read=parse_number) for name in asked]
        numbers = [str(place.value) for place in places if isinstance(place, Known)]
        yield Slice(uuid, "/".join((f"MIG-{parent}", *numbers)))
