"""How much device memory the allocator of this process can really have."""

from __future__ import annotations

import math
from typing import Any

from cift_probe.evidence import Evidence, Known, absent
from cift_probe.measure.declare import Task, instrument
from cift_probe.measure.inside import cap_memory

_SHARE = 0.8  # of what is free; more would crowd out a compositor or another user
_CHUNK = 1 << 30
_HELD = 256 << 20

PRODUCES = ("device.allocatable.share", "device.usable.bytes")


@instrument(
    "memory_space",
    version=2,
    produces=PRODUCES,
    estimate_s=2.0,
    deadline_s=120.0,
    faults=("held_memory", "refused"),
)
def measure_memory_space(task: Task) -> dict[str, Evidence]:
    """Allocate and write four fifths of what is free, give it back, and tell what is usable.

    `device.allocatable.share` is what was really handed out over what CUDA called free here,
    0.8 at the most; `device.usable.bytes` is what is free for the allocator in this process,
    after its CUDA context. With a cap it is what would be free on a card of that size, with
    the same context and driver reserve.
    The probe stays below the free memory, since WSL and Windows serve more from host memory.
    """
    if task.device == "cpu":
        return dict.fromkeys(PRODUCES, absent("on the CPU there is no device memory"))
    import torch

    cap_memory(None)  # the card is asked here; the cap bounds what is called usable
    held = None
    if task.fault == "held_memory":
        held = torch.ones(_HELD, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    usable = free + kept
    allocated = _allocate(torch, int(free * _SHARE), task)
    torch.cuda.empty_cache()
    del held
    if task.vram_cap is not None:
        taken = total - usable
        usable = max(0, min(usable, task.vram_cap - taken))
    how = "torch.cuda.mem_get_info after the CUDA context"
    capped = f"{how}, within the cap" if task.vram_cap is not None else how
    return {
        "device.allocatable.share": Known(
            allocated / free if free else math.nan, "1", "allocated and written in 1 GiB pieces"
        ),
        "device.usable.bytes": Known(usable, "B", capped),
    }


def _allocate(torch: Any, wanted: int, task: Task) -> int:
    pieces = []
    allocated = 0
    try:
        while allocated < wanted:
            size = min(_CHUNK, wanted - allocated)
            if task.fault == "refused" and allocated:
                break
            piece = torch.empty(size, dtype=torch.uint8, device="cuda")
            piece.fill_(1)  # a page that is never written may never be backed
            pieces.append(piece)
            allocated += size
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        pass  # what was handed out before is the answer
    del pieces
    return allocated
