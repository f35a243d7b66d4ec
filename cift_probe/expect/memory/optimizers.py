"""What optimizers keep per parameter, and what their step allocates on top.

torch/optim/adam.py (2.13): `_multi_tensor_adam` holds the square roots of all second moments at
once, `_fused_adam` nothing, `_single_tensor_adam` two tensors of one parameter's size.
bitsandbytes 0.50 optim/optimizer.py: below 4,096 numbers the state is float32; paged state is
managed memory, outside of torch's allocator, from 100,000 numbers (get_state_buffer).
transformers 5.24 optimization.py Adafactor: a row and a column per matrix, float32 copies.
"""

from __future__ import annotations

from typing import NamedTuple

from cift_probe.expect.memory.inventory import Tensor, rounded
from cift_probe.expect.memory.tape import FP32, HALF

SMALL = 4096
PAGED_FROM = 100_000
BLOCKWISE = 256


class Optimizer(NamedTuple):
    """Bytes between steps, and bytes that the step itself adds at its highest moment."""

    state: int
    temporaries: int


def optimizer_bytes(
    name: str, tensors: list[Tensor], item: int, *, wide_embedding: bool = False
) -> Optimizer:
    """Return what an optimizer takes for `tensors` of `item` bytes per number.

    `wide_embedding`: an 8-bit optimizer keeps the embedding's state in float32.
    """
    if name.startswith("adamw_torch"):
        return _adam(name, tensors, item)
    if name in {"adamw_bnb_8bit", "paged_adamw_8bit"}:
        return _adam_8bit(tensors, paged=name.startswith("paged"), wide=wide_embedding)
    if name == "paged_adamw_32bit":
        return Optimizer(sum(t.copies * _paged_32bit(t.elements) for t in tensors), 0)
    if name == "sgd":
        return Optimizer(0, 0)
    if name == "adafactor":
        return _adafactor(tensors, item)
    raise KeyError(name)


def _adam(name: str, tensors: list[Tensor], item: int) -> Optimizer:
    one = sum(t.copies * rounded(t.elements * item) for t in tensors)
    steps = sum(t.copies for t in tensors) * 512 if name == "adamw_torch_fused" else 0
    largest = max((rounded(t.elements * item) for t in tensors), default=0)
    extra = {"adamw_torch": one, "adamw_torch_loop": 2 * largest}.get(name, 0)
    return Optimizer(2 * one + steps, extra)


def _adam_8bit(tensors: list[Tensor], *, paged: bool, wide: bool) -> Optimizer:
    state = 0
    for tensor in tensors:
        size = tensor.elements
        if wide and tensor.group == "embedding":
            state += 0 if paged else tensor.copies * 2 * rounded(size * FP32)
            continue
        if size < SMALL:
            state += tensor.copies * 2 * rounded(size * FP32)
            continue
        scales = 2 * rounded(-(-size // BLOCKWISE) * FP32)
        moments = 0 if paged and size >= PAGED_FROM else 2 * rounded(size)
        state += tensor.copies * (moments + scales)
    return Optimizer(state, 0)


def _paged_32bit(size: int) -> int:
    return 0 if size >= PAGED_FROM else 2 * rounded(size * FP32)


def _adafactor(tensors: list[Tensor], item: int) -> Optimizer:
    """Factor the second moment; the step works on float32 copies of one parameter."""
    state, extra = 0, 0
    for tensor in tensors:
        rows, columns = tensor.shape
        matrix = min(rows, columns) > 1
        kept = rounded(rows * FP32) + rounded(columns * FP32)
        state += tensor.copies * (kept if matrix else rounded(tensor.elements * FP32))
        copies = 2 if item == HALF else 0  # grad.float() and p.float()
        extra = max(extra, (copies + 2) * rounded(tensor.elements * FP32))
    return Optimizer(state, extra)
