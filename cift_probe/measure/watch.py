"""Peak memory and duration of a step's instants, read from torch's allocator and a clock."""

from __future__ import annotations

import math
import time
from typing import Any

from cift_probe.stack.instants import Marks


class Watch(Marks):
    """Notes peaks (bytes allocated) per instant and durations (seconds) of steps."""

    def __init__(self, num_steps: int, pause_s: float = 0.0, *, profiled: bool = True) -> None:
        """Watch nothing yet; `pause_s` is a planted fault that slows every step.

        The last of `num_steps` is profiled for the time that the device itself computes, and
        is left out of `durations`, unless `profiled` is False.
        """
        super().__init__(self._record)
        self.peaks: dict[str, int] = {}
        self.allocated: list[int] = []  # at the end of each step
        self.durations: list[float] = []
        self.busy_s = math.nan
        self._profiled_step = num_steps - 1 if profiled else -1
        self._profile: Any = None
        self._pause_s = pause_s
        self._started = 0.0

    def _record(self, instant: str) -> None:
        """Keep the largest peak seen for an instant over all steps, and begin anew."""
        import torch

        if not torch.cuda.is_available():
            return
        peak = torch.cuda.max_memory_allocated()
        self.peaks[instant] = max(peak, self.peaks.get(instant, 0))
        torch.cuda.reset_peak_memory_stats()

    def step_begins(self) -> None:
        """Note the time."""
        super().step_begins()
        if len(self.durations) == self._profiled_step:
            self._profile = device_profile()
            self._profile.start()
        self._started = settled_time()

    def step_ends(self) -> None:
        """Note how long the step took, and what it left allocated."""
        super().step_ends()
        time.sleep(self._pause_s)
        ended = settled_time()
        self.allocated.append(allocated_now())
        if self._profile is None:
            self.durations.append(ended - self._started)
        else:
            self._profile.stop()
            self.busy_s = device_seconds(self._profile)


def device_profile() -> Any:
    """Return a profile of what runs on the device, not yet started."""
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA])


def device_seconds(profile: Any) -> float:
    """Return the sum of the durations of all kernels and copies in a profile; NaN for none.

    One stream runs one kernel at a time, so that the sum is the time the device was busy.
    """
    total = sum(event.device_time_total for event in profile.key_averages())
    return total / 1e6 if total else math.nan


def settled_time() -> float:
    """Return a clock reading in seconds after all work on the device has ended."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def allocated_now() -> int:
    """Return bytes that torch's allocator has handed out; 0 without a device."""
    import torch

    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
