"""Relations: the one place where missing evidence becomes an outcome."""

from __future__ import annotations

import operator
from typing import Any

import pytest

from cift_probe.evidence import Known, Ledger, Reading, Scope, UnitMismatchError, Unknown, absent
from cift_probe.verdict import (
    Finding,
    Outcome,
    agrees,
    all_of,
    any_of,
    at_least,
    at_most,
    disjoint,
    equals,
    is_empty,
    is_false,
    is_in,
    is_present,
    is_true,
    overlaps,
    same_major,
    unless_absent,
)

ONE, TWO = Known(1, "1"), Known(2, "1")
MISSING, NONE = Unknown("no permission"), absent("not on this card")
TWO_SIDED = (agrees, at_most, at_least, disjoint, equals, is_in, overlaps, same_major)


@pytest.mark.parametrize("side", [ONE, MISSING])
def test_evidence_has_no_truth_value(side: Any) -> None:
    with pytest.raises(TypeError, match="no truth value"):
        operator.truth(side)


@pytest.mark.parametrize("relation", TWO_SIDED)
def test_missing_evidence_is_unknown_on_either_side(relation: Any) -> None:
    for finding in (relation(MISSING, ONE), relation(ONE, MISSING)):
        assert finding.outcome is Outcome.UNKNOWN
        assert finding.reason == "no permission"


@pytest.mark.parametrize("relation", TWO_SIDED)
def test_what_a_device_cannot_have_is_not_applicable(relation: Any) -> None:
    for finding in (relation(NONE, ONE), relation(ONE, NONE), relation(NONE, MISSING)):
        assert finding.outcome is Outcome.NOT_APPLICABLE
        assert finding.reason == "not on this card"


@pytest.mark.parametrize("relation", [is_true, is_false, is_empty])
def test_one_sided_relations_pass_on_nothing_missing(relation: Any) -> None:
    assert relation(MISSING).outcome is Outcome.UNKNOWN
    assert relation(NONE).outcome is Outcome.NOT_APPLICABLE


def test_absence_fails_presence_alone() -> None:
    assert is_present(NONE).outcome is Outcome.FAIL
    assert is_present(MISSING).outcome is Outcome.UNKNOWN
    assert is_present(ONE).outcome is Outcome.PASS


@pytest.mark.parametrize("relation", [agrees, at_most, at_least, equals])
def test_units_are_never_mixed(relation: Any) -> None:
    with pytest.raises(UnitMismatchError):
        relation(Known(1, "B"), Known(1, "s"))


@pytest.mark.parametrize("relation", [agrees, at_most, at_least])
@pytest.mark.parametrize("value", ["nan", float("nan")])
def test_not_a_number_holds_nothing(relation: Any, value: Any) -> None:
    assert relation(Known(value, "1"), ONE).outcome is Outcome.FAIL


def test_a_band_counts_at_its_worse_end() -> None:
    assert at_most(Known(100, "B", band=0.01), Known(100, "B")).outcome is Outcome.FAIL
    assert at_most(Known(99, "B", band=0.01), Known(100, "B")).outcome is Outcome.PASS
    assert at_least(Known(100, "B", band=0.01), Known(100, "B")).outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (Known(105, "B"), Outcome.PASS),
        (Known(95, "B"), Outcome.PASS),
        (Known(106, "B"), Outcome.FAIL),
        (Known(94, "B"), Outcome.FAIL),
        (Known(104, "B", band=0.01), Outcome.FAIL),
        (Known(96, "B", band=0.02), Outcome.FAIL),
        (Known(102, "B", band=0.02), Outcome.PASS),
        (Known("inf", "B"), Outcome.FAIL),
        (Known("-inf", "B"), Outcome.FAIL),
    ],
)
def test_what_agrees_is_within_the_band_of_the_prediction(found: Known, outcome: Outcome) -> None:
    assert agrees(found, Known(100, "B", band=0.05)).outcome is outcome


def test_a_prediction_without_a_band_is_met_exactly_or_not_at_all() -> None:
    assert agrees(Known(100, "B"), Known(100, "B")).outcome is Outcome.PASS
    assert agrees(Known(101, "B"), Known(100, "B")).outcome is Outcome.FAIL
    assert agrees(Known(0, "B"), Known(0, "B", band=0.1)).outcome is Outcome.PASS
    assert agrees(Known(1, "B"), Known(0, "B", band=0.1)).outcome is Outcome.FAIL


def test_a_prediction_that_is_not_a_number_is_met_by_nothing() -> None:
    assert agrees(Known(1, "B"), Known("nan", "B", band=0.1)).outcome is Outcome.FAIL
    assert agrees(Known("nan", "B"), Known("nan", "B", band=0.1)).outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("found", "words"),
    [(112 << 20, "12.00 MiB (12.00%) above it"), (99 << 20, "1.00 MiB (1.00%) below it")],
)
def test_how_far_a_value_is_from_its_prediction_is_told(found: int, words: str) -> None:
    finding = agrees(Known(found, "B"), Known(100 << 20, "B", band=0.02))
    assert finding.reason.endswith(words)
    assert "100.00 MiB ± 2.0%" in finding.reason


@pytest.mark.parametrize(
    ("found", "limit", "outcome"),
    [("535.54", "525", "PASS"), ("99.0", "525", "FAIL"), ("525.60.13", "525.60.13", "PASS")],
)
def test_versions_compare_as_versions(found: str, limit: str, outcome: str) -> None:
    finding = at_least(Known(found, "version"), Known(limit, "version"))
    assert finding.outcome == outcome


@pytest.mark.parametrize("wrong", [Known("abc", "version"), Known("", "version")])
def test_a_version_that_is_none_is_an_error_of_the_check(wrong: Known) -> None:
    with pytest.raises(ValueError, match="not a dotted number"):
        at_least(wrong, Known("1", "version"))


@pytest.mark.parametrize("value", [True, "seven", [1]])
def test_what_has_no_order_is_an_error_of_the_check(value: Any) -> None:
    with pytest.raises(TypeError):
        at_most(Known(value, "1"), ONE)


def test_the_worst_part_decides_and_all_parts_are_kept() -> None:
    good, bad = at_most(ONE, TWO), at_most(TWO, ONE)
    unknown, nothing = at_most(MISSING, ONE), at_most(NONE, ONE)
    assert all_of(good, nothing).outcome is Outcome.PASS
    assert all_of(good, unknown).outcome is Outcome.UNKNOWN
    assert all_of(unknown, bad, good).outcome is Outcome.FAIL
    assert all_of(nothing, nothing).outcome is Outcome.NOT_APPLICABLE
    assert all_of(good, bad).parts == (good, bad)
    with pytest.raises(ValueError, match="at least one"):
        all_of()


def test_one_part_is_enough_and_all_parts_are_kept() -> None:
    good, bad = at_most(ONE, TWO), at_most(TWO, ONE)
    unknown, nothing = at_most(MISSING, ONE), at_most(NONE, ONE)
    assert any_of(bad, good, unknown).outcome is Outcome.PASS
    assert any_of(bad, unknown).outcome is Outcome.UNKNOWN
    assert any_of(nothing, bad).outcome is Outcome.FAIL
    assert any_of(nothing, nothing).outcome is Outcome.NOT_APPLICABLE
    assert any_of(bad, good).parts == (bad, good)
    broken = Finding(Outcome.ERROR, reason="broke")
    assert any_of(good, broken).outcome is Outcome.ERROR
    with pytest.raises(ValueError, match="at least one"):
        any_of()


def test_only_what_is_present_is_judged() -> None:
    finding = unless_absent(NONE, Known("flash"), lambda: at_most(TWO, ONE))
    assert finding.outcome is Outcome.NOT_APPLICABLE
    assert "flash" in finding.reason
    assert unless_absent(MISSING, ONE, lambda: at_most(ONE, TWO)).outcome is Outcome.UNKNOWN
    assert unless_absent(ONE, ONE, lambda: at_most(TWO, ONE)).outcome is Outcome.FAIL


def test_the_producer_is_asked_once_and_an_unproduced_key_is_unknown() -> None:
    asked: list[str] = []

    def produce(name: str, scope: Scope) -> dict[str, Any]:
        asked.append(name)
        return {scope.key("device.name"): Known("H200")}

    reading = Reading(Ledger("facts", produce), Scope("gpu0"))
    assert reading["device.name"] == Known("H200")
    assert reading["device.name"] == Known("H200")
    assert isinstance(reading["device.rumour"], Unknown)
    assert asked == ["device.name", "device.rumour"]
    assert reading.keys[0] == "facts:device.name[gpu0]"


@pytest.mark.parametrize(
    ("found", "refused", "outcome"),
    [
        ([], [79], Outcome.PASS),
        ([13, 31], [79, 48], Outcome.PASS),
        ([13, 79, 48], [79, 48], Outcome.FAIL),
        ([79], [], Outcome.PASS),
    ],
)
def test_lists_that_share_nothing_are_disjoint(
    found: list[int], refused: list[int], outcome: Outcome
) -> None:
    finding = disjoint(Known(found), Known(refused))
    assert finding.outcome is outcome
    if outcome is Outcome.FAIL:
        assert finding.reason.endswith("among them 79, 48")
