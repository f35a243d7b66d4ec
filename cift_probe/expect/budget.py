"""What a plan allows a training step to take."""

from __future__ import annotations

from cift_probe.evidence import Evidence, Known, absent
from cift_probe.plan import Plan

PREFIX = "plan.budget."
_UNITS = {"peak_allocated": "B", "required": "B", "step_s": "s", "host_ram": "B"}


def expect_budget(name: str, plan: Plan) -> Evidence:
    """Return one line of the plan's budget, or that the plan states none."""
    field = name.removeprefix(PREFIX)
    value = None if plan.budget is None else getattr(plan.budget, field)
    if value is None:
        return absent(f"the plan {plan.name} states no budget for {field}")
    return Known(value, _UNITS[field], source=f"[budget] of the plan {plan.name}")
