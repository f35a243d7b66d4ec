"""The life of the small plan: what its stages come to, and that every planted fault is seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from counted_allocator import GIB, CountedAllocator, SegmentedAllocator

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.expect.limits import read_limits
from cift_probe.expect.predicted import band_of, expect_logits, reference_plan
from cift_probe.measure import lifecycle, watch
from cift_probe.measure.declare import Task
from cift_probe.measure.lifecycle import Life, Space, StepWatch, evidence_of, space_left
from cift_probe.measure.sliced import DirtyProcessError
from cift_probe.measure.stages import HELD_BYTES, Stage, Stages
from cift_probe.measure.training import third_party_warnings_ignored
from cift_probe.models import load_model
from cift_probe.plan import Plan

pytestmark = pytest.mark.xdist_group("training")  # the real run is shared
needs_stack = pytest.mark.skipif(find_spec("trl") is None, reason="no training stack")

MIB = 1 << 20
GPU = Task("gpu0")


def limit(name: str) -> float:
    return float(str(read_limits()[f"lifecycle.{name}"].value))


def value(seen: Mapping[str, Evidence], name: str) -> Any:
    found = seen[f"lifecycle.{name}"]
    assert isinstance(found, Known), found
    return found.value


# ---- what a life comes to ----


def a_stage(before: int, after: int, peak: int, **changed: Any) -> Stage:
    fields: dict[str, Any] = {
        "reserved": 600 * MIB,
        "host_growth": 50 * MIB,
        "host_peak": 2 * GIB,
        "seconds": 1.0,
    }
    return Stage(before=before, after=after, peak=peak, **(fields | changed))


def a_life(**changed: Any) -> Life:
    """Return a life in the numbers of the small plan."""
    stages = {
        "loading": a_stage(0, 107 * MIB, 110 * MIB),
        "forward": a_stage(116 * MIB, 180 * MIB, 300 * MIB),
        "training": a_stage(180 * MIB, 208 * MIB, 1),  # the steps have their own peaks
        "evaluation": a_stage(208 * MIB, 208 * MIB, 790 * MIB),
        "saving": a_stage(208 * MIB, 208 * MIB, 209 * MIB, host_growth=20 * MIB),
        "merging": a_stage(208 * MIB, 200 * MIB, 220 * MIB, host_growth=2 * MIB),
    }
    fields: dict[str, Any] = {
        "stages": stages,
        "instants": {"loss": 404 * MIB, "backward of the loss": 408 * MIB},
        "around_optimizer": [(218 * MIB, 237 * MIB), (237 * MIB, 237 * MIB)],
        "after_steps": [227 * MIB, 228 * MIB, 228 * MIB, 228 * MIB],
        "space": Space(unused=300 * MIB, stuck=24 * MIB, held=240 * MIB, largest=0.8),
        "checkpoint_bytes": 250 * MIB,
    }
    return Life(**(fields | changed))


def test_a_life_says_all_that_the_instrument_declares() -> None:
    seen = evidence_of(a_life(), "how")
    assert set(seen) == set(lifecycle.PRODUCES)
    assert {item.source for item in seen.values()} == {"how"}
    numbers = {
        "load.allocated": 107 * MIB,
        "load.host": 50 * MIB,
        "load.host.share": 0.2,
        "forward.peak": 300 * MIB,
        "step.peak": 408 * MIB,
        "optimizer_state": 19 * MIB,
        "optimizer_state.later": 0,
        "growth": 0,
        "unused": 300 * MIB,
        "stuck.share": 0.1,
        "largest_block.share": 0.8,
        "evaluation.added": 582 * MIB,
        "saving.device": MIB,
        "saving.host": 20 * MIB,
        "merging.device": 12 * MIB,
        "merging.host": 2 * MIB,
    }
    assert {name: value(seen, name) for name in numbers} == numbers
    stored = value(seen, "stages")["evaluation"]
    assert msgspec.convert(stored, Stage) == a_life().stages["evaluation"]


def test_every_byte_says_that_it_is_one() -> None:
    for name, item in evidence_of(a_life(), "how").items():
        assert isinstance(item, Known)
        if name != "lifecycle.stages":
            assert item.unit == ("1" if name.endswith("share") else "B"), name


def test_growth_leaves_out_the_first_step() -> None:
    assert value(evidence_of(a_life(after_steps=[1, 50, 60, 75]), ""), "growth") == 25


def test_state_that_comes_late_is_not_the_first_steps() -> None:
    seen = evidence_of(a_life(around_optimizer=[(10, 10), (10, 29)]), "")
    assert (value(seen, "optimizer_state"), value(seen, "optimizer_state.later")) == (0, 19)


def test_where_nothing_is_held_nothing_is_stuck() -> None:
    space = Space(unused=0, stuck=0, held=0, largest=0.8)
    assert value(evidence_of(a_life(space=space), ""), "stuck.share") == 0.0


def test_host_memory_that_the_kernel_does_not_tell_is_unknown() -> None:
    stages = {
        name: msgspec.structs.replace(stage, host_growth=None)
        for name, stage in a_life().stages.items()
    }
    seen = evidence_of(a_life(stages=stages), "how")
    untold = {name for name, item in seen.items() if isinstance(item, Unknown)}
    assert untold == {name for name in lifecycle.PRODUCES if ".host" in name}


# ---- planted faults, with an allocator that only counts ----


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> CountedAllocator:
    counted = CountedAllocator()
    for module in (lifecycle, watch):
        monkeypatch.setattr(module, "allocated_now", counted.allocated)
    monkeypatch.setattr(lifecycle, "cap_memory", lambda _cap: None)
    return counted


@pytest.mark.parametrize(
    "name", ["loading", "forward", "training", "evaluation", "saving", "merging"]
)
def test_memory_that_a_stage_holds_is_seen_in_that_stage_alone(
    allocator: CountedAllocator, name: str
) -> None:
    assert f"held_{name}" in lifecycle.FAULTS
    for fault, more in (("", 0), (f"held_{name}", HELD_BYTES), ("held_other", 0)):
        stages = Stages(allocator, fault)
        with stages.stage(name):
            kept = allocator.hold(5 * MIB)
            allocator.hold(3 * MIB)
        seen = stages.seen[name]
        assert (seen.growth, seen.after - seen.before) == (8 * MIB + more, 5 * MIB + more)
        assert seen.seconds > 0
        del kept
        assert allocator.taken == 0
    assert allocator.settled == 3


@pytest.mark.parametrize("name", ["loading", "saving", "merging"])
def test_host_memory_that_a_stage_takes_is_seen_in_that_stage(
    allocator: CountedAllocator, name: str
) -> None:
    assert f"host_{name}" in lifecycle.FAULTS
    growths = []
    for fault in ("", f"host_{name}"):
        stages = Stages(allocator, fault)
        with stages.stage(name):
            pass
        growths.append(stages.seen[name].host_growth or 0)
    assert growths[0] < 16 * MIB
    assert growths[1] >= HELD_BYTES


def test_a_stage_that_was_watched_has_the_peak_of_its_instants(
    allocator: CountedAllocator,
) -> None:
    stages = Stages(allocator)
    with stages.stage("training"):
        allocator.hold(MIB)
    stages.correct_peak("training", {"loss": 5 * MIB, "optimizer": 3 * MIB})
    assert stages.seen["training"].peak == 5 * MIB


def test_what_is_held_on_purpose_is_beyond_every_limit() -> None:
    names = ("saving.device", "merging.device", "saving.host", "merging.host")
    assert all(limit(f"{name}.max") < HELD_BYTES for name in names)
    logits = expect_logits(reference_plan())
    assert isinstance(logits, Known)
    in_bfloat16 = logits.value / 3  # the least that logits take, kept in one piece
    assert in_bfloat16 + HELD_BYTES > logits.value
    assert band_of("plan.predicted.weights.band") * 107 * MIB < HELD_BYTES


def steps(allocator: CountedAllocator, fault: str, num_steps: int = 20) -> StepWatch:
    """Pass the marks of steps whose optimizer keeps 19 MiB from the first one on."""
    seen = StepWatch(num_steps, allocator, fault)
    state = None
    for _ in range(num_steps):
        seen.step_begins()
        gradients = allocator.hold(9 * MIB)
        seen.mark("clipping")
        state = state or allocator.hold(19 * MIB)
        seen.mark("optimizer")
        del gradients
        seen.step_ends()
    return seen


def test_the_optimizers_state_is_what_its_own_instant_added(allocator: CountedAllocator) -> None:
    seen = steps(allocator, "")
    assert seen.around_optimizer[0] == (9 * MIB, 28 * MIB)
    assert set(seen.around_optimizer[1:]) == {(28 * MIB, 28 * MIB)}
    assert seen.allocated == [19 * MIB] * 20
    assert len(seen.durations) == 20


def test_a_larger_state_is_seen_at_the_first_step(allocator: CountedAllocator) -> None:
    around = steps(allocator, "larger_state").around_optimizer
    assert around[0] == (9 * MIB, 36 * MIB)
    assert band_of("plan.predicted.optimizer_state.band") < (36 - 9) / 19 - 1
    assert around[1][1] - around[1][0] == 0


def test_state_that_appears_later_is_seen(allocator: CountedAllocator) -> None:
    around = steps(allocator, "late_state").around_optimizer
    assert around[0] == (9 * MIB, 28 * MIB)
    assert around[1][1] - around[1][0] == 8 * MIB
    assert limit("optimizer_state.later.max") < 8 * MIB


def test_what_every_step_leaves_behind_is_seen(allocator: CountedAllocator) -> None:
    after = steps(allocator, "leaked_step").allocated
    seen = value(evidence_of(a_life(after_steps=after), ""), "growth")
    assert seen == 18 * MIB
    assert seen > limit("growth.max")


def test_pieces_that_keep_their_segments_are_seen(allocator: CountedAllocator) -> None:
    sound = space_left(allocator, GPU)
    assert sound == Space(unused=0, stuck=0, held=0, largest=0.8)
    segmented = SegmentedAllocator()
    living = segmented.hold(208 * MIB)
    segmented.release()
    segmented.most_reserved = segmented.highest = segmented.taken  # a model fills its segments
    seen = space_left(segmented, Task("gpu0", fault="fragmented"))
    assert seen.stuck / seen.held > limit("stuck.share.max")
    assert seen.unused > 0
    del living
    assert segmented.taken == 0


@pytest.mark.parametrize(("share", "largest"), [(1.0, 0.8), (0.5, 0.5), (0.33, 0.3), (0.0, 0.0)])
def test_the_largest_block_is_found_from_above(
    allocator: CountedAllocator, share: float, largest: float
) -> None:
    allocator.largest_share = share
    assert space_left(allocator, GPU).largest == largest


def test_a_refused_block_is_seen(allocator: CountedAllocator) -> None:
    seen = space_left(allocator, Task("gpu0", fault="refused")).largest
    assert seen == 0.4
    assert seen < limit("largest_block.share.min")


def test_the_whole_card_is_asked_and_the_cap_put_back(
    allocator: CountedAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    caps: list[int | None] = []
    monkeypatch.setattr(lifecycle, "cap_memory", caps.append)
    space_left(allocator, Task("gpu0", vram_cap=GIB))
    assert caps == [None, GIB]


# ---- the instrument, as far as it goes without a GPU ----


def test_on_the_cpu_there_is_nothing_to_measure() -> None:
    seen = lifecycle.measure_lifecycle(Task("cpu"))
    assert set(seen) == set(lifecycle.PRODUCES)
    assert all(isinstance(item, Known) and item.absent for item in seen.values())


def measured(monkeypatch: pytest.MonkeyPatch, answer: Any) -> dict[str, Evidence]:
    """Return what the instrument makes of a life, or of an error on the way."""

    def run_life(plan: Plan, depth: int, task: Task, folder: Path, _allocator: Any) -> Life:
        assert (plan.name, depth, task.device) == ("smollm2-135m-qlora", 30, "gpu0")
        assert folder.is_dir()
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Life)
        return answer

    monkeypatch.setattr(lifecycle, "run_life", run_life)
    seen = dict(lifecycle.measure_lifecycle(GPU))
    assert set(seen) == set(lifecycle.PRODUCES)
    return seen


def test_the_instrument_tells_a_life(monkeypatch: pytest.MonkeyPatch) -> None:
    how = "smollm2-135m-qlora, all 30 layers, random weights"
    assert measured(monkeypatch, a_life()) == evidence_of(a_life(), how)


def test_a_card_that_is_too_small_has_no_small_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has\nmore")
    for item in measured(monkeypatch, error).values():
        assert isinstance(item, Known)
        assert item.absent == (
            "the small plan ran out of memory: CUDA out of memory. Tried to allocate 2 GiB."
        )


@pytest.mark.parametrize(
    "error", [ImportError("No module named 'trl'"), DirtyProcessError("4096 bytes")]
)
def test_what_keeps_it_from_running_makes_it_unknown(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    for item in measured(monkeypatch, error).values():
        assert isinstance(item, Unknown)
        assert item.reason == str(error)


def test_another_error_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="device-side assert"):
        measured(monkeypatch, RuntimeError("CUDA error: device-side assert triggered"))


# ---- a real life on the CPU, where the counted allocator sees nothing ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("life")


@pytest.fixture(scope="module")
def lived(folder: Path) -> Iterator[Life]:
    """Live once with two layers and two steps, more than all weights in host memory first."""
    plan = Plan(name="tiny", model="smollm2-135m", sequence_length=16, batch_size=2)
    task = Task("cpu", fault="host_loading")
    with pytest.MonkeyPatch.context() as patch, third_party_warnings_ignored():
        patch.setattr(lifecycle, "NUM_STEPS", 2)
        patch.setattr(lifecycle, "cap_memory", lambda _cap: None)
        yield lifecycle.run_life(plan, 2, task, folder, CountedAllocator())


@needs_stack
def test_a_real_life_passes_every_stage_in_order(lived: Life, folder: Path) -> None:
    assert list(lived.stages) == [
        "loading",
        "forward",
        "training",
        "evaluation",
        "saving",
        "merging",
    ]
    assert len(lived.around_optimizer) == len(lived.after_steps) == 2
    shape = load_model("smollm2-135m")
    embedding = shape.count("vocab_size") * shape.count("hidden_size")
    layer = 3 * 576 * 1536 + 2 * 576 * 576 + 2 * 576 * 192 + 2 * 576
    assert lived.checkpoint_bytes == 2 * (embedding + 2 * layer + 576)
    on_disk = (folder / "model" / "model.safetensors").stat().st_size
    assert on_disk == pytest.approx(lived.checkpoint_bytes, rel=0.001)
    assert (folder / "adapter" / "adapter_model.safetensors").stat().st_size > 0


@needs_stack
def test_weights_that_pass_through_host_memory_are_seen(lived: Life) -> None:
    growth = lived.stages["loading"].host_growth
    assert growth is not None
    assert growth / lived.checkpoint_bytes > limit("load.host.share.max")
