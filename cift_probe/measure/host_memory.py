"""Host memory of this process while something runs: its peak, by looking often."""

from __future__ import annotations

import threading
from typing import Any, Self

import psutil

_PAUSE_S = 0.005


class HostWatch:
    """Follows this process' memory inside a `with` block; all in bytes.

    `resident_peak` counts what the process has in memory, `growth` by how much its anonymous
    memory rose at most: pages of files, which the kernel may drop at any time, are left out.
    `growth` is None where the kernel does not tell the two apart (gVisor says that all is
    anonymous). Short peaks between two looks are missed; a model that is copied is not one.
    """

    def __init__(self, pause_s: float = _PAUSE_S) -> None:
        """Look every `pause_s` seconds."""
        self.resident_peak = 0
        self.growth: int | None = None
        self._pause_s = pause_s
        self._process = psutil.Process()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._before: int | None = None
        self._anonymous_peak = 0

    def __enter__(self) -> Self:
        """Begin to look."""
        self._before = self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Look once more, and end."""
        self._ended.set()
        self._thread.join()
        if self._look() is not None and self._before is not None:
            self.growth = max(0, self._anonymous_peak - self._before)

    def _look_on(self) -> None:
        while not self._ended.wait(self._pause_s):
            self._look()

    def _look(self) -> int | None:
        resident, anonymous = split(self._process.memory_info())
        self.resident_peak = max(self.resident_peak, resident)
        self._anonymous_peak = max(self._anonymous_peak, anonymous or 0)
        return anonymous


def split(told: Any) -> tuple[int, int | None]:
    """Return resident bytes, and how many of them are anonymous; None where that is not told.

    A Python process always has pages of files: where none are told, the kernel does not count.
    """
    shared = getattr(told, "shared", 0)
    return int(told.rss), int(told.rss - shared) if shared else None
