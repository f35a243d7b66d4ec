"""The smallest room that the suite's small plan runs in, by trying."""

from __future__ import annotations

from typing import Any

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure.declare import Task, instrument
from cift_probe.measure.full_depth import run_steps, runs_capped, smallest_cap
from cift_probe.measure.inside import allocated_after_cleaning
from cift_probe.measure.sliced import is_out_of_memory
from cift_probe.measure.training import third_party_warnings_ignored
from cift_probe.measure.watch import Watch
from cift_probe.models import load_model
from cift_probe.plan import REFERENCE_PLAN, Plan, read_plan
from cift_probe.stack import trl_stack

_TOLERANCE = 0.02  # of the peak: a third of the band that is asked for, in half the runs
_NUM_STEPS = 2
_HELD_BYTES = 128 << 20

PRODUCES = ("room.smallest", "room.refused", "room.reserved")


@instrument(
    "room",
    version=1,
    produces=PRODUCES,
    estimate_s=12.0,
    deadline_s=300.0,
    clean=True,
    faults=("held_memory",),
)
def measure_room(task: Task) -> dict[str, Evidence]:
    """Find the smallest cap under which loading and two steps of the small plan run; bytes.

    `smallest` ran, `refused` did not, and the truth lies between; `reserved` is what the
    allocator takes without a cap. The cap bounds torch's allocator: the context lies outside.
    """
    if task.device == "cpu":
        return dict.fromkeys(PRODUCES, absent("on the CPU there is no device memory to fit into"))
    if left := allocated_after_cleaning():
        return dict.fromkeys(PRODUCES, Unknown(f"{left} bytes are still allocated before it"))
    plan = read_plan(REFERENCE_PLAN)
    depth = load_model(plan.model).num_hidden_layers
    try:
        with third_party_warnings_ignored():
            held = hold(_HELD_BYTES) if task.fault == "held_memory" else None
            peak, reserved = measure_uncapped(plan, depth)
            refused, smallest = smallest_cap(
                lambda cap: runs_capped(plan, depth, cap), peak, reserved, _TOLERANCE
            )
            del held
    except ImportError as error:
        return dict.fromkeys(PRODUCES, Unknown(str(error), trl_stack.stack_versions()))
    except ValueError as error:
        return dict.fromkeys(PRODUCES, Unknown(str(error)))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0].partition(" GPU ")[0]
        return dict.fromkeys(PRODUCES, absent(f"the small plan ran out of memory: {said}"))
    how = f"{plan.name}, all {depth} layers, bisection of the allocator's cap"
    return {
        "room.smallest": Known(smallest, "B", how),
        "room.refused": Known(refused, "B", how),
        "room.reserved": Known(reserved, "B", how),
    }


def measure_uncapped(plan: Plan, depth: int) -> tuple[int, int]:
    """Return the peaks of what is handed out and of what is held, in bytes, without a cap."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    watch = Watch(_NUM_STEPS, profiled=False)
    run_steps(plan, depth, watch, _NUM_STEPS)
    return max(watch.peaks.values()), int(torch.cuda.max_memory_reserved())


def hold(num_bytes: int) -> Any:
    """Planted fault: memory that somebody holds all the while."""
    import torch

    return torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
