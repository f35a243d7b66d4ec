"""The allocator's room that a step needs beyond its peak of allocated bytes.

Blocks are rounded and split (c10/cuda/CUDACachingAllocator.cpp): a remainder of up to 1 MiB of a
large block stays with it, segments are multiples of 2 MiB, and a hole that one of the largest
tensors left is often too small, or no longer whole, when the next one of its size is wanted.

The shares were measured: smallest caps found by bisection of 37 traced steps replayed through a
model of that allocator (`tests/data/room_measurements.jsonl`); the model was compared with an H200.
"""

from __future__ import annotations

from typing import NamedTuple

SHARE_OF_PEAK = 0.015
SHARE_OF_LARGEST = 0.6
# unpacked weights of several sizes come and go between the activations
SHARE_OF_LARGEST_PACKED = 0.8
BAND = 0.1


class Room(NamedTuple):
    """Smallest room under which the step runs, in bytes, and its relative band."""

    size: int
    band: float


def required_room(peak: int, largest: int, *, packed: bool) -> Room:
    """Return the point estimate from the peak and the largest single tensor, both in bytes."""
    share = SHARE_OF_LARGEST_PACKED if packed else SHARE_OF_LARGEST
    return Room(int(peak * (1 + SHARE_OF_PEAK) + share * largest), BAND)
