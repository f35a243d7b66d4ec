"""The same verdicts again, from stored evidence alone: no machine, no instrument."""

from __future__ import annotations

import msgspec

from cift_probe.evidence import Ledger, Scope
from cift_probe.report.schema import Report
from cift_probe.report.writer import ReportError
from cift_probe.verdict.catalogue import Catalogue
from cift_probe.verdict.court import Court
from cift_probe.verdict.declare import WITNESSES, Check
from cift_probe.verdict.finding import Finding, Outcome


def rejudge(report: Report, catalogue: Catalogue) -> list[Finding]:
    """Return the findings that the checks of `catalogue` come to on a report's evidence.

    Every stored finding is decided again, prerequisites first, in the report's order; those that
    came to ERROR are left out, because what a check broke on is no evidence. `executed` and
    `duration_s` are the stored ones. Raises ReportError for a check that the catalogue lacks.
    """
    ledgers = {name: Ledger(name) for name in WITNESSES}
    for witness, ledger in ledgers.items():
        for key, evidence in report.evidence.get(witness, {}).items():
            ledger.enter(key, evidence)
    court = Court(catalogue, ledgers)
    return [
        _again(court, stored) for stored in report.findings if stored.outcome is not Outcome.ERROR
    ]


def scope_of(check: Check, case: str) -> Scope:
    """Return the scope that a case of a check stands for: `gpu0,my-plan`, `my-plan` or empty."""
    if check.device == "host":
        return Scope(plan=case)
    device, _, plan = case.partition(",")
    return Scope(device, plan)


def _again(court: Court, stored: Finding) -> Finding:
    check = court.catalogue.get(stored.check)
    if check is None:
        message = (
            f"{stored.label} is no check of this suite; judge the report with the suite of the "
            "version that it names, or add the check"
        )
        raise ReportError(message)
    finding = court.decide(check, scope_of(check, stored.case))
    return msgspec.structs.replace(finding, executed=stored.executed, duration_s=stored.duration_s)
