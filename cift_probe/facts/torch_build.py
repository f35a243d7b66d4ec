"""What the installed torch says of itself, read in a child that imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from cift_probe.evidence import Evidence, Known, Scope, Unknown, absent
from cift_probe.worker import WorkerFaultError

Call: TypeAlias = Callable[[str, Any, float], Any]

_DEADLINE_S = 180.0  # a first import from a cold network disk takes minutes
_BUILD = "cift_probe.stack.build:read_torch_build"
_DEVICE = "cift_probe.stack.build:read_torch_device"
_SOURCE = "import torch, in a child process"

_NO_CUDA = "this torch was built without CUDA"
# key, field of the child's answer, unit, what the absence of a value means ("" = not told)
_BUILD_FIELDS = (
    ("torch.version", "version", "version", ""),
    ("torch.file", "file", "", ""),
    ("torch.cuda.version", "cuda", "version", _NO_CUDA),
    ("torch.hip.version", "hip", "version", "this torch was built without ROCm"),
    ("torch.arch.list", "arch_list", "", _NO_CUDA),
    ("torch.cxx11_abi", "cxx11_abi", "", ""),
    ("torch.cudnn.version", "cudnn", "version", _NO_CUDA),
    ("torch.nccl.version", "nccl", "version", "this torch was built without NCCL"),
    ("torch.cuda.available", "available", "", ""),
    ("torch.cuda.error", "error", "", "torch reports no error"),
    ("torch.cuda.count", "count", "1", ""),
)
_DEVICE_FIELDS = (
    ("torch.device.name", "name", "", ""),
    ("torch.device.uuid", "uuid", "", ""),
    ("torch.device.capability", "capability", "capability", ""),
    ("torch.device.memory.total", "total_memory", "B", ""),
)


def read_torch_build(call: Call) -> dict[str, Evidence]:
    """Return versions and build flags of torch; a child that fails makes all of them Unknown."""
    return _read(call, _BUILD, _BUILD_FIELDS)


def read_torch_device(call: Call, label: str) -> dict[str, Evidence]:
    """Return what torch says of the one device that its child sees, under stored keys."""
    found = _read(call, _DEVICE, _DEVICE_FIELDS)
    return {Scope(label).key(key): value for key, value in found.items()}


def _read(
    call: Call, target: str, fields: tuple[tuple[str, str, str, str], ...]
) -> dict[str, Evidence]:
    try:
        told = call(target, None, _DEADLINE_S)
    except WorkerFaultError as fault:
        return {key: Unknown(fault.detail, _SOURCE) for key, *_ in fields}
    return {
        key: _evidence(told.get(field), unit, missing, told.get("error"))
        for key, field, unit, missing in fields
    }


def _evidence(value: Any, unit: str, missing: str, error: str | None) -> Evidence:
    if value is not None:
        note = error or "" if value is False else ""
        return Known(value, unit, _SOURCE, note=note)
    if missing:
        return absent(missing, _SOURCE)
    return Unknown("torch does not tell", _SOURCE)
