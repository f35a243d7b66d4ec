"""Outcomes, exit codes, order, and what a wrong suite is told."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from suite_runner import (
    NOT_APPLICABLE,
    PASSING,
    ROOT,
    UNKNOWN,
    error_lines,
    one_check,
    run,
    run_pytest,
    write_suite,
)

FAILING = 'return is_true(facts["host.wsl"])'  # tests of ours do not run under WSL
SHOULD = ', severity="should"'


@pytest.mark.parametrize(
    ("body", "options", "code", "outcome"),
    [
        (PASSING, "", 0, "PASS"),
        (FAILING, "", 1, "FAIL"),
        (UNKNOWN, "", 10, "UNKNOWN"),
        (NOT_APPLICABLE, "", 0, "NOT_APPLICABLE"),
        ("return 1 / 0 and None", "", 1, "ERROR"),
        ("return True", "", 1, "ERROR"),
        (FAILING, SHOULD, 0, "FAIL"),
        (UNKNOWN, SHOULD, 0, "UNKNOWN"),
    ],
)
def test_outcome_and_severity_decide_the_exit_code(
    tmp_path: Path, body: str, options: str, code: int, outcome: str
) -> None:
    write_suite(tmp_path, one_check("HST101", body, options=options))
    session = run_pytest(tmp_path)
    assert session.code == code, session.text
    assert session.outcomes == {"HST101": outcome}
    assert session.report.suite.exit_code == code


@pytest.mark.parametrize(("body", "code"), [(FAILING, 1), (UNKNOWN, 10)])
def test_strict_severity_makes_advice_count(tmp_path: Path, body: str, code: int) -> None:
    write_suite(tmp_path, one_check("HST101", body, options=SHOULD))
    assert run_pytest(tmp_path, "--strict-severity").code == code


def test_a_failure_outranks_what_is_undecided(tmp_path: Path) -> None:
    write_suite(tmp_path, one_check("HST101", FAILING), one_check("HST102", UNKNOWN))
    assert run_pytest(tmp_path).code == 1


def test_nothing_undecided_is_shown_as_passed_or_skipped(tmp_path: Path) -> None:
    write_suite(tmp_path, one_check("HST101", UNKNOWN))
    text = run_pytest(tmp_path, "-v").text
    assert "UNDECIDED" in text
    assert "1 undecided" in text
    assert "passed" not in text.rpartition("= 1 undecided")[0].splitlines()[-1]


def test_a_failure_says_what_was_found_and_what_to_do(tmp_path: Path) -> None:
    write_suite(tmp_path, one_check("HST101", FAILING))
    text = run_pytest(tmp_path).text
    for word in (
        "found:  no",
        "reason:",
        "where:  environment (must)",
        "why:    so.",
        "fix:    this.",
    ):
        assert word in text


def test_a_failed_prerequisite_blocks_and_is_named(tmp_path: Path) -> None:
    write_suite(
        tmp_path,
        one_check("HST103", PASSING, options=', after=("HST102",)'),
        one_check("HST102", PASSING, options=', after=("HST101",)'),
        one_check("HST101", FAILING),
    )
    session = run_pytest(tmp_path)
    assert session.outcomes == {"HST101": "FAIL", "HST102": "UNKNOWN", "HST103": "UNKNOWN"}
    assert {item.blocked_by for item in session.report.findings} == {"", "HST101"}
    assert "blocked by HST101: HST102, HST103" in session.text


def test_a_deselected_prerequisite_is_decided_and_reported_as_such(tmp_path: Path) -> None:
    write_suite(
        tmp_path,
        one_check("HST101", FAILING),
        one_check("HST102", PASSING, options=', after=("HST101",)'),
    )
    session = run_pytest(tmp_path, "-k", "hst102")
    executed = {item.check: item.executed.value for item in session.report.findings}
    assert executed == {"HST101": "prerequisite", "HST102": "selected"}
    assert "HST101" in session.report.summary.not_run


def test_a_check_is_chosen_by_its_id(tmp_path: Path) -> None:
    write_suite(
        tmp_path,
        one_check("HST101", PASSING, name="test_one_thing"),
        one_check("HST102", PASSING, name="test_another"),
    )
    session = run_pytest(tmp_path, "-k", "HST102")
    assert [item.check for item in session.report.findings] == ["HST102"]


GOOD = one_check("HST101", PASSING)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (GOOD + one_check("HST101", PASSING, name="test_again"), "choose a free number"),
        (one_check("HST1", PASSING), "three capitals and three digits"),
        (one_check("HST101", "pass"), "return a comparison"),
        (one_check("HST101", PASSING, options=', after=("HST999",)'), "correct the id"),
        (one_check("HST101", PASSING, doc="Only a title."), "lacks its Why section"),
        (one_check("HST101", PASSING, doc="It holds.\n\nWhy: so."), "lacks its Fix"),
        (one_check("HST101", PASSING, witnesses="rumour"), "takes one or more of facts"),
        (one_check("HST101", "return all_of()", witnesses=""), "takes one or more of facts"),
        (one_check("HST101", PASSING, options=', severity="maybe"'), "use must, should, info"),
        (one_check("HST101", PASSING, name="holds"), "must begin with test_"),
        (
            one_check("HST101", PASSING, options=', after=("HST102",)')
            + one_check("HST102", PASSING, options=', after=("HST101",)'),
            "wait for one another",
        ),
        ("\n\ndef test_plain() -> None:\n    pass\n", "declare it with @check"),
        ("\n\ndef broken(:\n", "cannot be read as Python"),
        (one_check("HST101", PASSING, options=", aftr=()"), "aftr"),
    ],
)
def test_a_wrong_declaration_stops_with_a_sentence(tmp_path: Path, source: str, words: str) -> None:
    write_suite(tmp_path, source)
    session = run_pytest(tmp_path)
    assert session.code == 4, session.text
    assert any(words in line for line in error_lines(session.text)), session.text
    assert session.folders == []


def test_a_suite_file_without_the_plugin_ends_in_an_error(tmp_path: Path) -> None:
    suite = ROOT / "suites" / "host" / "test_memory.py"
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = run(
        [sys.executable, "-m", "pytest", "--noconftest", "-c", "pytest.ini", str(suite)], tmp_path
    )
    assert done.returncode == 1
    assert "fixture 'facts' not found" in done.stdout
    assert "passed" not in done.stdout


def test_a_session_that_stops_early_is_not_complete_and_not_green(tmp_path: Path) -> None:
    checks = (one_check("HST101", FAILING, options=SHOULD), one_check("HST102", PASSING))
    write_suite(tmp_path, *checks)
    session = run_pytest(tmp_path, "-x")
    assert session.code == 1
    assert not session.report.suite.complete
    reason = "the session ended before it was decided"
    assert session.report.summary.not_run == {"HST102": reason}


def test_a_check_that_kills_its_xdist_worker_is_no_pass(tmp_path: Path) -> None:
    deadly = "os.kill(os.getpid(), signal.SIGKILL)\n    return None"
    write_suite(tmp_path, one_check("HST101", PASSING), one_check("HST102", deadly))
    session = run_pytest(tmp_path, "-n", "1")
    assert session.code != 0, session.text
    assert not session.report.suite.complete
    assert "HST102" in session.report.summary.not_run


def test_auto_starts_one_worker_per_gpu(tmp_path: Path) -> None:
    write_suite(tmp_path, one_check("HST101", PASSING))
    session = run_pytest(tmp_path, "-n", "auto")
    assert session.code == 0, session.text
    assert "1 worker [1 item]" in session.text


def test_suites_import_the_judge_and_nothing_else() -> None:
    imported = {
        node.module
        for path in (ROOT / "suites").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    assert imported == {"cift_probe.verdict"}
    assert not [
        path
        for path in (ROOT / "suites").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import)
    ]


def test_quick_leaves_out_what_is_slow_and_says_so(tmp_path: Path) -> None:
    write_suite(tmp_path, GOOD, one_check("HST102", PASSING, options=", quick=False"))
    session = run_pytest(tmp_path, "--quick")
    assert session.outcomes == {"HST101": "PASS"}
    assert session.report.summary.not_run == {"HST102": "left out by --quick"}


def test_soak_checks_run_only_on_request(tmp_path: Path) -> None:
    write_suite(tmp_path, GOOD, one_check("HST102", PASSING, options=", soak=True"))
    assert run_pytest(tmp_path).outcomes == {"HST101": "PASS"}
    assert run_pytest(tmp_path, "-m", "soak").outcomes == {"HST102": "PASS"}


def test_without_a_gpu_the_acceptance_run_fails_at_once_and_says_why(tmp_path: Path) -> None:
    from suite_runner import run_cift

    session = run_cift(tmp_path, "run", "-m", "gpu", "--quick")
    assert session.code == 1, session.text
    outcomes = session.outcomes
    assert outcomes.pop("GPU001[gpu0]") == "FAIL"
    dependents = [item for item in session.report.findings if item.blocked_by]
    assert {item.blocked_by for item in dependents} == {"GPU001[gpu0]"}
    assert len(dependents) > 15
    assert all(item.outcome == "UNKNOWN" for item in dependents)
    assert "PASS" not in {outcomes[item.label] for item in dependents}
    answers = {answer.plan: answer for answer in session.report.answers}
    assert set(answers) == {"llama-3.1-8b-qlora", "llama-3.2-1b-full", "smollm2-135m-qlora"}
    for answer in answers.values():
        assert answer.verdict == "undecided"
        assert "GPU001[gpu0]" in answer.reason
    assert "GPU001[gpu0]" in (session.folders[-1] / "report.md").read_text()


def test_two_workers_give_the_same_ids_and_outcomes_as_one(tmp_path: Path) -> None:
    write_suite(
        tmp_path,
        one_check("HST101", PASSING),
        one_check("HST102", FAILING, options=', after=("HST101",)'),
        one_check("HST103", UNKNOWN, options=SHOULD),
        one_check("HST104", PASSING, options=', after=("HST102",)'),
        one_check("HST105", "return 1 / 0 and None"),
    )
    alone = run_pytest(tmp_path / ".", "-k", "not hst103")
    both = run_pytest(tmp_path / ".", "-k", "not hst103", "-n", "2")
    assert alone.code == both.code == 1
    assert alone.outcomes == both.outcomes
    assert len(both.outcomes) == 4
    assert both.report.summary.not_run == alone.report.summary.not_run
    assert {"HST103"} == set(both.report.summary.not_run)
    assert both.report.evidence["facts"].keys() >= alone.report.evidence["facts"].keys()
