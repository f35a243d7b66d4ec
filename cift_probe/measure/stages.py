"""Stages of a run: what each takes on the device and in host memory, and how long it lasts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from cift_probe.measure.host_memory import HostWatch

HELD_BYTES = 512 << 20  # a planted fault: more than any stage of the small plan may add


class Stage(msgspec.Struct, frozen=True):
    """What one stage took, in bytes and seconds.

    `before`, `after` and `peak` are handed out by torch's allocator, `reserved` is the most that
    it held by then. `host_growth` is None where the kernel does not tell it.
    """

    before: int
    after: int
    peak: int
    reserved: int
    host_growth: int | None
    host_peak: int
    seconds: float

    @property
    def growth(self) -> int:
        """Device bytes at the peak beyond those before the stage."""
        return self.peak - self.before


class Allocator:
    """What torch's allocator tells of the visible device, in bytes."""

    def allocated(self) -> int:
        """Return what is handed out."""
        import torch

        return int(torch.cuda.memory_allocated())

    def peak(self) -> int:
        """Return the most that was handed out since the last `forget_peak`."""
        import torch

        return int(torch.cuda.max_memory_allocated())

    def forget_peak(self) -> None:
        """Begin to look for a peak anew."""
        import torch

        torch.cuda.reset_peak_memory_stats()

    def reserved(self) -> int:
        """Return what the allocator holds, handed out or not."""
        import torch

        return int(torch.cuda.memory_reserved())

    def release(self) -> None:
        """Give back the segments in which nothing is handed out."""
        import torch

        torch.cuda.empty_cache()

    def free(self) -> int:
        """Return what CUDA calls free on the device."""
        import torch

        return int(torch.cuda.mem_get_info()[0])

    def settle(self) -> None:
        """Wait until the device has done its work."""
        import torch

        torch.cuda.synchronize()

    def hold(self, num_bytes: int) -> Any:
        """Return a tensor of that many bytes; raises torch.OutOfMemoryError."""
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def fits(self, num_bytes: int) -> bool:
        """Tell whether a block of that many bytes can be allocated at once; gives it back."""
        import torch

        try:
            self.hold(num_bytes)
        except torch.OutOfMemoryError:
            return False
        finally:
            self.release()
        return True


class Stages:
    """Notes what each stage of a run takes.

    The planted faults "held_NAME" and "host_NAME" make that stage take more device or host memory.
    """

    def __init__(self, allocator: Allocator, fault: str = "") -> None:
        """Note nothing yet."""
        self.seen: dict[str, Stage] = {}
        self._allocator = allocator
        self._fault = fault

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note what runs inside the block."""
        told = self._allocator
        told.forget_peak()
        before = told.allocated()
        held = told.hold(HELD_BYTES) if self._fault == f"held_{name}" else None
        started = time.perf_counter()
        with HostWatch() as host:
            copy = bytearray(b"1") * HELD_BYTES if self._fault == f"host_{name}" else None
            yield
            told.settle()
        self.seen[name] = Stage(
            before=before,
            after=told.allocated(),
            peak=told.peak(),
            reserved=told.reserved(),
            host_growth=host.growth,
            host_peak=host.resident_peak,
            seconds=time.perf_counter() - started,
        )
        del held, copy

    def correct_peak(self, name: str, peaks: Mapping[str, int]) -> None:
        """Give a stage the peak of its instants, where a watch began anew at each of them."""
        peak = max(peaks.values(), default=0)
        self.seen[name] = msgspec.structs.replace(self.seen[name], peak=peak)
