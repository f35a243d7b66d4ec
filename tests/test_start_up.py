"""What a start loads, and the options that users rely on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from suite_runner import PASSING, one_check, run, run_cift, run_pytest, write_suite

HEAVY = ("torch", "transformers", "rich", "pytest", "numpy", "pynvml")
CODE = "import json, sys; {action}; print(json.dumps(sorted(sys.modules)), file=sys.stderr)"


@pytest.mark.parametrize(
    "action",
    [
        "import cift_probe",
        "from cift_probe.cli import run_command; run_command(['report', 'nowhere'])",
        "from cift_probe.cli import run_command; run_command([])",
    ],
)
def test_a_start_loads_nothing_heavy(tmp_path: Path, action: str) -> None:
    done = run([sys.executable, "-c", CODE.format(action=action)], tmp_path)
    loaded = json.loads(done.stderr.strip().splitlines()[-1])
    assert [name for name in HEAVY if name in loaded] == []


def test_the_options_of_the_suite_are_these(tmp_path: Path) -> None:
    write_suite(tmp_path, one_check("HST101", PASSING))
    text = run_pytest(tmp_path, "--help").text
    section = text.partition("can-i-fine-tune:")[2].partition("\n\n")[0]
    options = {word for word in section.replace("=", " ").split() if word.startswith("--")}
    assert options == {
        "--model",
        "--plan",
        "--quick",
        "--report-dir",
        "--resume",
        "--resume-from",
        "--strict-severity",
        "--vram-cap",
    }


def test_the_commands_are_these(tmp_path: Path) -> None:
    text = run_cift(tmp_path, "--help").text
    commands = text.partition("COMMAND\n")[2].split("\n")
    named = {line.split()[0] for line in commands if line.startswith("    ") and line[4] != " "}
    assert named == {"compat", "diagnose", "estimate", "facts", "report", "run"}


def test_a_run_does_not_leave_anything_but_its_reports(tmp_path: Path) -> None:
    session = run_cift(tmp_path, "run", "-m", "cpu", "--quick", "-k", "shared_memory")
    assert session.code == 0, session.text
    assert [path.name for path in tmp_path.iterdir()] == ["reports"]
    names = sorted(path.name for path in session.folders[-1].iterdir())
    assert names == ["journal.jsonl", "report.json", "report.md"]


def test_a_pytest_ini_in_the_folder_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError\n")
    environment = {"PYTEST_ADDOPTS": "--no-such-option"}
    arguments = ("run", "-m", "cpu", "--quick", "-k", "shared_memory")
    session = run_cift(tmp_path, *arguments, environment=environment)
    assert session.code == 0, session.text
