"""Which weights of the decoder layers a plan's quantisation reached."""

from __future__ import annotations

from typing import Any

from cift_probe.stack.instants import decoder_layers

_MATRIX, _EXPERTS = 2, 3  # dimensions of a linear weight, and of experts that are fused into one


def linear_bytes(model: Any) -> tuple[int, int]:
    """Return bytes of linear weights in the decoder layers: those left as they were, and all.

    Linear are weights of two dimensions and fused experts of three, whatever their module is
    called: what is no `nn.Linear` is what quantisation passes over. Embedding and head lie outside
    the layers and are kept in full precision on purpose.
    """
    left = total = 0
    for weight in decoder_layers(model).parameters():
        if weight.dim() not in (_MATRIX, _EXPERTS):
            continue
        num_bytes = weight.numel() * weight.element_size()
        total += num_bytes
        if not _is_quantised(weight):
            left += num_bytes
    return left, total


def _is_quantised(weight: Any) -> bool:
    return hasattr(weight, "quant_state") or weight.element_size() == 1
