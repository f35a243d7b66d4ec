"""From slices to full depth: every instant on its own line, the maximum last."""

from __future__ import annotations

import pytest

from cift_probe.stack.extrapolate import DepthError, at_depth, line, peak, verified

# DESIGN, measured on an H200 with TRL: a full fine-tuning of a 1B points to 9,267 MiB at 16
# layers when the maxima of 4 and 8 are extrapolated; the truth is 10,049. The instants below
# are constructed to have these sums: the loss leads at 4 and 8 layers, the optimizer at 16.
FULL_1B = {
    4: {"loss": 5_811.0, "optimizer": 5_131.0},
    8: {"loss": 6_963.0, "optimizer": 6_770.3},
    16: {"loss": 9_267.0, "optimizer": 10_048.9},
}
TRUTH_AT_16 = 10_049.0


@pytest.mark.parametrize(
    ("shallow", "per_layer", "depth", "truth"),
    [
        # (depth, MiB), MiB per layer, and what full depth took: DESIGN's four pairs. DESIGN
        # states the ends; the per-layer shares are chosen, since a line needs any two points
        ((2, 7_000.0), (13_053.2 - 7_000.0) / 30, 32, 13_053.1),  # QLoRA, raw loop
        ((2, 7_000.0), (22_961.1 - 7_000.0) / 30, 32, 22_961.6),  # LoRA, raw loop
        ((4, 3_000.0), (6_804.9 - 3_000.0) / 28, 32, 6_805.6),  # QLoRA, TRL
        ((4, 3_000.0), (18_233.8 - 3_000.0) / 28, 32, 18_233.7),  # LoRA, TRL
    ],
)
def test_a_line_through_two_slices_meets_the_full_depth_of_an_8b(
    shallow: tuple[int, float], per_layer: float, depth: int, truth: float
) -> None:
    layers, mib = shallow
    predicted = line({layers: mib, 2 * layers: mib + layers * per_layer}, depth)
    assert predicted == pytest.approx(truth, rel=1e-3)
    assert predicted == pytest.approx(mib + (depth - layers) * per_layer)


def test_a_line_goes_through_its_points_and_on_at_the_same_slope() -> None:
    points = {2: 10.0, 4: 16.0}
    assert [line(points, depth) for depth in (2, 3, 4, 32)] == [10.0, 13.0, 16.0, 100.0]


def test_a_line_uses_the_two_deepest_points_whatever_their_order() -> None:
    assert line({8: 30.0, 2: 999.0, 4: 10.0}, 16) == 70.0


def test_a_line_may_fall() -> None:
    assert line({4: 10.0, 8: 6.0}, 16) == -2.0


@pytest.mark.parametrize("points", [{}, {4: 1.0}])
def test_fewer_than_two_depths_give_no_line(points: dict[int, float]) -> None:
    with pytest.raises(DepthError, match="measure two depths"):
        line(points, 32)


def test_every_instant_is_extrapolated_on_its_own() -> None:
    slices = {2: {"a": 10.0, "b": 5.0}, 4: {"a": 12.0, "b": 5.0}}
    assert at_depth(slices, 10) == {"a": 18.0, "b": 5.0}


def test_the_maximum_is_taken_last_since_another_instant_overtakes() -> None:
    shallow = {depth: FULL_1B[depth] for depth in (4, 8)}
    maxima = {depth: peak(instants)[1] for depth, instants in shallow.items()}
    assert line(maxima, 16) == pytest.approx(9_267.0)
    assert line(maxima, 16) / TRUTH_AT_16 - 1 == pytest.approx(-0.078, abs=5e-4)
    name, predicted = peak(at_depth(shallow, 16))
    assert name == "optimizer"
    assert predicted == pytest.approx(TRUTH_AT_16, rel=1e-3)
    assert {peak(instants)[0] for instants in shallow.values()} == {"loss"}


def test_slices_with_different_instants_are_not_alike() -> None:
    with pytest.raises(DepthError, match="differ in their instants"):
        at_depth({2: {"a": 1.0}, 4: {"a": 1.0, "b": 2.0}}, 32)


def test_no_slices_are_no_slices_alike() -> None:
    with pytest.raises(DepthError):
        at_depth({}, 32)


def test_the_peak_is_the_largest_instant_and_its_name() -> None:
    assert peak({"loss": 3.0, "optimizer": 7.0, "embedding": 5.0}) == ("optimizer", 7.0)


def test_a_straight_line_is_verified_without_error() -> None:
    assert verified({2: {"a": 4.0}, 4: {"a": 6.0}, 8: {"a": 10.0}}) == 0.0


@pytest.mark.parametrize("measured", [12.5, 25.0 / 3])
def test_a_bent_line_is_verified_with_its_relative_error(measured: float) -> None:
    error = verified({2: {"a": 4.0}, 4: {"a": 6.0}, 8: {"a": measured}})
    assert error == pytest.approx(0.2)  # 10 predicted, too low and too high by a fifth


def test_an_overtaking_instant_is_no_bend() -> None:
    assert verified(FULL_1B) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("depths", [(4,), (4, 8)])
def test_fewer_than_three_depths_verify_nothing(depths: tuple[int, ...]) -> None:
    with pytest.raises(DepthError):
        verified({depth: FULL_1B[depth] for depth in depths})
