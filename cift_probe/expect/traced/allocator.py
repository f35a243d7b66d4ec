"""A model of PyTorch's caching allocator: from allocations and releases to reserved bytes.

Rounding, the choice of a block, splitting, segment sizes, and what is given back before an
allocation fails, as in c10/cuda/CUDACachingAllocator.cpp of torch 2.11 to 2.13, one stream, no
options but `expandable_segments`. Checked against an H200: `benchmarks/memory_table.py`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

KIB, MIB = 1 << 10, 1 << 20
MIN_BLOCK = 512  # kMinBlockSize: all sizes are rounded to at least 512 bytes
SMALL = MIB  # kSmallSize: the largest "small" allocation
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer
MIN_OWN_SEGMENT = 10 * MIB  # kMinLargeAlloc: above it a segment is made to measure
ROUND_SEGMENT = 2 * MIB  # kRoundLarge

# ("a", id, bytes) allocates, ("f", id) releases, ("m", name) ends an instant,
# ("r",) empties the cache and begins the peaks anew
Event: TypeAlias = tuple[str, int, int] | tuple[str, int] | tuple[str, str] | tuple[str]


class OutOfRoomError(Exception):
    """An allocation failed under the cap, after everything cached was given back."""


class _Block:
    """A piece of a segment; neighbours of one segment are linked."""

    __slots__ = ("free", "mapped", "next", "offset", "previous", "segment", "size", "small")

    def __init__(self, segment: int, offset: int, size: int, *, small: bool) -> None:
        self.segment = segment
        self.offset = offset
        self.size = size
        self.small = small
        self.free = True
        self.mapped = True
        self.previous: _Block | None = None
        self.next: _Block | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Order of the search for the smallest block that is large enough."""
        return (self.size, self.segment, self.offset)


class CachingAllocator:
    """Segments of fixed size from the driver, cut into blocks; the default of PyTorch.

    `allocated` and `reserved` are bytes now, `peak_allocated` and `peak_reserved` since the last
    `reset_peaks`. `cap` bounds `reserved`, as `set_per_process_memory_fraction` does.
    """

    def __init__(self, cap: int | None = None) -> None:
        """Begin with nothing reserved."""
        self.cap = cap
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._free: dict[bool, list[tuple[int, int, int, _Block]]] = {True: [], False: []}
        self._blocks: dict[int, _Block] = {}
        self._num_segments = 0

    def allocate(self, name: int, num_bytes: int) -> int:
        """Hand out a block and return its bytes; raises OutOfRoomError where the cap forbids it."""
        size = max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)
        small = size <= SMALL
        block = self._take(size, small=small) or self._extend(size, small=small)
        self._split(block, size)
        block.free = False
        self._blocks[name] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block.size

    def release(self, name: int) -> None:
        """Take a block back and join it with free neighbours."""
        block = self._blocks.pop(name)
        self.allocated -= block.size
        block.free = True
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free and neighbour.mapped:
                self._forget(neighbour)
                block = _joined(neighbour, block)
        self._remember(block)

    def empty_cache(self) -> None:
        """Give back every segment of which nothing is in use."""
        for small, blocks in self._free.items():
            whole = [item for item in blocks if item[3].previous is None and item[3].next is None]
            self.reserved -= sum(item[0] for item in whole)
            gone = {id(item[3]) for item in whole}
            self._free[small] = [item for item in blocks if id(item[3]) not in gone]

    def reset_peaks(self) -> None:
        """Begin the peaks anew at what is there now."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _take(self, size: int, *, small: bool) -> _Block | None:
        blocks = self._free[small]
        index = bisect.bisect_left(blocks, (size,))
        return blocks.pop(index)[3] if index < len(blocks) else None

    def _extend(self, size: int, *, small: bool) -> _Block:
        """Get a new segment from the driver."""
        if small:
            wanted = SMALL_SEGMENT
        elif size < MIN_OWN_SEGMENT:
            wanted = LARGE_SEGMENT
        else:
            wanted = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        self._make_room(wanted)
        self.reserved += wanted
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._num_segments += 1
        return _Block(self._num_segments, 0, wanted, small=small)

    def _make_room(self, wanted: int) -> None:
        if self.cap is None or self.reserved + wanted <= self.cap:
            return
        self.empty_cache()
        if self.reserved + wanted > self.cap:
            raise OutOfRoomError

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        # should_split(): the rest of a large block is cut off only above 1 MiB
        if rest >= MIN_BLOCK if block.small else rest > SMALL:
            self._remember(_cut(block, size))

    def _remember(self, block: _Block) -> None:
        bisect.insort(self._free[block.small], (*block.key, block))

    def _forget(self, block: _Block) -> None:
        blocks = self._free[block.small]
        del blocks[bisect.bisect_left(blocks, block.key)]


class ExpandableAllocator(CachingAllocator):
    """`expandable_segments:True`: one segment a pool, to which memory is mapped piece by piece.

    A piece is 2 MiB for small and 20 MiB for large allocations. Pieces that nothing uses are
    unmapped only when room is short, or by `empty_cache`.
    """

    def _extend(self, size: int, *, small: bool) -> _Block:
        piece = SMALL_SEGMENT if small else LARGE_SEGMENT
        block = self._find_unmapped(size, small=small)
        missing = size - (block.size if block.mapped else 0)
        wanted = -(-missing // piece) * piece
        if self.cap is not None and self.reserved + wanted > self.cap:
            if block.mapped:
                self._remember(block)
            self.empty_cache()
            block = self._take(size, small=small) or self._find_unmapped(size, small=small)
            if block.mapped and block.size >= size:
                return block
            missing = size - (block.size if block.mapped else 0)
            wanted = -(-missing // piece) * piece
            if self.reserved + wanted > self.cap:
                raise OutOfRoomError
        return self._map(block, wanted)

    def _find_unmapped(self, size: int, *, small: bool) -> _Block:
        """Return the first hole that is large enough with its free neighbour, or the end.

        The free mapped block before a hole is returned in its place, taken out of the free ones.
        """
        for hole in self._holes(small=small):
            before = hole.previous
            joined = before is not None and before.free and before.mapped
            room = hole.size + (before.size if joined and before is not None else 0)
            if room >= size:
                if joined and before is not None:
                    self._forget(before)
                    return before
                return hole
        message = "the end of an expandable segment is a hole without bound"
        raise AssertionError(message)

    def _holes(self, *, small: bool) -> Iterable[_Block]:
        if not hasattr(self, "_heads"):
            self._heads: dict[bool, _Block] = {}
        if small not in self._heads:
            end = _Block(int(small), 0, 1 << 60, small=small)
            end.mapped = False
            self._heads[small] = end
        block: _Block | None = self._heads[small]
        while block is not None:
            if not block.mapped:
                yield block
            block = block.next

    def _map(self, block: _Block, num_bytes: int) -> _Block:
        """Map the beginning of a hole, and join it with the free block before it."""
        hole = block if not block.mapped else block.next
        if hole is None:
            message = "a block that ends in no hole cannot grow"
            raise AssertionError(message)
        if hole.size > num_bytes:
            rest = _cut(hole, num_bytes)
            rest.mapped = False
        hole.mapped = True
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return hole if hole is block else _joined(block, hole)

    def _split(self, block: _Block, size: int) -> None:
        if block.size - size >= MIN_BLOCK:  # should_split(): always, with expandable segments
            self._remember(_cut(block, size))

    def empty_cache(self) -> None:
        """Unmap every whole piece of which nothing is in use."""
        for small, blocks in self._free.items():
            piece = SMALL_SEGMENT if small else LARGE_SEGMENT
            for _, _, _, block in list(blocks):
                start = -(-block.offset // piece) * piece
                end = (block.offset + block.size) // piece * piece
                if end <= start:
                    continue
                self._forget(block)
                if start > block.offset:
                    middle = _cut(block, start - block.offset)
                    self._remember(block)
                else:
                    middle = block
                if middle.offset + middle.size > end:
                    self._remember(_cut(middle, end - middle.offset))
                middle.mapped = False
                self.reserved -= middle.size
                self._join_holes(middle)

    def _join_holes(self, hole: _Block) -> None:
        if hole.next is not None and not hole.next.mapped:
            hole = _joined(hole, hole.next)
        if hole.previous is not None and not hole.previous.mapped:
            _joined(hole.previous, hole)


def _cut(block: _Block, size: int) -> _Block:
    """Cut a block after `size` bytes; return the free rest behind it."""
    rest = _Block(block.segment, block.offset + size, block.size - size, small=block.small)
    rest.previous, rest.next = block, block.next
    if block.next is not None:
        block.next.previous = rest
    block.next = rest
    block.size = size
    return rest


def _joined(one: _Block, other: _Block) -> _Block:
    """Join two neighbours into the one that comes first."""
    first, second = (one, other) if one.offset < other.offset else (other, one)
    first.size += second.size
    first.next = second.next
    if second.next is not None:
        second.next.previous = first
    return first


class Replay(NamedTuple):
    """Bytes seen while events ran: peaks over all, and allocated peaks by instant."""

    peak_allocated: int
    peak_reserved: int
    instants: dict[str, int]
    reserved_at_end: int


def replay(
    events: Iterable[Event],
    make: Callable[[int | None], CachingAllocator] = CachingAllocator,
    cap: int | None = None,
) -> Replay:
    """Run events through an allocator; raises OutOfRoomError under a cap that is too small.

    Peaks are counted from the last ("r",), the end of loading.
    """
    room = make(cap)
    instants: dict[str, int] = {}
    peak = 0
    for event in events:
        kind = event[0]
        if kind == "a":
            room.allocate(event[1], event[2])  # type: ignore[arg-type, misc]  # by its kind
        elif kind == "f":
            room.release(event[1])  # type: ignore[arg-type, misc]  # as above
        elif kind == "m":
            name = str(event[1])  # type: ignore[misc]  # as above
            instants[name] = max(instants.get(name, 0), room.peak_allocated)
            peak = max(peak, room.peak_allocated)
            room.peak_allocated = room.allocated
        else:
            room.empty_cache()
            room.reset_peaks()
            instants, peak = {}, 0
    return Replay(max(peak, room.peak_allocated), room.peak_reserved, instants, room.reserved)


def smallest_cap(
    events: list[Event],
    make: Callable[[int | None], CachingAllocator] = CachingAllocator,
    tolerance: float = 0.004,
) -> int:
    """Return the smallest cap, in bytes, under which the events run, loading included.

    By bisection between the peak of what is allocated and what is reserved without a cap, until
    the bounds are closer than `tolerance` of the peak. The upper bound is returned.
    """
    plain = [event for event in events if event[0] != "r"]
    free = replay(plain, make)
    low, high = free.peak_allocated - 1, free.peak_reserved
    while high - low > tolerance * free.peak_allocated:
        middle = (low + high) // 2
        try:
            replay(plain, make, middle)
        except OutOfRoomError:
            low = middle
        else:
            high = middle
    return high
