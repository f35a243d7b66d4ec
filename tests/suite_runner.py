"""Runs the plugin on small suites written on the spot, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from cift_probe.report.schema import Report
from cift_probe.report.writer import read_report

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 120

HEAD = """
import os, signal
from cift_probe.verdict import *
from cift_probe.verdict import Finding, Outcome, check
"""


def one_check(
    check_id: str,
    body: str,
    *,
    options: str = "",
    witnesses: str = "facts",
    name: str = "",
    doc: str = "It holds.\n\nWhy: so.\n\nFix: this.",
) -> str:
    """Return the source of one check."""
    name = name or f"test_{check_id.lower()}_holds"
    inside = [*f'"""{doc}"""'.splitlines(), body]
    lines = [f'@check("{check_id}"{options})', f"def {name}({witnesses}) -> Finding:"]
    return "\n".join(["", "", *lines, *(f"    {line}" for line in inside), ""])


PASSING = 'return at_least(facts["host.cpu.num_logical"], facts["host.cpu.num_physical"])'
FAILING = 'return is_empty(facts["package.torch.no_such_list"])'
UNKNOWN = 'return is_true(facts["host.nothing_tells_this"])'
NOT_APPLICABLE = 'return is_true(facts["package.flash_attn"])'


class Session:
    """One finished run of the plugin: exit code, output, and its report if it wrote one."""

    def __init__(self, done: subprocess.CompletedProcess[str], reports: Path) -> None:
        """Read what a run left in `reports`."""
        self.code = done.returncode
        self.text = done.stdout + done.stderr
        self.folders = sorted(reports.glob("*/")) if reports.is_dir() else []

    @property
    def report(self) -> Report:
        """The report of the latest run."""
        return read_report(self.folders[-1] / "report.json")

    @property
    def outcomes(self) -> dict[str, str]:
        """Outcome by label of the latest report."""
        return {item.label: item.outcome.value for item in self.report.findings}


def run_pytest(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> Session:
    """Run the plugin on the suite in `folder`/suites, reports going to `folder`/reports."""
    suites, reports = folder / "suites", folder / "reports"
    command = [sys.executable, "-m", "pytest", "-p", "cift_probe.pytest_plugin"]
    command += ["-c", str(ini_file(folder)), "--rootdir", str(folder)]
    command += ["--report-dir", str(reports), *arguments, str(suites)]
    return Session(run(command, folder, environment), reports)


def run_cift(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> Session:
    """Run the command `cift` from `folder`."""
    command = [sys.executable, "-m", "cift_probe", *arguments]
    return Session(run(command, folder, environment), folder / "reports")


def run(
    command: list[str], folder: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with this checkout on the path and no GPU visible."""
    surroundings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        **(environment or {}),
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def ini_file(folder: Path) -> Path:
    """Write the configuration of a small suite."""
    path = folder / "pytest.ini"
    path.write_text(
        f"[pytest]\naddopts = --strict-markers --import-mode=importlib\n"
        f"cift_suites = {folder / 'suites'}\n"
    )
    return path


def write_suite(folder: Path, *checks: str, family: str = "host") -> None:
    """Write checks into a suite file of a family."""
    place = folder / "suites" / family
    place.mkdir(parents=True, exist_ok=True)
    (place / "test_written.py").write_text(HEAD + "".join(checks))


def journal_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a run's journal."""
    lines = (folder / "journal.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def error_lines(text: str) -> list[str]:
    """Return the lines of an output that a user is meant to read as the error."""
    return [line for line in text.splitlines() if re.match(r"ERROR: |cift", line)]


def plain(report: Report) -> dict[str, Any]:
    """Return a report as JSON values."""
    values: dict[str, Any] = msgspec.to_builtins(report)
    return values
