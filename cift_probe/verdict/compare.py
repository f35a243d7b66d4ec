"""Relations between pieces of evidence: the only place where Unknown becomes an outcome.

Every relation takes what was found first and what it is held against second, and returns a
`Finding`. The order of the rules is the same for all of them:

1. a side that is absent on this machine: NOT_APPLICABLE, with that reason;
2. a side that is Unknown: UNKNOWN, with that reason, never a pass and never a default;
3. different units: `UnitMismatchError`, because the check is wrong, not the machine;
4. the relation itself: PASS or FAIL. A value with an error band is taken at its worse end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import msgspec

from cift_probe.evidence import Evidence, Known, UnitMismatchError, Unknown
from cift_probe.verdict.display import evidence_text
from cift_probe.verdict.finding import Finding, Outcome

if TYPE_CHECKING:
    from packaging.version import Version

_DOTTED = ("version", "capability")
_NOT_FINITE = ("nan", "inf", "-inf")  # how evidence.json_safe writes them


def at_most(found: Evidence, limit: Evidence) -> Finding:
    """Hold when `found`, at the upper end of its band, is not above `limit`."""
    return _settle("at most", found, limit, lambda: bool(_upper(found) <= _ordered(limit)))


def at_least(found: Evidence, limit: Evidence) -> Finding:
    """Hold when `found`, at the lower end of its band, is not below `limit`."""
    return _settle("at least", found, limit, lambda: bool(_lower(found) >= _ordered(limit)))


def agrees(found: Evidence, predicted: Evidence) -> Finding:
    """Hold when `found`, at either end of its band, is within the band of `predicted`."""
    finding = _settle(
        "within the band of",
        found,
        predicted,
        lambda: _distance(found, predicted) <= _band(predicted),
    )
    if finding.outcome not in (Outcome.PASS, Outcome.FAIL):
        return finding
    return msgspec.structs.replace(
        finding, reason=f"{finding.reason}: {_difference(found, predicted)}"
    )


def equals(found: Evidence, expected: Evidence) -> Finding:
    """Hold when both sides are the same; versions compare without their local part."""
    return _settle("equal to", found, expected, lambda: _plain(found) == _plain(expected))


def is_in(found: Evidence, options: Evidence) -> Finding:
    """Hold when `found` is one of `options` (a list; units are not compared)."""
    return _settle(
        "one of", found, options, lambda: _value(found) in _items(options), same_unit=False
    )


def overlaps(found: Evidence, accepted: Evidence) -> Finding:
    """Hold when two lists share an element; the shared elements are named, best first."""
    shared: list[object] = []

    def test() -> bool:
        offered = _items(found)
        shared.extend(item for item in _items(accepted) if item in offered)
        return bool(shared)

    finding = _settle("overlapping", found, accepted, test)
    if shared:
        return msgspec.structs.replace(finding, reason=f"{finding.reason}; served by {shared[0]}")
    return finding


def disjoint(found: Evidence, refused: Evidence) -> Finding:
    """Hold when two lists share no element; the shared ones are named."""
    shared: list[object] = []

    def test() -> bool:
        unwanted = _items(refused)
        shared.extend(item for item in _items(found) if item in unwanted)
        return not shared

    finding = _settle("free of", found, refused, test)
    if shared:
        named = ", ".join(map(str, shared))
        return msgspec.structs.replace(finding, reason=f"{finding.reason}; among them {named}")
    return finding


def is_true(found: Evidence) -> Finding:
    """Hold when a flag is set."""
    return _settle("set", found, None, lambda: _flag(found) is True)


def is_false(found: Evidence) -> Finding:
    """Hold when a flag is not set."""
    return _settle("not set", found, None, lambda: _flag(found) is False)


def is_empty(found: Evidence) -> Finding:
    """Hold when a list has no element."""
    return _settle("empty", found, None, lambda: len(_items(found)) == 0)


def is_present(found: Evidence) -> Finding:
    """Hold when the thing exists here; the one relation that an absence fails."""
    if isinstance(found, Known) and found.absent:
        return Finding(Outcome.FAIL, "present", found, reason=found.absent)
    return _settle("present", found, None, lambda: True)


def same_major(found: Evidence, expected: Evidence) -> Finding:
    """Hold when two versions share their major release."""
    return _settle(
        "of the same major release as",
        found,
        expected,
        lambda: _release(found).major == _release(expected).major,
    )


def all_of(*findings: Finding) -> Finding:
    """Join findings: the worst one decides; nothing applicable is NOT_APPLICABLE."""
    if not findings:
        message = "all_of() needs at least one finding"
        raise ValueError(message)
    for outcome in (Outcome.ERROR, Outcome.FAIL, Outcome.UNKNOWN, Outcome.PASS):
        chosen = [finding for finding in findings if finding.outcome is outcome]
        if chosen:
            reasons = "; ".join(finding.reason for finding in chosen if finding.reason)
            return msgspec.structs.replace(chosen[0], reason=reasons, parts=findings)
    return msgspec.structs.replace(findings[0], parts=findings)


def any_of(*findings: Finding) -> Finding:
    """Join findings of which one is enough: the best one decides, and what broke is told first."""
    if not findings:
        message = "any_of() needs at least one finding"
        raise ValueError(message)
    order = (Outcome.ERROR, Outcome.PASS, Outcome.UNKNOWN, Outcome.FAIL, Outcome.NOT_APPLICABLE)
    chosen = min(findings, key=lambda finding: order.index(finding.outcome))
    return msgspec.structs.replace(chosen, parts=findings)


def unless_absent(presence: Evidence, instead: Evidence, judge: Callable[[], Finding]) -> Finding:
    """Judge only what is present; where it is absent, name what serves `instead`."""
    if isinstance(presence, Known) and presence.absent:
        reason = f"{presence.absent}; what serves instead: {evidence_text(instead)}"
        return Finding(Outcome.NOT_APPLICABLE, "present", found=presence, reason=reason)
    if isinstance(presence, Unknown):
        return Finding(Outcome.UNKNOWN, "present", found=presence, reason=presence.reason)
    return judge()


def _settle(
    relation: str,
    found: Evidence,
    limit: Evidence | None,
    test: Callable[[], bool],
    *,
    same_unit: bool = True,
) -> Finding:
    sides = [side for side in (found, limit) if side is not None]
    for side in sides:
        if isinstance(side, Known) and side.absent:
            return Finding(Outcome.NOT_APPLICABLE, relation, found, limit, side.absent)
    for side in sides:
        if isinstance(side, Unknown):
            return Finding(Outcome.UNKNOWN, relation, found, limit, side.reason)
    units = {side.unit for side in sides if isinstance(side, Known)}
    if same_unit and len(units) > 1:
        message = f"cannot hold {' against '.join(sorted(map(repr, units)))}"
        raise UnitMismatchError(message)
    holds = test()
    return Finding(
        Outcome.PASS if holds else Outcome.FAIL,
        relation,
        found,
        limit,
        _sentence(relation, found, limit, holds=holds),
    )


def _sentence(relation: str, found: Evidence, limit: Evidence | None, *, holds: bool) -> str:
    verb = "is" if holds else "is not"
    text = f"{evidence_text(found)} {verb} {relation}"
    text += f" {evidence_text(limit)}" if limit is not None else ""
    notes = [side.note for side in (found, limit) if isinstance(side, Known) and side.note]
    return f"{text} ({'; '.join(notes)})" if notes else text


def _distance(found: Evidence, predicted: Evidence) -> float:
    """Return how far the farther end of `found` is from `predicted`, relative to it."""
    middle = _ordered(predicted)
    ends = (_upper(found), _lower(found))
    if middle == 0:
        return 0.0 if ends == (0, 0) else math.inf
    return float(max(abs(end - middle) for end in ends) / abs(middle))


def _band(evidence: Evidence) -> float:
    return evidence.band if isinstance(evidence, Known) else 0.0


def _difference(found: Evidence, predicted: Evidence) -> str:
    first, second = _ordered(found), _ordered(predicted)
    if not second or not math.isfinite(first):
        return "no relative difference"
    unit = found.unit if isinstance(found, Known) else ""
    apart = evidence_text(Known(abs(first - second), unit))
    share = abs(first - second) / abs(second)
    return f"{apart} ({share:.2%}) {'above' if first >= second else 'below'} it"


def _value(evidence: Evidence) -> object:
    if isinstance(evidence, Unknown):  # the order of rules in _settle keeps this from happening
        message = f"no value: {evidence.reason}"
        raise TypeError(message)
    return evidence.value


def _flag(evidence: Evidence) -> bool:
    value = _value(evidence)
    if not isinstance(value, bool):
        message = f"{value!r} is not a flag"
        raise TypeError(message)
    return value


def _items(evidence: Evidence) -> Collection[object]:
    value = _value(evidence)
    if not isinstance(value, list | tuple):
        message = f"{value!r} is not a list"
        raise TypeError(message)
    return value


def _plain(evidence: Evidence) -> object:
    value = _value(evidence)
    if isinstance(evidence, Known) and evidence.unit in _DOTTED:
        return _parsed(_dotted(evidence).public)
    return value


def _dotted(evidence: Known) -> Version:
    try:
        return _parsed(str(evidence.value))
    except ValueError as error:
        message = f"{evidence.value!r} from {evidence.source} is not a dotted number"
        raise ValueError(message) from error


def _parsed(text: str) -> Version:
    from packaging.version import Version  # 10 ms that an estimate can do without

    return Version(text)


def _release(evidence: Evidence) -> Version:
    if isinstance(evidence, Unknown) or evidence.unit != "version":
        message = f"{evidence!r} is no version"
        raise TypeError(message)
    return _dotted(evidence)


def _ordered(evidence: Evidence, factor: float = 1.0) -> Any:
    value = _value(evidence)
    if isinstance(evidence, Known) and evidence.unit in _DOTTED:
        return _dotted(evidence)
    if value in _NOT_FINITE:
        return float(str(value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        message = f"{value!r} has no order"
        raise TypeError(message)
    return value * factor if factor != 1.0 else value


def _upper(evidence: Evidence) -> Any:
    band = evidence.band if isinstance(evidence, Known) else 0.0
    return _never_nan(_ordered(evidence, 1.0 + band), worst=math.inf)


def _lower(evidence: Evidence) -> Any:
    band = evidence.band if isinstance(evidence, Known) else 0.0
    return _never_nan(_ordered(evidence, 1.0 - band), worst=-math.inf)


def _never_nan(number: float | Version, worst: float) -> float | Version:
    # NaN compares false with everything; whichever way a relation is written, it must not hold.
    return worst if isinstance(number, float) and math.isnan(number) else number
