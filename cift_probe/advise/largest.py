"""The largest sequence or batch with which a plan still fits on a card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from cift_probe.advise.fit import Fit, answer, formula
from cift_probe.devices import Device
from cift_probe.models import load_model
from cift_probe.plan import Plan
from cift_probe.verdict.answer import Verdict

Dimension = Literal["seq", "batch"]
_STEP = {"seq": 64, "batch": 1}  # sequences are told in multiples of 64 tokens
_LONGEST = {"seq": 1 << 20, "batch": 1 << 12}


def find_largest(plan: Plan, card: str, device: Device, dimension: Dimension) -> Fit | None:
    """Return the answer for the largest plan that fits; None when not even the smallest does.

    Found by bisection: more tokens need more memory, but for a step where a longer sequence leaves
    a model's window and runs another attention kernel; there a still longer one may fit.
    """
    step = _STEP[dimension]
    limit = _LONGEST[dimension]
    if dimension == "seq":
        limit = min(limit, load_model(plan.model).max_position_embeddings or limit)

    def tried(count: int) -> Fit:
        changed = _with(plan, dimension, count)
        return answer(changed, card, device, formula(changed, device))

    return _largest(lambda count: tried(count * step), max(1, limit // step))


def _largest(tried: Callable[[int], Fit], limit: int) -> Fit | None:
    low, high = 0, limit
    best: Fit | None = None
    while low < high:
        middle = (low + high + 1) // 2
        found = tried(middle)
        if found.verdict is Verdict.FITS:
            low, best = middle, found
        else:
            high = middle - 1
    return best


def _with(plan: Plan, dimension: Dimension, count: int) -> Plan:
    if dimension == "seq":
        return msgspec.structs.replace(plan, sequence_length=count)
    return msgspec.structs.replace(plan, batch_size=count, padding=plan.padding and count > 1)
