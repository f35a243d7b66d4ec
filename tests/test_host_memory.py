"""Host memory of this process: what rises is seen, and what belongs to files is left out."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cift_probe.measure.host_memory import HostWatch, split

MIB = 1 << 20
SIZE = 64 * MIB


def touched(num_bytes: int) -> bytearray:
    """Return bytes that really are in memory, and were long enough to be seen."""
    taken = bytearray(b"1") * num_bytes
    time.sleep(0.05)
    return taken


def test_a_peak_that_has_passed_is_seen() -> None:
    with HostWatch() as host:
        taken = touched(SIZE)
        del taken
    assert host.growth is not None
    assert SIZE <= host.growth < SIZE + 16 * MIB
    assert host.resident_peak > SIZE


def test_where_nothing_rises_nothing_grows() -> None:
    with HostWatch() as host:
        time.sleep(0.02)
    assert host.growth is not None
    assert host.growth < 4 * MIB


def test_pages_of_a_file_are_not_the_process_own(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(SIZE))
    with HostWatch() as host, path.open("rb") as file:
        before = psutil.Process().memory_info().rss
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        time.sleep(0.05)
        assert psutil.Process().memory_info().rss - before >= SIZE // 2
        mapped.close()
    assert host.growth is not None
    assert host.growth < SIZE // 4


def test_a_kernel_that_tells_no_pages_of_files_tells_no_growth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = SimpleNamespace(rss=SIZE, shared=0)
    process = SimpleNamespace(memory_info=lambda: told)
    monkeypatch.setattr(psutil, "Process", lambda: process)
    with HostWatch() as host:
        pass
    assert host.growth is None
    assert host.resident_peak == SIZE


def test_resident_and_anonymous_are_told_apart() -> None:
    assert split(SimpleNamespace(rss=10, shared=4)) == (10, 6)
    assert split(SimpleNamespace(rss=10)) == (10, None)


def test_the_looking_ends_with_an_error_inside() -> None:
    def fail() -> None:
        message = "inside"
        raise RuntimeError(message)

    host = HostWatch()
    with pytest.raises(RuntimeError, match="inside"), host:
        fail()
    assert not host._thread.is_alive()  # noqa: SLF001 - nothing public tells
