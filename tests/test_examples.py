"""The reports that we show are real, redacted, whole, and judged the same way today."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite_runner import ROOT

from cift_probe.report.markdown import render
from cift_probe.report.redact import redact
from cift_probe.report.rejudge import rejudge
from cift_probe.report.writer import read_report
from cift_probe.verdict.catalogue import load

EXAMPLES = sorted((ROOT / "reports" / "examples").glob("*.json"))
CATALOGUE = load(ROOT / "suites")


def test_there_is_a_report_of_a_gpu() -> None:
    assert any(read_report(path).suite.selection == "-m 'gpu'" for path in EXAMPLES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_whole_and_gives_the_same_outcomes_today(path: Path) -> None:
    report = read_report(path)
    assert report.suite.complete
    today = {finding.label: finding.outcome for finding in rejudge(report, CATALOGUE)}
    assert today == {finding.label: finding.outcome for finding in report.findings}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_hides_who_it_was(path: Path) -> None:
    report = read_report(path)
    assert redact(report) == report
    serials = [item for key, item in report.machine.items() if key.startswith("device.serial")]
    assert all("redacted" in str(item) for item in serials)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_page_beside_an_example_is_its_rendering(path: Path) -> None:
    assert path.with_suffix(".md").read_text() == render(read_report(path))
