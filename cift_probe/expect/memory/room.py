"""The allocator's room that a step needs beyond its peak of allocated bytes.

Blocks are rounded and split (c10/cuda/CUDACachingAllocator.cpp): a remainder of up to 1 MiB of a
large block stays with it, segments are multiples of 2 MiB, and a hole that one of the largest
tensors left is often too small, or no longer whole, when the next one of its size is wanted.

How much that is depends on the order of things, which a ledger does not have. The shares were
measured: smallest caps of the "build" half of the traced steps in `tests/data/traced_steps.jsonl`
(`scripts/trace_grid.py`), each replayed through a model of the allocator that was compared with an
H200; the other half is in `tests/test_formula.py`.
"""

from __future__ import annotations

from typing import NamedTuple

# Segments of 20 MiB that a small plan does not fill, and shares that are too coarse for it: the
# plan of 408 MiB that every session runs needed 74 MiB less than said on an H200 (MEM007).
SEGMENT_SLACK = 96 << 20


class Room(NamedTuple):
    """Smallest room under which the step runs, in bytes, and its relative band."""

    size: int
    band: float


class Shares(NamedTuple):
    """Room beyond the peak: a share of the peak, and one of the largest single tensor."""

    of_peak: float
    of_largest: float
    band: float


# method, and whether the whole batch's logits exist at once
_SHARES = {
    ("full", True): Shares(0.0, 1.1, 0.12),
    ("full", False): Shares(0.03, 0.45, 0.08),
    ("lora", True): Shares(0.07, 0.0, 0.17),
    ("lora", False): Shares(0.03, 0.5, 0.08),
    ("qlora", True): Shares(0.015, 0.85, 0.15),
    ("qlora", False): Shares(0.025, 0.75, 0.08),
}
_INFERENCE = Shares(0.015, 0.6, 0.1)  # not replayed: the layers' share with plain weights


def required_room(peak: int, largest: int, method: str, *, full_logits: bool) -> Room:
    """Return the room from the peak and the largest single tensor, both in bytes."""
    shares = _SHARES.get((method, full_logits), _INFERENCE)
    size = int(peak * (1 + shares.of_peak) + shares.of_largest * largest)
    return Room(size, max(shares.band, SEGMENT_SLACK / size))
