"""The smallest room of the small plan, on a stand-in for a run under a cap."""

from __future__ import annotations

from typing import Any

import pytest

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.measure import full_depth, room
from cift_probe.measure.declare import Task
from cift_probe.measure.full_depth import smallest_cap
from cift_probe.measure.watch import Watch
from cift_probe.plan import Plan

MIB = 1 << 20
PEAK, RESERVED, TRUTH = 408 * MIB, 560 * MIB, 500 * MIB


class Card:
    """A card on which the small plan runs under any cap from TRUTH on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in for what the instrument would ask a GPU."""
        self.held, self.left = 0, 0
        self.caps: list[int] = []
        self.error: Exception | None = None
        monkeypatch.setattr(room, "hold", self.hold)
        monkeypatch.setattr(room, "measure_uncapped", self.uncapped)
        monkeypatch.setattr(room, "runs_capped", self.runs)
        monkeypatch.setattr(room, "allocated_after_cleaning", lambda: self.left)

    def hold(self, num_bytes: int) -> object:
        self.held = num_bytes
        return object()

    def uncapped(self, plan: Plan, depth: int) -> tuple[int, int]:
        assert (plan.name, depth) == ("smollm2-135m-qlora", 30)
        if self.error is not None:
            raise self.error
        return PEAK + self.held, RESERVED + self.held

    def runs(self, _plan: Plan, _depth: int, cap: int) -> bool:
        self.caps.append(cap)
        return cap >= TRUTH + self.held


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def measured(fault: str = "") -> dict[str, Evidence]:
    seen = room.measure_room(Task("gpu0", fault=fault))
    assert set(seen) == set(room.PRODUCES)
    return dict(seen)


def number(evidence: Evidence) -> int:
    assert isinstance(evidence, Known)
    assert evidence.unit == "B"
    return int(evidence.value)


def test_the_truth_lies_between_what_was_refused_and_what_ran(card: Card) -> None:
    seen = measured()
    refused, smallest = number(seen["room.refused"]), number(seen["room.smallest"])
    assert refused < TRUTH <= smallest
    assert smallest - refused <= 0.02 * PEAK
    assert number(seen["room.reserved"]) == RESERVED
    assert len(card.caps) <= 7  # each is a load and two steps


@pytest.mark.usefixtures("card")
def test_memory_that_somebody_holds_needs_more_room() -> None:
    sound = number(measured()["room.smallest"])
    more = number(measured("held_memory")["room.smallest"]) - sound
    assert abs(more - 128 * MIB) <= 0.05 * PEAK
    assert more > 0.07 * 1.07 * TRUTH  # the band that is asked for


def test_on_the_cpu_there_is_no_room() -> None:
    seen = room.measure_room(Task("cpu"))
    assert set(seen) == set(room.PRODUCES)
    assert all(isinstance(item, Known) and item.absent for item in seen.values())


def test_a_dirty_process_measures_nothing(card: Card) -> None:
    card.left = 4096
    for item in measured().values():
        assert isinstance(item, Unknown)
        assert "4096 bytes are still allocated" in item.reason


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("No module named 'trl'"), "trl"),
        (ValueError("does not run in the 5 bytes that it reserved"), "5 bytes"),
    ],
)
def test_what_keeps_it_from_running_makes_it_unknown(
    card: Card, error: Exception, words: str
) -> None:
    card.error = error
    for item in measured().values():
        assert isinstance(item, Unknown)
        assert words in item.reason


def test_a_card_that_is_too_small_has_no_small_plan(card: Card) -> None:
    card.error = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has\nmore")
    for item in measured().values():
        assert isinstance(item, Known)
        assert "Tried to allocate 2 GiB." in item.absent
    card.error = RuntimeError("CUDA error: misaligned address")
    with pytest.raises(RuntimeError, match="misaligned"):
        measured()


# ---- the bisection, and a run under a cap ----


@pytest.mark.parametrize("truth", [100, 137, 150, 100 + (64 << 20)])
def test_the_bisection_encloses_the_truth(truth: int) -> None:
    low, high = smallest_cap(lambda cap: cap >= truth, 100, 150, tolerance=0.01)
    assert low < truth <= high
    assert high - low <= 1


def test_a_step_that_needs_more_than_it_reserved_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not run in"):
        smallest_cap(lambda _cap: False, 100, 150)


class Cuda:
    """torch.cuda, as far as a cap goes."""

    def __init__(self) -> None:
        """Bound nothing."""
        self.fractions: list[float] = []

    def mem_get_info(self) -> tuple[int, int]:
        return 900, 1000

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.fractions.append(fraction)


@pytest.mark.parametrize(
    ("error", "runs"),
    [(None, True), (RuntimeError("CUDA out of memory."), False)],
)
def test_a_run_under_a_cap_takes_the_cap_away_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, *, runs: bool
) -> None:
    torch = pytest.importorskip("torch")
    cuda = Cuda()
    caps: list[int | None] = []

    def steps(*_: Any) -> None:
        if error is not None:
            raise error

    for name in ("mem_get_info", "set_per_process_memory_fraction"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(full_depth, "run_steps", steps)
    monkeypatch.setattr(full_depth, "cap_memory", caps.append)
    assert full_depth.runs_capped(Plan(name="p", model="qwen3-8b"), 2, 250) is runs
    assert cuda.fractions == [0.25]
    assert caps == [None]


def test_another_error_under_a_cap_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def steps(*_: Any) -> None:
        message = "CUDA error: misaligned address"
        raise RuntimeError(message)

    cuda = Cuda()
    for name in ("mem_get_info", "set_per_process_memory_fraction"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(full_depth, "run_steps", steps)
    monkeypatch.setattr(full_depth, "cap_memory", lambda _cap: None)
    with pytest.raises(RuntimeError, match="misaligned"):
        full_depth.runs_capped(Plan(name="p", model="qwen3-8b"), 2, 250)


def test_without_a_cap_peaks_are_read_from_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def steps(_plan: Plan, _depth: int, watch: Watch, num_steps: int) -> None:
        assert num_steps == 2
        watch.peaks.update({"loss": 7, "optimizer": 5})

    monkeypatch.setattr(room, "run_steps", steps)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 9)
    assert room.measure_uncapped(Plan(name="p", model="qwen3-8b"), 2) == (7, 9)
