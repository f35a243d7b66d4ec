"""Sessions that end early: their journal, their partial report, and going on from there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
from suite_runner import PASSING, journal_lines, one_check, run_cift, run_pytest, write_suite

# the check dies in its first session and passes once the file is there
DEADLY = (
    'return equals(facts["host.os"], facts["host.os"]) if os.path.exists("survive") '
    "else os.kill(os.getpid(), signal.SIGKILL)"
)


def killed_session(folder: Path) -> Path:
    """Leave a run that was killed in its second check; return its folder."""
    write_suite(
        folder,
        one_check("HST101", PASSING),
        one_check("HST102", DEADLY, options=', after=("HST101",)'),
        one_check("HST103", PASSING, options=', after=("HST102",)'),
    )
    session = run_pytest(folder)
    assert session.code == -9
    [place] = session.folders
    return place


def test_a_killed_session_leaves_its_journal_and_no_report(tmp_path: Path) -> None:
    place = killed_session(tmp_path)
    assert [path.name for path in place.iterdir()] == ["journal.jsonl"]
    entries = [entry["entry"] for entry in journal_lines(place)]
    assert entries[0] == "header"
    assert entries[-1] == "started"
    assert "finding" in entries


def test_the_report_of_a_killed_session_names_the_check_in_flight(tmp_path: Path) -> None:
    place = killed_session(tmp_path)
    printed = run_cift(tmp_path, "report", str(place))
    assert printed.code == 0, printed.text
    assert "ended early. In flight: HST102" in printed.text


def test_the_next_session_writes_the_partial_report(tmp_path: Path) -> None:
    place = killed_session(tmp_path)
    session = run_pytest(tmp_path, "-k", "hst101")
    assert "a run ended early (HST102)" in session.text
    partial = json.loads((place / "report.json").read_text())
    assert partial["suite"]["complete"] is False
    assert partial["suite"]["exit_code"] is None
    assert [item["check"] for item in partial["findings"]] == ["HST101"]


def test_resume_goes_on_where_the_session_ended(tmp_path: Path) -> None:
    place = killed_session(tmp_path)
    (tmp_path / "survive").touch()
    session = run_pytest(tmp_path, "--resume")
    assert session.code == 0, session.text
    assert session.folders == [place]
    assert session.outcomes == {"HST101": "PASS", "HST102": "PASS", "HST103": "PASS"}
    executed = {item.check: item.executed.value for item in session.report.findings}
    assert executed == {"HST101": "resumed", "HST102": "selected", "HST103": "selected"}
    assert session.report.suite.num_resumed == 1
    assert session.report.suite.complete


def test_resume_by_folder_works_after_the_partial_report_was_written(tmp_path: Path) -> None:
    place = killed_session(tmp_path)
    run_pytest(tmp_path, "-k", "hst101")
    (tmp_path / "survive").touch()
    session = run_pytest(tmp_path, "--resume-from", str(place))
    assert session.code == 0, session.text
    report = json.loads((place / "report.json").read_text())
    assert report["suite"]["complete"] is True


def test_a_torn_last_line_is_no_obstacle(tmp_path: Path) -> None:
    place = killed_session(tmp_path)
    with (place / "journal.jsonl").open("a") as file:
        file.write('{"entry": "finding", "fin')
    (tmp_path / "survive").touch()
    assert run_pytest(tmp_path, "--resume").code == 0


def test_resume_without_a_run_that_ended_early_is_refused(tmp_path: Path) -> None:
    write_suite(tmp_path, one_check("HST101", PASSING))
    assert run_pytest(tmp_path).code == 0
    session = run_pytest(tmp_path, "--resume")
    assert session.code == 4
    assert "ended early; leave --resume out" in session.text


def test_resume_of_another_machine_s_run_is_refused(tmp_path: Path) -> None:
    place = killed_session(tmp_path)
    path = place / "journal.jsonl"
    header, *rest = path.read_text().splitlines()
    content = json.loads(header)
    content["content"]["machine"] = "another"
    path.write_text("\n".join([json.dumps(content), *rest]) + "\n")
    session = run_pytest(tmp_path, "--resume")
    assert session.code == 4
    assert "was begun on another machine" in session.text


def test_resume_with_another_cap_or_plan_is_refused(tmp_path: Path) -> None:
    killed_session(tmp_path)
    for arguments, word in ((("--vram-cap", "8GiB"), "cap"), (("--model", "qwen3-8b"), "plans")):
        session = run_pytest(tmp_path, "--resume", *arguments)
        assert session.code == 4, session.text
        assert f"{word} changed since it was begun" in session.text


def test_a_run_that_goes_on_is_not_resumed(tmp_path: Path) -> None:
    place = killed_session(tmp_path)
    path = place / "journal.jsonl"
    header, *rest = path.read_text().splitlines()
    content = json.loads(header)
    me = psutil.Process()
    content["content"] |= {"pid": me.pid, "pid_started": me.create_time()}
    path.write_text("\n".join([json.dumps(content), *rest]) + "\n")
    session = run_pytest(tmp_path, "--resume-from", str(place))
    assert session.code == 4
    assert "is still running" in session.text
    assert "no run in" in run_pytest(tmp_path, "--resume").text


def test_an_interrupt_leaves_a_report_that_says_so(tmp_path: Path) -> None:
    body = "raise KeyboardInterrupt"
    checks = (one_check("HST101", PASSING), one_check("HST102", body + "\n    return None"))
    write_suite(tmp_path, *checks)
    session = run_pytest(tmp_path)
    assert session.code == 2, session.text
    assert session.report.suite.complete is False
    assert session.report.suite.in_flight == "HST102"
    assert session.outcomes == {"HST101": "PASS"}


def test_a_terminated_session_leaves_a_report_that_says_so(tmp_path: Path) -> None:
    body = "os.kill(os.getpid(), signal.SIGTERM)\n    return None"
    write_suite(tmp_path, one_check("HST101", PASSING), one_check("HST102", body))
    session = run_pytest(tmp_path)
    assert session.code == 2, session.text
    assert session.report.suite.in_flight == "HST102"


def test_a_full_disk_ends_the_session_in_one_line(tmp_path: Path) -> None:
    # a limit on the size of files stands in for a disk: the same error from the same calls
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
    ignore = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    (tmp_path / "sitecustomize.py").write_text(limit + ignore)
    write_suite(tmp_path, one_check("HST101", PASSING))
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    environment = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    session = run_pytest(tmp_path, environment=environment)
    assert session.code == 3, session.text
    assert "free room or name another folder" in session.text
    assert "Traceback" not in session.text
    assert not list(tmp_path.glob("reports/*/report.json"))
