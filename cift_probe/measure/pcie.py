"""The PCIe link while it works: what it runs at, and how much it carries each way.

At rest a link falls back to its first generation to save power, so that only a reading during a
copy says what it can do. Bytes per second and lane: PCI Express base specification, after 8b/10b
(generations 1 and 2), 128b/130b (3 to 5) and flit encoding (6).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure.declare import Task, instrument
from cift_probe.measure.sampling import Reading, Sampler
from cift_probe.sensors import Nvml, RefusedError, parse_number, read_board_handle

PRODUCES = ("pcie.generation", "pcie.width", "pcie.to_device", "pcie.to_host", "pcie.share")
_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_BYTES = 256 << 20
_LASTS_S = 0.4  # per direction; a link of the first generation takes that long for one copy
_LEAST = 3  # copies per direction
_PAUSE_S = 0.01
_SLOWER = 3  # times, of the planted fault


@instrument(
    "pcie",
    version=1,
    produces=PRODUCES,
    estimate_s=1.5,
    deadline_s=60.0,
    faults=("slow_copy", "first_generation"),
)
def measure_pcie(task: Task) -> dict[str, Evidence]:
    """Copy pinned memory to the device and back, and read the link meanwhile; B/s.

    Each direction is the median of its copies. `share` is the slower direction over what the
    link, as it was read during the copies, could carry.
    """
    if task.device == "cpu":
        return dict.fromkeys(PRODUCES, absent("the CPU is behind no link"))
    import torch

    if torch.cuda.get_device_properties(0).is_integrated:
        return dict.fromkeys(PRODUCES, absent("host and device share one memory"))
    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
    _copy(torch, device, host)  # pages are backed, the link wakes
    slower = _SLOWER if task.fault == "slow_copy" else 1
    with Sampler(_first if task.fault == "first_generation" else read_link, _PAUSE_S) as sampler:
        there = _rate(torch, device, host, slower)
        back = _rate(torch, host, device, slower)
    del host
    torch._C._host_emptyCache()  # noqa: SLF001 - else torch keeps the pinned memory for good
    return judge(sampler, there, back)


def read_link(nvml: Nvml, uuid: str) -> dict[str, Evidence]:
    """Return generation and width of the PCIe link as they are at this moment."""
    asked = {
        "device.pcie.generation.current": "nvmlDeviceGetCurrPcieLinkGeneration",
        "device.pcie.width.current": "nvmlDeviceGetCurrPcieLinkWidth",
    }
    try:
        handle = nvml.ask("nvmlDeviceGetHandleByUUID", uuid)
        board = read_board_handle(nvml, handle, uuid)
    except RefusedError as error:
        return dict.fromkeys(asked, Unknown(str(error), "NVML"))
    return {
        key: nvml.evidence(function, board, unit="1", read=parse_number)
        for key, function in asked.items()
    }


def judge(sampler: Sampler, there: float, back: float) -> dict[str, Evidence]:
    """Return the evidence of two rates (B/s) and of what was read of the link meanwhile."""
    generation = sampler.middle("device.pcie.generation.current", "1")
    width = sampler.middle("device.pcie.width.current", "1")
    how = f"median of copies of {_BYTES >> 20} MiB of pinned memory"
    return {
        "pcie.generation": generation,
        "pcie.width": width,
        "pcie.to_device": Known(there, "B/s", how),
        "pcie.to_host": Known(back, "B/s", how),
        "pcie.share": _share(min(there, back), generation, width),
    }


def _share(rate: float, generation: Evidence, width: Evidence) -> Evidence:
    for side in (generation, width):
        if isinstance(side, Unknown) or side.absent:
            return side
    told = [side.value for side in (generation, width) if isinstance(side, Known)]
    lane = _LANE.get(told[0])
    if lane is None or not told[1]:
        return Unknown(f"no rate is listed for generation {told[0]}, {told[1]} lanes", "PCIe")
    link = lane * told[1]
    note = f"of {link / 1e9:.1f} GB/s, generation {told[0]}, {told[1]} lanes"
    return Known(rate / link, "1", "the slower direction over the link's rate", note=note)


def _rate(torch: Any, to: Any, of: Any, slower: int) -> float:
    """Return the median rate of copies that go on for a while, B/s."""
    seconds: list[float] = []
    started = time.perf_counter()
    while len(seconds) < _LEAST or time.perf_counter() - started < _LASTS_S:
        before = time.perf_counter()
        for _ in range(slower):
            _copy(torch, to, of)
        seconds.append(time.perf_counter() - before)
    return _BYTES / statistics.median(seconds)


def _copy(torch: Any, to: Any, of: Any) -> None:
    to.copy_(of, non_blocking=True)
    torch.cuda.synchronize()


def _first(nvml: Nvml, uuid: str) -> Reading:
    key = "device.pcie.generation.current"
    return {**read_link(nvml, uuid), key: Known(1, "1", "planted")}
