"""The life of one small fine-tuning, whole: load, forward, train, evaluate, save, merge.

One plan of the suite's own, at full depth, from a folder with random weights, through TRL. What
is predicted of it and what it really took are compared on every machine, so that the suite's
estimators are proved where they are used.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec

from cift_probe import data
from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure.declare import Task, instrument
from cift_probe.measure.inside import allocated_after_cleaning, cap_memory
from cift_probe.measure.sliced import DirtyProcessError, is_out_of_memory
from cift_probe.measure.stages import Allocator, Stage, Stages
from cift_probe.measure.training import third_party_warnings_ignored
from cift_probe.measure.watch import Watch, allocated_now
from cift_probe.models import load_model
from cift_probe.plan import REFERENCE_PLAN, Plan, read_plan
from cift_probe.stack import trl_stack

NUM_STEPS = 20
_LARGEST_PERCENT = 80  # of what is free: more would crowd out a compositor or another user
_PERCENT_STEP = 5
_LEAKED_BYTES = 1 << 20
_STATE_BYTES = 8 << 20
_PIECE_BYTES = 4 << 20  # five of these share a segment of the allocator
_NUM_PIECES = 160

PRODUCES = (
    "lifecycle.stages",
    "lifecycle.load.allocated",
    "lifecycle.load.host",
    "lifecycle.load.host.share",
    "lifecycle.forward.peak",
    "lifecycle.step.peak",
    "lifecycle.step.peak.instants",
    "lifecycle.optimizer_state",
    "lifecycle.optimizer_state.later",
    "lifecycle.growth",
    "lifecycle.unused",
    "lifecycle.stuck.share",
    "lifecycle.largest_block.share",
    "lifecycle.evaluation.added",
    "lifecycle.saving.device",
    "lifecycle.saving.host",
    "lifecycle.merging.device",
    "lifecycle.merging.host",
)
FAULTS = (
    "host_loading",
    "host_saving",
    "host_merging",
    "held_loading",
    "held_forward",
    "held_training",
    "held_evaluation",
    "held_saving",
    "held_merging",
    "larger_state",
    "late_state",
    "leaked_step",
    "fragmented",
    "refused",
)


class Space(msgspec.Struct, frozen=True):
    """What training left of the device's memory.

    `unused` bytes were held and not handed out, `stuck` of them, out of `held`, even after the
    cache was emptied; `largest` is the share of what is free that is had at once.
    """

    unused: int
    stuck: int
    held: int
    largest: float


class Life(msgspec.Struct, frozen=True):
    """What one life took: its stages, its steps and the checkpoint it began with; bytes.

    `around_optimizer` has what was allocated just before and after the optimizer of each step,
    `after_steps` what was at the end of each.
    """

    stages: dict[str, Stage]
    instants: dict[str, int]
    around_optimizer: list[tuple[int, int]]
    after_steps: list[int]
    space: Space
    checkpoint_bytes: int


class StepWatch(Watch):
    """A watch that also notes what the optimizer leaves behind; plants the faults of a step."""

    def __init__(self, num_steps: int, allocator: Allocator, fault: str) -> None:
        """Watch nothing yet."""
        super().__init__(num_steps, profiled=False)
        self.around_optimizer: list[tuple[int, int]] = []
        self._before_optimizer = 0
        self._allocator = allocator
        self._fault = fault
        self._kept: list[Any] = []

    def mark(self, instant: str) -> None:
        """End an instant."""
        if instant == "optimizer":
            state_step = {"larger_state": 0, "late_state": 1}.get(self._fault)
            if state_step == len(self.around_optimizer):
                self._kept.append(self._allocator.hold(_STATE_BYTES))
            self.around_optimizer.append((self._before_optimizer, allocated_now()))
        super().mark(instant)
        if instant == "clipping":
            self._before_optimizer = allocated_now()

    def step_ends(self) -> None:
        """Note what a step left allocated."""
        if self._fault == "leaked_step":
            self._kept.append(self._allocator.hold(_LEAKED_BYTES))
        super().step_ends()


@instrument(
    "lifecycle",
    version=1,
    produces=PRODUCES,
    estimate_s=15.0,
    deadline_s=300.0,
    clean=True,
    faults=FAULTS,
)
def measure_lifecycle(task: Task) -> dict[str, Evidence]:
    """Run the small plan of the suite from its folder to its merged adapter.

    Device bytes are torch's allocator's. `load.host` is by how much anonymous host memory rose
    while loading, its share is of the bytes of all weights in the folder. `growth` compares the
    ends of the last and of the second step: the optimizer's state appears in the first.
    `stuck.share` is what the allocator could not give back after training, of all that it then
    held. `evaluation.added` is what a batch whose logits are kept adds at its peak.
    """
    if task.device == "cpu":
        return dict.fromkeys(PRODUCES, absent("on the CPU there is no device memory to fit into"))
    plan = read_plan(REFERENCE_PLAN)
    depth = load_model(plan.model).num_hidden_layers
    try:
        with third_party_warnings_ignored(), tempfile.TemporaryDirectory() as folder:
            life = run_life(plan, depth, task, Path(folder), Allocator())
    except (ImportError, DirtyProcessError) as error:
        return dict.fromkeys(PRODUCES, Unknown(str(error), trl_stack.stack_versions()))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0].partition(" GPU ")[0]
        return dict.fromkeys(PRODUCES, absent(f"the small plan ran out of memory: {said}"))
    return evidence_of(life, f"{plan.name}, all {depth} layers, random weights")


def run_life(plan: Plan, depth: int, task: Task, folder: Path, allocator: Allocator) -> Life:
    """Run a plan of the stack `trl` from loading to merging, with files in `folder`."""
    from cift_probe.stack import checkpoint
    from cift_probe.stack.step import let_go, prepare_trainer

    trl_stack.keep_offline()
    warm_up(task)
    written = checkpoint.write_checkpoint(plan, depth, folder / "model")
    if left := allocated_after_cleaning():
        message = f"{left} bytes are still allocated before the small plan is loaded"
        raise DirtyProcessError(message)
    stages = Stages(allocator, task.fault)
    with stages.stage("loading"):
        model = checkpoint.load_checkpoint(plan, written, task.torch_device)
    watch = StepWatch(NUM_STEPS, allocator, task.fault)
    trainer = prepare_trainer(
        plan, model, watch, torch_device=task.torch_device, folder=folder, num_steps=NUM_STEPS
    )
    del model
    with stages.stage("forward"):
        forward_only(trainer, plan)
    with stages.stage("training"):
        trainer.train()
    stages.correct_peak("training", watch.peaks)
    space = space_left(allocator, task)
    with stages.stage("evaluation"):
        evaluate(trainer, plan)
    with stages.stage("saving"):
        trainer.model.save_pretrained(folder / "adapter")
    with stages.stage("merging"):
        trainer.model.merge_and_unload()
    let_go(trainer)
    return Life(
        stages=stages.seen,
        instants=watch.peaks,
        around_optimizer=watch.around_optimizer,
        after_steps=watch.allocated,
        space=space,
        checkpoint_bytes=written.num_bytes,
    )


def warm_up(task: Task) -> None:
    """Load a tiny model, so that libraries and kernels are not counted as the loader's memory."""
    embedded = data.folder("embedded")
    trl_stack.load_quantised(embedded, task.torch_device, "bfloat16")


def forward_only(trainer: Any, plan: Plan) -> None:
    """Compute the loss of one batch as the trainer does, without gradients."""
    rows = [trainer.train_dataset[index] for index in range(plan.batch_size)]
    trainer.model.eval()
    trainer.prediction_step(trainer.model, trainer.data_collator(rows), prediction_loss_only=True)
    trainer.model.train()


def evaluate(trainer: Any, plan: Plan) -> None:
    """Evaluate one batch as people do who compute metrics: its logits are kept."""
    trainer.compute_metrics = lambda _predictions: {}
    trainer.evaluate(trainer.train_dataset.select(range(plan.batch_size)))


def space_left(allocator: Allocator, task: Task) -> Space:
    """Return what training left; asks the whole card, whatever cap the session has."""
    pieces = []
    if task.fault == "fragmented":
        pieces = [allocator.hold(_PIECE_BYTES) for _ in range(_NUM_PIECES)][::5]
    unused = allocator.reserved() - allocator.allocated()
    allocator.release()
    held = allocator.reserved()
    stuck = held - allocator.allocated()
    cap_memory(None)
    free = allocator.free()
    largest = 0
    for percent in range(_LARGEST_PERCENT, 0, -_PERCENT_STEP):
        if task.fault == "refused" and percent > _LARGEST_PERCENT // 2:
            continue
        if allocator.fits(free * percent // 100):
            largest = percent
            break
    cap_memory(task.vram_cap)
    del pieces
    return Space(unused, stuck, held, largest / 100)


def evidence_of(life: Life, how: str) -> dict[str, Evidence]:
    """Turn a life into evidence."""
    stages = life.stages
    loading, saving, merging = (stages[name] for name in ("loading", "saving", "merging"))
    first, second = life.around_optimizer[:2]
    numbers: dict[str, tuple[Any, str]] = {
        "load.allocated": (loading.after - loading.before, "B"),
        "forward.peak": (stages["forward"].peak, "B"),
        "step.peak": (max(life.instants.values()), "B"),
        "step.peak.instants": (life.instants, "B"),
        "optimizer_state": (first[1] - first[0], "B"),
        "optimizer_state.later": (second[1] - second[0], "B"),
        "growth": (life.after_steps[-1] - life.after_steps[1], "B"),
        "unused": (life.space.unused, "B"),
        "stuck.share": (life.space.stuck / life.space.held if life.space.held else 0.0, "1"),
        "largest_block.share": (life.space.largest, "1"),
        "evaluation.added": (stages["evaluation"].growth, "B"),
        "saving.device": (saving.growth, "B"),
        "merging.device": (merging.growth, "B"),
        "stages": (msgspec.to_builtins(stages), ""),
    }
    known: dict[str, Evidence] = {
        f"lifecycle.{name}": Known(value, unit, how) for name, (value, unit) in numbers.items()
    }
    return known | {
        "lifecycle.load.host": host_evidence(loading, how),
        "lifecycle.load.host.share": host_evidence(loading, how, life.checkpoint_bytes),
        "lifecycle.saving.host": host_evidence(saving, how),
        "lifecycle.merging.host": host_evidence(merging, how),
    }


def host_evidence(stage: Stage, how: str, relative_to: int = 0) -> Evidence:
    """Return by how much host memory rose in a stage: bytes, or the share of a number of bytes."""
    if stage.host_growth is None:
        return Unknown("the kernel does not tell anonymous memory from pages of files", how)
    if relative_to:
        return Known(stage.host_growth / relative_to, "1", how)
    return Known(stage.host_growth, "B", how)
