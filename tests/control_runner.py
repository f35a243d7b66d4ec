"""Runs a check on fabricated machines: the same function that pytest calls on a real one.

A control file `tests/controls/<ID>.toml` holds one passing machine and cases that differ from
it. Evidence is written under "witness:key"; a value is {value, unit}, {unknown = reason} or
{absent = reason}. What is expected is worked out from the fabricated facts by the real rules,
unless the file states it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from cift_probe import expect
from cift_probe.evidence import Evidence, Known, Ledger, Scope, Unknown, absent
from cift_probe.verdict.catalogue import Catalogue
from cift_probe.verdict.court import Court
from cift_probe.verdict.finding import Finding, Outcome

ORDERED = ("at most", "at least")
BANDED = "within the band of"


class ControlError(AssertionError):
    """A control does not prove what it is there to prove."""


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fabricated machine: what differs from the passing one, and what must come out.

    `found` names the evidence that the finding must show as found. `boundary` marks a machine
    that sits on the limit.
    """

    name: str
    outcome: Outcome
    set: dict[str, dict[str, Any]]
    found: str = ""
    boundary: bool = False


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One control file."""

    machine: dict[str, dict[str, Any]]
    case: list[Case]


def read_control(path: Path) -> Control:
    """Return a control; raises ControlError for a file that is missing or malformed."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Control)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        message = f"{path.name}: {error}"
        raise ControlError(message) from error


def run_control(catalogue: Catalogue, check_id: str, control: Control) -> None:
    """Hold a check against its control; raises ControlError where the two disagree."""
    passing = judge(catalogue, check_id, control.machine)
    _expect(check_id, "the passing machine", passing, Outcome.PASS)
    _all_read(check_id, control, passing)
    on_the_limit = _is_on_the_limit(passing)
    for case in control.case:
        finding = judge(catalogue, check_id, {**control.machine, **case.set})
        _expect(check_id, case.name, finding, case.outcome)
        _single_change(check_id, control, case)
        _found_side(check_id, case, finding)
        on_the_limit = on_the_limit or case.boundary
        if case.boundary and case.outcome is Outcome.PASS and not _is_on_the_limit(finding):
            message = f"{check_id}: {case.name}: is called a boundary, and lies beside the limit"
            raise ControlError(message)
    _complete(check_id, control, on_the_limit=on_the_limit)


def judge(catalogue: Catalogue, check_id: str, machine: dict[str, dict[str, Any]]) -> Finding:
    """Return what a check finds on a fabricated machine."""
    facts = Ledger("facts")
    ledgers = {
        "facts": facts,
        "expected": Ledger("expected", lambda n, s: expect.produce(n, s, facts, {})),
        "measured": Ledger("measured"),
    }
    for name, row in machine.items():
        witness, _, key = name.partition(":")
        ledgers[witness].enter(key, evidence(row))
    return Court(catalogue, ledgers).judge(catalogue[check_id], Scope())


def evidence(row: dict[str, Any]) -> Evidence:
    """Return the evidence that a row of a control file states."""
    if "unknown" in row:
        return Unknown(row["unknown"], "control")
    if "absent" in row:
        return absent(row["absent"], "control")
    return Known(row["value"], row.get("unit", ""), "control", row.get("band", 0.0))


def _all_read(check_id: str, control: Control, passing: Finding) -> None:
    # facts may be read by a rule of expect instead of by the check itself
    stated = {key for key in control.machine if not key.startswith("facts:")}
    unread = sorted(stated - set(passing.evidence))
    if unread:
        message = f"{check_id}: nothing reads {', '.join(unread)}; remove it from the control"
        raise ControlError(message)


def _expect(check_id: str, name: str, finding: Finding, outcome: Outcome) -> None:
    if finding.outcome is not outcome:
        message = f"{check_id}: {name}: {finding.outcome} ({finding.reason}), not {outcome}"
        raise ControlError(message)


def _single_change(check_id: str, control: Control, case: Case) -> None:
    changed = [key for key, row in case.set.items() if control.machine.get(key) != row]
    if len(changed) != 1:
        message = f"{check_id}: {case.name}: differs in {len(changed)} values, not in one"
        raise ControlError(message)


def _found_side(check_id: str, case: Case, finding: Finding) -> None:
    if case.outcome is not Outcome.FAIL:
        return
    if case.found not in finding.evidence:
        message = f"{check_id}: {case.name}: name what is found; the check reads {finding.evidence}"
        raise ControlError(message)
    row = case.set.get(case.found)
    if row is not None and finding.found != evidence(row):
        message = f"{check_id}: {case.name}: {finding.found} is shown as found, not {case.found}"
        raise ControlError(message)


def _complete(check_id: str, control: Control, *, on_the_limit: bool) -> None:
    outcomes = {case.outcome for case in control.case}
    for needed in (Outcome.FAIL, Outcome.UNKNOWN):
        if needed not in outcomes:
            message = f"{check_id}: has no case that comes to {needed}"
            raise ControlError(message)
    if not on_the_limit:
        message = f"{check_id}: has no case on the boundary"
        raise ControlError(message)


def _is_on_the_limit(finding: Finding) -> bool:
    """Tell whether a part of the comparison sits on its limit; unordered ones have none."""
    parts = finding.parts or (finding,)
    ordered = [part for part in parts if part.relation in (*ORDERED, BANDED)]
    return not ordered or any(map(_sits_on_its_limit, ordered))


def _sits_on_its_limit(part: Finding) -> bool:
    found, limit = part.found, part.limit
    if not isinstance(found, Known) or not isinstance(limit, Known):
        return False
    if part.relation == BANDED:
        ends = (limit.lower, limit.upper)  # a count of bytes is the last whole one inside
        return limit.band > 0 and any(abs(found.value - end) < 1 for end in ends)
    return bool(found.value == limit.value)
