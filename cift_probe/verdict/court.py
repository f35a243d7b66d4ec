"""The court: hands evidence to checks, keeps prerequisites before dependents, signs findings."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from cift_probe.evidence import Ledger, Reading, Scope
from cift_probe.verdict.catalogue import Catalogue
from cift_probe.verdict.declare import Check
from cift_probe.verdict.finding import Executed, Finding, Outcome

Witnesses: TypeAlias = Mapping[str, Ledger]
_CLEAR = (Outcome.PASS, Outcome.NOT_APPLICABLE)


class Court:
    """Decides checks of one catalogue on one machine; every (check, case) once."""

    def __init__(self, catalogue: Catalogue, witnesses: Witnesses) -> None:
        """Judge with the ledgers "facts", "expected" and "measured" of `witnesses`."""
        self.catalogue = catalogue
        self.witnesses = witnesses
        self.findings: dict[tuple[str, str], Finding] = {}

    def recall(self, finding: Finding) -> None:
        """Take over a finding from an earlier session of the same machine."""
        resumed = msgspec.structs.replace(finding, executed=Executed.RESUMED)
        self.findings[finding.check, finding.case] = resumed

    def decide(self, check: Check, scope: Scope, executed: Executed = Executed.SELECTED) -> Finding:
        """Return the finding of a check in a scope, deciding its prerequisites first."""
        known = self.findings.get((check.id, scope.label))
        if known is None:
            known = self._blocked(check, scope, executed) or self.judge(check, scope, executed)
        elif executed is Executed.SELECTED and known.executed is Executed.PREREQUISITE:
            known = msgspec.structs.replace(known, executed=executed)
        self.findings[check.id, scope.label] = known
        return known

    def _blocked(self, check: Check, scope: Scope, executed: Executed) -> Finding | None:
        for name in check.after:
            first = self.catalogue[name]
            if first.device == "gpu" and scope.device == "cpu":
                continue  # what a GPU must have is no condition for a run on the CPU
            theirs = _scope_for(first, scope)
            finding = self.decide(first, theirs, Executed.PREREQUISITE)
            if finding.outcome not in _CLEAR:
                origin = finding.blocked_by or finding.label
                reason = f"blocked by {origin}: {_origin_reason(finding)}"
                blocked = Finding(Outcome.UNKNOWN, reason=reason, blocked_by=origin)
                return self._sign(blocked, check, scope, executed, [], 0.0)
        return None

    def judge(self, check: Check, scope: Scope, executed: Executed = Executed.SELECTED) -> Finding:
        """Return the finding of a check by itself, whatever its prerequisites say."""
        readings = {name: Reading(self.witnesses[name], scope) for name in check.witnesses}
        started = time.perf_counter()
        try:
            finding = check.function(**readings)
            if not isinstance(finding, Finding):
                kind = type(finding).__name__
                finding = Finding(Outcome.ERROR, reason=f"returned {kind}, not a Finding")
        except Exception as error:  # noqa: BLE001 - whatever a check raises is its ERROR, not ours
            finding = Finding(Outcome.ERROR, reason=f"{type(error).__name__}: {error}")
        keys = [key for reading in readings.values() for key in reading.keys]
        return self._sign(finding, check, scope, executed, keys, time.perf_counter() - started)

    def _sign(
        self,
        finding: Finding,
        check: Check,
        scope: Scope,
        executed: Executed,
        keys: list[str],
        duration_s: float,
    ) -> Finding:
        return msgspec.structs.replace(
            finding,
            check=check.id,
            case=scope.label,
            requirement=check.requirement,
            why=check.why,
            fix=check.fix,
            family=self.catalogue.family(check.id),
            severity=check.severity,
            domain=check.domain,
            executed=executed,
            evidence=tuple(dict.fromkeys(keys)),
            duration_s=round(duration_s, 4),
        )


def _scope_for(check: Check, scope: Scope) -> Scope:
    """Narrow a dependent's scope to what its prerequisite is asked per."""
    device = scope.device
    if check.device == "host":
        device = ""
    elif not device:
        device = "gpu0"
    return Scope(device=device, plan=scope.plan if check.each == "plan" else "")


def _origin_reason(finding: Finding) -> str:
    # "blocked by A: blocked by A: …" helps nobody; the first cause is what can be mended.
    return finding.reason.removeprefix(f"blocked by {finding.blocked_by}: ")
