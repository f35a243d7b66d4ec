"""An allocator that only counts: bytes are taken, and come back when what holds them is gone."""

from __future__ import annotations

from typing import Any

from cift_probe.measure.stages import Allocator

GIB = 1 << 30
SEGMENT = 20 << 20


class Held:
    """What holds bytes until it is gone."""

    def __init__(self, owner: CountedAllocator, num_bytes: int) -> None:
        """Take bytes from `owner`."""
        self._owner, self._num_bytes = owner, num_bytes
        owner.taken += num_bytes
        owner.highest = max(owner.highest, owner.taken)

    def __del__(self) -> None:
        """Give them back."""
        self._owner.taken -= self._num_bytes


class CountedAllocator(Allocator):
    """Counts what is held; pieces below a segment share segments of 20 MiB, five to each."""

    def __init__(self) -> None:
        """Hold nothing of 100 GiB."""
        self.taken = self.highest = 0
        self.total = 100 * GIB
        self.largest_share = 1.0
        self.most_reserved = 0
        self.settled = 0

    def allocated(self) -> int:
        return self.taken

    def peak(self) -> int:
        return self.highest

    def forget_peak(self) -> None:
        self.highest = self.taken

    def reserved(self) -> int:
        """Return what the cache holds: all that was ever taken, until it is released."""
        self.most_reserved = max(self.most_reserved, self.highest)
        return self.most_reserved

    def release(self) -> None:
        self.highest = self.most_reserved = self.taken

    def free(self) -> int:
        return self.total - self.taken

    def settle(self) -> None:
        self.settled += 1

    def hold(self, num_bytes: int) -> Any:
        return Held(self, num_bytes)

    def fits(self, num_bytes: int) -> bool:
        return num_bytes <= self.largest_share * self.free()


class SegmentedAllocator(CountedAllocator):
    """Gives back only segments in which nothing lives: a segment is as large as five pieces."""

    def release(self) -> None:
        num_pieces = self.taken // (4 << 20)
        self.highest = self.most_reserved = num_pieces * SEGMENT
