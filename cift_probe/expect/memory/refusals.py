"""What the ledger was not checked for, and therefore does not answer."""

from __future__ import annotations

from cift_probe.expect.memory.anatomy import Architecture, UnknownArchitectureError
from cift_probe.expect.memory.architectures import describe
from cift_probe.expect.memory.training import adapted_roles
from cift_probe.models import ModelError, ModelShape
from cift_probe.plan import OPTIMIZERS, Plan


def refuse(plan: Plan, shape: ModelShape, architecture: Architecture) -> str:
    """Return why there is no prediction, or nothing."""
    if plan.attention == "flash_attention_2":
        return "flash_attention_2: the FlashAttention package's workspaces were not traced"
    if plan.method == "inference":
        return ""
    if plan.optimizer not in OPTIMIZERS:
        return f"the optimizer {plan.optimizer!r} has no row in the ledger"
    return _wrong_targets(plan, shape, architecture)


def wrong_targets(plan: Plan, shape: ModelShape) -> str:
    """Return what is wrong with the names of modules that LoRA shall adapt, or nothing.

    Nothing as well where the model's modules are not known here.
    """
    try:
        return _wrong_targets(plan, shape, describe(shape, "flash"))
    except (UnknownArchitectureError, ModelError):
        return ""


def _wrong_targets(plan: Plan, shape: ModelShape, architecture: Architecture) -> str:
    if plan.method not in {"lora", "qlora"}:
        return ""
    names = [p.module for p in architecture.projections[0]]
    listed = plan.targets if isinstance(plan.targets, tuple) else (plan.targets,)
    unknown = sorted(set(listed) - {*names, "all-linear", "attention"})
    if unknown or not adapted_roles(architecture, plan.targets):
        wrong = unknown[0] if unknown else str(plan.targets)
        return (
            f"no linear layer of {shape.model_type} is named {wrong!r}; it has {', '.join(names)}"
        )
    return ""
