"""How much host memory the driver pins at once, as offloading and loaders ask for it."""

from __future__ import annotations

from typing import Any

from cift_probe.evidence import Evidence, Known, absent
from cift_probe.measure.declare import Task, instrument

PRODUCES = ("host.pinned.largest",)
_SIZES = tuple(size << 20 for size in (64, 256, 512, 1024))
_LIMITED = 256 << 20


@instrument(
    "pinned",
    version=1,
    produces=PRODUCES,
    estimate_s=1.0,
    deadline_s=60.0,
    faults=("limited",),
)
def measure_pinned(task: Task) -> dict[str, Evidence]:
    """Pin 64, 256, 512 and 1024 MiB, one after the other; bytes of the largest that was had.

    WSL, some virtual machines and drivers limit it far below the memory that is free.
    """
    if task.device == "cpu":
        return dict.fromkeys(PRODUCES, absent("without a device nothing is pinned"))
    import torch

    torch.cuda.synchronize()  # a driver that does not start is told as such
    largest, note = 0, ""
    for size in _SIZES:
        try:
            _pin(torch, size, limited=task.fault == "limited")
        except RuntimeError as error:
            note = str(error).partition("\n")[0]
            break
        largest = size
    most = note or f"no more than {_SIZES[-1] >> 20} MiB were asked for"
    how = "torch.empty(…, pin_memory=True)"
    return {"host.pinned.largest": Known(largest, "B", how, note=most)}


def _pin(torch: Any, size: int, *, limited: bool) -> None:
    if limited and size > _LIMITED:
        message = "CUDA error: out of memory (planted)"
        raise RuntimeError(message)
    piece = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    del piece
    torch._C._host_emptyCache()  # noqa: SLF001 - else torch keeps it, and asks for less next time
