"""From a session, or from the journal of one that ended early, to its report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from cift_probe.evidence import Ledger, Scope
from cift_probe.plan import Plan
from cift_probe.report.journal import read_journal
from cift_probe.report.schema import Report, Suite
from cift_probe.report.writer import ReportError, build_report, read_report
from cift_probe.verdict.answer import Answer, Verdict, answer_plan
from cift_probe.verdict.finding import Finding, Outcome, Severity
from cift_probe.verdict.summary import exit_code

JOURNAL, REPORT = "journal.jsonl", "report.json"
BASIS = "MEM001"  # the check that the extrapolation to full depth rests on


class Asked(msgspec.Struct, frozen=True):
    """What a session was asked to answer, and on which devices."""

    plans: list[Plan]
    demanded: list[str]
    devices: list[str]
    strict: bool = False


def assemble(
    suite: Suite,
    asked: Asked,
    ledgers: Mapping[str, Ledger],
    findings: list[Finding],
    not_run: dict[str, str],
) -> Report:
    """Return the report of a session; every plan is answered for every device.

    The exit code is part of it when the session came to its end.
    """
    measured = ledgers["measured"] if "measured" in ledgers else Ledger("measured")
    answers = [
        _explained(
            answer_plan(plan, device, measured, demanded=plan.name in asked.demanded), findings
        )
        for plan in asked.plans
        for device in asked.devices or ["gpu0"]
    ]
    code = exit_code(findings, answers, strict=asked.strict) if suite.complete else None
    return build_report(
        suite=msgspec.structs.replace(suite, exit_code=code),
        evidence={name: dict(ledger) for name, ledger in ledgers.items()},
        findings=findings,
        answers=answers,
        plans=[msgspec.to_builtins(plan) for plan in asked.plans],
        not_run=not_run,
    )


def _explained(answer: Answer, findings: list[Finding]) -> Answer:
    """Let an undecided answer say which check stood in its way, if one did.

    An answer whose evidence did not pass its own check is no answer.
    """
    case = Scope(answer.device, answer.plan).label
    for finding in findings:
        bent = finding.check == BASIS and finding.case == case and finding.outcome is Outcome.FAIL
        if bent and answer.verdict is not Verdict.DOES_NOT_FIT:
            reason = f"{finding.label}: {finding.reason}"
            return msgspec.structs.replace(answer, verdict=Verdict.UNDECIDED, reason=reason)
    if answer.verdict is not Verdict.UNDECIDED:
        return answer
    for finding in findings:
        if finding.blocked_by and finding.case == case:
            return msgspec.structs.replace(answer, reason=finding.reason)
    for finding in findings:
        failed = finding.outcome is Outcome.FAIL and finding.severity is Severity.MUST
        if failed and finding.case == answer.device:
            reason = f"{finding.label}: {finding.reason}"
            return msgspec.structs.replace(answer, reason=reason)
    return answer


def open_report(path: Path) -> Report:
    """Return a stored report, or what the journal of a run that ended early says so far.

    `path` is a report file or the folder of a run. Raises ReportError or JournalError.
    """
    try:
        if not path.is_dir():
            return read_report(path)
        if (path / REPORT).exists() or not (path / JOURNAL).exists():
            return read_report(path / REPORT)
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror}); name a report.json"
        raise ReportError(message) from error
    told = read_journal(path / JOURNAL)
    ledgers = {}
    for name, entries in told.evidence.items():
        ledgers[name] = Ledger(name)
        for key, evidence in entries.items():
            ledgers[name].enter(key, evidence)
    try:
        suite = msgspec.convert({**told.header["suite"], "in_flight": told.in_flight}, Suite)
        asked = msgspec.convert(told.header["asked"], Asked)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        message = f"{path / JOURNAL}: its header is of another version ({error}); start a new run"
        raise ReportError(message) from error
    return assemble(suite, asked, ledgers, told.findings, told.not_run)
