"""The tensors that stay: weights, quantisation constants, adapters, gradients.

bitsandbytes 0.50 functional.py (quantize_4bit: 64 values per scale, scales of 256 scales each;
int8_vectorwise_quant) says what a quantised weight consists of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from cift_probe.expect.memory.anatomy import Architecture, Projection
from cift_probe.expect.memory.tape import BLOCK_BYTES, FP32

BLOCK = 64
NESTED_BLOCK = 256
TABLES = 2 * BLOCK_BYTES  # the 16 values of the type, and the offset of the scales
NESTED_TABLE = 256 * FP32


class Tensor(NamedTuple):
    """A parameter: what it belongs to, how many numbers, how often.

    `shape` is what is left without the last dimension, and without the one before it.
    """

    group: str
    elements: int
    copies: int
    shape: tuple[int, int] = (1, 1)
    role: str = ""


def rounded(size: int) -> int:
    """Return bytes as the allocator hands them out."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def parameters(architecture: Architecture) -> list[Tensor]:
    """Return all parameters of the base model, one row per kind of tensor."""
    dims, layers = architecture.dims, len(architecture.order)
    hidden, vocabulary = dims["hidden"], architecture.vocabulary
    found = [Tensor("embedding", vocabulary * hidden, 1, (vocabulary, hidden))]
    if not architecture.tied:
        group = "linear" if architecture.packed_head else "head"
        found.append(Tensor(group, vocabulary * hidden, 1, (vocabulary, hidden)))
    if architecture.head_bias:
        found.append(Tensor("bias", vocabulary, 1, (vocabulary, 1)))
    found.append(Tensor("norm", hidden, architecture.norm_tensors, (hidden, 1)))
    copies = layers * architecture.norm_tensors
    found += [Tensor("norm", dims[width], copies) for width in architecture.norms]
    for projection in architecture.projections[0]:
        rows, columns = dims[projection.rows], dims[projection.columns]
        shape = (rows, columns)
        found.append(Tensor("linear", rows * columns, layers, shape, projection.role))
        if projection.bias:
            found.append(Tensor("bias", rows, layers))
    for names in architecture.extras:
        sizes = [dims[name] for name in names]
        rows, columns = math.prod(sizes[:-1]), math.prod(sizes[:-2]) * sizes[-1]
        found.append(Tensor("expert", math.prod(sizes), layers, (rows, columns)))
    return found


def stored(tensors: list[Tensor], item: int) -> int:
    """Return the bytes of tensors at one width."""
    return sum(tensor.copies * rounded(tensor.elements * item) for tensor in tensors)


def packed(tensor: Tensor, kind: str, *, double: bool) -> tuple[int, int]:
    """Return bytes of a quantised weight and of its constants, all copies together."""
    if kind == "int8":
        return tensor.copies * rounded(tensor.elements), tensor.copies * rounded(
            tensor.shape[0] * FP32
        )
    scales = -(-tensor.elements // BLOCK)
    constants = TABLES
    if double:
        nested = -(-scales // NESTED_BLOCK)
        constants += rounded(scales) + rounded(nested * FP32) + NESTED_TABLE
    else:
        constants += rounded(scales * FP32) - BLOCK_BYTES
    return tensor.copies * rounded(-(-tensor.elements // 2)), tensor.copies * constants


def unquantised_share(architecture: Architecture) -> float:
    """Return the share of the layers' matrices, by elements, that 4 or 8 bits leave as they are.

    0 where loading replaces every linear layer, 1 where it replaces none.
    """
    tensors = [item for item in parameters(architecture) if item.group in {"linear", "expert"}]
    total = sum(item.copies * item.elements for item in tensors)
    left = [item for item in tensors if item.group == "expert" or not architecture.quantisable]
    return sum(item.copies * item.elements for item in left) / total if total else 0.0


def adapters(architecture: Architecture, adapted: frozenset[str], rank: int) -> Iterator[Tensor]:
    """Return LoRA's two matrices of every adapted linear layer."""
    layers = len(architecture.order)
    for projection in architecture.projections[0]:
        if projection.role in adapted:
            rows, columns = _shape(architecture, projection)
            yield Tensor("adapter", rank * columns, layers, (rank, columns))
            yield Tensor("adapter", rows * rank, layers, (rows, rank))

    if "experts" in adapted:
        dims = architecture.dims
        # peft 0.21 gives the fused gate and up twice the rank, and every expert its own
        for rows, columns, own in (
            (dims["expert_gate_up"], dims["hidden"], 2 * rank * dims["experts"]),
            (dims["hidden"], dims["expert"], rank * dims["experts"]),
        ):
            yield Tensor("adapter", own * columns, layers, (own, columns))
            yield Tensor("adapter", rows * own, layers, (rows, own))


def _shape(architecture: Architecture, projection: Projection) -> tuple[int, int]:
    return architecture.dims[projection.rows], architecture.dims[projection.columns]
