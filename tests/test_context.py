"""What stands between a card and a tensor, with a driver that is only told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from cift_probe import sensors
from cift_probe.evidence import Known, Unknown
from cift_probe.measure import context
from cift_probe.measure.declare import Task

MIB = 1 << 20
RESERVED = 100 * MIB


class Torch:
    """torch, as far as it is asked: a card with one free stretch of `room` bytes."""

    OutOfMemoryError = MemoryError
    uint8 = "uint8"

    def __init__(self, room: int) -> None:
        """Have `room` bytes free."""
        self.room = room
        self.cuda = SimpleNamespace(
            memory_reserved=lambda: RESERVED,
            empty_cache=lambda: None,
            mem_get_info=lambda: (room, room),
        )

    def empty(self, size: int, **_: Any) -> object:
        if size > self.room:
            raise MemoryError
        return object()


def processes(*told: tuple[int, int | None]) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in told]


def seen_context(
    monkeypatch: pytest.MonkeyPatch, running: list[SimpleNamespace], used: int, problem: str = ""
) -> Known | Unknown:
    answers = {
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetComputeRunningProcesses": running,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=used),
    }
    nvml = SimpleNamespace(problem=problem, ask=lambda name, *_: answers[name])

    @contextmanager
    def opened() -> Iterator[Any]:
        yield nvml

    monkeypatch.setattr(sensors, "open_nvml", opened)
    return context._context_bytes(Torch(0))  # noqa: SLF001 - the pure part


def test_this_process_is_told_apart_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    running = processes((os.getpid(), 700 * MIB), (1, 5000 * MIB))
    found = seen_context(monkeypatch, running, 6000 * MIB)
    assert isinstance(found, Known)
    assert found.value == 600 * MIB


def test_alone_on_the_card_all_that_is_used_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen_context(monkeypatch, processes((-1, None)), 800 * MIB)
    assert isinstance(found, Known)
    assert found.value == 700 * MIB


def test_among_others_without_an_id_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen_context(monkeypatch, processes((-1, None), (-2, None)), 800 * MIB)
    assert isinstance(found, Unknown)
    assert "2 processes" in found.reason


def test_without_nvml_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen_context(monkeypatch, [], 0, "no library") == Unknown("no library")


@pytest.mark.parametrize("room", [0, 63 * MIB, 1000 * MIB, 137 << 30])
def test_the_largest_block_is_enclosed_from_below(room: int) -> None:
    found = context._largest_block(Torch(room), 140 << 30)  # noqa: SLF001 - the pure part
    assert room - 64 * MIB <= found <= room


def test_on_the_cpu_there_is_no_context() -> None:
    seen = context.measure_context(Task("cpu"))
    assert set(seen) == set(context.PRODUCES)
    assert all(isinstance(item, Known) and item.absent for item in seen.values())
