"""Which attention kernel each layer runs, as transformers 5.17 to 5.24 and torch 2.13 choose it.

transformers/masking_utils.py: without padding and without a window that matters, sdpa is given no
mask, and keys are repeated for grouped heads beside a mask or where a head is wider than 256
(integrations/sdpa_attention.py).
torch then chooses by aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
"""

from __future__ import annotations

from cift_probe.expect.memory.anatomy import Architecture
from cift_probe.expect.memory.profiles import Profile
from cift_probe.expect.memory.versions import EAGER_SINCE, Version
from cift_probe.models import ModelShape
from cift_probe.plan import Plan

FLASH_HEAD = 256
AMPERE = (8, 0)  # flash attention, and bfloat16 in the memory-efficient kernel
ALWAYS_MASKED = frozenset({"falcon"})  # modeling_falcon.py; its one key head stays one


def choose_kernels(
    plan: Plan,
    profile: Profile,
    shape: ModelShape,
    architecture: Architecture,
    capability: tuple[int, int],
    transformers: Version,
) -> Architecture:
    """Return the architecture with the kernel of every layer filled in."""
    eager_since = EAGER_SINCE.get(shape.model_type)
    if plan.attention == "eager" or (eager_since and transformers >= eager_since):
        return _all(architecture, "eager", masked=True)
    grouped = architecture.kinds[0].grouped
    dtype = _query_dtype(plan, profile)

    def kernel(*, masked: bool) -> str:
        # a mask and a wide head come with repeated keys (use_gqa_in_sdpa), but for Falcon's
        head = architecture.dims["head"]
        repeats = (masked or head > FLASH_HEAD) and shape.model_type not in ALWAYS_MASKED
        same_heads = not grouped or repeats
        return choose_sdpa(dtype, capability, head, same_heads=same_heads, masked=masked)

    if shape.model_type in ALWAYS_MASKED or plan.padding or plan.packing:
        return _all(architecture, kernel(masked=True), masked=True)
    plain = _all(architecture, kernel(masked=False), masked=False)
    if not (architecture.window and plan.sequence_length >= architecture.window):
        return plain
    one = plain.kinds[0]
    kinds = (one._replace(kernel=kernel(masked=True), masked=True), one)
    order = tuple(0 if windowed else 1 for windowed in architecture.windowed)
    return plain._replace(kinds=kinds, order=order, projections=architecture.projections * 2)


def _query_dtype(plan: Plan, profile: Profile) -> str:
    """Return the type in which attention meets its queries; autocast turns them to 16 bits."""
    autocast = plan.method in profile.autocast and plan.dtype != "float32"
    upcast = plan.method == "qlora" and profile.upcasts
    return "float32" if upcast and not autocast else plan.dtype


def choose_sdpa(
    dtype: str, capability: tuple[int, int], head: int, *, same_heads: bool, masked: bool
) -> str:
    """Return torch's choice; grouped heads without a mask come with `enable_gqa`."""
    ampere = capability >= AMPERE
    if not masked and dtype != "float32" and ampere and head <= FLASH_HEAD:
        return "flash"
    if same_heads and (ampere or dtype != "bfloat16"):
        return "efficient"
    return "math"


def _all(architecture: Architecture, kernel: str, *, masked: bool) -> Architecture:
    kinds = tuple(layer._replace(kernel=kernel, masked=masked) for layer in architecture.kinds)
    return architecture._replace(kinds=kinds)
