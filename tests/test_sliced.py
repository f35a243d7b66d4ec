"""What follows from slices of a model: memory, time, and the answer to a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest

from cift_probe.evidence import Evidence, Known, Ledger, Scope, Unknown, absent
from cift_probe.expect.limits import read_limits
from cift_probe.measure import sliced, watch
from cift_probe.measure.declare import Task
from cift_probe.measure.inside import Result
from cift_probe.measure.sliced import Slice
from cift_probe.plan import Plan
from cift_probe.verdict.answer import Answer, Verdict, answer_plan

GIB = 1 << 30
MIB = 1 << 20
DEPTH = 32
DEPTHS = sliced.NUM_PERIODS  # every layer of this model is like the others
PLAN = Plan(name="an-8b", model="llama-3.1-8b", sequence_length=1024)
GPU = Task("gpu0", msgspec.to_builtins(PLAN))


def a_slice(depth: int, **changed: Any) -> Slice:
    """Return a slice on straight lines: 1 GiB + 100 MiB a layer, 10 ms + 5 ms a layer."""
    fields: dict[str, Any] = {
        "instants": {"loss": float(GIB + depth * 100 * MIB), "optimizer": float(depth * 90 * MIB)},
        "reserved": float(GIB + depth * 110 * MIB + 50 * MIB),
        "weights": float(500 * MIB + depth * 80 * MIB),
        "step_s": 0.010 + 0.005 * depth,
        "spread_s": 0.0,
        "busy_s": 0.0095 + 0.00475 * depth,  # 95 % of the step
        "unquantised": 0.0,
        "linear": float(depth * 80 * MIB),
    }
    return Slice(**(fields | changed))


def slices(**changed: Any) -> dict[int, Slice]:
    return {depth: a_slice(depth, **changed) for depth in DEPTHS}


def known(evidence: Evidence) -> Known:
    assert isinstance(evidence, Known)
    return evidence


def test_every_value_is_carried_to_full_depth() -> None:
    seen = sliced.evidence_of(slices(), DEPTH)
    assert set(seen) == set(sliced.PRODUCES) - {"step.host_ram"}  # the whole instrument's
    assert known(seen["step.peak"]).value == GIB + DEPTH * 100 * MIB
    assert known(seen["step.peak.instant"]).value == "loss"
    assert known(seen["step.peak.instants"]).value == {
        "loss": GIB + DEPTH * 100 * MIB,
        "optimizer": DEPTH * 90 * MIB,
    }
    assert known(seen["step.weights"]).value == 500 * MIB + DEPTH * 80 * MIB
    assert known(seen["step.seconds"]).value == pytest.approx(0.17)
    assert known(seen["step.gpu_busy"]).value == pytest.approx(0.95)
    assert known(seen["step.extrapolation.error"]).value == pytest.approx(0.0, abs=1e-12)
    assert known(seen["step.out_of_memory"]).absent
    assert seen["step.peak"].source == "slices of 2, 4, 8 of 32 layers"
    stored = known(seen["step.slices"]).value
    assert msgspec.convert(stored["8"], Slice) == a_slice(8)


def test_the_band_of_a_straight_peak_is_what_the_tier_vouches_for() -> None:
    assert known(sliced.evidence_of(slices(), DEPTH)["step.peak"]).band == 0.01


def test_an_instant_that_leads_only_at_full_depth_sets_the_peak() -> None:
    taken = {
        depth: a_slice(depth, instants={"loss": 2.0 * GIB, "optimizer": float(depth * 100 * MIB)})
        for depth in DEPTHS
    }
    seen = sliced.evidence_of(taken, DEPTH)
    assert known(seen["step.peak.instant"]).value == "optimizer"
    assert known(seen["step.peak"]).value == DEPTH * 100 * MIB


def bent() -> dict[int, Slice]:
    """Return slices as the planted fault leaves them: the deepest one holds 64 MiB a layer."""
    held = 64 * MIB * 8
    straight = a_slice(8)
    return slices() | {
        8: a_slice(
            8,
            instants={name: value + held for name, value in straight.instants.items()},
            reserved=straight.reserved + held,
        )
    }


def test_bent_slices_exceed_the_limit_and_widen_the_band() -> None:
    seen = sliced.evidence_of(bent(), DEPTH)
    limit = read_limits()["step.extrapolation.error.max"].value
    assert isinstance(limit, float)
    error = known(seen["step.extrapolation.error"]).value
    assert error == pytest.approx(512 / (1024 + 800 + 512))
    assert error > 10 * limit
    assert known(seen["step.peak"]).band == known(seen["step.required"]).band == error


def test_memory_held_in_every_slice_raises_the_peak() -> None:
    held = {
        depth: a_slice(depth, instants={"loss": a_slice(depth).instants["loss"] + depth * 64 * MIB})
        for depth in DEPTHS
    }
    plain = known(sliced.evidence_of(slices(), DEPTH)["step.peak"]).value
    assert known(sliced.evidence_of(held, DEPTH)["step.peak"]).value == plain + DEPTH * 64 * MIB


def test_the_requirement_is_what_is_reserved() -> None:
    seen = known(sliced.evidence_of(slices(), DEPTH)["step.required"])
    assert seen.value == GIB + DEPTH * 110 * MIB + 50 * MIB
    assert seen.band == 0.07


@pytest.mark.parametrize("reserved", [3 * GIB, 2 * GIB])
def test_the_requirement_is_never_below_the_peak_and_an_overhead(reserved: int) -> None:
    seen = sliced.evidence_of(slices(reserved=float(reserved)), DEPTH)  # a line that stays flat
    peak = known(seen["step.peak"]).value
    overhead = reserved - (GIB + 200 * MIB)  # of the shallowest slice, which has the largest
    assert known(seen["step.required"]).value == peak + overhead >= peak


def test_the_share_that_quantisation_missed_is_that_of_the_full_depth() -> None:
    taken = {
        # the first layer is dense and packed, all others are experts that were passed over
        depth: a_slice(
            depth, unquantised=float((depth - 1) * 90 * MIB), linear=float(depth * 90 * MIB)
        )
        for depth in DEPTHS
    }
    seen = known(sliced.evidence_of(taken, DEPTH)["step.unquantised.share"])
    assert (seen.value, seen.unit) == (pytest.approx(31 / 32), "1")
    assert known(sliced.evidence_of(slices(), DEPTH)["step.unquantised.share"]).value == 0.0


def test_layers_without_linear_weights_have_no_share() -> None:
    seen = sliced.evidence_of(slices(linear=0.0), DEPTH)["step.unquantised.share"]
    assert isinstance(seen, Unknown)


# ---- time ----


def test_a_busy_device_has_the_narrow_band_and_no_note() -> None:
    assert sliced.step_time(slices(), DEPTH) == pytest.approx((0.17, 0.07, 0.95))
    assert known(sliced.evidence_of(slices(), DEPTH)["step.seconds"]).note == ""


def test_a_device_that_waits_for_the_cpu_has_the_wide_band_and_says_so() -> None:
    waiting = {depth: a_slice(depth, busy_s=0.001 * depth) for depth in DEPTHS}
    seconds, band, busy = sliced.step_time(waiting, DEPTH)
    assert (band, busy) == pytest.approx((0.7, 0.032 / 0.17))
    told = known(sliced.evidence_of(waiting, DEPTH)["step.seconds"])
    assert told.value == seconds
    assert "launch-bound" in told.note


@pytest.mark.parametrize(("share", "band"), [(0.901, 0.07), (0.899, 0.7)])
def test_nine_tenths_divide_busy_from_waiting(share: float, band: float) -> None:
    timed = {d: a_slice(d, busy_s=share * a_slice(d).step_s) for d in DEPTHS}
    assert sliced.step_time(timed, DEPTH)[1] == band


def test_the_busy_share_is_never_more_than_the_whole() -> None:
    timed = {d: a_slice(d, busy_s=1.2 * a_slice(d).step_s) for d in DEPTHS}
    assert sliced.step_time(timed, DEPTH)[2] == 1.0


def test_the_spread_reaches_full_depth_with_the_weights_of_the_line() -> None:
    taken = slices() | {4: a_slice(4, spread_s=0.003), 8: a_slice(8, spread_s=0.004)}
    # at 32 layers the line is 7 times the deepest slice less 6 times the one before
    spread = math.hypot(7 * 0.004, 6 * 0.003)
    seconds, band, _ = sliced.step_time(taken, DEPTH)
    assert band == pytest.approx(spread / seconds)
    assert band > 0.07


def test_the_spread_at_the_deepest_slice_is_its_own() -> None:
    taken = slices() | {4: a_slice(4, spread_s=0.040), 8: a_slice(8, spread_s=0.010)}
    seconds, band, _ = sliced.step_time(taken, 8)
    assert (seconds, band) == pytest.approx((0.05, 0.2))


def after_the_pipe(evidence: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """Return what the session receives: through JSON, as the child sends it."""
    line = msgspec.json.encode(msgspec.to_builtins(Result(dict(evidence), 0)))
    return msgspec.convert(msgspec.json.decode(line), Result).evidence


@pytest.mark.parametrize("deepest", [0.030, 0.029, 0.001])
def test_a_time_that_does_not_grow_with_depth_is_unknown_and_the_memory_is_not(
    deepest: float,
) -> None:
    taken = slices() | {8: a_slice(8, step_s=deepest), 4: a_slice(4, step_s=0.030)}
    assert math.isnan(sliced.step_time(taken, DEPTH)[0])
    seen = after_the_pipe(sliced.evidence_of(taken, DEPTH))
    assert isinstance(seen["step.seconds"], Unknown)
    assert isinstance(seen["step.gpu_busy"], Unknown)
    assert known(seen["step.peak"]).value == GIB + DEPTH * 100 * MIB


def test_a_profile_without_kernels_does_not_make_the_device_busy() -> None:
    taken = slices(busy_s=math.nan)
    seconds, band, busy = sliced.step_time(taken, DEPTH)
    assert (seconds, band) == pytest.approx((0.17, 0.7))
    assert math.isnan(busy)
    seen = sliced.evidence_of(taken, DEPTH)
    assert isinstance(seen["step.gpu_busy"], Unknown)
    assert "not known" in known(seen["step.seconds"]).note


class NoProfile:
    def start(self) -> None:
        """Begin nothing."""

    def stop(self) -> None:
        """End nothing."""

    def key_averages(self) -> list[Any]:
        return []


def test_a_slowed_step_is_timed_and_the_profiled_one_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(watch, "device_profile", NoProfile)
    seen = watch.Watch(num_steps=4, pause_s=0.02)
    for _ in range(4):
        seen.step_begins()
        seen.step_ends()
    assert len(seen.durations) == 3
    assert all(0.02 <= duration < 0.2 for duration in seen.durations)
    assert math.isnan(seen.busy_s)
    assert seen.allocated == [0] * 4  # without a device nothing is


def test_a_watch_that_profiles_nothing_times_every_step() -> None:
    pytest.importorskip("torch")
    seen = watch.Watch(num_steps=2, profiled=False)
    for _ in range(2):
        seen.step_begins()
        seen.step_ends()
    assert len(seen.durations) == 2


# ---- the instrument, as far as it goes without a GPU ----


def test_on_the_cpu_there_is_nothing_to_fit_into() -> None:
    seen = sliced.measure_sliced(Task("cpu", GPU.plan))
    assert set(seen) == set(sliced.PRODUCES)
    assert all("no device memory" in known(item).absent for item in seen.values())


def test_without_a_plan_everything_is_unknown() -> None:
    seen = sliced.measure_sliced(Task("gpu0"))
    assert set(seen) == set(sliced.PRODUCES)
    assert all(isinstance(item, Unknown) for item in seen.values())


def test_a_dirty_process_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced, "read_period", lambda _shape: (0, 1))
    monkeypatch.setattr(sliced, "allocated_after_cleaning", lambda: 4096)
    seen = sliced.measure_sliced(GPU)
    assert set(seen) == set(sliced.PRODUCES)
    for item in seen.values():
        assert isinstance(item, Unknown)
        assert item.reason == "4096 bytes are still allocated before the slice of 2 layers"


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


def at_depth_raise(error: RuntimeError, failing: int) -> Any:
    def measure(_plan: Plan, depth: int, _task: Task) -> Slice:
        if depth == failing:
            raise error
        return a_slice(depth)

    return measure


def test_a_slice_that_does_not_fit_is_told_with_its_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore lines")
    monkeypatch.setattr(sliced, "read_period", lambda _shape: (0, 1))
    monkeypatch.setattr(sliced, "measure_slice", at_depth_raise(error, 4))
    seen = dict(sliced.measure_sliced(GPU))
    assert set(seen) == set(sliced.PRODUCES)
    told = known(seen.pop("step.out_of_memory")).value
    assert told == (
        "a slice of 4 layers ran out of memory: CUDA out of memory. Tried to allocate 2 GiB"
    )
    nothing_to_extrapolate = {"step.extrapolation.error", "step.peak"}
    for key, item in seen.items():
        assert item == (absent(told) if key in nothing_to_extrapolate else Unknown(told)), key


def test_another_error_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: device-side assert triggered")
    monkeypatch.setattr(sliced, "read_period", lambda _shape: (0, 1))
    monkeypatch.setattr(sliced, "measure_slice", at_depth_raise(error, 4))
    with pytest.raises(RuntimeError, match="device-side assert"):
        sliced.measure_sliced(GPU)


def measured(monkeypatch: pytest.MonkeyPatch, task: Task) -> dict[str, Evidence]:
    """Return what the instrument makes of slices on straight lines."""
    monkeypatch.setattr(sliced, "read_period", lambda _shape: (0, 1))
    monkeypatch.setattr(sliced, "allocatable", lambda _cap: 80 * GIB)
    monkeypatch.setattr(sliced, "measure_slice", lambda _plan, depth, _task: a_slice(depth))
    seen = dict(sliced.measure_sliced(task))
    assert set(seen) == set(sliced.PRODUCES)
    return seen


def test_the_instrument_measures_its_three_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = measured(monkeypatch, GPU)
    host = known(seen.pop("step.host_ram"))
    assert seen == sliced.evidence_of(slices(), DEPTH)
    assert (host.unit, host.value > MIB) == ("B", True)


def test_host_memory_that_is_taken_meanwhile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced, "_HOST_BYTES", 256 * MIB)
    without = known(measured(monkeypatch, GPU)["step.host_ram"]).value
    fault = msgspec.structs.replace(GPU, fault="host_copy")
    assert known(measured(monkeypatch, fault)["step.host_ram"]).value > without + 200 * MIB


def test_a_plan_that_quantises_nothing_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    lora = msgspec.structs.replace(PLAN, method="lora", quantisation="none")
    task = Task("gpu0", msgspec.to_builtins(lora))
    assert known(measured(monkeypatch, task)["step.unquantised.share"]).absent


@pytest.mark.skipif(find_spec("trl") is None, reason="the extra `train` is not installed")
@pytest.mark.parametrize(("fault", "share"), [("", 0.0), ("not_quantised", 1.0)])
def test_a_slice_that_was_not_quantised_is_seen(
    monkeypatch: pytest.MonkeyPatch, fault: str, share: float
) -> None:
    import torch

    from cift_probe.measure.training import third_party_warnings_ignored
    from cift_probe.stack import step, trl_stack

    def prepare(_plan: Plan, _model: Any, seen: watch.Watch, **_: Any) -> Any:
        seen.peaks["loss"] = 5
        return lambda: seen.durations.extend([1.0, 1.0, 2.0])

    monkeypatch.setattr(step, "prepare_step", prepare)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 7)
    monkeypatch.setattr(Task, "torch_device", "cpu")
    trl_stack.keep_offline()
    plan = Plan(name="small", model="smollm2-135m", sequence_length=16)
    with third_party_warnings_ignored():
        seen = sliced.measure_slice(plan, 2, Task("gpu0", fault=fault), num_steps=3)
    assert seen.unquantised / seen.linear == share
    assert (seen.instants, seen.reserved, seen.step_s) == ({"loss": 5.0}, 7.0, 2.0)


# ---- the answer ----


def answer(*, room: Evidence, **steps: Evidence) -> Answer:
    measured = Ledger("measured")
    measured.enter("device.usable.bytes[gpu0]", room)
    for name, evidence in (sliced.evidence_of(slices(), DEPTH) | steps).items():
        measured.enter(Scope("gpu0", PLAN.name).key(name.replace("__", ".")), evidence)
    return answer_plan(PLAN, "gpu0", measured, demanded=True)


def room(num_bytes: float) -> Known:
    return Known(int(num_bytes), "B")


REQUIRED = GIB + DEPTH * 110 * MIB + 50 * MIB
PEAK = GIB + DEPTH * 100 * MIB


def test_a_plan_fits_when_the_upper_end_of_its_band_does() -> None:
    found = answer(room=room(REQUIRED * 1.07 + 1))
    assert found.verdict is Verdict.FITS
    assert (found.required_bytes, found.peak_allocated_bytes) == (REQUIRED, PEAK)
    assert found.headroom_bytes in {0, 1}
    assert (found.tier, found.band, found.step_band, found.demanded) == ("sliced", 0.07, 0.07, True)
    assert found.step_s == pytest.approx(0.17)
    assert found.tokens_per_s == pytest.approx(1024 / 0.17)
    assert found.joules_per_token is None


def test_a_plan_inside_its_band_is_undecided() -> None:
    for share in (1.06, 1.0, 0.94):
        found = answer(room=room(REQUIRED * share))
        assert found.verdict is Verdict.UNDECIDED
        assert "between what its tensors take and" in found.reason


def test_an_upper_estimate_that_is_too_large_decides_nothing_while_the_tensors_fit() -> None:
    required = Known(8 * GIB, "B", band=0.07)
    found = answer(room=room(7 * GIB), step__required=required)
    assert found.verdict is Verdict.UNDECIDED


def test_without_a_peak_the_lower_end_of_the_estimate_decides() -> None:
    required, unknown = Known(8 * GIB, "B", band=0.07), Unknown("no peak")
    found = answer(room=room(7 * GIB), step__required=required, step__peak=unknown)
    assert found.verdict is Verdict.DOES_NOT_FIT
    assert "needs at least" in found.reason


def test_a_plan_whose_tensors_alone_are_too_large_does_not_fit() -> None:
    required = Known(PEAK + 1, "B", band=0.07)  # whose lower end would fit
    found = answer(room=room(PEAK - 1), step__required=required)
    assert found.verdict is Verdict.DOES_NOT_FIT
    assert "tensors alone" in found.reason
    assert found.headroom_bytes is not None
    assert found.headroom_bytes < 0


def test_a_slice_out_of_memory_means_that_the_plan_does_not_fit() -> None:
    error = OutOfMemoryError("CUDA out of memory")
    found = answer(room=room(80 * GIB), **sliced.out_of_memory(4, error))
    assert found.verdict is Verdict.DOES_NOT_FIT
    assert found.reason == "a slice of 4 layers ran out of memory: CUDA out of memory"
    assert (found.required_bytes, found.step_s) == (None, None)


def test_a_requirement_that_is_unknown_leaves_the_plan_undecided() -> None:
    found = answer(room=room(80 * GIB), step__required=Unknown("the driver was lost"))
    assert (found.verdict, found.reason) == (Verdict.UNDECIDED, "the driver was lost")
    assert (found.required_bytes, found.usable_bytes, found.band) == (None, None, None)


def test_room_that_is_unknown_or_absent_leaves_the_plan_undecided() -> None:
    unknown = answer(room=Unknown("no answer"))
    assert (unknown.verdict, unknown.reason) == (Verdict.UNDECIDED, "no answer")
    none = answer(room=absent("there is no device memory"))
    assert (none.verdict, none.reason) == (Verdict.UNDECIDED, "there is no device memory")


def test_a_plan_that_was_not_measured_is_undecided_and_says_what_is_missing() -> None:
    found = answer_plan(PLAN, "gpu0", Ledger("measured"), demanded=False)
    assert found.verdict is Verdict.UNDECIDED
    assert found.reason == "step.required was not measured in this session"


def test_a_smaller_cap_on_memory_turns_the_answer() -> None:
    # what the instrument `memory_space` calls usable is already bounded by the cap
    assert answer(room=room(80 * GIB)).verdict is Verdict.FITS
    capped = answer(room=room(4 * GIB))
    assert capped.verdict is Verdict.DOES_NOT_FIT
    assert (capped.usable_bytes, capped.headroom_bytes) == (4 * GIB, 4 * GIB - int(REQUIRED * 1.07))


def test_a_time_that_is_unknown_is_no_zero() -> None:
    found = answer(room=room(80 * GIB), step__seconds=Unknown("not timed"))
    assert found.verdict is Verdict.FITS
    assert (found.step_s, found.step_band, found.tokens_per_s) == (None, None, None)


def test_an_answer_says_when_its_time_is_the_hosts() -> None:
    slow = Known(0.3, "s", band=0.5, note="launch-bound: the device waits")
    found = answer(room=room(80 * GIB), step__seconds=slow)
    assert found.limits[-1] == "launch-bound: the device waits"
    assert found.step_band == 0.5


def test_out_of_memory_is_known_through_a_loader_s_own_error() -> None:
    plain = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(RuntimeError, match="automatic conversion") as caught:
        loader_that_runs_out_of_memory(plain)
    assert sliced.is_out_of_memory(caught.value)
    assert sliced.is_out_of_memory(plain)
    assert not sliced.is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))


def loader_that_runs_out_of_memory(plain: RuntimeError) -> None:
    """Raise what transformers' loader makes of an error in one tensor."""
    try:
        raise plain
    except RuntimeError as error:
        message = "We encountered some issues during automatic conversion of the weights"
        raise RuntimeError(message) from error


def tried(
    monkeypatch: pytest.MonkeyPatch, free: int, whole: Slice | Exception
) -> tuple[dict[str, Evidence], list[int]]:
    """Return what settling says with so many free bytes, and which depths it ran."""
    depths: list[int] = []

    def measure_slice(_plan: Plan, depth: int, *_: Any) -> Slice:
        depths.append(depth)
        if isinstance(whole, Exception):
            raise whole
        return whole

    monkeypatch.setattr(sliced, "allocatable", lambda _cap: free)
    monkeypatch.setattr(sliced, "measure_slice", measure_slice)
    seen = sliced.evidence_of(slices(), DEPTH)
    return sliced.settled(PLAN, DEPTH, GPU, seen), depths


BETWEEN = PEAK + 100 * MIB


@pytest.mark.parametrize("free", [PEAK // 2, 2 * PEAK])
def test_a_clear_answer_is_not_tried(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    assert tried(monkeypatch, free, a_slice(DEPTH)) == ({}, [])


def test_the_band_of_8_bit_plans_holds_what_trained_weights_may_add(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    int8 = msgspec.structs.replace(PLAN, quantisation="int8")
    plain, wide = (
        measured(monkeypatch, Task("gpu0", msgspec.to_builtins(plan))) for plan in (PLAN, int8)
    )
    for key in ("step.peak", "step.required"):
        assert known(wide[key]).band == pytest.approx(known(plain[key]).band + 0.05)


def test_without_a_trial_an_open_answer_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    task = msgspec.structs.replace(GPU, trial=False)
    seen = measured(monkeypatch, task)
    monkeypatch.setattr(sliced, "allocatable", lambda _cap: BETWEEN)
    again = sliced.measure_sliced(task)
    assert again["step.required"] == seen["step.required"]
    assert known(again["step.out_of_memory"]).absent


def test_the_instrument_tries_the_whole_step_where_the_answer_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    depths: list[int] = []

    def measure(_plan: Plan, depth: int, *_: Any) -> Slice:
        depths.append(depth)
        return a_slice(depth, reserved=float(BETWEEN)) if depth == DEPTH else a_slice(depth)

    monkeypatch.setattr(sliced, "read_period", lambda _shape: (0, 1))
    monkeypatch.setattr(sliced, "allocatable", lambda _cap: BETWEEN)
    monkeypatch.setattr(sliced, "measure_slice", measure)
    assert known(sliced.measure_sliced(GPU)["step.required"]).value == BETWEEN
    assert depths == [*DEPTHS, DEPTH]


def test_an_unclean_process_leaves_the_answer_open_and_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(_plan: Plan, depth: int, *_: Any) -> Slice:
        if depth == DEPTH:
            message = "7 bytes are still allocated"
            raise sliced.DirtyProcessError(message)
        return a_slice(depth)

    monkeypatch.setattr(sliced, "read_period", lambda _shape: (0, 1))
    monkeypatch.setattr(sliced, "allocatable", lambda _cap: BETWEEN)
    monkeypatch.setattr(sliced, "measure_slice", measure)
    seen = sliced.measure_sliced(GPU)
    assert known(seen["step.required"]) == known(
        sliced.evidence_of(slices(), DEPTH)["step.required"]
    )


def test_an_open_answer_is_settled_by_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = a_slice(DEPTH, reserved=float(BETWEEN - MIB))
    seen, depths = tried(monkeypatch, BETWEEN, ran)
    assert depths == [DEPTH]
    required = known(seen["step.required"])
    assert (required.value, required.band) == (BETWEEN - MIB, 0.0)
    assert answer(room=room(BETWEEN)).verdict is Verdict.UNDECIDED
    assert answer(room=room(BETWEEN), **seen).verdict is Verdict.FITS


def test_a_whole_step_that_runs_out_of_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA out of memory. Tried to allocate 2 MiB. GPU 0 has 8 GiB\nmore")
    seen, _ = tried(monkeypatch, BETWEEN, error)
    told = answer(room=room(BETWEEN), **seen)
    assert told.verdict is Verdict.DOES_NOT_FIT
    assert told.reason == "all 32 layers: CUDA out of memory. Tried to allocate 2 MiB."


def test_another_error_of_the_whole_step_is_not_taken_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        tried(monkeypatch, BETWEEN, RuntimeError("shapes do not match"))
