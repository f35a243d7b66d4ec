"""The scripts that contributors and `make` run."""

from __future__ import annotations

import sys
from pathlib import Path

import build_stack
import mutate_checks
import pytest
from control_runner import ControlError, read_control, run_control
from suite_runner import ROOT, run

from cift_probe.verdict.catalogue import load

CATALOGUE = load(ROOT / "suites")


@pytest.mark.parametrize("check_id", list(CATALOGUE))
def test_every_way_to_break_a_check_is_noticed_by_its_control(check_id: str) -> None:
    tried = list(mutate_checks.mutants(CATALOGUE, check_id))
    assert tried
    assert [name for name, source in tried if mutate_checks.survives(check_id, source)] == []


def test_the_mutation_script_reports_a_survivor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutate_checks, "survives", lambda _check, _source: True)
    assert mutate_checks.main(["GPU001"]) == 1
    assert "survived: GPU001: turned around" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("check_id", "fault"),
    [
        ("MEM009", "joined otherwise"),
        ("MEM016", "joined otherwise"),
        ("MEM006", "sides swapped"),
        ("MEM003", "opposite relation"),
    ],
)
def test_a_mutant_is_broken_in_what_it_compares_and_not_in_its_names(
    tmp_path: Path, check_id: str, fault: str
) -> None:
    tried = mutate_checks.mutants(CATALOGUE, check_id)
    source = next(source for description, source in tried if description.startswith(fault))
    path = tmp_path / "mutant" / "test_mutant.py"
    path.parent.mkdir()
    path.write_text(source)
    control = read_control(ROOT / "tests" / "controls" / f"{check_id}.toml")
    with pytest.raises(ControlError) as caught:
        run_control(load(tmp_path, complete=False), check_id, control)
    assert "NameError" not in str(caught.value)


@pytest.mark.parametrize(
    ("cuda", "devices", "index"),
    [
        (None, [], "cpu"),
        ((11, 8), [(8, 0)], "cpu"),
        ((12, 2), [(8, 9)], "cu126"),
        ((12, 8), [(12, 0)], "cu128"),
        ((12, 8), [(9, 0)], "cu126"),
        ((13, 0), [(9, 0)], "cu130"),
        ((13, 0), [(7, 0)], "cu126"),
        ((13, 0), [(7, 0), (12, 0)], "cpu"),
        ((13, 0), [], "cu130"),
    ],
)
def test_torch_is_chosen_for_the_driver(
    cuda: tuple[int, int] | None,
    devices: list[tuple[int, int]],
    index: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert build_stack.choose_index(cuda, devices) == index
    told = "update the driver" in capsys.readouterr().out
    assert told == (index == "cpu" and cuda is not None)


def test_an_old_python_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    monkeypatch.setattr(sys, "argv", ["build_stack.py", "--venv", str(tmp_path / "v")])
    assert build_stack.main() == 2
    assert "install 3.11 or later" in capsys.readouterr().out
    assert not (tmp_path / "v").exists()


def test_an_environment_that_is_up_to_date_is_left_alone(tmp_path: Path) -> None:
    stamp = tmp_path / "cift-stack.txt"
    stamp.write_text(build_stack.describe("cpu", "train"))
    before = stamp.stat().st_mtime_ns
    done = run(
        [sys.executable, str(ROOT / "scripts" / "build_stack.py"), "--cpu", "--venv", "."],
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["cift-stack.txt"]
    assert stamp.stat().st_mtime_ns == before
