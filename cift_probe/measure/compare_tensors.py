"""How far a result is from its reference; random inputs that are never zeros."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

SEED = 7


def random_tensor(
    shape: tuple[int, ...],
    *,
    device: str,
    dtype: Any,
    seed: int = SEED,
    scale: float = 1.0,
) -> Any:
    """Return N(0, scale) values of `shape`, the same on every machine.

    Drawn on the CPU: generators of different devices give different numbers.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator).mul_(scale)
    return drawn.to(device=device, dtype=dtype)


def worst(errors: Iterable[float]) -> float:
    """Return the largest error, NaN if one is NaN: max() drops one that is not the first."""
    numbers = list(errors)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def relative_error(found: Any, reference: Any) -> float:
    """Return the Frobenius norm of the difference over the norm of the reference."""
    reference = reference.double()
    difference = (found.double() - reference).norm().item()
    size = reference.norm().item()
    return float(difference / size) if size else math.nan


def worst_element(found: Any, reference: Any) -> float:
    """Return the largest deviation of one element over the reference's root mean square."""
    reference = reference.double()
    largest = (found.double() - reference).abs().max().item()
    size = reference.square().mean().sqrt().item()
    return float(largest / size) if size else math.nan


def worst_column_error(found: Any, reference: Any) -> float:
    """Return the largest relative error of one column of two (rows, columns) matrices.

    One damaged block of a weight reaches one output only; a norm over all would hide it.
    """
    reference = reference.double()
    difference = (found.double() - reference).norm(dim=0)
    size = reference.norm(dim=0)
    return float((difference / size).max().item())
