"""How much device memory the allocator of this process can really have."""

from __future__ import annotations

import math
import time
from typing import Any

from cift_probe.evidence import Evidence, Known, absent
from cift_probe.measure.declare import Task, instrument
from cift_probe.measure.inside import cap_memory

_SHARE = 0.8  # of what is free; more would crowd out a compositor or another user
_CHUNK = 1 << 30
_SLOWER = 5  # times: PCIe against device memory is more than that on every card

PRODUCES = (
    "device.allocatable.share",
    "device.usable.bytes",
    "device.spill",
    "device.spilled",
)


@instrument(
    "memory_space",
    version=4,
    produces=PRODUCES,
    estimate_s=2.0,
    deadline_s=120.0,
    faults=("held_memory", "refused", "spilled"),
)
def measure_memory_space(task: Task) -> dict[str, Evidence]:
    """Allocate and write four fifths of what is free, give it back, and tell what is usable.

    `device.allocatable.share` is what was really handed out over what CUDA called free here,
    0.8 at the most; `device.usable.bytes` is what is free for the allocator in this process,
    after its CUDA context. With a cap it is what would be free on a card of that size, with
    the same context and driver reserve.
    WSL and Windows serve from host memory what the card does not have: the probe stays below
    the free memory, and stops where writing gets five times slower, which `device.spilled` tells,
    and `device.spill` how much was had before; that is then what is usable.
    """
    if task.device == "cpu":
        return dict.fromkeys(PRODUCES, absent("on the CPU there is no device memory"))
    import torch

    cap_memory(None)  # the card is asked here; the cap bounds what is called usable
    held = None
    if task.fault == "held_memory":
        quarter = torch.cuda.mem_get_info()[0] // 4
        held = torch.ones(quarter, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    usable = free + kept
    allocated, spilled = _allocate(torch, int(free * _SHARE), task)
    torch.cuda.empty_cache()
    del held
    if spilled:
        usable = min(usable, allocated)
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
        "device.spill": Known(allocated, "B", "writing got five times slower behind it")
        if spilled
        else absent("every piece was written at the speed of the device"),
        "device.spilled": Known(spilled, source="pace of writing pieces of 1 GiB"),
    }


def _allocate(torch: Any, wanted: int, task: Task) -> tuple[int, bool]:
    """Return bytes that were handed out and written, and whether more came from host memory."""
    pieces: list[Any] = []
    allocated = 0
    fastest = math.inf  # seconds per byte
    try:
        while allocated < wanted:
            size = min(_CHUNK, wanted - allocated)
            if task.fault == "refused" and allocated:
                break
            piece = torch.empty(size, dtype=torch.uint8, device="cuda")
            piece.fill_(1)  # a page that is never written may never be backed
            pieces.append(piece)
            pace = _write_pace(torch, piece, size)
            if task.fault == "spilled" and allocated:
                pace *= 2 * _SLOWER
            if size == _CHUNK and pace > _SLOWER * fastest:
                return allocated, True
            fastest = min(fastest, pace)
            allocated += size
    except torch.OutOfMemoryError:
        pass  # what was handed out before is the answer
    finally:
        pieces.clear()
    return allocated, False


def _write_pace(torch: Any, piece: Any, size: int) -> float:
    """Return seconds per byte of writing a piece that is backed already."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    piece.fill_(2)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / size
