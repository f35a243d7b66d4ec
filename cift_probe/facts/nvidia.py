"""What NVML says of the driver and of each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cift_probe.evidence import Evidence, Known, Scope, Unknown, absent
from cift_probe.facts import gpu_links, gpu_memory, gpu_processes, kernel_log, pci
from cift_probe.sensors import (
    DRIVER_NOT_LOADED,
    LIBRARY_NOT_FOUND,
    Nvml,
    RefusedError,
    parse_hertz,
    parse_number,
    parse_text,
    parse_watt,
    read_board_handle,
    read_boards,
    read_throttle,
    read_visible,
)

_ROOT = Path("/")
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
# nvmlGpuVirtualizationMode_t; a whole GPU passed through to a guest is a whole GPU
_VIRTUAL = {0: "none", 1: "passthrough", 2: "vgpu", 3: "host of vgpus", 4: "host of vsga"}
_DRIVER_MODELS = {0: "WDDM", 1: "TCC", 2: "MCDM"}  # nvmlDriverModel_t
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_CORRECTED, _UNCORRECTED = 0, 1  # nvmlMemoryErrorType_t
_VOLATILE, _AGGREGATE = 0, 1  # nvmlEccCounterType_t
_GPU = 0  # nvmlTemperatureSensors_t
_SHUTDOWN, _SLOWDOWN = 0, 1  # nvmlTemperatureThresholds_t
_WSL_LIBRARY = "usr/lib/wsl/lib/libnvidia-ml.so.1"


class Field(NamedTuple):
    """One question to NVML: our key, its function, arguments after the handle, unit, reading."""

    key: str
    function: str
    arguments: tuple[int, ...] = ()
    unit: str = ""
    read: Callable[[Any], Any] = parse_text


def parse_capability(answer: Any) -> str:
    """Return "9.0" from (9, 0); raises ValueError."""
    major, minor = answer
    return f"{parse_number(major)}.{parse_number(minor)}"


def parse_cuda_version(answer: Any) -> str:
    """Return "13.0" from 13000 (cuda.h: 1000 * major + 10 * minor); raises ValueError."""
    number = parse_number(answer)
    return f"{number // 1000}.{number % 1000 // 10}"


def _flag(answer: Any) -> bool:
    return bool(parse_number(answer))


def _switch(answer: Any) -> str:
    return "on" if _flag(answer[0]) else "off"


def _compute_mode(answer: Any) -> str:
    return _COMPUTE_MODES.get(parse_number(answer), f"unnamed mode {answer}")


def _driver_model(answer: Any) -> str:
    return _DRIVER_MODELS.get(parse_number(answer[0]), f"unnamed model {answer[0]}")


def _virtualization(answer: Any) -> str:
    return _VIRTUAL.get(parse_number(answer), f"unnamed mode {answer}")


def _bar1(info: Any) -> int:
    return parse_number(info.bar1Total)


def _bus_id(info: Any) -> str:
    return parse_text(info.busId)


def _pci_id(info: Any) -> str:
    number = parse_number(info.pciDeviceId)
    return f"{number & 0xFFFF:04x}:{number >> 16:04x}"


# Fields that a MIG slice answers itself; the others are asked of its board.
_OWN_FIELDS = (
    Field("device.name", "nvmlDeviceGetName"),
    Field("device.uuid", "nvmlDeviceGetUUID"),
)
_ECC = "nvmlDeviceGetTotalEccErrors"
_REMAP = "nvmlDeviceGetRemappedRows"  # correctable, uncorrectable, pending, failed
_THRESHOLD = "nvmlDeviceGetTemperatureThreshold"
_CLOCK, _MOST = "nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo"
_DEFAULT_POWER = "nvmlDeviceGetPowerManagementDefaultLimit"
_COUNT: tuple[str, Callable[[Any], Any]] = ("1", parse_number)
_BOARD_FIELDS = (
    Field("device.serial", "nvmlDeviceGetSerial"),
    Field("device.pci.bus_id", "nvmlDeviceGetPciInfo", read=_bus_id),
    Field("device.pci.id", "nvmlDeviceGetPciInfo", read=_pci_id),
    Field("device.vbios", "nvmlDeviceGetVbiosVersion"),
    Field("device.gsp.version", "nvmlDeviceGetGspFirmwareVersion"),
    Field(
        "device.capability",
        "nvmlDeviceGetCudaComputeCapability",
        unit="capability",
        read=parse_capability,
    ),
    Field("device.ecc.mode", "nvmlDeviceGetEccMode", read=_switch),
    Field("device.ecc.uncorrected", _ECC, (_UNCORRECTED, _VOLATILE), *_COUNT),
    Field("device.ecc.uncorrected.aggregate", _ECC, (_UNCORRECTED, _AGGREGATE), *_COUNT),
    Field("device.ecc.corrected", _ECC, (_CORRECTED, _VOLATILE), *_COUNT),
    Field("device.remap.correctable", _REMAP, (), "1", lambda rows: parse_number(rows[0])),
    Field("device.remap.uncorrectable", _REMAP, (), "1", lambda rows: parse_number(rows[1])),
    Field("device.remap.pending", _REMAP, (), "", lambda rows: _flag(rows[2])),
    Field("device.remap.failed", _REMAP, (), "", lambda rows: _flag(rows[3])),
    Field("device.retired.pending", "nvmlDeviceGetRetiredPagesPendingStatus", read=_flag),
    Field("device.pcie.generation.current", "nvmlDeviceGetCurrPcieLinkGeneration", (), *_COUNT),
    Field("device.pcie.generation.max", "nvmlDeviceGetMaxPcieLinkGeneration", (), *_COUNT),
    Field("device.pcie.width.current", "nvmlDeviceGetCurrPcieLinkWidth", (), *_COUNT),
    Field("device.pcie.width.max", "nvmlDeviceGetMaxPcieLinkWidth", (), *_COUNT),
    Field("device.pcie.generation.own", "nvmlDeviceGetGpuMaxPcieLinkGeneration", (), *_COUNT),
    Field("device.pcie.replays", "nvmlDeviceGetPcieReplayCounter", (), *_COUNT),
    Field("device.bar1.total", "nvmlDeviceGetBAR1MemoryInfo", (), "B", _bar1),
    Field("device.virtualization", "nvmlDeviceGetVirtualizationMode", read=_virtualization),
    Field("device.power.limit", "nvmlDeviceGetEnforcedPowerLimit", (), "W", parse_watt),
    Field("device.power.limit.default", _DEFAULT_POWER, (), "W", parse_watt),
    Field("device.power.draw", "nvmlDeviceGetPowerUsage", (), "W", parse_watt),
    Field("device.clock.sm", _CLOCK, (_SM,), "Hz", parse_hertz),
    Field("device.clock.sm.max", _MOST, (_SM,), "Hz", parse_hertz),
    Field("device.clock.memory", _CLOCK, (_MEMORY,), "Hz", parse_hertz),
    Field("device.clock.memory.max", _MOST, (_MEMORY,), "Hz", parse_hertz),
    Field("device.temperature", "nvmlDeviceGetTemperature", (_GPU,), "degC", parse_number),
    Field("device.temperature.slowdown", _THRESHOLD, (_SLOWDOWN,), "degC", parse_number),
    Field("device.temperature.shutdown", _THRESHOLD, (_SHUTDOWN,), "degC", parse_number),
    Field("device.persistence", "nvmlDeviceGetPersistenceMode", read=_flag),
    Field("device.compute_mode", "nvmlDeviceGetComputeMode", read=_compute_mode),
    Field("device.mig.mode", "nvmlDeviceGetMigMode", read=_switch),
    Field("device.driver_model", "nvmlDeviceGetDriverModel", read=_driver_model),
)
DEVICE_KEYS = (
    *(field.key for field in (*_OWN_FIELDS, *_BOARD_FIELDS)),
    *gpu_memory.KEYS,
    *gpu_processes.KEYS,
    *gpu_links.KEYS,
    *kernel_log.KEYS,
    "device.throttle.reasons",
    "device.mig.parent",
    "device.index",
)


def read_driver(nvml: Nvml, root: Path = _ROOT) -> dict[str, Evidence]:
    """Return driver versions and the number of devices this process may use, without a scope."""
    counted = read_count(nvml, root)
    found = {
        "driver.version": nvml.evidence(
            "nvmlSystemGetDriverVersion", unit="version", read=parse_text
        ),
        "driver.nvml.version": nvml.evidence(
            "nvmlSystemGetNVMLVersion", unit="version", read=parse_text
        ),
        "driver.cuda.version": nvml.evidence(
            "nvmlSystemGetCudaDriverVersion_v2", unit="version", read=parse_cuda_version
        ),
    }
    if nvml.problem and isinstance(counted, Known):  # no GPU, hence no driver to ask after
        found = dict.fromkeys(found, absent(f"no driver: {counted.note}", counted.source))
    return {**found, "device.count": counted, "device.lost": read_lost(nvml, counted)}


def read_lost(nvml: Nvml, counted: Evidence) -> Evidence:
    """Return why devices that NVML lists do not answer, one reason per device."""
    source = "NVML nvmlDeviceGetHandleByIndex"
    if nvml.problem:
        return counted if isinstance(counted, Unknown) else Known([], source=counted.source)
    try:
        return Known([board.problem for board in read_boards(nvml) if board.problem], source=source)
    except (RefusedError, ValueError) as error:
        return Unknown(str(error), source)


def read_count(nvml: Nvml, root: Path = _ROOT) -> Evidence:
    """Return how many GPUs or MIG slices CUDA_VISIBLE_DEVICES leaves to this process.

    Without a driver the bus is asked: no NVIDIA device there means 0; one there means that its
    driver is missing, and how many GPUs there are is Unknown. A lost device is not counted, and
    when no other answers the number is Unknown.
    """
    if nvml.problem:
        return _count_without_driver(nvml, root)
    source = "NVML nvmlDeviceGetCount, CUDA_VISIBLE_DEVICES"
    try:
        boards = read_boards(nvml)
    except (RefusedError, ValueError) as error:
        return Unknown(str(error), source)
    lost = [board.problem for board in boards if board.problem]
    if lost and len(lost) == len(boards):
        return Unknown(f"NVML lists {len(boards)} device(s), but: {lost[0]}", source)
    visible = read_visible(nvml)
    notes = [f"NVML lists {len(boards)}"] if len(boards) != len(visible) else []
    notes += [f"{len(lost)} of them: {lost[0]}"] if lost else []
    return Known(len(visible), "1", source, note="; ".join(notes))


def _count_without_driver(nvml: Nvml, root: Path) -> Evidence:
    source = "NVML nvmlInit"
    problem = nvml.problem
    if nvml.problem_code == LIBRARY_NOT_FOUND and (root / _WSL_LIBRARY).exists():
        problem += f"; hint: add /{Path(_WSL_LIBRARY).parent} to the linker's path (ldconfig)"
    if nvml.problem_code not in (0, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND):
        return Unknown(problem, source)
    there = pci.read_hardware(root)
    if isinstance(there, Unknown):
        return Unknown(f"{problem}; {there.reason}", source)
    if there.value:
        reason = f"an NVIDIA device is on the PCI bus, but {problem}"
        return Unknown(reason, f"{source}, {there.source}")
    note = "; ".join(filter(None, (problem, "no NVIDIA device on the PCI bus", there.note)))
    return Known(0, "1", there.source, note=note)


def read_device(
    nvml: Nvml, uuid: str, index: int, root: Path = _ROOT, visible: Sequence[str] | None = None
) -> dict[str, Evidence]:
    """Return every field of one device, without a scope; `index` is its place among the visible.

    `visible` has the UUIDs of all that are visible; they are read where it is None.

    Of a MIG slice, what it shares with its board (temperature, power, ECC) is the board's.
    """
    source = "NVML nvmlDeviceGetHandleByUUID"
    try:
        handle = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
        board = read_board_handle(nvml, handle, uuid)
    except RefusedError as error:
        return dict.fromkeys(DEVICE_KEYS, Unknown(str(error), source))
    found = {field.key: _ask(nvml, handle, field) for field in _OWN_FIELDS}
    found |= {field.key: _ask(nvml, board, field) for field in _BOARD_FIELDS}
    found["device.throttle.reasons"] = read_throttle(nvml, board)
    found["device.index"] = Known(index, "1", "CUDA_VISIBLE_DEVICES and PCI bus order")
    parent = nvml.evidence("nvmlDeviceGetUUID", board, read=parse_text)
    whole = absent("not a MIG slice", source)
    found["device.mig.parent"] = parent if uuid.startswith("MIG-") else whole
    found |= gpu_memory.read(nvml, handle, found["device.name"], found["device.capability"], root)
    found |= gpu_processes.read(nvml, handle)
    others = read_visible(nvml) if visible is None else visible
    peers = [item for item in others if item != uuid and not item.startswith("MIG-")]
    found |= gpu_links.read_links(nvml, board, found["device.pci.bus_id"], peers, root)
    log = kernel_log.read_log(str(root / "dev/kmsg"))
    found |= kernel_log.read_xids(found["device.pci.bus_id"], log)
    return found


def scoped(found: dict[str, Evidence], label: str) -> dict[str, Evidence]:
    """Return evidence of one device under its stored keys."""
    return {Scope(label).key(key): value for key, value in found.items()}


def no_device(label: str, evidence: Evidence) -> dict[str, Evidence]:
    """Return one answer for every device field, for a device that is not there."""
    return scoped(dict.fromkeys(DEVICE_KEYS, evidence), label)


def _ask(nvml: Nvml, handle: Any, field: Field) -> Evidence:
    return nvml.evidence(field.function, handle, *field.arguments, unit=field.unit, read=field.read)
