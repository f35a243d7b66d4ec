"""The largest sequence or batch with which a plan still fits on a card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from cift_probe.advise.fit import Fit, answer, formula
from cift_probe.devices import Device
from cift_probe.models import load_model
from cift_probe.plan import MAX_COUNT, Plan
from cift_probe.verdict.answer import Verdict

Dimension = Literal["seq", "batch"]
MEMORY = "memory"
POSITIONS = "the model's positions"
SEARCH = "the end of the search"
_STEP = {"seq": 64, "batch": 1}  # sequences are told in multiples of 64 tokens
_LONGEST = {"seq": MAX_COUNT, "batch": 1 << 12}


def find_largest(plan: Plan, card: str, device: Device, dimension: Dimension) -> Fit | None:
    """Return the answer for the largest plan that fits; None when not even the smallest does.

    Its `limited_by` says what ends there: memory, the model's positions, or the search. Found by
    bisection: more tokens need more memory, but for a step where a longer sequence leaves a
    model's window and runs another attention kernel; there a still longer one may fit.
    """
    step, limit, bound = _STEP[dimension], _LONGEST[dimension], SEARCH
    positions = load_model(plan.model).max_position_embeddings
    if dimension == "seq" and positions is not None and positions <= limit:
        limit, bound = positions, POSITIONS

    def tried(count: int) -> Fit:
        changed = _with(plan, dimension, min(count * step, limit))
        return answer(changed, card, device, formula(changed, device))

    last = -(-limit // step)  # the limit itself, which need not be a multiple
    count, best = _largest(tried, last)
    if best is None:
        return None
    return msgspec.structs.replace(best, limited_by=bound if count == last else MEMORY)


def _largest(tried: Callable[[int], Fit], limit: int) -> tuple[int, Fit | None]:
    low, high = 0, limit
    best: Fit | None = None
    while low < high:
        middle = (low + high + 1) // 2
        found = tried(middle)
        if found.verdict is Verdict.FITS:
            low, best = middle, found
        else:
            high = middle - 1
    return low, best


def _with(plan: Plan, dimension: Dimension, count: int) -> Plan:
    if dimension == "seq":
        prompt = min(plan.prompt_length, count - 1)
        return msgspec.structs.replace(plan, sequence_length=count, prompt_length=prompt)
    return msgspec.structs.replace(plan, batch_size=count, padding=plan.padding and count > 1)
