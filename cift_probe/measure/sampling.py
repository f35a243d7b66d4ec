"""A look at the sensors again and again while something runs on the device."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Self, TypeAlias

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.sensors import Nvml, open_nvml, read_visible

Reading: TypeAlias = Mapping[str, Evidence]
Read: TypeAlias = Callable[[Nvml, str], Reading]


_OPENS_S = 10.0


class Sampler:
    """Reads the sensors of the one visible device in a thread, inside a `with` block.

    The block begins when NVML is open, which takes a while in a sandbox. `samples` holds (seconds
    since then, reading). One is taken at once, and then one every `pause_s` seconds: a block that
    ends sooner has one all the same. `problem` is the reason when NVML shows no device. torch and
    NVML let go of the interpreter while they wait.
    """

    def __init__(self, read: Read, pause_s: float) -> None:
        """Look with `read(nvml, uuid)`."""
        self.samples: list[tuple[float, Reading]] = []
        self.problem = ""
        self._read = read
        self._pause_s = pause_s
        self._ended, self._opened = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> Self:
        """Begin to look."""
        self._thread.start()
        self._opened.wait(_OPENS_S)
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._ended.set()
        self._thread.join()

    def later(self, share: float = 0.5) -> list[Reading]:
        """Return the readings of the last `share` of the time: what was settled by then."""
        if not self.samples:
            return []
        last = self.samples[-1][0]
        return [reading for at, reading in self.samples if at >= last * (1 - share)]

    def middle(self, key: str, unit: str) -> Evidence:
        """Return the lower median of a number over the later half; Unknown or absent as told."""
        told = [reading[key] for reading in self.later() if key in reading]
        numbers = [item.value for item in told if isinstance(item, Known) and not item.absent]
        if numbers:
            source = next(item.source for item in told if isinstance(item, Known))
            note = f"median of {len(numbers)} readings under load"
            return Known(statistics.median_low(numbers), unit, source, note=note)
        return told[-1] if told else Unknown(self.problem or "NVML was not read in time", "NVML")

    def _look_on(self) -> None:
        with open_nvml() as nvml:
            visible = read_visible(nvml)
            self._opened.set()
            if not visible:
                self.problem = nvml.problem or "NVML shows no device"
                return
            started = time.perf_counter()
            while True:
                reading = self._read(nvml, visible[0])
                self.samples.append((time.perf_counter() - started, reading))
                if self._ended.wait(self._pause_s):
                    return
