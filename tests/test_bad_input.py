"""Bad input: one line that names the thing to change, exit code 4, and nothing half-written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from suite_runner import (
    PASSING,
    ROOT,
    error_lines,
    one_check,
    run,
    run_cift,
    run_pytest,
    write_suite,
)

from cift_probe import data
from cift_probe.data import DataError
from cift_probe.expect.limits import read_limits


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    write_suite(tmp_path, one_check("HST101", PASSING))
    (tmp_path / "broken.toml").write_text("model = \n")
    (tmp_path / "stranger.toml").write_text('model = "llama-9-8b"\n')
    (tmp_path / "targets.toml").write_text('model = "llama-3.1-8b"\ntargets = ["bogus"]\n')
    budget = f"[budget]\nrequired = {10**200}\n"
    (tmp_path / "digits.toml").write_text('model = "llama-3.1-8b"\n' + budget)
    (tmp_path / "file").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "lama-3.1-8b"], "did you mean llama-3.1-8b"),
        (["--model", "~nobody-of-that-name/config.json"], "is no model"),
        (["--plan", "missing.toml"], "missing.toml"),
        (["--plan", "targets.toml"], "is named 'bogus'"),
        (["--plan", "digits.toml"], "has no unit"),
        (["--plan", "broken.toml"], "broken.toml: is no TOML"),
        (["--plan", "stranger.toml"], "'llama-9-8b' is no model"),
        (["--plan", "."], "name a readable TOML file"),
        (["--vram-cap", "24"], "write a number and a unit"),
        (["--report-dir", "file"], "is a file; name a folder"),
        (["--report-dir", "file/below"], "is a file; name a folder"),
        (["--report-dir", "/proc/reports"], "name another"),
        (["--resume-from", "nowhere"], "nowhere"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(
    suite: Path, arguments: list[str], words: str
) -> None:
    before = sorted(suite.rglob("*"))
    session = run_pytest(suite, *arguments)
    assert session.code == 4, session.text
    [line] = error_lines(session.text)
    assert words in line
    left = {path for path in suite.rglob("*") if "__pycache__" not in path.parts}
    assert left - set(before) <= {suite / "pytest.ini"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"value": 1}, "missing required field"),
        ({"value": {}, "unit": "B"}, "value"),
        ({"value": 1, "unit": 4}, "unit"),
    ],
)
def test_a_malformed_row_names_table_row_and_fault(
    monkeypatch: pytest.MonkeyPatch, row: dict[str, object], words: str
) -> None:
    whole = {"source": "s", "date": "d", "owner": "o", "why": "w", **row}
    monkeypatch.setattr(data, "load_toml", lambda _name: {"some.limit": whole})
    read_limits.cache_clear()
    with pytest.raises(DataError, match=r"data/thresholds.toml: row 'some.limit'") as caught:
        read_limits()
    read_limits.cache_clear()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"), [("[row\n", "line 1"), ("lonely = 1\n", "'lonely' is no row")]
)
def test_a_malformed_table_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "table.toml").write_text(text)
    monkeypatch.setattr(data, "_HERE", tmp_path)
    with pytest.raises(DataError, match=r"data/table\.toml") as caught:
        data.load_toml("table.toml")
    assert words in str(caught.value)


def test_a_malformed_table_ends_a_session_before_it_begins(suite: Path) -> None:
    (suite / "sitecustomize.py").write_text(
        "import cift_probe.data as d, pathlib\nd._HERE = pathlib.Path('tables')\n"
    )
    (suite / "tables").mkdir()
    (suite / "tables" / "thresholds.toml").write_text('["a"]\nvalue = 1\n')
    paths = os.pathsep.join([str(suite), str(Path(__file__).parent.parent)])
    session = run_pytest(suite, "--quick", environment={"PYTHONPATH": paths})
    assert session.code == 4, session.text
    assert "data/" in session.text
    assert session.folders == []


def test_a_report_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"schema_version": "9.0"}))
    session = run_cift(tmp_path, "report", str(path))
    assert session.code == 4
    [line] = error_lines(session.text)
    assert "upgrade cift-probe" in line


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"schema_version": 1}', "\x00"])
def test_what_is_no_report_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    session = run_cift(tmp_path, "report", str(path))
    assert session.code == 4
    [line] = error_lines(session.text)
    assert str(path) in line


@pytest.mark.parametrize("arguments", [["frobnicate"], ["report"], ["--no-such-option"]])
def test_a_wrong_command_is_refused_in_one_line(tmp_path: Path, arguments: list[str]) -> None:
    session = run_cift(tmp_path, *arguments)
    assert session.code == 4
    assert len(error_lines(session.text)) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * 100_000, "is no TOML"),
        ("x = " + "9" * 5_000, "is no TOML"),
        ('model = "qwen3-8b"\noptimizer = "nonsense"\n', "optimizer = 'nonsense'"),
        ('model = "qwen3-8b"\n[budget]\nstep_s = nan\n', "no number of seconds"),
        ('model = "qwen3-8b"\n[budget]\nstep_s = inf\n', "no number of seconds"),
        (f'model = "qwen3-8b"\n[budget]\nrequired = "{"9" * 400}GiB"\n', "size that memory can"),
        ('model = "qwen3-8b"\n"a\\nb" = 1\n', "a\\nb"),
    ],
)
def test_an_odd_plan_is_refused_in_one_line(suite: Path, content: str, words: str) -> None:
    (suite / "odd.toml").write_text(content)
    session = run_pytest(suite, "--plan", "odd.toml")
    assert session.code == 4, session.text
    [line] = error_lines(session.text)
    assert words in line


def test_special_files_are_neither_read_nor_waited_for(suite: Path) -> None:
    os.mkfifo(suite / "pipe")
    (suite / "reports" / "old").mkdir(parents=True)
    os.mkfifo(suite / "reports" / "old" / "journal.jsonl")
    for plan in ("./pipe", "/dev/zero", "x" * 5_000):
        session = run_pytest(suite, "--plan", plan)
        assert session.code == 4, session.text
        assert len(error_lines(session.text)) == 1
    for file in ("pipe", "/dev/zero", "x" * 5_000):
        assert run_cift(suite, "report", file).code == 4
    assert run_pytest(suite).code == 0


@pytest.mark.parametrize("pid", ['"abc"', "-1", "[]", "1e999"])
def test_an_odd_old_journal_does_not_stop_a_new_run(suite: Path, pid: str) -> None:
    old = suite / "reports" / "20250101T000000Z-1"
    old.mkdir(parents=True)
    header = f'{{"entry": "header", "content": {{"pid": {pid}, "pid_started": 1.0}}}}\n'
    (old / "journal.jsonl").write_text(header)
    session = run_pytest(suite)
    assert session.code == 0, session.text
    assert "cannot be read" in session.text
    assert run_pytest(suite, "--resume").code == 4
    assert run_cift(suite, "report", str(old)).code == 4


def test_a_link_that_leads_nowhere_is_no_report_folder(suite: Path) -> None:
    (suite / "link").symlink_to(suite / "nowhere")
    (suite / "loop").symlink_to(suite / "loop")
    for name in ("link", "loop", "n" * 300):
        session = run_pytest(suite, "--report-dir", name)
        assert session.code == 4, session.text
        assert len(error_lines(session.text)) == 1


@pytest.mark.parametrize("option", ["--setup-only", "--setup-plan"])
def test_a_run_that_judges_nothing_is_refused(suite: Path, option: str) -> None:
    assert run_pytest(suite, option).code == 4


def test_python_without_docstrings_is_told_apart_from_a_wrong_suite(suite: Path) -> None:
    session = run_pytest(suite, environment={"PYTHONOPTIMIZE": "2"})
    assert session.code == 4
    assert "unset PYTHONOPTIMIZE" in session.text


def test_a_run_without_xdist_or_with_warnings_as_errors_works(suite: Path) -> None:
    assert run_pytest(suite, "-p", "no:xdist").code == 0
    arguments = ("run", "-m", "cpu", "-k", "shared_memory", "-W", "error")
    assert run_cift(suite, *arguments).code == 0


def test_a_full_or_closed_output_ends_without_a_traceback(suite: Path) -> None:
    command = f"{sys.executable} -m cift_probe report missing.json"
    for redirected in (f"{command} >&-", f"{command} 2>&1 | head -0", f"{command} >/dev/full"):
        done = run(["sh", "-c", redirected], suite)
        assert "Traceback" not in done.stderr + done.stdout
    report = ROOT / "reports" / "examples"
    example = next(report.glob("*.json"))
    shell = f"{sys.executable} -m cift_probe report {example} >/dev/full"
    done = run(["sh", "-c", shell], suite)
    assert done.returncode == 3
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
