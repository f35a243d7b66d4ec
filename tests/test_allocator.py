"""The model of PyTorch's caching allocator: rounding, blocks, segments, caps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cift_probe.expect.traced.allocator import (
    MIB,
    CachingAllocator,
    Event,
    ExpandableAllocator,
    OutOfRoomError,
    replay,
    smallest_cap,
)

Make = Callable[[int | None], CachingAllocator]
BOTH = pytest.mark.parametrize("make", [CachingAllocator, ExpandableAllocator])


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),  # kMinBlockSize, kSmallBuffer
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),  # kLargeBuffer
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # kMinLargeAlloc: a segment made to measure
        (21 * MIB + 1, 22 * MIB, 22 * MIB),  # kRoundLarge; the rest of ≤ 1 MiB is not cut off
    ],
)
def test_one_allocation_takes_its_block_and_its_segment(
    asked: int, allocated: int, reserved: int
) -> None:
    room = CachingAllocator()
    room.allocate(1, asked)
    assert (room.allocated, room.reserved) == (allocated, reserved)


def test_the_rest_of_a_large_block_is_cut_off_only_above_one_mib() -> None:
    room = CachingAllocator()
    room.allocate(1, 30 * MIB)
    room.release(1)
    room.allocate(2, 29 * MIB)
    assert room.allocated == 30 * MIB
    room.release(2)
    room.allocate(3, 29 * MIB - 512)
    assert room.allocated == 29 * MIB - 512


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    room = CachingAllocator()
    for name, size in ((1, 40), (2, 30), (3, 50)):
        room.allocate(name, size * MIB)
    for name in (1, 2, 3):
        room.release(name)
    room.allocate(4, 30 * MIB)
    room.allocate(5, 40 * MIB)
    assert room.reserved == 120 * MIB


def test_neighbours_are_joined_when_they_are_released() -> None:
    room = CachingAllocator()
    for name in range(1, 5):
        room.allocate(name, 5 * MIB)
    assert room.reserved == 20 * MIB
    for name in (1, 3, 2, 4):
        room.release(name)
    room.allocate(9, 9 * MIB)
    room.allocate(10, 9 * MIB)
    assert room.reserved == 20 * MIB


@BOTH
def test_an_allocation_that_fits_only_after_the_cache_is_emptied_succeeds(make: Make) -> None:
    room = make(60 * MIB)
    room.allocate(1, 40 * MIB)
    room.release(1)
    room.allocate(2, 60 * MIB)
    assert room.reserved == 60 * MIB


@BOTH
def test_beyond_the_cap_there_is_no_room(make: Make) -> None:
    room = make(60 * MIB)
    room.allocate(1, 40 * MIB)
    with pytest.raises(OutOfRoomError):
        room.allocate(2, 30 * MIB)


def test_expandable_segments_grow_where_fixed_ones_leave_holes() -> None:
    events: list[Event] = [("a", 1, 100 * MIB), ("f", 1), ("a", 2, 140 * MIB)]
    fixed, expandable = replay(events), replay(events, ExpandableAllocator)
    assert fixed.peak_reserved == 240 * MIB
    assert expandable.peak_reserved == 140 * MIB


@pytest.mark.parametrize("seed", range(12))
@BOTH
def test_books_balance_whatever_happens(make: Make, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - reproducible, not a secret
    room = make(None)
    live: dict[int, int] = {}
    for name in range(600):
        if live and chance.random() < 0.5:
            gone = chance.choice(list(live))
            room.release(gone)
            del live[gone]
        else:
            live[name] = int(2 ** chance.uniform(3, 27))
            room.allocate(name, live[name])
        if chance.random() < 0.02:
            room.empty_cache()
        assert sum(live.values()) <= room.allocated <= room.reserved <= room.peak_reserved
    for name in list(live):
        room.release(name)
    room.empty_cache()
    assert (room.allocated, room.reserved) == (0, 0)


def test_instants_keep_their_own_peaks_and_loading_is_left_out() -> None:
    events: list[Event] = [
        ("a", 1, 100 * MIB),
        ("a", 2, 50 * MIB),
        ("f", 2),
        ("r",),
        ("a", 3, 20 * MIB),
        ("m", "forward"),
        ("f", 3),
        ("a", 4, 30 * MIB),
        ("m", "backward"),
    ]
    seen = replay(events)
    assert seen.instants == {"forward": 120 * MIB, "backward": 130 * MIB}
    assert seen.peak_allocated == 130 * MIB


@BOTH
def test_the_smallest_cap_is_enough_and_a_little_less_is_not(make: Make) -> None:
    chance = random.Random(5)  # noqa: S311 - as above
    events: list[Event] = []
    live: list[int] = []
    for name in range(300):
        if live and chance.random() < 0.48:
            events.append(("f", live.pop(chance.randrange(len(live)))))
        else:
            live.append(name)
            events.append(("a", name, chance.randrange(MIB, 60 * MIB)))
    cap = smallest_cap(events, make, tolerance=0.001)
    replay(events, make, cap)
    peak = replay(events, make).peak_allocated
    with pytest.raises(OutOfRoomError):
        replay(events, make, int(cap - 0.002 * peak))
