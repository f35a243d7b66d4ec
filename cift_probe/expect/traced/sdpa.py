"""Scaled dot product attention on fake tensors: the kernel that torch would choose on the card.

aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.11 to 2.13), select_sdp_backend.
cuDNN's kernel, which Hopper prefers, takes and gives the same tensors as flash attention, and
allocates no more; it is not told apart.
"""

from __future__ import annotations

from typing import Any

import torch

from cift_probe.expect.memory.kernels import choose_sdpa

_NO_KERNEL = 1 << 16  # heads of several widths: too wide for flash attention
_CARD = {"capability": (9, 0)}
_real = torch.nn.functional.scaled_dot_product_attention


def install() -> None:
    """Replace torch's function in this process."""
    torch.nn.functional.scaled_dot_product_attention = _attention


def use_capability(capability: tuple[int, int]) -> None:
    """State the card's compute capability."""
    _CARD["capability"] = capability


def choose(query: Any, key: Any, value: Any, mask: Any, *, enable_gqa: bool) -> str:
    """Return "flash", "efficient" or "math" for tensors of (batch, heads, sequence, head)."""
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    widths = {tensor.shape[-1] for tensor in (query, key, value)}
    head = max(widths) if len(widths) == 1 else _NO_KERNEL
    dtype = str(query.dtype).removeprefix("torch.")
    if not same_heads and not enable_gqa:
        return "math"
    return choose_sdpa(
        dtype, _CARD["capability"], head, same_heads=same_heads, masked=mask is not None
    )


def _attention(  # noqa: PLR0917 - torch's signature
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002 - torch's signature
) -> Any:
    if query.device.type != "cuda":
        return _real(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    if attn_mask is not None:
        attn_mask = _as_bias(attn_mask, query)
    kernel = choose(query, key, value, attn_mask, enable_gqa=enable_gqa)
    with torch.autocast("cuda", enabled=False):
        return _run(kernel, (query, key, value), attn_mask, (dropout_p, is_causal), scale)


def _run(
    kernel: str, tensors: tuple[Any, ...], bias: Any, options: tuple[float, bool], scale: Any
) -> Any:
    query, key, value = tensors
    dropout_p, is_causal = options
    aten = torch.ops.aten
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(  # noqa: SLF001 - its name
            query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale
        )[0]
    if kernel == "math":
        grouped = query.shape[1] != key.shape[1] and key.shape[1] != 1
        return aten._scaled_dot_product_attention_math(  # noqa: SLF001 - its name
            query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=grouped
        )[0]
    if bias is not None:
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs_gradient = query.requires_grad or key.requires_grad or value.requires_grad
    return aten._scaled_dot_product_efficient_attention(  # noqa: SLF001 - its name
        query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]


def _as_bias(mask: Any, query: Any) -> Any:
    """Return a mask as what is added to scores: convert_boolean_attn_mask."""
    if mask.dtype != torch.bool:
        return mask
    bias = torch.zeros_like(mask, dtype=query.dtype)
    return bias.masked_fill_(mask.logical_not(), float("-inf"))
