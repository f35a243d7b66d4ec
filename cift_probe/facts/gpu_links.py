"""How a device is tied to the rest of the machine: PCIe, NVLink, fabric, peers, near processors.

Sources: nvml.h (nvmlGpuFabricInfo_v2_t, nvmlGpuP2PStatus_t, nvmlGpuTopologyLevel_t,
nvmlDeviceGetNvLinkState); the kernel's sysfs-bus-pci (numa_node, local_cpulist, link/*_aspm).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.facts.system import parse_range
from cift_probe.sensors import Nvml, RefusedError, parse_number

KEYS = (
    "device.fabric.state",
    "device.nvlink.num_links",
    "device.nvlink.num_active",
    "device.peers.refused",
    "device.peers.path",
    "device.numa.node",
    "device.cpus.near",
    "device.pcie.aspm",
)
_FABRIC_VERSION_2 = 0x02000024  # nvml.h, NVML_STRUCT_VERSION(GpuFabricInfo, 2)
_COMPLETED = 3  # nvmlGpuFabricState_t
_FABRIC_STATES = {1: "not started", 2: "in progress", _COMPLETED: "completed"}
_MOST_LINKS = 18  # nvml.h, NVML_NVLINK_MAX_LINKS
_DOES_NOT_EXIST = (2, 3)  # invalid argument: there is no such link; not supported
_READ = 0  # nvmlGpuP2PCapsIndex_t
_P2P = {
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the way through the I/O hubs does not support it",
    4: "switched off by the driver's settings",
    5: "not supported",
    6: "unknown to the driver",
}
_PATHS = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one host bridge",
    40: "one memory node",
    50: "across memory nodes",
}
_BUS_ID = re.compile(
    r"(?:[0-9A-Fa-f]{4})?(?P<short>[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)"
)


class FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster_uuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint32),
        ("state", ctypes.c_uint),
        ("health", ctypes.c_uint32),
    )


def parse_bus_id(text: str) -> str:
    """Return the name of a device below /sys/bus/pci/devices; empty for another form.

    >>> parse_bus_id("00000000:1B:00.0")
    '0000:1b:00.0'
    """
    match = _BUS_ID.fullmatch(text)
    return match["short"].lower() if match else ""


def read_links(
    nvml: Nvml, handle: Any, bus_id: Evidence, peers: list[str], root: Path = Path("/")
) -> dict[str, Evidence]:
    """Return every key above for one board; `peers` are the UUIDs of the other visible ones."""
    name = parse_bus_id(str(bus_id.value)) if isinstance(bus_id, Known) else ""
    folder = root / "sys/bus/pci/devices" / name if name else None
    return {
        "device.fabric.state": read_fabric(nvml, handle),
        **read_nvlink(nvml, handle),
        **read_peers(nvml, handle, peers),
        "device.numa.node": _read_node(folder),
        "device.cpus.near": _read_near(folder),
        "device.pcie.aspm": _read_aspm(folder),
    }


def read_fabric(nvml: Nvml, handle: Any) -> Evidence:
    """Return the state of the NVSwitch fabric as this device sees it; absent without one."""
    info = FabricInfo(version=_FABRIC_VERSION_2)

    def read(_answer: Any) -> str:
        state = _FABRIC_STATES.get(info.state, "")
        failed = info.state == _COMPLETED and info.status  # before that, nvml.h gives it no meaning
        return f"{state}, with error {info.status}" if failed else state

    told = nvml.evidence("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info), read=read)
    if isinstance(told, Known) and not told.absent and not told.value:
        return absent("this device is on no NVSwitch fabric", told.source)
    return told


def read_nvlink(nvml: Nvml, handle: Any) -> dict[str, Evidence]:
    """Return how many NVLinks the device has, and how many of them are active."""
    keys = ("device.nvlink.num_links", "device.nvlink.num_active")
    source = "NVML nvmlDeviceGetNvLinkState"
    states = []
    for link in range(_MOST_LINKS):
        try:
            states.append(parse_number(nvml.ask("nvmlDeviceGetNvLinkState", handle, link)))
        except RefusedError as error:
            if error.code in _DOES_NOT_EXIST:
                break
            return dict.fromkeys(keys, Unknown(str(error), source))
        except ValueError as error:
            return dict.fromkeys(keys, Unknown(str(error), source))
    if not states:
        return dict.fromkeys(keys, absent("this device has no NVLink", source))
    active = sum(map(bool, states))
    return {keys[0]: Known(len(states), "1", source), keys[1]: Known(active, "1", source)}


def read_peers(nvml: Nvml, handle: Any, peers: list[str]) -> dict[str, Evidence]:
    """Return why peers cannot be read directly, by UUID, and the way to each of them."""
    source = "NVML nvmlDeviceGetP2PStatus"
    if not peers:
        alone = absent("this process sees one device", source)
        return {"device.peers.refused": alone, "device.peers.path": alone}
    refused, paths = [], {}
    for uuid in peers:
        try:
            other = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
            status = parse_number(nvml.ask("nvmlDeviceGetP2PStatus", handle, other, _READ))
            level = nvml.ask("nvmlDeviceGetTopologyCommonAncestor", handle, other)
        except (RefusedError, ValueError) as error:
            unknown = Unknown(f"{uuid}: {error}", source)
            return {"device.peers.refused": unknown, "device.peers.path": unknown}
        paths[uuid] = _PATHS.get(level, f"level {level}")
        if status:
            refused.append(f"{uuid}: {_P2P.get(status, f'status {status}')}")
    return {
        "device.peers.refused": Known(refused, source=source),
        "device.peers.path": Known(paths, source="NVML nvmlDeviceGetTopologyCommonAncestor"),
    }


def _read_node(folder: Path | None) -> Evidence:
    text = _text(folder, "numa_node").strip()
    if not re.fullmatch(r"-?\d{1,6}", text):
        return _hidden("numa_node")
    if int(text) < 0:
        return absent("the firmware names no memory node for this device", "numa_node")
    return Known(int(text), "1", "numa_node")


def _read_near(folder: Path | None, usable: Collection[int] | None = None) -> Evidence:
    """Tell whether this process may run on a processor near the device."""
    try:
        near = parse_range(_text(folder, "local_cpulist"))
    except ValueError:
        return _hidden("local_cpulist")
    if usable is None:
        if not hasattr(os, "sched_getaffinity"):
            return Unknown("the system does not tell where this process may run", "affinity")
        usable = os.sched_getaffinity(0)
    both = len(near & set(usable))
    note = f"{both} of {len(usable)} processors of this process are near it"
    return Known(bool(both), source="local_cpulist and sched_getaffinity", note=note)


def _read_aspm(folder: Path | None) -> Evidence:
    names = ("l0s_aspm", "l1_aspm", "l1_1_aspm", "l1_2_aspm", "clkpm")
    told = {name: _text(folder, f"link/{name}").strip() for name in names}
    told = {name: text for name, text in told.items() if text in ("0", "1")}
    if not told:
        return _hidden("link/*_aspm")
    return Known([name for name, text in told.items() if text == "1"], source="sysfs link/*_aspm")


def _hidden(name: str) -> Unknown:
    return Unknown("the kernel does not show the device's PCI folder here", f"/sys/bus/pci {name}")


def _text(folder: Path | None, name: str) -> str:
    if folder is None:
        return ""
    try:
        return (folder / name).read_text(errors="replace")
    except OSError:
        return ""
