"""The managed memory of a paged optimizer: taken from the device, unseen by torch's allocator."""

from __future__ import annotations

import ctypes
from typing import Any

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure.declare import Task, instrument

NUM_PARAMETERS = 1 << 25
_NUM_SMALL = 1 << 18  # what bitsandbytes pages is larger than 1e5
_CONCURRENT_MANAGED_ACCESS = 89  # CUDA Driver API, CUdevice_attribute
_LIBRARY = "libcuda.so.1"

PRODUCES = ("paged.device.added", "paged.torch.added")


@instrument(
    "paged",
    version=1,
    produces=PRODUCES,
    estimate_s=2.0,
    deadline_s=120.0,
    faults=("held_memory", "not_paged"),
)
def measure_paged(task: Task) -> dict[str, Evidence]:
    """Take one step of bitsandbytes' paged AdamW on 2^25 parameters; bytes.

    `device.added` is by how much free memory, as CUDA tells it, fell beyond what torch reserved
    more; `torch.added` is by how much torch's own count rose. Where the driver does not page
    managed memory (under WSL and Windows, on some virtual GPUs) there is nothing to measure.
    """
    if task.device == "cpu":
        return dict.fromkeys(PRODUCES, absent("on the CPU there is no device memory to page"))
    import torch

    if torch.cuda.get_device_properties(0).is_integrated:
        return dict.fromkeys(PRODUCES, absent("host and device share their memory: no paging"))
    if not read_attribute(_CONCURRENT_MANAGED_ACCESS):
        text = "the driver does not page managed memory here (concurrentManagedAccess is 0)"
        return dict.fromkeys(PRODUCES, absent(text))
    try:
        return take_step(torch, task)
    except ImportError as error:
        return dict.fromkeys(PRODUCES, Unknown(f"bitsandbytes cannot be imported: {error}"))


def take_step(torch: Any, task: Task) -> dict[str, Evidence]:
    """Return what the first step of the optimizer added; frees what it paged."""
    import bitsandbytes

    paged = bitsandbytes.optim.PagedAdamW32bit
    kind = bitsandbytes.optim.AdamW32bit if task.fault == "not_paged" else paged
    try:
        one_step(torch, paged, _NUM_SMALL)  # kernels are loaded, which takes device memory too
        weight = trainable(torch, NUM_PARAMETERS)
        optimizer = kind([weight])
        free, reserved, allocated = told(torch)
        optimizer.step()
        if task.fault == "held_memory":
            one_step(torch, paged, NUM_PARAMETERS // 2)
        free_after, reserved_after, allocated_after = told(torch)
    finally:
        release(bitsandbytes)
    fell = free - free_after - (reserved_after - reserved)
    how = "torch.cuda.mem_get_info around the first step, 2^25 parameters"
    return {
        "paged.device.added": Known(fell, "B", how),
        "paged.torch.added": Known(allocated_after - allocated, "B", how),
    }


def trainable(torch: Any, num_parameters: int) -> Any:
    """Return a parameter in bfloat16 with a gradient."""
    weight = torch.nn.Parameter(torch.zeros(num_parameters, dtype=torch.bfloat16, device="cuda"))
    weight.grad = torch.ones_like(weight)
    return weight


def one_step(torch: Any, kind: Any, num_parameters: int) -> None:
    """Take one step of an optimizer on a parameter of its own."""
    kind([trainable(torch, num_parameters)]).step()
    torch.cuda.synchronize()


def told(torch: Any) -> tuple[int, int, int]:
    """Return bytes that CUDA calls free, that torch reserved, and that it handed out."""
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    return free, torch.cuda.memory_reserved(), torch.cuda.memory_allocated()


def paged_tensors(bitsandbytes: Any) -> list[Any]:
    """Return the list in which bitsandbytes keeps what it has paged."""
    kept: list[Any] = bitsandbytes.functional.GlobalPageManager.get_instance().paged_tensors
    return kept


def release(bitsandbytes: Any) -> None:
    """Free managed memory, which bitsandbytes itself never does; nobody may use it afterwards."""
    kept = paged_tensors(bitsandbytes)
    library = ctypes.CDLL(_LIBRARY)
    while kept:
        library.cuMemFree_v2(ctypes.c_uint64(kept.pop().data_ptr()))


def read_attribute(number: int) -> int:
    """Return an attribute of the visible device; 0 where the driver does not tell."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        device, value = ctypes.c_int(), ctypes.c_int()
        failed = library.cuInit(0) or library.cuDeviceGet(ctypes.byref(device), 0)
        failed = failed or library.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    except (OSError, AttributeError):
        return 0
    return 0 if failed else value.value
