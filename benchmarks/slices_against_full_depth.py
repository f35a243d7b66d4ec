"""How far the memory and time that slices predict are from a run at full depth.

    python benchmarks/slices_against_full_depth.py [PLAN.toml ...]

Needs a GPU that holds the plans at full depth. Prints one line per plan: peak allocated and step
time predicted from slices and measured at full depth, and the smallest cap (by bisection, to
64 MiB) against the requirement that the answer is given from.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cift_probe.evidence import Evidence, Known
from cift_probe.measure import sliced
from cift_probe.measure.declare import Task
from cift_probe.measure.inside import allocated_after_cleaning
from cift_probe.plan import Plan, load_model, read_plan

MIB = 1024**2
STEP_BYTES = 64 * MIB
PLANS = (
    Plan(name="llama-3.1-8b-qlora", model="llama-3.1-8b"),
    Plan(name="qwen2.5-1.5b-qlora-b2", model="qwen2.5-1.5b", batch_size=2),
    Plan(name="llama-3.1-8b-lora", model="llama-3.1-8b", method="lora", quantisation="none"),
    Plan(name="llama-3.2-1b-full", model="llama-3.2-1b", method="full", quantisation="none"),
)


def main(arguments: list[str]) -> int:
    """Compare the named plans, or the built-in ones."""
    plans = [read_plan(name) for name in arguments] or PLANS
    print("plan | peak sliced, full MiB | error | step sliced, full s | required, cap MiB")
    for plan in plans:
        print(compare(plan), flush=True)
    return 0


def compare(plan: Plan) -> str:
    """Return one line: predicted against measured."""
    task = Task("gpu0", plan=msgspec.to_builtins(plan))
    predicted = sliced.measure_sliced(task)
    depth = load_model(plan.model).num_hidden_layers
    full = sliced.measure_slice(plan, depth, task)
    peak = max(full.instants.values())
    guess = number(predicted["step.peak"])
    cap = smallest_cap(plan, depth, peak, full.reserved)
    return (
        f"{plan.name} | {guess / MIB:,.1f}, {peak / MIB:,.1f} | {guess / peak - 1:+.2%} | "
        f"{number(predicted['step.seconds']):.3f}, {full.step_s:.3f} | "
        f"{number(predicted['step.required']) / MIB:,.0f}, {cap / MIB:,.0f}"
    )


def smallest_cap(plan: Plan, depth: int, peak: float, reserved: float) -> float:
    """Return the smallest cap, in bytes, under which the step was seen to run."""
    low, high = peak, reserved * 1.02
    while high - low > STEP_BYTES:
        middle = (low + high) / 2
        if runs(plan, depth, middle):
            high = middle
        else:
            low = middle
    return high


def runs(plan: Plan, depth: int, cap: float) -> bool:
    """Tell whether the step runs when the allocator may hold `cap` bytes."""
    import torch

    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.mem_get_info()[1])
    try:
        sliced.measure_slice(plan, depth, Task("gpu0"))
    except torch.OutOfMemoryError:
        return False
    else:
        return True
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        allocated_after_cleaning()


def number(evidence: Evidence) -> float:
    """Return a known number; raises SystemExit with the reason for an unknown one."""
    if not isinstance(evidence, Known):
        raise SystemExit(evidence.reason)
    return float(evidence.value)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
