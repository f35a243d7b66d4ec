"""Every check is held against fabricated machines that make it pass, fail and stay undecided."""

from pathlib import Path

import pytest
from control_runner import Control, ControlError, read_control, run_control

from cift_probe.verdict.catalogue import Catalogue, load

ROOT = Path(__file__).parent.parent
CONTROLS = ROOT / "tests" / "controls"
CATALOGUE = load(ROOT / "suites")


@pytest.mark.parametrize("check_id", list(CATALOGUE))
def test_check_follows_its_control(check_id: str) -> None:
    run_control(CATALOGUE, check_id, read_control(CONTROLS / f"{check_id}.toml"))


def test_no_control_is_left_without_its_check() -> None:
    assert {path.stem for path in CONTROLS.glob("*.toml")} == set(CATALOGUE)


@pytest.mark.parametrize("check_id", list(CATALOGUE))
def test_an_empty_control_proves_nothing(check_id: str) -> None:
    machine = read_control(CONTROLS / f"{check_id}.toml").machine
    with pytest.raises(ControlError):
        run_control(CATALOGUE, check_id, Control(machine=machine, case=[]))
    with pytest.raises(ControlError):
        run_control(CATALOGUE, check_id, Control(machine={}, case=[]))


def test_the_catalogue_orders_prerequisites_first() -> None:
    order = {check_id: place for place, check_id in enumerate(CATALOGUE)}
    late = [
        (check.id, first)
        for check in CATALOGUE.values()
        for first in check.after
        if order[first] > order[check.id]
    ]
    assert isinstance(CATALOGUE, Catalogue)
    assert late == []
