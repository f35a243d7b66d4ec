"""Device memory as NVML tells it, and where it is the host's memory instead.

Sources: nvml.h (nvmlMemory_v2_t: total = reserved + free + used); for the integrated GPUs,
developer.nvidia.com/cuda-gpus and the CUDA for Tegra application note. NVML on them answers
"not supported", 0, or figures that mean nothing (seen on GB10). A coherent but discrete device
(GH200) is dedicated: its own memory is the budget.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.facts import host
from cift_probe.sensors import Nvml, parse_number

_NAMES = ("total", "free", "used", "reserved")
KEYS = (*(f"device.memory.{name}" for name in _NAMES), "device.memory.kind")
_VERSION_2 = 0x02000028  # nvml.h, NVML_STRUCT_VERSION(Memory, 2)
_CALL = "nvmlDeviceGetMemoryInfo"
# Jetson TX1, TX2, Xavier, Orin, Thor (10.1 before CUDA 13), and GB10: capabilities that no
# discrete GPU has
_INTEGRATED = ("5.3", "6.2", "7.2", "8.7", "10.1", "11.0", "12.1")
_INTEGRATED_NAMES = ("NVIDIA GB10", "NVIDIA Thor", "Orin (nvgpu)")
_SLACK = 1.01  # rounding of the parts


def read(
    nvml: Nvml,
    handle: Any,
    name: Evidence,
    capability: Evidence,
    root: Path = Path("/"),
) -> dict[str, Evidence]:
    """Return total, free, used and driver-reserved memory in bytes, and which kind it is."""
    told = nvml.evidence(_CALL, handle, _VERSION_2, read=_figures)
    if isinstance(told, Unknown):  # drivers before 510 know the first version alone
        former = nvml.evidence(_CALL, handle, read=_figures)
        told = former if isinstance(former, Known) else told
    if _value(capability) in _INTEGRATED or _value(name) in _INTEGRATED_NAMES:
        return _host_memory(host.read_meminfo(root), told.source)
    if isinstance(told, Unknown):
        kind = Known("dedicated", source=capability.source) if _value(capability) else told
        return {**dict.fromkeys(KEYS, told), "device.memory.kind": kind}
    if told.absent:
        return dict.fromkeys(KEYS, _unlisted(capability, told.source))
    return _dedicated(told.value, told.source)


def _figures(info: Any) -> dict[str, int]:
    found = {name: parse_number(getattr(info, name)) for name in _NAMES if hasattr(info, name)}
    total = found["total"]
    parts = sum(found.values()) - total
    if total == 0 or found["free"] > total or parts > total * _SLACK:
        message = f"figures that contradict each other: {found}"
        raise ValueError(message)
    return found


def _dedicated(figures: dict[str, int], source: str) -> dict[str, Evidence]:
    note = "" if "reserved" in figures else "what the driver reserves is counted as used"
    found: dict[str, Evidence] = {
        f"device.memory.{name}": Known(size, "B", source, note=note if name == "used" else "")
        for name, size in figures.items()
    }
    found.setdefault(
        "device.memory.reserved", Unknown("drivers before 510 do not tell it apart", source)
    )
    return {**found, "device.memory.kind": Known("dedicated", source=source)}


def _host_memory(told: dict[str, int], refused: str) -> dict[str, Evidence]:
    # MemAvailable, not what CUDA calls free: that leaves out page cache, which is given back
    source = "/proc/meminfo"
    note = f"the host's memory, which device and host share; {refused} does not tell it"
    total, available = told.get("MemTotal"), told.get("MemAvailable")
    if total is None or available is None:
        missing = Unknown("the device shares the host's memory, which is not told", source)
        found: dict[str, Evidence] = dict.fromkeys(KEYS, missing)
    else:
        found = {
            "device.memory.total": Known(total, "B", f"{source} MemTotal", note=note),
            "device.memory.free": Known(available, "B", f"{source} MemAvailable", note=note),
            "device.memory.used": Known(total - available, "B", source, note=note),
        }
    nothing = absent("memory is shared with the host; the driver reserves none apart", source)
    kind = Known("unified", source="compute capability and name")
    return {**found, "device.memory.reserved": nothing, "device.memory.kind": kind}


def _unlisted(capability: Evidence, source: str) -> Unknown:
    # Not taken for unified: to offer the host's memory for a card's would be the worst mistake.
    shown = _value(capability) or "unknown"
    return Unknown(
        f"NVML does not support the memory of this device, and its capability ({shown}) is not "
        "listed as integrated; hint: add it to cift_probe/facts/gpu_memory.py",
        source,
    )


def _value(evidence: Evidence) -> str:
    return str(evidence.value or "") if isinstance(evidence, Known) else ""
