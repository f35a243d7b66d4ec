"""Stored evidence leads to the same verdicts, without the machine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cift_probe.evidence import Evidence, Known, Ledger, Scope, Unknown
from cift_probe.report.redact import Names, redact
from cift_probe.report.rejudge import rejudge
from cift_probe.report.schema import Report, Suite
from cift_probe.report.writer import ReportError, build_report, read_report, write_report
from cift_probe.verdict.catalogue import Catalogue, load
from cift_probe.verdict.court import Court
from cift_probe.verdict.finding import Executed, Finding, Outcome

SUITE_FILE = '''
from cift_probe.verdict import Finding, Reading, at_least, at_most, check, equals


@check("HST001")
def test_memory_is_there(facts: Reading, expected: Reading) -> Finding:
    """There is memory.

    Why: it is needed.

    Fix: add some.
    """
    return at_least(facts["host.memory"], expected["host.memory.min"])


@check("GPU001", after=("HST001",), device="gpu")
def test_names_agree(facts: Reading) -> Finding:
    """Both libraries mean one device.

    Why: an index proves nothing.

    Fix: set CUDA_DEVICE_ORDER.
    """
    return equals(facts["torch.device.uuid"], facts["device.uuid"])


@check("MEM001", after=("GPU001",), device="any", each="plan")
def test_step_fits(measured: Reading, expected: Reading) -> Finding:
    """A step fits.

    Why: else it does not run.

    Fix: shorten it.
    """
    return at_most(measured["step.peak"], expected["budget"])
'''
UUID = "4f1c9a02-77aa-4b1e-9a3c-0123456789ab"
OTHER = "5f1c9a02-77aa-4b1e-9a3c-0123456789ab"
GOOD: dict[str, Evidence] = {
    "facts:host.memory": Known(8, "B"),
    "expected:host.memory.min": Known(8, "B"),
    "facts:device.uuid[gpu0]": Known(f"GPU-{UUID}"),
    "facts:torch.device.uuid[gpu0]": Known(f"GPU-{UUID}"),
    "measured:step.peak[gpu0,p]": Known(9, "B", band=0.01),
    "measured:step.peak[cpu,p]": Known(12, "B"),
    "expected:budget[p]": Known(10, "B"),
}
MACHINES: dict[str, dict[str, Evidence]] = {
    "good": GOOD,
    "too little memory, all else blocked": {**GOOD, "facts:host.memory": Known(7, "B")},
    "memory not told": {**GOOD, "facts:host.memory": Unknown("no /proc", "procfs")},
    "another device": {**GOOD, "facts:torch.device.uuid[gpu0]": Known(f"GPU-{OTHER}")},
    "a band that reaches over the limit": {
        **GOOD,
        "measured:step.peak[gpu0,p]": Known(10, "B", band=0.01),
    },
    "a loss that is no number": {**GOOD, "measured:step.peak[gpu0,p]": Known(float("nan"), "B")},
}
SCOPES = (
    ("HST001", Scope()),
    ("GPU001", Scope("gpu0")),
    ("MEM001", Scope("cpu", "p")),
    ("MEM001", Scope("gpu0", "p")),
)


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    folder = tmp_path / "suite" / "memory"
    folder.mkdir(parents=True)
    (folder / "test_three.py").write_text(SUITE_FILE)
    return load(tmp_path / "suite")


def judged(catalogue: Catalogue, machine: dict[str, Evidence]) -> Report:
    ledgers = {name: Ledger(name) for name in ("facts", "expected", "measured")}
    for name, evidence in machine.items():
        witness, _, key = name.partition(":")
        ledgers[witness].enter(key, evidence)
    court = Court(catalogue, ledgers)
    return build_report(
        suite=Suite(name="x", version="1", run_id="r", started="now", complete=True),
        evidence={name: dict(ledger) for name, ledger in ledgers.items()},
        findings=[court.decide(catalogue[check_id], scope) for check_id, scope in SCOPES],
        answers=[],
        plans=[],
        not_run={},
    )


def told(findings: list[Finding]) -> list[tuple[str, Outcome, str, str]]:
    return [(item.label, item.outcome, item.reason, item.blocked_by) for item in findings]


@pytest.mark.parametrize("name", MACHINES)
def test_a_stored_report_is_judged_the_same(
    catalogue: Catalogue, tmp_path: Path, name: str
) -> None:
    write_report(tmp_path, judged(catalogue, MACHINES[name]))
    stored = read_report(tmp_path / "report.json")
    assert told(rejudge(stored, catalogue)) == told(stored.findings)


@pytest.mark.parametrize("name", MACHINES)
def test_a_redacted_report_comes_to_the_same_outcomes(catalogue: Catalogue, name: str) -> None:
    stored = judged(catalogue, MACHINES[name])
    again = rejudge(redact(stored, Names()), catalogue)
    assert [item.outcome for item in again] == [item.outcome for item in stored.findings]


def test_the_machines_of_this_test_differ_in_outcome(catalogue: Catalogue) -> None:
    outcomes = {
        tuple(item.outcome for item in judged(catalogue, machine).findings)
        for machine in MACHINES.values()
    }
    assert len(outcomes) >= 5
    assert {Outcome.PASS, Outcome.FAIL, Outcome.UNKNOWN} <= {
        item for row in outcomes for item in row
    }


def test_other_evidence_leads_to_another_verdict(catalogue: Catalogue) -> None:
    stored = judged(catalogue, GOOD)
    stored.evidence["expected"]["budget[p]"] = Known(8, "B")
    again = {item.label: item.outcome for item in rejudge(stored, catalogue)}
    assert again["MEM001[gpu0,p]"] is Outcome.FAIL
    assert again["HST001"] is Outcome.PASS


def test_what_broke_is_left_out(catalogue: Catalogue) -> None:
    stored = judged(catalogue, GOOD)
    stored.findings[1] = msgspec.structs.replace(stored.findings[1], outcome=Outcome.ERROR)
    labels = [item.label for item in rejudge(stored, catalogue)]
    assert labels == ["HST001", "MEM001[cpu,p]", "MEM001[gpu0,p]"]


def test_how_a_finding_came_to_be_is_kept(catalogue: Catalogue) -> None:
    stored = judged(catalogue, GOOD)
    first = msgspec.structs.replace(
        stored.findings[0], executed=Executed.PREREQUISITE, duration_s=7.5
    )
    stored.findings[0] = first
    assert rejudge(stored, catalogue)[0] == first


def test_a_check_that_the_suite_lacks_is_named(catalogue: Catalogue) -> None:
    stored = judged(catalogue, GOOD)
    stored.findings[0] = msgspec.structs.replace(stored.findings[0], check="OLD001")
    with pytest.raises(ReportError, match="OLD001 is no check of this suite"):
        rejudge(stored, catalogue)
