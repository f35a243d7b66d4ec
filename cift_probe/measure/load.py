"""The device under load: clocks, heat, power and why clocks are held down, while it multiplies."""

from __future__ import annotations

import statistics
import time
from typing import Any

import msgspec

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure.declare import Task, instrument
from cift_probe.measure.sampling import Reading, Sampler
from cift_probe.sensors import Nvml, read_sample

PRODUCES = (
    "load.rate",
    "load.clock.sm",
    "load.throttle.reasons",
    "load.temperature",
    "load.power",
)
_SIDE = 8192
_LASTS_S = 2.0
_CHUNK = 2  # products between two looks at the clock; on the slowest devices one takes a second
_PAUSE_S = 0.05
_BF16 = 8  # major capability with bf16 in the tensor cores
_SHARE = 0.2  # of the later readings: below it a reason came and went
_SLOW_HZ = 300_000_000
_HOT = "hardware thermal slowdown"


@instrument(
    "load",
    version=1,
    produces=PRODUCES,
    estimate_s=3.0,
    deadline_s=60.0,
    faults=("paused", "slow_clock", "thermal_slowdown"),
)
def measure_load(task: Task) -> dict[str, Evidence]:
    """Multiply matrices for two seconds and read the sensors twenty times a second.

    Numbers are medians over the later half; a reason counts that stood in a fifth of its
    readings. `rate` is FLOP/s of half-precision products of 8192 x 8192. Two seconds warm no
    heat sink through: what throttles here, throttles always; that a long run stays cool is not
    shown.
    """
    if task.device == "cpu":
        return dict.fromkeys(PRODUCES, absent("the CPU has no such sensors in NVML"))
    import torch

    major = torch.cuda.get_device_capability(0)[0]
    dtype = torch.bfloat16 if major >= _BF16 else torch.float16
    left = torch.randn(_SIDE, _SIDE, device="cuda", dtype=dtype)
    right = torch.randn(_SIDE, _SIDE, device="cuda", dtype=dtype)
    result = left @ right  # cuBLAS takes its workspace, clocks begin to rise
    torch.cuda.synchronize()
    reads = {"slow_clock": _slow, "thermal_slowdown": _hot}
    with Sampler(reads.get(task.fault, read_sample), _PAUSE_S) as sampler:
        rates = _multiply(torch, left, right, result, paused=task.fault == "paused")
    return judge(sampler, rates)


def judge(sampler: Sampler, rates: list[float]) -> dict[str, Evidence]:
    """Return the evidence of the rates of all chunks (FLOP/s) and of the readings meanwhile."""
    later = rates[len(rates) // 2 :]
    how = f"median of {len(later)} x {_CHUNK} products of {_SIDE} x {_SIDE}"
    return {
        "load.rate": Known(statistics.median(later), "FLOP/s", how),
        "load.clock.sm": sampler.middle("device.clock.sm", "Hz"),
        "load.throttle.reasons": _reasons(sampler),
        "load.temperature": sampler.middle("device.temperature", "degC"),
        "load.power": sampler.middle("device.power.draw", "W"),
    }


def _reasons(sampler: Sampler) -> Evidence:
    told = [reading["device.throttle.reasons"] for reading in sampler.later()]
    known = [item for item in told if isinstance(item, Known) and not item.absent]
    if not known:
        return told[-1] if told else Unknown(sampler.problem or "NVML was not read", "NVML")
    counted = [reason for item in known for reason in item.value]
    often = sorted({item for item in counted if counted.count(item) >= _SHARE * len(known)})
    return Known(often, "", known[-1].source, note=f"of {len(known)} readings under load")


def _multiply(torch: Any, left: Any, right: Any, result: Any, *, paused: bool) -> list[float]:
    rates: list[float] = []
    started = time.perf_counter()
    while len(rates) < 2 or time.perf_counter() - started < _LASTS_S:  # noqa: PLR2004 - two halves
        before = time.perf_counter()
        for _ in range(_CHUNK):
            torch.matmul(left, right, out=result)
        torch.cuda.synchronize()
        if paused:
            time.sleep(time.perf_counter() - before)
        rates.append(_CHUNK * 2 * _SIDE**3 / (time.perf_counter() - before))
    return rates


def _slow(nvml: Nvml, uuid: str) -> Reading:
    return {**read_sample(nvml, uuid), "device.clock.sm": Known(_SLOW_HZ, "Hz", "planted")}


def _hot(nvml: Nvml, uuid: str) -> Reading:
    found = dict(read_sample(nvml, uuid))
    reasons = found["device.throttle.reasons"]
    if isinstance(reasons, Known) and not reasons.absent:
        hot = msgspec.structs.replace(reasons, value=[*reasons.value, _HOT])
        found["device.throttle.reasons"] = hot
    return found
