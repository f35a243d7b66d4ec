"""The real step of a plan at full depth, and the smallest room that it runs in."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure.declare import Task, instrument
from cift_probe.measure.inside import allocated_after_cleaning, cap_memory
from cift_probe.measure.sliced import is_out_of_memory, measure_slice
from cift_probe.models import load_model
from cift_probe.plan import Plan
from cift_probe.stack.instants import Marks

PRODUCES = (
    "step.measured.peak",
    "step.measured.instant",
    "step.measured.instants",
    "step.measured.reserved",
    "step.measured.weights",
    "step.measured.seconds",
    "step.measured.out_of_memory",
)
_NUM_STEPS = 5
_MORE, _MOST = 1.1, 3.0  # how the upper bound grows where loading decides, and how far
_TOLERANCE = 0.005  # of the peak: how narrowly the smallest cap is enclosed


@instrument(
    "step.measured",
    version=1,
    produces=PRODUCES,
    estimate_s=40.0,
    deadline_s=600.0,
    per_plan=True,
    clean=True,
    faults=("held_memory",),
)
def measure_full_depth(task: Task) -> dict[str, Evidence]:
    """Run the plan's step at full depth, with random weights; bytes from torch's allocator.

    `step.measured.out_of_memory` says what was missing where it does not fit.
    """
    if task.device == "cpu":
        return dict.fromkeys(PRODUCES, absent("on the CPU there is no device memory to fit into"))
    if task.plan is None:
        return dict.fromkeys(PRODUCES, Unknown("no plan was asked"))
    plan = msgspec.convert(task.plan, Plan)
    depth = load_model(plan.model).num_hidden_layers
    try:
        seen = measure_slice(plan, depth, task, _NUM_STEPS)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        text = f"at full depth: {str(error).partition(' GPU ')[0]}"
        missing: dict[str, Evidence] = dict.fromkeys(PRODUCES, absent(text))
        return missing | {"step.measured.out_of_memory": Known(text)}
    how = f"all {depth} layers, random weights"
    peak = Known(int(max(seen.instants.values())), "B", how, plan.outlier_band)
    return {
        "step.measured.peak": peak,
        "step.measured.instant": Known(max(seen.instants, key=seen.instants.__getitem__), "", how),
        "step.measured.instants": Known(
            {name: int(value) for name, value in seen.instants.items()}, "B", how
        ),
        "step.measured.reserved": Known(int(seen.reserved), "B", how),
        "step.measured.weights": Known(int(seen.weights), "B", how),
        "step.measured.seconds": Known(seen.step_s, "s", how),
        "step.measured.out_of_memory": absent("the step ran", how),
    }


@instrument(
    "step.measured.room",
    version=1,
    produces=("step.measured.room",),
    estimate_s=60.0,
    deadline_s=900.0,
    per_plan=True,
    clean=True,
    faults=("held_memory",),
)
def measure_room_at_full_depth(task: Task) -> dict[str, Evidence]:
    """Find the smallest cap under which loading and two steps run, all layers, by bisection."""
    name = "step.measured.room"
    if task.device == "cpu":
        return {name: absent("on the CPU there is no device memory to fit into")}
    if task.plan is None:
        return {name: Unknown("no plan was asked")}
    plan = msgspec.convert(task.plan, Plan)
    depth = load_model(plan.model).num_hidden_layers
    seen = measure_slice(plan, depth, task, _NUM_STEPS)
    peak = int(max(seen.instants.values()))
    low, high = smallest_cap(lambda cap: runs_capped(plan, depth, cap), peak, int(seen.reserved))
    how = f"all {depth} layers under a cap, by bisection; refused with {low} bytes"
    return {name: Known(high, "B", how, band=(high - low) / high + plan.outlier_band)}


def smallest_cap(
    runs: Callable[[int], bool], peak: int, reserved: int, tolerance: float = _TOLERANCE
) -> tuple[int, int]:
    """Return (largest refused, smallest sufficient) bytes, by bisection between peak and reserved.

    `runs` tells whether the step runs under a cap. Without fragmentation the peak itself would do;
    more than what is reserved without a cap is never needed, but for the granularity of a
    segment. Raises ValueError when not even that suffices.
    """
    low, high = peak - 1, reserved + (64 << 20)
    while not runs(high):  # loading can need more than the steps that `reserved` is about
        if high > _MOST * reserved:
            message = (
                f"the step does not run in {high} bytes, and reserves {reserved} without a cap"
            )
            raise ValueError(message)
        low, high = high, int(high * _MORE)
    while high - low > tolerance * peak:
        middle = (low + high) // 2
        if runs(middle):
            high = middle
        else:
            low = middle
    return low, high


def run_steps(plan: Plan, depth: int, marks: Marks, num_steps: int = 2) -> None:
    """Load the plan's model with `depth` layers and random weights, and run its steps."""
    from cift_probe.stack import slices, trl_stack
    from cift_probe.stack.step import prepare_step

    trl_stack.keep_offline()
    with tempfile.TemporaryDirectory() as folder:
        model = slices.build_slice(plan, depth, "cuda:0")
        run = prepare_step(
            plan,
            model,
            marks,
            torch_device="cuda:0",
            folder=Path(folder),
            num_steps=num_steps,
        )
        del model
        run()


def runs_capped(plan: Plan, depth: int, cap: int) -> bool:
    """Tell whether loading and two steps run when the allocator may hold `cap` bytes."""
    import torch

    allocated_after_cleaning()
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.mem_get_info()[1])
    try:
        run_steps(plan, depth, Marks(lambda _instant: None))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    else:
        return True
    finally:
        cap_memory(None)
        allocated_after_cleaning()
