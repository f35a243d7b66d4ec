"""The child's end of a measurement: carry out one instrument, then put the process in order."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Any

import msgspec

from cift_probe.evidence import Evidence, json_safe
from cift_probe.measure.declare import Task


class Request(msgspec.Struct, frozen=True):
    """What the session sends: the instrument's function as "module:name", and its task."""

    target: str
    task: Task


class Result(msgspec.Struct, frozen=True):
    """What the child sends back.

    `allocated_bytes` is what torch's allocator still holds on the device after cleaning up; a
    process in which it is not 0 may take no memory truth. None where torch is not loaded.
    """

    evidence: dict[str, Evidence]
    allocated_bytes: int | None


def run(payload: Any) -> Any:
    """Run one instrument; takes and returns JSON values."""
    request = msgspec.convert(payload, Request)
    module, _, name = request.target.partition(":")
    if request.task.device != "cpu":
        cap_memory(request.task.vram_cap)
    evidence = getattr(import_module(module), name)(request.task)
    safe = {key: json_safe(value) for key, value in evidence.items()}
    return msgspec.to_builtins(Result(safe, allocated_after_cleaning()))


def cap_memory(num_bytes: int | None) -> None:
    """Let torch's allocator hold what a card of `num_bytes` would leave it; None is all there is.

    Context and driver reserve of this card count against the smaller one too. Where torch is
    missing the instrument itself says so.
    """
    try:
        import torch
    except ImportError:
        return
    total = torch.cuda.mem_get_info()[1]
    share = 1.0 if num_bytes is None else min(1.0, max(0, num_bytes - _taken()) / total)
    torch.cuda.set_per_process_memory_fraction(share)


def allocatable(num_bytes: int | None) -> int:
    """Return bytes that torch's allocator can hold on the device, or on one of `num_bytes`."""
    import torch

    taken, total = _taken(), torch.cuda.mem_get_info()[1]
    return max(0, min(total, total if num_bytes is None else num_bytes) - taken)


def _taken() -> int:
    """Return bytes of the device that others hold, or this process outside torch's allocator."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


def allocated_after_cleaning() -> int | None:
    """Return bytes that are still allocated after everything releasable was released."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    _let_bitsandbytes_go()
    gc.collect()
    if not torch.cuda.is_initialized():
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - the only way; cuBLAS keeps 32 MiB or more
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated())


def _let_bitsandbytes_go() -> None:
    """Drop what bitsandbytes keeps for good and makes again when it is asked."""
    quantisation = sys.modules.get("bitsandbytes.functional")
    if quantisation is not None:
        quantisation.name2qmap.clear()  # 1 KiB of tables
    optimizers = sys.modules.get("bitsandbytes.optim")
    if optimizers is not None:
        # transformers' Trainer registers every embedding with it, which then outlives its model
        optimizers.GlobalOptimManager._instance = None  # noqa: SLF001 - there is no other way
