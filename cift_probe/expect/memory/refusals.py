"""What the ledger was not checked for, and therefore does not answer."""

from __future__ import annotations

from cift_probe.expect.memory.architectures import Architecture
from cift_probe.expect.memory.training import adapted_roles
from cift_probe.models import ModelShape
from cift_probe.plan import Plan

OPTIMIZERS = frozenset(
    {
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_torch_loop",
        "adamw_bnb_8bit",
        "paged_adamw_8bit",
        "paged_adamw_32bit",
        "adafactor",
        "sgd",
    }
)


def refuse(plan: Plan, shape: ModelShape, architecture: Architecture) -> str:
    """Return why there is no prediction, or nothing."""
    if plan.attention == "flash_attention_2":
        return "flash_attention_2: the FlashAttention package's workspaces were not traced"
    if plan.method == "inference":
        return ""
    if plan.optimizer not in OPTIMIZERS:
        return f"the optimizer {plan.optimizer!r} has no row in the ledger"
    if plan.method != "full":
        return _refuse_targets(plan, shape, architecture)
    return ""


def _refuse_targets(plan: Plan, shape: ModelShape, architecture: Architecture) -> str:
    if not adapted_roles(architecture, plan.targets):
        return f"no linear layer of {shape.model_type} is named {plan.targets!r}"
    names = {p.module for p in architecture.projections[0]}
    listed = plan.targets if isinstance(plan.targets, tuple) else ()
    unknown = sorted(set(listed) - names)
    if unknown:
        return f"no linear layer of {shape.model_type} is named {unknown[0]!r}"
    return ""
