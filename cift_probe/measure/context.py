"""What stands between a card's memory and a tensor: context, workspaces, the largest block."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure.declare import Task, instrument
from cift_probe.measure.inside import allocated_after_cleaning, cap_memory

_STEP = 64 << 20  # how narrowly the largest block is enclosed, bytes
_SMALL = 64  # rows and columns of a product that makes cuBLAS start
_HELD = 256 << 20

PRODUCES = (
    "device.context.bytes",
    "device.cublas_workspace.bytes",
    "device.largest_block.bytes",
    "device.largest_block.share",
)


@instrument(
    "device.context",
    version=1,
    produces=PRODUCES,
    estimate_s=2.0,
    deadline_s=120.0,
    clean=True,
    faults=("held_memory", "fragmented"),
)
def measure_context(task: Task) -> dict[str, Evidence]:
    """Tell what this process holds outside torch's allocator, and the largest free block.

    `device.context.bytes` is what NVML counts for this process, or for the card where nothing
    else runs on it, less what the allocator holds. `device.cublas_workspace.bytes` is what a
    product and its backward pass leave allocated. `device.largest_block.bytes` is the largest
    single allocation that succeeds, never more than CUDA calls free, since WSL and Windows would
    serve more from host memory; its share is over what is free.
    """
    if task.device == "cpu":
        return dict.fromkeys(PRODUCES, absent("on the CPU there is no device memory"))
    import torch

    cap_memory(None)
    workspace = _workspace_bytes(torch)
    allocated_after_cleaning()
    outside = _Outside() if task.fault == "held_memory" else None
    context = _context_bytes(torch)
    if outside is not None:
        outside.free()
    free, _ = torch.cuda.mem_get_info()
    held = _fragments(torch, free) if task.fault == "fragmented" else []
    largest = _largest_block(torch, free)
    del held
    torch.cuda.empty_cache()
    return {
        "device.context.bytes": context,
        "device.cublas_workspace.bytes": Known(workspace, "B", "a product and its backward pass"),
        "device.largest_block.bytes": Known(
            largest, "B", f"single allocations, by bisection to {_STEP >> 20} MiB"
        ),
        "device.largest_block.share": Known(
            largest / free if free else 0.0, "1", "largest single allocation over what is free"
        ),
    }


def _workspace_bytes(torch: Any) -> int:
    """Return bytes that stay allocated after a product forward and backward, besides tensors."""
    allocated_after_cleaning()
    before = torch.cuda.memory_allocated()
    one = torch.ones(_SMALL, _SMALL, device="cuda", requires_grad=True)
    (one @ one).sum().backward()
    torch.cuda.synchronize()
    del one
    return int(torch.cuda.memory_allocated() - before)


def _context_bytes(torch: Any) -> Evidence:
    """Return what NVML counts for this process beyond torch's allocator."""
    import pynvml

    from cift_probe.sensors import RefusedError, open_nvml

    ours = torch.cuda.memory_reserved()
    with open_nvml() as nvml:
        if nvml.problem:
            return Unknown(nvml.problem)
        try:
            uuid = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            handle = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
            processes = nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle)
            used = nvml.ask("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2).used
        except RefusedError as error:
            return Unknown(str(error))
    own = [item.usedGpuMemory for item in processes if item.pid == os.getpid()]
    if own and own[0]:
        return Known(int(own[0] - ours), "B", "NVML, memory of this process")
    if len(processes) <= 1:  # in a container NVML counts process ids outside of it
        return Known(int(used - ours), "B", "NVML, memory in use on a card with one process")
    return Unknown(f"{len(processes)} processes use the card, and NVML does not name this one")


def _largest_block(torch: Any, free: int) -> int:
    low, high = 0, free
    while high - low > _STEP:
        middle = (low + high) // 2
        try:
            torch.empty(middle, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            high = middle
        else:
            low = middle
        torch.cuda.empty_cache()
    return low


class _Outside:
    """Memory from the driver itself, past torch's allocator, as another library would take it."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._pointer = ctypes.c_uint64()
        status = self._driver.cuMemAlloc_v2(ctypes.byref(self._pointer), ctypes.c_size_t(_HELD))
        if status:
            message = f"cuMemAlloc answered {status}"
            raise RuntimeError(message)

    def free(self) -> None:
        self._driver.cuMemFree_v2(self._pointer)


def _fragments(torch: Any, free: int) -> list[Any]:
    """Hold a quarter of what was free, so that less of it is in one piece."""
    return [torch.empty(free // 4, dtype=torch.uint8, device="cuda")]
