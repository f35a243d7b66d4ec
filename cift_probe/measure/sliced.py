"""The real step of a plan on slices of its model, and what follows for the full depth."""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure.declare import Task, instrument
from cift_probe.measure.host_memory import HostWatch
from cift_probe.measure.inside import allocatable, allocated_after_cleaning
from cift_probe.measure.watch import Watch
from cift_probe.models import load_model
from cift_probe.plan import Plan
from cift_probe.stack import extrapolate
from cift_probe.stack.pattern import depths_of, read_period

NUM_PERIODS = (2, 4, 8)  # two draw the line, the third tells whether it is one
NUM_STEPS = 11  # the last one is profiled
_WARM_UP_STEPS = 2  # kernels are chosen and Adam's state is allocated in these
_SMALLEST_BAND = 0.01  # what the tier vouches for at best
_RESERVED_BAND = 0.07  # reserved bytes are not linear in depth: 2 to 7 % off where measured
_TIME_BAND = 0.07
# One plan on one model of GPU, eight sessions: 0.20 to 0.62 s, as fast as the CPU launched
# kernels. Seen from the slowest session the fastest is 68 % away.
_LAUNCH_BOUND_BAND = 0.7
_BUSY = 0.9  # below this share the device waits for the CPU
_NUM_TRIAL_STEPS = 4  # Adam's state is there in the second
_HELD_BYTES = 64 << 20
_SLEEP_S = 0.05
_LOOK_S = 0.05  # a step is timed meanwhile
_HOST_BYTES = 4 << 30

PRODUCES = (
    "step.peak",
    "step.peak.instant",
    "step.peak.instants",
    "step.slices",
    "step.extrapolation.error",
    "step.required",
    "step.seconds",
    "step.gpu_busy",
    "step.weights",
    "step.unquantised.share",
    "step.host_ram",
    "step.out_of_memory",
)


class Slice(msgspec.Struct, frozen=True):
    """What one slice took: bytes per instant, bytes reserved and loaded, seconds per step.

    `step_s` is the median, `spread_s` the median absolute deviation from it, `busy_s` the time
    in which the device itself computed. `unquantised` are bytes of linear weights in the layers
    that quantisation left as they were, of `linear` bytes in all.
    """

    instants: dict[str, float]
    reserved: float
    weights: float
    step_s: float
    spread_s: float
    busy_s: float
    unquantised: float = 0.0
    linear: float = 0.0

    @property
    def overhead(self) -> float:
        """Bytes reserved beyond the peak: what the allocator holds and does not hand out."""
        return self.reserved - max(self.instants.values())


class DirtyProcessError(RuntimeError):
    """Memory cannot be measured in this process: something is still allocated."""


@instrument(
    "step.sliced",
    version=2,
    produces=PRODUCES,
    estimate_s=45.0,
    deadline_s=900.0,  # where the whole step is tried as well
    per_plan=True,
    clean=True,
    faults=("held_memory", "slowed", "bent", "host_copy", "not_quantised"),
)
def measure_sliced(task: Task) -> dict[str, Evidence]:
    """Run the plan's step at 2, 4 and 8 layers and extrapolate to its full depth.

    Peaks are bytes that torch's allocator has handed out, from after loading over all steps.
    `step.required` is an upper estimate of the smallest room that the step runs in: bytes
    *reserved* without a cap, on the line through 4 and 8 layers or the peak plus the largest
    overhead of a slice, whichever is more; where that leaves the answer open on this device, the
    whole step is tried. `step.seconds` comes from the medians at 4 and 8
    layers and is this machine's: where the CPU launches kernels slower than the GPU runs them,
    it is the host that is measured, and its band is wide. `step.gpu_busy` is the share of
    the step in which the device computes. `step.unquantised.share` is of the bytes of linear
    weights in the layers. `step.host_ram` is the most that this process had in host memory; the
    weights are random and read from no file.
    """
    if task.device == "cpu":
        return dict.fromkeys(PRODUCES, absent("on the CPU there is no device memory to fit into"))
    if task.plan is None:
        return dict.fromkeys(PRODUCES, Unknown("no plan was asked"))
    plan = msgspec.convert(task.plan, Plan)
    full_depth = load_model(plan.model).num_hidden_layers
    slices: dict[int, Slice] = {}
    with HostWatch(_LOOK_S) as host:
        copy = bytearray(b"1") * _HOST_BYTES if task.fault == "host_copy" else None
        failed = _measure_slices(plan, task, slices)
    del copy
    if failed:
        return failed
    seen = evidence_of(slices, full_depth)
    if task.trial:
        with contextlib.suppress(DirtyProcessError):  # then the answer stays open
            seen |= settled(plan, full_depth, task, seen)
    seen |= {key: widened(seen[key], plan) for key in ("step.peak", "step.required")}
    how = "resident memory of the process that ran the slices"
    if plan.quantisation == "none":
        seen["step.unquantised.share"] = absent(f"the plan {plan.name} quantises nothing")
    return seen | {"step.host_ram": Known(host.resident_peak, "B", how)}


def _measure_slices(plan: Plan, task: Task, slices: dict[int, Slice]) -> dict[str, Evidence]:
    """Fill in the slices of a plan; returns what is to be said where one fails."""
    shape = load_model(plan.model)
    for depth in depths_of(shape.num_hidden_layers, *read_period(shape), NUM_PERIODS):
        try:
            slices[depth] = measure_slice(plan, depth, task)
        except DirtyProcessError as error:
            return dict.fromkeys(PRODUCES, Unknown(str(error)))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return out_of_memory(depth, error)
    return {}


def measure_slice(plan: Plan, depth: int, task: Task, num_steps: int = NUM_STEPS) -> Slice:
    """Return what the plan's step takes with `depth` layers; leaves the process as it was."""
    from cift_probe.stack import trl_stack

    before = allocated_after_cleaning()
    if before:
        message = f"{before} bytes are still allocated before the slice of {depth} layers"
        raise DirtyProcessError(message)
    trl_stack.keep_offline()
    with tempfile.TemporaryDirectory() as folder:
        return _run(plan, depth, task, Path(folder), num_steps)


def _run(plan: Plan, depth: int, task: Task, folder: Path, num_steps: int) -> Slice:
    import torch

    from cift_probe.stack import slices
    from cift_probe.stack.linear_weights import linear_bytes
    from cift_probe.stack.step import prepare_step

    held = []
    if task.fault == "not_quantised":
        plan = msgspec.structs.replace(plan, method="lora", quantisation="none")
    model = slices.build_slice(plan, depth, task.torch_device)
    if task.fault == "held_memory" or (task.fault == "bent" and depth == max(NUM_PERIODS)):
        held = [torch.ones(_HELD_BYTES, dtype=torch.uint8, device="cuda") for _ in range(depth)]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    weights = torch.cuda.memory_allocated()
    unquantised, linear = linear_bytes(model)
    watch = Watch(num_steps, pause_s=_SLEEP_S * depth if task.fault == "slowed" else 0.0)
    run = prepare_step(
        plan, model, watch, torch_device=task.torch_device, folder=folder, num_steps=num_steps
    )
    del model
    run()
    del held
    durations = watch.durations[_WARM_UP_STEPS:]
    median = statistics.median(durations)
    return Slice(
        instants={name: float(value) for name, value in watch.peaks.items()},
        reserved=float(torch.cuda.max_memory_reserved()),
        weights=float(weights),
        step_s=median,
        spread_s=statistics.median(abs(item - median) for item in durations),
        busy_s=watch.busy_s,
        unquantised=float(unquantised),
        linear=float(linear),
    )


def widened(evidence: Evidence, plan: Plan) -> Evidence:
    """Return evidence with a band for what trained weights may add to random ones."""
    if isinstance(evidence, Unknown) or evidence.absent or not plan.outlier_band:
        return evidence
    return msgspec.structs.replace(evidence, band=evidence.band + plan.outlier_band)


def settled(
    plan: Plan, full_depth: int, task: Task, seen: Mapping[str, Evidence]
) -> dict[str, Evidence]:
    """Return what trying tells where the estimate cannot: the whole step in what is free here.

    Nothing where all that is free is enough for the upper end of `step.required`, or too little
    for the tensors alone.
    """
    peak, required = seen["step.peak"], seen["step.required"]
    if not isinstance(peak, Known) or not isinstance(required, Known):
        raise TypeError  # evidence_of makes both
    free = allocatable(task.vram_cap)
    if not peak.lower <= free < required.upper:
        return {}
    try:
        whole = measure_slice(plan, full_depth, task, _NUM_TRIAL_STEPS)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"step.out_of_memory": Known(f"all {full_depth} layers: {_said(error)}")}
    how = f"all {full_depth} layers in {free} bytes"
    note = "the step ran in what is free here"
    return {"step.required": Known(min(int(whole.reserved), free), "B", how, note=note)}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error, or what it was raised from, is torch's out of memory.

    A loader wraps it in an error of its own.
    """
    while error is not None:
        if type(error).__name__ == "OutOfMemoryError" or "CUDA out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def out_of_memory(depth: int, error: RuntimeError) -> dict[str, Evidence]:
    """Return that a slice alone does not fit: then the whole does not either."""
    text = f"a slice of {depth} layers ran out of memory: {_said(error)}"
    evidence: dict[str, Evidence] = dict.fromkeys(PRODUCES, Unknown(text))
    evidence["step.out_of_memory"] = Known(text)
    # a card that is too small is no worse a card: there is nothing to extrapolate
    evidence["step.extrapolation.error"] = absent(text)
    evidence["step.peak"] = absent(text)
    return evidence


def _said(error: RuntimeError) -> str:
    return str(error).partition("\n")[0].partition(" GPU ")[0]


def evidence_of(slices: Mapping[int, Slice], full_depth: int) -> dict[str, Evidence]:
    """Turn slices into evidence for the full depth."""
    instants = {depth: item.instants for depth, item in slices.items()}
    whole = extrapolate.at_depth(instants, full_depth)
    name, peak = extrapolate.peak(whole)
    error = extrapolate.verified(instants)
    band = max(_SMALLEST_BAND, error)
    reserved = extrapolate.line({d: item.reserved for d, item in slices.items()}, full_depth)
    overhead = max(item.overhead for item in slices.values())
    weights = extrapolate.line({d: item.weights for d, item in slices.items()}, full_depth)
    seconds, time_band, busy = step_time(slices, full_depth)
    how = f"slices of {', '.join(map(str, sorted(slices)))} of {full_depth} layers"
    return {
        "step.peak": Known(int(peak), "B", how, band),
        "step.peak.instant": Known(name, "", how),
        "step.peak.instants": Known({key: int(value) for key, value in whole.items()}, "B", how),
        "step.slices": Known(
            {str(depth): msgspec.to_builtins(item) for depth, item in slices.items()}, "", how
        ),
        "step.extrapolation.error": Known(error, "1", how),
        "step.required": Known(
            int(max(reserved, peak + overhead)),
            "B",
            how,
            max(_RESERVED_BAND, error),
            note="bytes reserved, an upper estimate of the smallest room",
        ),
        **_time_evidence(seconds, time_band, busy, how),
        "step.weights": Known(int(weights), "B", how),
        "step.unquantised.share": unquantised_share(slices, full_depth, how),
        "step.out_of_memory": absent("no slice ran out of memory", how),
    }


def unquantised_share(slices: Mapping[int, Slice], full_depth: int, how: str) -> Evidence:
    """Return the share of the linear weights' bytes that quantisation left as they were."""
    left = extrapolate.line({d: item.unquantised for d, item in slices.items()}, full_depth)
    total = extrapolate.line({d: item.linear for d, item in slices.items()}, full_depth)
    if total <= 0:
        return Unknown("no linear weight was found in the layers", how)
    return Known(left / total, "1", how)


def _time_evidence(seconds: float, band: float, busy: float, how: str) -> dict[str, Evidence]:
    if math.isnan(seconds):
        untimed = Unknown("the deepest slice was not slower than the one before it", how)
        return {"step.seconds": untimed, "step.gpu_busy": untimed}
    if math.isnan(busy):
        note = "whether the device waits for the CPU is not known: the profile shows no kernel"
        unseen = Unknown("the profile of a step shows nothing that ran on the device", how)
        return {
            "step.seconds": Known(seconds, "s", how, band, note=note),
            "step.gpu_busy": unseen,
        }
    bound = "" if busy >= _BUSY else "launch-bound: the device waits for the CPU of this host"
    return {
        "step.seconds": Known(seconds, "s", how, band, note=bound),
        "step.gpu_busy": Known(busy, "1", f"{how}; profile of one step each"),
    }


def step_time(slices: Mapping[int, Slice], full_depth: int) -> tuple[float, float, float]:
    """Return seconds per step at full depth, their relative band, and the device's busy share.

    The two deepest slices draw the lines; the spreads reach the full depth through the same
    weights as the medians, and are taken as independent. Where the device waits for the CPU,
    the time is the host's and differs from session to session: the band says so. The time is NaN
    where more layers took no longer, the share where the profile saw nothing on the device.
    """
    seconds = extrapolate.line({d: item.step_s for d, item in slices.items()}, full_depth)
    busy_s = extrapolate.line({d: item.busy_s for d, item in slices.items()}, full_depth)
    lower, upper = sorted(slices)[-2:]
    reach = (full_depth - upper) / (upper - lower)
    spread = math.hypot((1 + reach) * slices[upper].spread_s, reach * slices[lower].spread_s)
    if seconds <= 0 or slices[upper].step_s <= slices[lower].step_s:
        return math.nan, math.inf, math.nan
    busy = math.nan if math.isnan(busy_s) else min(1.0, max(0.0, busy_s / seconds))
    floor = _TIME_BAND if busy >= _BUSY else _LAUNCH_BOUND_BAND
    return seconds, max(floor, spread / seconds), busy
