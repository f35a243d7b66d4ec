"""What the installed torch says of itself, read in a child that imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from cift_probe.evidence import Evidence, Known, Scope, Unknown, absent
from cift_probe.worker import WorkerFaultError

Call: TypeAlias = Callable[[str, Any, float], Any]

_DEADLINE_S = 180.0  # a first import from a cold network disk takes minutes
_BUILD = "cift_probe.stack.build:read_torch_build"
_DEVICE = "cift_probe.stack.build:read_torch_device"
_OPERATORS = "cift_probe.stack.build:read_operators"
_SOURCE = "import torch, in a child process"
_NO_CUDA = "this torch was built without CUDA"


class Field(NamedTuple):
    """One key, its field of the child's answer, its unit, and what a missing value means."""

    key: str
    field: str
    unit: str = ""
    missing: str = ""  # empty: not told, hence Unknown


_BUILD_FIELDS = (
    Field("torch.version", "version", "version"),
    Field("torch.file", "file"),
    Field("torch.cuda.version", "cuda", "version", _NO_CUDA),
    Field("torch.hip.version", "hip", "version", "this torch was built without ROCm"),
    Field("torch.arch.list", "arch_list", "", _NO_CUDA),
    Field("torch.cxx11_abi", "cxx11_abi"),
    Field("torch.cudnn.version", "cudnn", "version", "this torch was built without cuDNN"),
    Field("torch.nccl.version", "nccl", "version", "this torch was built without NCCL"),
    Field("torch.debug", "debug"),
    Field("torch.git", "git", "", "this build does not name its commit"),
    Field("torch.xnnpack", "xnnpack"),
    Field("torch.xpu.version", "xpu", "", "this torch was built without XPU"),
    Field("torch.accelerator", "accelerator"),
    Field("torch.hip.runtime.version", "hip_runtime", "", "this torch was built without ROCm"),
    Field("torch.miopen.version", "miopen", "", "this torch was built without ROCm"),
)
# These depend on the devices that the child sees, and so belong to its device.
_START_FIELDS = (
    Field("torch.cuda.available", "available"),
    Field("torch.cuda.error", "error", "", "CUDA reports no error"),
    Field("torch.cuda.count", "count", "1"),
)
_DEVICE_FIELDS = (
    Field("torch.device.name", "name"),
    Field("torch.device.uuid", "uuid"),
    Field("torch.device.capability", "capability", "capability"),
    Field("torch.device.memory.total", "total_memory", "B"),
    Field("torch.device.memory.free", "free_memory", "B"),
    Field("torch.device.bf16", "bf16"),
    Field("torch.device.integrated", "integrated"),
    Field("torch.device.num_multiprocessors", "num_multiprocessors", "1"),
    Field("torch.device.shared_memory", "shared_memory", "B"),
    Field("torch.device.expandable_segments", "expandable_segments"),
)


_OPERATOR_FIELDS = (Field("xformers.operators", "operators"),)


def read_operators(call: Call | None) -> dict[str, Evidence]:
    """Return which of its operators xformers calls available, from the child that imports it."""
    return _read(call, _OPERATORS, _OPERATOR_FIELDS)


def read_torch_build(call: Call | None, label: str = "") -> dict[str, Evidence]:
    """Return versions and build flags of torch, and whether CUDA starts on the device `label`.

    A child that fails makes all of them Unknown, with what the child said.
    """
    fields = (*_BUILD_FIELDS, *_START_FIELDS)
    found = _read(call, _BUILD, fields)
    scope = Scope(label if label.startswith("gpu") else "")
    return {
        scope.key(field.key) if field in _START_FIELDS else field.key: found[field.key]
        for field in fields
    }


def read_torch_device(call: Call | None, label: str) -> dict[str, Evidence]:
    """Return what torch says of the one device that its child sees, under stored keys."""
    if label == "cpu":
        found: dict[str, Evidence] = {
            field.key: absent("the CPU is no CUDA device") for field in _DEVICE_FIELDS
        }
    else:
        found = _read(call, _DEVICE, _DEVICE_FIELDS)
    return {Scope(label).key(key): value for key, value in found.items()}


def _read(call: Call | None, target: str, fields: tuple[Field, ...]) -> dict[str, Evidence]:
    answer = _ask(call, target)
    if not isinstance(answer, dict):
        return {field.key: answer for field in fields}
    return {field.key: _evidence(answer, field) for field in fields}


def _ask(call: Call | None, target: str) -> dict[str, Any] | Evidence:
    if call is None:
        return Unknown("torch is read in a child process, and here is none", _SOURCE)
    try:
        told = call(target, {}, _DEADLINE_S)
    except WorkerFaultError as fault:
        return Unknown(fault.detail, _SOURCE)
    if not isinstance(told, dict):
        return Unknown(f"the child answered {told!r}", _SOURCE)
    return absent(str(told["missing"]), _SOURCE) if "missing" in told else told


def _evidence(told: dict[str, Any], field: Field) -> Evidence:
    value = told.get(field.field)
    if value is not None:
        note = (told.get("error") or "") if field.field == "available" else ""
        return Known(value, field.unit, _SOURCE, note=note)
    if field.missing and field.field in told:
        return absent(field.missing, _SOURCE)
    return Unknown(f"torch does not tell {field.field}", _SOURCE)
