"""Which attention kernel each layer runs, as transformers 5.24 and torch 2.13 choose it.

transformers/masking_utils.py: without padding and without a window that matters, sdpa needs no
mask and torch takes its flash kernel (head up to 256); with a mask it takes the memory-efficient
one. Gemma-2 has no sdpa implementation (soft-capped scores) and runs eager.
"""

from __future__ import annotations

from cift_probe.expect.memory.architectures import Architecture
from cift_probe.expect.memory.profiles import Profile
from cift_probe.models import ModelShape
from cift_probe.plan import Plan

FLASH_HEAD = 256
EAGER_ONLY = frozenset({"gemma2"})
ALWAYS_MASKED = frozenset({"falcon"})  # modeling_falcon.py hands every layer a mask


def choose_kernels(
    plan: Plan, profile: Profile, shape: ModelShape, architecture: Architecture
) -> Architecture:
    """Return the architecture with the kernel of every layer filled in."""
    if plan.method == "qlora" and profile.upcasts and "qlora" not in profile.autocast:
        # queries in float32: no flash kernel; with grouped keys no efficient one either, and
        # _scaled_dot_product_attention_math has the tensors of eager attention
        grouped = architecture.kinds[0].grouped
        return _all(architecture, "eager" if grouped else "efficient")
    layer = architecture.kinds[0]
    if plan.attention == "eager" or shape.model_type in EAGER_ONLY:
        return _all(architecture, "eager")
    if shape.model_type in ALWAYS_MASKED:
        return _all(architecture, "efficient")
    masked = plan.padding or plan.packing or architecture.dims["head"] > FLASH_HEAD
    if masked:
        return _all(architecture, "efficient")
    if not (architecture.window and plan.sequence_length > architecture.window):
        return architecture
    kinds = (layer._replace(kernel="efficient"), layer)
    order = tuple(0 if windowed else 1 for windowed in architecture.windowed)
    return architecture._replace(kinds=kinds, order=order, projections=architecture.projections * 2)


def _all(architecture: Architecture, kernel: str) -> Architecture:
    kinds = tuple(layer._replace(kernel=kernel) for layer in architecture.kinds)
    return architecture._replace(kinds=kinds)
