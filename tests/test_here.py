"""The tiers that run the step on this machine's GPU, as `cift estimate` asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import pytest

from cift_probe import facts
from cift_probe.advise import here
from cift_probe.evidence import Evidence, Known, Scope, Unknown, absent
from cift_probe.expect.estimate import Estimate
from cift_probe.plan import Plan

GIB = 1 << 30
PLAN = Plan(name="p", model="llama-3.1-8b")
SLICED = {
    "step.peak": Known(6 * GIB, "B", "slices", 0.01),
    "step.peak.instant": Known("loss"),
    "step.peak.instants": Known({"loss": 6 * GIB}),
    "step.required": Known(7 * GIB, "B", "slices", 0.07),
}
MEASURED = {
    "step.measured.peak": Known(6 * GIB, "B", "all layers"),
    "step.measured.instant": Known("loss"),
    "step.measured.instants": Known({"loss": 6 * GIB}),
    "step.measured.room": Known(13 * GIB // 2, "B", "by bisection"),
}


class Bench:
    """Answers with what it was given, as instruments that tell several keys at once do."""

    evidence: Mapping[str, Evidence] = SLICED
    ran: list[str]
    closed = False

    def __init__(self, *_: Any, trial: bool) -> None:
        """Forget what ran before; the card asked about need not be this one."""
        assert not trial
        Bench.ran = []

    def produce(self, name: str, scope: Scope) -> dict[str, Evidence]:
        self.ran.append(name)
        room = name == "step.measured.room"
        told = {key: item for key, item in self.evidence.items() if key.endswith("room") == room}
        return {scope.key(key): item for key, item in told.items()}

    def close(self) -> None:
        Bench.closed = True


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "Bench", Bench)
    monkeypatch.setattr(Bench, "evidence", SLICED)
    monkeypatch.setattr(facts, "read_devices", lambda: ["gpu0"])
    monkeypatch.setattr(here, "trace", lambda *_, **__: Unknown("no stack"))


@pytest.mark.parametrize(
    ("tier", "evidence", "ran"),
    [
        ("sliced", SLICED, ["step.peak"]),
        ("measured", MEASURED, ["step.measured.peak", "step.measured.room"]),
    ],
)
def test_every_instrument_runs_once(
    monkeypatch: pytest.MonkeyPatch,
    tier: Literal["sliced", "measured"],
    evidence: Mapping[str, Evidence],
    ran: list[str],
) -> None:
    monkeypatch.setattr(Bench, "evidence", evidence)
    found = here.measure_here(PLAN, tier)
    assert isinstance(found, Estimate)
    assert Bench.ran == ran
    assert Bench.closed
    assert (found.tier, found.peak_allocated_bytes, found.instant) == (tier, 6 * GIB, "loss")


def test_the_allocators_share_of_slices_is_the_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Estimate(
        tier="traced",
        stack="trl",
        peak_allocated_bytes=5 * GIB,
        band=0.01,
        required_bytes=5 * GIB + 300,
        required_band=0.04,
        instant="loss",
        instants={"loss": 5 * GIB},
    )
    monkeypatch.setattr(here, "trace", lambda *_, **__: whole)
    found = here.measure_here(PLAN, "sliced")
    assert isinstance(found, Estimate)
    assert (found.required_bytes, found.required_band) == (6 * GIB + 300, 0.03)
    assert "tier traced" in found.note


def test_slices_of_8_bit_plans_are_as_unsure_as_their_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Estimate(
        tier="traced",
        stack="trl",
        peak_allocated_bytes=5 * GIB,
        band=0.06,
        required_bytes=5 * GIB + 300,
        required_band=0.09,
        instant="loss",
        instants={"loss": 5 * GIB},
    )
    monkeypatch.setattr(here, "trace", lambda *_, **__: whole)
    found = here.measure_here(msgspec.structs.replace(PLAN, quantisation="int8"), "sliced")
    assert isinstance(found, Estimate)
    assert found.required_band == pytest.approx(0.08)


@pytest.mark.parametrize("missing", [Unknown("the child died"), absent("on the CPU there is none")])
def test_without_a_measurement_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, missing: Evidence
) -> None:
    monkeypatch.setattr(Bench, "evidence", SLICED | {"step.required": missing})
    found = here.measure_here(PLAN, "sliced")
    assert isinstance(found, Unknown)
    assert found.reason in {"the child died", "on the CPU there is none"}


def test_without_a_gpu_there_is_no_such_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "read_devices", list)
    found = here.measure_here(PLAN, "measured")
    assert isinstance(found, Unknown)
    assert "has no GPU" in found.reason
