"""What README.md tells people to type."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from suite_runner import ROOT, run_cift

from cift_probe.plan import parse_plan

README = (ROOT / "README.md").read_text()
COMMANDS = sorted(set(re.findall(r"^(cift [^#\n]*?)\s*(?:#.*)?$", README, re.MULTILINE)))
# what the commands stand for here: the real ones take minutes, and need a run
IN_A_HURRY = ("-k", "shared_memory")


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", [item for item in COMMANDS if item.startswith("cift run")])
def test_a_run_command_is_understood(tmp_path: Path, command: str) -> None:
    (tmp_path / "my-plan.toml").write_text(plan_of_the_readme())
    arguments = command.split()[1:]
    if "--resume" in arguments:
        session = run_cift(tmp_path, *arguments)
        assert "no run in" in session.text
        return
    session = run_cift(tmp_path, *arguments, *IN_A_HURRY)
    # a demanded plan stays undecided where its checks were left out
    assert session.code == (10 if "--plan" in arguments else 0), session.text
    assert session.report.suite.complete


def test_the_report_command_prints_the_run(tmp_path: Path) -> None:
    session = run_cift(tmp_path, "run", "-m", "cpu", *IN_A_HURRY)
    printed = run_cift(tmp_path, "report", str(session.folders[-1]))
    assert printed.text == (session.folders[-1] / "report.md").read_text()
    as_json = run_cift(tmp_path, "report", str(session.folders[-1]), "--format", "json")
    assert as_json.text == (session.folders[-1] / "report.json").read_text()


@pytest.mark.parametrize("command", [item for item in COMMANDS if item.startswith("cift est")])
def test_an_estimate_answers_as_printed(tmp_path: Path, command: str) -> None:
    session = run_cift(tmp_path, *command.split()[1:])
    assert session.code in {0, 1, 10}, session.text
    if command == "cift estimate llama-3.1-8b --gpu rtx-4090":
        assert session.text.splitlines()[0] in README


def test_a_log_is_diagnosed(tmp_path: Path) -> None:
    assert "cift diagnose train.log" in COMMANDS
    (tmp_path / "train.log").write_text("RuntimeError: CUDA error: invalid device ordinal\n")
    session = run_cift(tmp_path, "diagnose", "train.log")
    assert session.code == 0
    assert "device_index_mismatch" in session.text


def test_the_plan_is_a_plan() -> None:
    assert parse_plan(plan_of_the_readme(), "README.md", "my-plan").sequence_length == 4096


def test_every_file_that_is_named_exists() -> None:
    linked = re.findall(r"\]\(([^)#:]+)\)", README)
    assert linked
    assert [name for name in linked if not (ROOT / name).exists()] == []


def test_make_and_ci_are_the_same_door() -> None:
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()
    assert "make report" in README
    assert "make test" in README


def plan_of_the_readme() -> str:
    """Return the TOML block of README.md."""
    [block] = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    return str(block)
