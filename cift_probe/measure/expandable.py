"""Whether torch's allocator can grow its segments here: what `expandable_segments:True` needs."""

from __future__ import annotations

import os
from typing import Any

from cift_probe.evidence import Evidence, Known, absent
from cift_probe.measure.declare import Task, instrument

PRODUCES = ("allocator.expandable.works",)
_BYTES = 64 << 20
_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@instrument(
    "expandable",
    version=1,
    produces=PRODUCES,
    estimate_s=0.5,
    deadline_s=60.0,
    faults=("not_set",),
)
def measure_expandable(task: Task) -> dict[str, Evidence]:
    """Switch expandable segments on, allocate and write 64 MiB, and see in which kind it lies.

    Virtual GPUs, Jetson and Windows lack the driver's virtual memory management that it needs.
    The process' own setting is put back.
    """
    if task.device == "cpu":
        return dict.fromkeys(PRODUCES, absent("on the CPU there are no segments"))
    import torch

    torch.cuda.empty_cache()
    before = os.environ.get(_NAMES[0]) or os.environ.get(_NAMES[1], "expandable_segments:False")
    try:
        if task.fault != "not_set":
            _set(torch, "expandable_segments:True")
        works, note = _allocate(torch)
    except RuntimeError as error:
        works, note = False, str(error).partition("\n")[0]
    finally:
        _set(torch, before)
        torch.cuda.empty_cache()
    how = "64 MiB allocated with the setting on, kind of their segment"
    return {"allocator.expandable.works": Known(works, source=how, note=note)}


def _allocate(torch: Any) -> tuple[bool, str]:
    piece = torch.ones(_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    place = piece.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= place < segment["address"] + segment["total_size"]:
            grows = bool(segment.get("is_expandable"))
            return grows, "" if grows else "the setting is accepted and has no effect"
    return False, "torch does not tell which segment the memory lies in"


def _set(torch: Any, text: str) -> None:
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # noqa: SLF001 - the only way
    if change is None:  # torch before 2.10
        change = torch.cuda.memory._set_allocator_settings  # noqa: SLF001 - as above
    change(text)
