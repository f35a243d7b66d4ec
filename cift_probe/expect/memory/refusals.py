"""What the ledger was not checked for, and therefore does not answer."""

from __future__ import annotations

from cift_probe.expect.memory.architectures import Architecture
from cift_probe.expect.memory.training import adapted_roles
from cift_probe.models import ModelShape
from cift_probe.plan import Plan

FLASH_FROM = (8, 0)
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


def refuse(
    plan: Plan, shape: ModelShape, architecture: Architecture, capability: tuple[int, int]
) -> str:
    """Return why there is no prediction, or nothing."""
    if capability < FLASH_FROM:
        # aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_flash_attention_hardware
        found = ".".join(map(str, capability))
        return f"compute capability {found}: no flash kernel and no bfloat16; not traced"
    if plan.attention == "flash_attention_2":
        return "flash_attention_2: the FlashAttention package's workspaces were not traced"
    reason = _refuse_types(plan)
    if reason or plan.method == "inference":
        return reason
    if plan.optimizer not in OPTIMIZERS:
        return f"the optimizer {plan.optimizer!r} has no row in the ledger"
    if plan.method != "full":
        return _refuse_targets(plan, shape, architecture)
    return ""


def _refuse_types(plan: Plan) -> str:
    if plan.quantisation == "int8":
        return "int8 layers (bitsandbytes MatMul8bitLt) were not traced; nf4 and fp4 were"
    if plan.method == "inference":
        wide = plan.dtype == "float32"
        return "inference in float32 was not traced; 16-bit types were" if wide else ""
    if plan.dtype != "bfloat16":
        return f"training in {plan.dtype} was not traced; only bfloat16 was"
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
