"""What the terminal shows: the machine first, at the end answers, failures, undecided."""

from __future__ import annotations

from itertools import groupby

import pytest

from cift_probe.evidence import Evidence, Known, Ledger, Scope
from cift_probe.pytest_plugin.run_folder import Run
from cift_probe.pytest_plugin.session import State
from cift_probe.verdict.answer import Answer
from cift_probe.verdict.display import bytes_text, evidence_text
from cift_probe.verdict.finding import Finding, Outcome, Severity


def header(state: State) -> list[str]:
    """Return the header lines: machine, GPU, driver, torch, plans, unfinished runs."""
    facts = state.machine.witnesses["facts"]
    machine = ", ".join(
        (
            _tell(facts, "host.cpu.model"),
            f"{_tell(facts, 'host.cpu.num_usable')} usable cores",
            f"{_tell(facts, 'host.memory.available')} of memory available",
            _tell(facts, "host.os"),
        )
    )
    lines = [f"machine: {machine}"]
    gpus = [_gpu(facts, device) for device in state.machine.devices]
    driver = _tell(facts, "driver.version")
    lines.append(f"gpu: {'; '.join(gpus) or 'none'}, driver {driver}")
    stack = ("torch", "transformers", "peft", "bitsandbytes", "trl")
    lines.append(", ".join(f"{name} {_tell(facts, f'package.{name}')}" for name in stack))
    lines.append(f"plans: {', '.join(state.machine.settings.plans)}")
    if state.run is not None:
        lines.extend(state.run.notices)
    return lines


def failure_text(finding: Finding) -> str:
    """Return what a failed check says: requirement, both sides, why it matters, the fix."""
    lines = [f"{finding.label} {finding.requirement}"]
    if finding.outcome is Outcome.ERROR:
        lines.append(f"  the check broke: {finding.reason}")
        return "\n".join(lines)
    lines.append(f"  found:  {_with_source(finding.found)}")
    if finding.limit is not None:
        lines.append(f"  limit:  {finding.relation} {_with_source(finding.limit)}")
    else:
        lines.append(f"  limit:  {finding.relation}")
    lines += [
        f"  reason: {finding.reason}",
        f"  where:  {finding.domain.value} ({finding.severity.value})",
        f"  why:    {finding.why}",
        f"  fix:    {finding.fix}",
    ]
    return "\n".join(lines)


def answer_text(answer: Answer) -> str:
    """Return the answer for one plan on one device, with what was measured."""
    numbers = ""
    if answer.required_bytes is not None:
        numbers = f" (tier {answer.tier})"
    if answer.peak_allocated_bytes is not None:
        numbers += f"; peak {bytes_text(answer.peak_allocated_bytes)} allocated"
    if answer.tokens_per_s is not None and answer.step_band is not None:
        numbers += f"; {answer.tokens_per_s:.0f} tokens/s ± {answer.step_band:.0%}"
    verdict = answer.verdict.value.replace("_", " ")
    return f"{answer.plan} on {answer.device}: {verdict}: {answer.reason}{numbers}"


def summary(reporter: pytest.TerminalReporter, run: Run) -> None:
    """Print what the report says, shortest path first."""
    report = run.report
    if report is None:
        return
    reporter.section("can I fine-tune?", bold=True)
    for answer in report.answers:
        reporter.write_line(answer_text(answer))
    reporter.write_line(report.summary.text)
    findings = report.findings
    advice = [
        item
        for item in findings
        if item.outcome is Outcome.FAIL and item.severity is not Severity.MUST
    ]
    if advice:
        reporter.section("advice", bold=False)
    for finding in advice:
        reporter.write_line(failure_text(finding))
    undecided = [item for item in findings if item.outcome is Outcome.UNKNOWN]
    if undecided:
        reporter.section("undecided", bold=False)
    for line in _grouped(undecided):
        reporter.write_line(line)
    reporter.write_line("")
    if run.unwritten:
        reporter.write_line(f"no report could be written: {run.unwritten}")
        return
    reporter.write_line(f"report: {run.folder}/report.md (and report.json)")


def _grouped(undecided: list[Finding]) -> list[str]:
    own = [item for item in undecided if not item.blocked_by]
    lines = [f"? {item.label} {item.requirement} ({item.reason})" for item in own]
    blocked = sorted((item for item in undecided if item.blocked_by), key=_blocker)
    for name, group in groupby(blocked, key=_blocker):
        labels = [item.label for item in group]
        lines.append(f"? blocked by {name}: {', '.join(labels)}")
    return lines


def _blocker(finding: Finding) -> str:
    return finding.blocked_by


def _with_source(evidence: Evidence | None) -> str:
    text = evidence_text(evidence)
    source = "" if evidence is None else evidence.source
    return f"{text}  [{source}]" if source else text


def _tell(facts: Ledger, name: str) -> str:
    return evidence_text(facts.find(name, Scope())[1])


def _gpu(facts: Ledger, device: str) -> str:
    scope = Scope(device)
    name = facts.find("device.name", scope)[1]
    memory = facts.find("device.memory.total", scope)[1]
    size = f" {bytes_text(memory.value)}" if isinstance(memory, Known) and memory.value else ""
    return f"{device} {evidence_text(name)}{size}"
