"""Bad input: one line that names the thing to change, exit code 4, and nothing half-written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from suite_runner import PASSING, error_lines, one_check, run_cift, run_pytest, write_suite

from cift_probe import data
from cift_probe.data import DataError
from cift_probe.expect.limits import read_limits


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    write_suite(tmp_path, one_check("HST101", PASSING))
    (tmp_path / "broken.toml").write_text("model = \n")
    (tmp_path / "stranger.toml").write_text('model = "llama-9-8b"\n')
    (tmp_path / "file").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "lama-3.1-8b"], "did you mean llama-3.1-8b"),
        (["--plan", "missing.toml"], "missing.toml"),
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
    monkeypatch.setattr(data, "files", lambda _package: tmp_path)
    with pytest.raises(DataError, match=r"data/table\.toml") as caught:
        data.load_toml("table.toml")
    assert words in str(caught.value)


def test_a_malformed_table_ends_a_session_before_it_begins(suite: Path) -> None:
    (suite / "sitecustomize.py").write_text(
        "import cift_probe.data as d, pathlib\n"
        "real = d.files\n"
        "d.files = lambda p: pathlib.Path('tables') if p == 'cift_probe.data' else real(p)\n"
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
