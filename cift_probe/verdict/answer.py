"""Answers: whether a plan can be trained on a device, and how sure that is.

Capability, not conformance: a small card is no worse a card because a 70B does not fit.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cift_probe.evidence import Evidence, Known, Ledger, Scope, Unknown
from cift_probe.plan import Plan
from cift_probe.verdict.display import bytes_text


class Verdict(StrEnum):
    """What is said of one plan. UNDECIDED is said whenever the evidence does not reach."""

    FITS = "fits"
    FITS_WITH_LEVERS = "fits_with_levers"
    DOES_NOT_FIT = "does_not_fit"
    UNDECIDED = "undecided"


class Answer(msgspec.Struct, frozen=True):
    """The answer for one plan on one device. A number that nobody measured is None, never 0.

    `band` is the relative error of `required_bytes`, whose upper end the verdict uses,
    `step_band` that of `step_s` and `tokens_per_s`.
    `limits` says what the answer does not cover.
    """

    plan: str
    device: str
    verdict: Verdict
    reason: str
    tier: str = ""
    demanded: bool = False
    peak_allocated_bytes: int | None = None
    required_bytes: int | None = None
    usable_bytes: int | None = None
    headroom_bytes: int | None = None
    band: float | None = None
    step_s: float | None = None
    step_band: float | None = None
    tokens_per_s: float | None = None
    joules_per_token: float | None = None
    levers: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()


_LIMITS = (
    "one device, the stack named in the plan, random token ids of full sequence length",
    "joules per token are not measured in this version",
)


def answer_plan(plan: Plan, device: str, measured: Ledger, *, demanded: bool) -> Answer:
    """Answer one plan on one device from what was measured; runs nothing.

    Without a measured requirement and usable memory the answer is UNDECIDED, with the reason.
    """
    scope = Scope(device, plan.name)
    overflow = _seen(measured, "step.out_of_memory", scope)
    required = _seen(measured, "step.required", scope)
    usable = _seen(measured, "device.usable.bytes", scope)
    peak = _number(_seen(measured, "step.peak", scope))
    if isinstance(overflow, Known) and not overflow.absent:
        return Answer(
            plan.name,
            device,
            Verdict.DOES_NOT_FIT,
            str(overflow.value),
            "sliced",
            demanded,
            peak_allocated_bytes=None if peak is None else int(peak),
            limits=_LIMITS,
        )
    for side in (required, usable):
        if isinstance(side, Unknown):
            return _undecided(plan.name, scope, side.reason, demanded=demanded)
        if side.absent:
            return _undecided(plan.name, scope, side.absent, demanded=demanded)
    if not isinstance(required, Known) or not isinstance(usable, Known):
        raise TypeError  # both branches above returned; this line is for the type checker
    tensors = None if peak is None else Known(peak, "B")
    room = int(usable.value)
    verdict, reason = fit(required, Known(room, "B"), tensors, upper_only=True)
    found = Answer(
        plan=plan.name,
        device=device,
        verdict=verdict,
        reason=reason,
        tier="sliced",
        demanded=demanded,
        peak_allocated_bytes=None if peak is None else int(peak),
        required_bytes=int(required.value),
        usable_bytes=room,
        headroom_bytes=room - int(required.upper),
        band=required.band,
    )
    return _timed(found, plan, _seen(measured, "step.seconds", scope))


def _timed(found: Answer, plan: Plan, step: Evidence) -> Answer:
    """Return an answer with the seconds of a step, where they were measured."""
    step_s = _number(step)
    return msgspec.structs.replace(
        found,
        step_s=step_s,
        step_band=None if step_s is None or isinstance(step, Unknown) else step.band,
        tokens_per_s=None if not step_s else plan.num_tokens / step_s,
        limits=(*_LIMITS, *_notes(step)),
    )


def _notes(step: Evidence) -> tuple[str, ...]:
    return (step.note,) if isinstance(step, Known) and step.note else ()


def fit(
    required: Known, usable: Known, peak: Known | None, *, upper_only: bool = False
) -> tuple[Verdict, str]:
    """Hold what is required against what is usable, in bytes, each at the worse end of its band.

    `peak` is what the tensors alone take: where it exceeds what is usable nothing helps.
    `upper_only` says that `required` bounds the need from above and tells nothing below it.
    """
    needs, has = bytes_text(required.upper), bytes_text(usable.lower)
    if required.upper <= usable.lower:
        return Verdict.FITS, f"needs at most {needs} of {has}"
    most = bytes_text(usable.upper)
    if peak is not None and peak.lower > usable.upper:
        return Verdict.DOES_NOT_FIT, f"its tensors alone take {bytes_text(peak.value)} of {most}"
    if required.lower > usable.upper and not (upper_only and peak is not None):
        least = bytes_text(required.lower)
        return Verdict.DOES_NOT_FIT, f"needs at least {least} of {most}"
    if upper_only:
        return Verdict.UNDECIDED, f"{has} lies between what its tensors take and {needs}"
    least = bytes_text(required.lower)
    return Verdict.UNDECIDED, f"needs {least} to {needs}; usable are {has} to {most}"


def _seen(measured: Ledger, name: str, scope: Scope) -> Evidence:
    found = measured.peek(name, scope)
    return Unknown(f"{name} was not measured in this session") if found is None else found[1]


def _number(evidence: Evidence) -> float | None:
    if isinstance(evidence, Unknown) or not isinstance(evidence.value, int | float):
        return None
    return evidence.value


def _undecided(plan: str, scope: Scope, reason: str, *, demanded: bool) -> Answer:
    return Answer(plan, scope.device, Verdict.UNDECIDED, reason, demanded=demanded, limits=_LIMITS)
