"""Options that trade memory, time and quality, each priced by the formula tier."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cift_probe.advise.fit import Fit, answer, formula
from cift_probe.devices import Device
from cift_probe.plan import Plan, PlanError, check_plan
from cift_probe.verdict.answer import Verdict

_SHOWN = 3
_SHORT_SEQUENCE = 512  # tokens; below it a lever would change what is learnt


class Lever(msgspec.Struct, frozen=True):
    """One change of a plan, what it costs besides memory, and the answer with it."""

    change: str
    price: str
    fit: Fit
    saved_bytes: int


def find_levers(found: Fit, device: Device) -> list[Lever]:
    """Return up to three levers, those first that make the plan fit, then those that save most.

    The plan's own requirement must come from the formula tier, so that like is compared with like.
    """
    if found.estimate is None:
        return []
    before = found.estimate.required_bytes
    levers = []
    for change, price, plan in _changes(found.plan):
        try:
            check_plan(plan)
        except PlanError:
            continue
        after = answer(plan, found.card, device, formula(plan, device))
        if after.estimate is not None and after.estimate.required_bytes < before:
            saved = before - after.estimate.required_bytes
            levers.append(Lever(change, price, after, saved))
    levers.sort(key=lambda item: (item.fit.verdict is not Verdict.FITS, -item.saved_bytes))
    return levers[:_SHOWN]


def _changes(plan: Plan) -> Iterator[tuple[str, str, Plan]]:
    """Yield what could be changed, its price in words, and the changed plan."""
    replace = msgspec.structs.replace
    if not plan.gradient_checkpointing and plan.method != "inference":
        changed = replace(plan, gradient_checkpointing=True)
        yield "gradient checkpointing on", "one more forward pass per step", changed
    if plan.method == "full":
        changed = replace(plan, method="lora")
        yield f"LoRA of rank {plan.rank} in place of full", "fewer weights learn", changed
    if plan.method == "lora":
        changed = replace(plan, method="qlora", quantisation="nf4")
        yield "QLoRA in NF4 in place of LoRA", "weights are rounded to 4 bits", changed
    if plan.method == "inference" and plan.quantisation == "none":
        yield "weights in NF4", "weights are rounded to 4 bits", replace(plan, quantisation="nf4")
    if plan.method == "full" and plan.optimizer.startswith("adamw_torch"):
        changed = replace(plan, optimizer="adamw_bnb_8bit")
        yield "optimizer adamw_bnb_8bit", "moments are rounded to 8 bits", changed
        changed = replace(plan, optimizer="paged_adamw_8bit")
        yield "optimizer paged_adamw_8bit", "moments in 8 bits, paged to the host", changed
    if plan.stack != "trl" and plan.method != "inference":
        changed = replace(plan, stack="trl")
        yield "stack trl", "the loss without full logits", changed
    if plan.batch_size > 1:
        smaller = max(1, plan.batch_size // 2)
        factor = -(-plan.batch_size // smaller)
        changed = replace(
            plan,
            batch_size=smaller,
            gradient_accumulation=plan.gradient_accumulation * factor,
            padding=plan.padding and smaller > 1,
        )
        yield f"batch {smaller}, accumulated {factor} times", "more launches per step", changed
    if plan.sequence_length // 2 >= _SHORT_SEQUENCE:
        shorter = plan.sequence_length // 2
        changed = replace(plan, sequence_length=shorter)
        yield f"sequences of {shorter} tokens", "longer rows are cut", changed
