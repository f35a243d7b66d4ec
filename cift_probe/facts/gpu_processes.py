"""Who else is on the device: the processes that NVML lists, less our own."""

from __future__ import annotations

import os
from typing import Any

import psutil

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.sensors import Nvml, parse_number

KEYS = ("device.processes.compute", "device.processes.foreign", "device.processes.graphics")
_COMPUTE = "nvmlDeviceGetComputeRunningProcesses"
_GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses"


def read(nvml: Nvml, handle: Any) -> dict[str, Evidence]:
    """Return the lists of {pid, name, memory}; bytes, None where NVML or the system does not tell.

    Foreign is who computes and is neither this session nor its child.
    """
    compute = nvml.evidence(_COMPUTE, handle, read=_listed)
    return {
        "device.processes.compute": compute,
        "device.processes.foreign": _foreign(compute),
        "device.processes.graphics": nvml.evidence(_GRAPHICS, handle, read=_listed),
    }


def _foreign(compute: Evidence) -> Evidence:
    if isinstance(compute, Unknown) or compute.absent:
        return compute
    ours = _own_processes()
    others = [item for item in compute.value if item["pid"] not in ours]
    seen = [item for item in others if psutil.pid_exists(item["pid"])]
    hidden = len(others) - len(seen)
    reason = f"{hidden} process(es) outside of this PID namespace, which may be our own"
    if hidden and not seen:
        return Unknown(reason, compute.source)
    return Known(seen, "", compute.source, note=reason if hidden else "")


def _own_processes() -> set[int]:
    # Under pytest-xdist the session is the controller: the other workers are its children too.
    session = psutil.Process()
    if "PYTEST_XDIST_WORKER" in os.environ:
        session = session.parent() or session
    return {session.pid, os.getpid()} | {item.pid for item in session.children(recursive=True)}


def _listed(processes: Any) -> list[dict[str, Any]]:
    return [
        {"pid": parse_number(item.pid), "name": _name(item.pid), "memory": _memory(item)}
        for item in processes
    ]


def _name(pid: int) -> str | None:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return None


def _memory(item: Any) -> int | None:
    try:
        return parse_number(item.usedGpuMemory)
    except ValueError:
        return None
