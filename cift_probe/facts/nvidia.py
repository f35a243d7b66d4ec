"""What NVML says of the driver and of each device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from cift_probe.evidence import Evidence, Known, Scope, Unknown
from cift_probe.sensors import Nvml, count_devices, read_visible, reason_of

_MHZ = 1_000_000
# nvml.h, nvmlClocksThrottleReasons*: bit and name
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
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_CORRECTED, _UNCORRECTED = 0, 1  # nvmlMemoryErrorType_t
_VOLATILE, _AGGREGATE = 0, 1  # nvmlEccCounterType_t
_GPU = 0  # nvmlTemperatureSensors_t
_SHUTDOWN, _SLOWDOWN = 0, 1  # nvmlTemperatureThresholds_t

Field = tuple[str, str, tuple[Any, ...], str, Callable[[Any], Any]]


def _same(value: Any) -> Any:
    return value


def _milliwatt(value: int) -> float:
    return value / 1000


def _megahertz(value: int) -> int:
    return value * _MHZ


def _capability(value: Any) -> str:
    major, minor = value
    return f"{major}.{minor}"


def _throttle(mask: int) -> list[str]:
    known = [name for bit, name in _THROTTLE.items() if mask & bit]
    rest = mask & ~sum(_THROTTLE)
    return known + ([f"unnamed reason {rest:#x}"] if rest else [])


def _mode(value: int) -> str:
    return _COMPUTE_MODES.get(value, f"unnamed mode {value}")


def _switch(value: Any) -> str:
    current = value[0] if isinstance(value, list | tuple) else value
    return "on" if current else "off"


# One row per field: our key, NVML's function, its arguments after the handle, unit, conversion.
_FIELDS: tuple[Field, ...] = (
    ("device.name", "nvmlDeviceGetName", (), "", _same),
    ("device.uuid", "nvmlDeviceGetUUID", (), "", _same),
    ("device.serial", "nvmlDeviceGetSerial", (), "", _same),
    ("device.vbios", "nvmlDeviceGetVbiosVersion", (), "", _same),
    ("device.gsp.version", "nvmlDeviceGetGspFirmwareVersion", (), "", _same),
    (
        "device.capability",
        "nvmlDeviceGetCudaComputeCapability",
        (),
        "capability",
        _capability,
    ),
    ("device.ecc.mode", "nvmlDeviceGetEccMode", (), "", _switch),
    (
        "device.ecc.uncorrected",
        "nvmlDeviceGetTotalEccErrors",
        (_UNCORRECTED, _VOLATILE),
        "1",
        int,
    ),
    (
        "device.ecc.uncorrected.aggregate",
        "nvmlDeviceGetTotalEccErrors",
        (_UNCORRECTED, _AGGREGATE),
        "1",
        int,
    ),
    ("device.ecc.corrected", "nvmlDeviceGetTotalEccErrors", (_CORRECTED, _VOLATILE), "1", int),
    ("device.retired.pending", "nvmlDeviceGetRetiredPagesPendingStatus", (), "", bool),
    ("device.pcie.generation.current", "nvmlDeviceGetCurrPcieLinkGeneration", (), "1", int),
    ("device.pcie.generation.max", "nvmlDeviceGetMaxPcieLinkGeneration", (), "1", int),
    ("device.pcie.width.current", "nvmlDeviceGetCurrPcieLinkWidth", (), "1", int),
    ("device.pcie.width.max", "nvmlDeviceGetMaxPcieLinkWidth", (), "1", int),
    (
        "device.throttle.reasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        (),
        "",
        _throttle,
    ),
    ("device.power.limit", "nvmlDeviceGetEnforcedPowerLimit", (), "W", _milliwatt),
    (
        "device.power.limit.default",
        "nvmlDeviceGetPowerManagementDefaultLimit",
        (),
        "W",
        _milliwatt,
    ),
    ("device.power.draw", "nvmlDeviceGetPowerUsage", (), "W", _milliwatt),
    ("device.clock.sm", "nvmlDeviceGetClockInfo", (_SM,), "Hz", _megahertz),
    ("device.clock.sm.max", "nvmlDeviceGetMaxClockInfo", (_SM,), "Hz", _megahertz),
    ("device.clock.memory", "nvmlDeviceGetClockInfo", (_MEMORY,), "Hz", _megahertz),
    ("device.clock.memory.max", "nvmlDeviceGetMaxClockInfo", (_MEMORY,), "Hz", _megahertz),
    ("device.temperature", "nvmlDeviceGetTemperature", (_GPU,), "degC", int),
    (
        "device.temperature.slowdown",
        "nvmlDeviceGetTemperatureThreshold",
        (_SLOWDOWN,),
        "degC",
        int,
    ),
    (
        "device.temperature.shutdown",
        "nvmlDeviceGetTemperatureThreshold",
        (_SHUTDOWN,),
        "degC",
        int,
    ),
    ("device.persistence", "nvmlDeviceGetPersistenceMode", (), "", bool),
    ("device.compute_mode", "nvmlDeviceGetComputeMode", (), "", _mode),
    ("device.mig.mode", "nvmlDeviceGetMigMode", (), "", _switch),
)


def read_driver(nvml: Nvml, root: Path = Path("/")) -> dict[str, Evidence]:
    """Return driver versions and the number of devices, without a scope."""
    return {
        "driver.version": nvml.evidence("nvmlSystemGetDriverVersion", unit="version"),
        "driver.nvml.version": nvml.evidence("nvmlSystemGetNVMLVersion"),
        "driver.cuda.version": nvml.evidence(
            "nvmlSystemGetCudaDriverVersion",
            unit="version",
            read=lambda number: f"{number // 1000}.{number % 1000 // 10}",
        ),
        "device.count": _visible_count(nvml, root),
    }


def read_device(nvml: Nvml, uuid: str, index: int) -> dict[str, Evidence]:
    """Return every field of one device, without a scope; `index` is its place among the visible."""
    try:
        handle = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
    except nvml.library.NVMLError as error:
        return _unknown(reason_of(error))
    found = {
        key: nvml.evidence(function, handle, *arguments, unit=unit, read=read)
        for key, function, arguments, unit, read in _FIELDS
    }
    if uuid.startswith("MIG-"):
        found["device.uuid"] = Known(uuid, source="CUDA_VISIBLE_DEVICES")
    found["device.index"] = Known(index, "1", source="CUDA_VISIBLE_DEVICES and PCI bus order")
    found |= _memory(nvml, handle)
    found |= _remap(nvml, handle)
    found |= _processes(nvml, handle)
    found |= _pci(nvml, handle)
    return found


def scoped(found: dict[str, Evidence], label: str) -> dict[str, Evidence]:
    """Return evidence of one device under its stored keys."""
    return {Scope(label).key(key): value for key, value in found.items()}


def _visible_count(nvml: Nvml, root: Path) -> Evidence:
    counted = count_devices(nvml, root)
    if isinstance(counted, Unknown) or not counted.value:
        return counted
    visible = len(read_visible(nvml))
    note = "" if visible == counted.value else f"NVML sees {counted.value}"
    return Known(visible, "1", f"{counted.source}, CUDA_VISIBLE_DEVICES", note=note)


def _memory(nvml: Nvml, handle: Any) -> dict[str, Evidence]:
    names = ("total", "free", "used", "reserved")
    version = getattr(nvml.library, "nvmlMemory_v2", None)
    arguments = () if version is None else (version,)
    found: dict[str, Evidence] = {
        f"device.memory.{name}": nvml.evidence(
            "nvmlDeviceGetMemoryInfo",
            handle,
            *arguments,
            unit="B",
            read=lambda info, name=name: int(getattr(info, name)),
        )
        for name in names
    }
    total = found["device.memory.total"]
    if isinstance(total, Known) and total.absent:
        return {**found, **_unified_memory(total.source)}
    kind = Known("dedicated", source=total.source)
    found["device.memory.kind"] = kind if isinstance(total, Known) else total
    return found


def _unified_memory(source: str) -> dict[str, Evidence]:
    # GB10 and Jetson: NVML answers "not supported", since the memory is the host's
    memory = psutil.virtual_memory()
    note = "unified with the host's memory; MemAvailable counts what the page cache would give back"
    origin = f"/proc/meminfo, since {source} is not supported"
    return {
        "device.memory.kind": Known("unified", source=source),
        "device.memory.total": Known(memory.total, "B", origin, note=note),
        "device.memory.free": Known(memory.available, "B", origin, note=note),
    }


def _remap(nvml: Nvml, handle: Any) -> dict[str, Evidence]:
    # nvmlDeviceGetRemappedRows: correctable, uncorrectable, pending, failed
    places = (
        ("device.remap.correctable", 0, "1", int),
        ("device.remap.uncorrectable", 1, "1", int),
        ("device.remap.pending", 2, "", bool),
        ("device.remap.failed", 3, "", bool),
    )
    return {
        key: nvml.evidence(
            "nvmlDeviceGetRemappedRows",
            handle,
            unit=unit,
            read=lambda rows, place=place, kind=kind: kind(rows[place]),
        )
        for key, place, unit, kind in places
    }


def _processes(nvml: Nvml, handle: Any) -> dict[str, Evidence]:
    ours = _own_processes()

    def listed(processes: Any) -> list[dict[str, Any]]:
        return [
            {"pid": int(item.pid), "name": _process_name(int(item.pid)), "memory": _used(item)}
            for item in processes
        ]

    def foreign(processes: Any) -> list[dict[str, Any]]:
        return [item for item in listed(processes) if item["pid"] not in ours]

    compute = "nvmlDeviceGetComputeRunningProcesses"
    return {
        "device.processes.compute": nvml.evidence(compute, handle, read=listed),
        "device.processes.foreign": nvml.evidence(compute, handle, read=foreign),
        "device.processes.graphics": nvml.evidence(
            "nvmlDeviceGetGraphicsRunningProcesses", handle, read=listed
        ),
    }


def _own_processes() -> set[int]:
    # a parent that started us (make, tox, xdist's controller) and our children are not foreign
    me = psutil.Process()
    family = [me, *me.parents(), *me.children(recursive=True)]
    return {item.pid for item in family} | {os.getpid()}


def _process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "not visible from here (another container or user)"


def _used(item: Any) -> int | None:
    value = getattr(item, "usedGpuMemory", None)
    return None if value is None else int(value)


def _pci(nvml: Nvml, handle: Any) -> dict[str, Evidence]:
    def bus_id(info: Any) -> str:
        value = info.busId
        return value.decode() if isinstance(value, bytes) else str(value)

    def pci_id(info: Any) -> str:
        number = int(info.pciDeviceId)
        return f"{number & 0xFFFF:04x}:{number >> 16:04x}"

    function = "nvmlDeviceGetPciInfo"
    return {
        "device.pci.bus_id": nvml.evidence(function, handle, read=bus_id),
        "device.pci.id": nvml.evidence(function, handle, read=pci_id),
    }


def no_device(label: str, reason: str) -> dict[str, Evidence]:
    """Return every device field as Unknown, for a device that is not there."""
    return scoped(_unknown(reason), label)


def _unknown(reason: str) -> dict[str, Evidence]:
    keys = [row[0] for row in _FIELDS]
    keys += [f"device.memory.{name}" for name in ("total", "free", "used", "reserved", "kind")]
    keys += [f"device.remap.{name}" for name in ("pending", "failed")]
    keys += [f"device.processes.{name}" for name in ("compute", "foreign", "graphics")]
    return {key: Unknown(reason, "NVML") for key in keys}
