"""The bench runs instruments in real children, and survives what they do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import psutil
import pytest

from cift_probe.evidence import Evidence, Known, Ledger, Scope, Unknown
from cift_probe.measure.bench import Bench
from cift_probe.measure.declare import FUNCTIONS, REGISTRY

CPU = Scope("cpu")
UUID = "GPU-00000000-1111-2222-3333-444444444444"
VISIBLE = {"cpu": "", "gpu0": UUID}
PLANS: dict[str, dict[str, Any]] = {"small": {"name": "small"}, "large": {"name": "large"}}


class Heard:
    """A listener that notes what it hears."""

    def __init__(self) -> None:  # noqa: D107 - a list
        self.told: list[tuple[str, str]] = []
        self.durations: list[float] = []

    def started(self, label: str, estimate_s: float) -> None:
        assert estimate_s > 0
        self.told.append(("started", label))

    def ended(self, label: str, duration_s: float) -> None:
        self.told.append(("ended", label))
        self.durations.append(duration_s)

    @property
    def runs(self) -> list[str]:
        return [label for what, label in self.told if what == "started"]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def bench(heard: Heard) -> Iterator[Bench]:
    """Return a bench that knows the planted instruments; no other test shall see them."""
    sys.modules.pop("planted_instruments", None)
    import_module("planted_instruments")
    made = Bench(VISIBLE.get, PLANS, 123, heard)
    yield made
    made.close()
    for name in [name for name in REGISTRY if name.startswith("planted.")]:
        del REGISTRY[name], FUNCTIONS[name]


def known(evidence: Evidence) -> Known:
    assert isinstance(evidence, Known), evidence
    return evidence


def pid(bench: Bench, name: str) -> int:
    return int(known(bench.produce(f"planted.{name}.pid", CPU)[f"planted.{name}.pid[cpu]"]).value)


def reasons(bench: Bench, name: str, scope: Scope = CPU) -> list[str]:
    """Return why the values of an instrument that produces `one` and `two` are unknown."""
    seen = bench.produce(f"planted.{name}.two", scope)
    assert set(seen) == {scope.key(f"planted.{name}.{key}") for key in ("one", "two")}
    found = []
    for item in seen.values():
        assert isinstance(item, Unknown)
        assert item.source == f"instrument planted.{name}/1"
        found.append(item.reason)
    return found


def test_all_that_an_instrument_produces_is_stored_for_its_device_with_its_source(
    bench: Bench,
) -> None:
    seen = bench.produce("planted.sound.pid", CPU)
    assert set(seen) == {"planted.sound.pid[cpu]", "planted.sound.visible[cpu]"}
    assert seen["planted.sound.pid[cpu]"].source == "instrument planted.sound/3"
    assert seen["planted.sound.visible[cpu]"].source == (
        "instrument planted.sound/3: the environment"
    )


def test_an_instrument_runs_in_another_process_that_serves_the_next_one_too(bench: Bench) -> None:
    first = pid(bench, "sound")
    assert first != os.getpid()
    assert pid(bench, "careless") == first


def test_a_name_that_no_instrument_produces_gives_nothing(bench: Bench, heard: Heard) -> None:
    assert bench.produce("planted.no.such.thing", CPU) == {}
    assert heard.told == []


def test_an_instrument_per_plan_gets_the_plan_and_the_cap(bench: Bench) -> None:
    for name in PLANS:
        seen = bench.produce("planted.plan.asked", Scope("cpu", name))
        assert known(seen[f"planted.plan.asked[cpu,{name}]"]).value == [{"name": name}, 123]


def test_an_instrument_that_is_not_per_plan_is_stored_for_the_device_alone(bench: Bench) -> None:
    seen = bench.produce("planted.careless.pid", Scope("cpu", "small"))
    assert set(seen) == {"planted.careless.pid[cpu]"}


def test_the_listener_hears_every_start_and_end(bench: Bench, heard: Heard) -> None:
    bench.produce("planted.plan.asked", Scope("cpu", "small"))
    reasons(bench, "raises")
    assert heard.told == [
        ("started", "planted.plan[cpu,small]"),
        ("ended", "planted.plan[cpu,small]"),
        ("started", "planted.raises[cpu]"),
        ("ended", "planted.raises[cpu]"),
    ]
    assert all(duration >= 0 for duration in heard.durations)


@pytest.mark.parametrize(
    ("name", "words", "survives"),
    [
        ("raises", "instrument planted.raises raised: ValueError: the planted error", True),
        ("hangs", "instrument planted.hangs gave no answer within 1 s", False),
        ("killed", "instrument planted.killed died of SIGKILL", False),
        ("misshapen", "", True),
    ],
)
def test_a_fault_makes_all_unknown_in_its_own_words_and_the_next_instrument_runs(
    bench: Bench, heard: Heard, name: str, words: str, *, survives: bool
) -> None:
    before = pid(bench, "sound")
    first, second = reasons(bench, name)
    assert first == second
    assert first.startswith(words)
    assert "inside:run" not in first
    assert (pid(bench, "careless") == before) is survives
    assert heard.told[-1] == ("ended", "planted.careless[cpu]")


def test_what_an_instrument_forgot_is_unknown_and_what_it_did_not_declare_is_dropped(
    bench: Bench,
) -> None:
    seen = bench.produce("planted.silent.told", CPU)
    assert set(seen) == {"planted.silent.told[cpu]", "planted.silent.forgotten[cpu]"}
    assert known(seen["planted.silent.told[cpu]"]).value == 1
    forgotten = seen["planted.silent.forgotten[cpu]"]
    assert isinstance(forgotten, Unknown)
    assert forgotten.reason == "the instrument said nothing about it"


def test_memory_is_measured_in_a_fresh_process_after_one_that_left_memory(bench: Bench) -> None:
    dirty = pid(bench, "leaves")
    assert pid(bench, "careless") == dirty  # only a clean instrument needs a fresh process
    fresh = pid(bench, "clean")
    assert fresh != dirty
    assert not psutil.pid_exists(dirty)
    assert pid(bench, "clean") == fresh  # which is clean still


def test_memory_is_measured_in_the_same_process_when_nothing_was_left(bench: Bench) -> None:
    assert pid(bench, "clean") == pid(bench, "sound")


@pytest.mark.parametrize("name", ["raises", "misshapen"])
def test_memory_is_measured_in_a_fresh_process_after_one_with_unknown_remains(
    bench: Bench, name: str
) -> None:
    before = pid(bench, "sound")
    reasons(bench, name)
    assert pid(bench, "clean") != before


def test_a_process_that_replaces_a_lost_one_is_clean(bench: Bench) -> None:
    pid(bench, "leaves")
    reasons(bench, "killed")
    replacement = pid(bench, "careless")
    assert pid(bench, "clean") == replacement


def test_a_device_that_does_not_exist_is_unknown_and_starts_nothing(
    bench: Bench, heard: Heard
) -> None:
    assert set(reasons(bench, "raises", Scope("gpu7"))) == {"this machine has no gpu7"}
    assert heard.told == []


def test_a_child_sees_its_own_device_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert bench.call("gpu0", "os:getenv", "CUDA_VISIBLE_DEVICES", 20.0) == UUID
    assert bench.call("cpu", "os:getenv", "CUDA_VISIBLE_DEVICES", 20.0) == ""
    seen = bench.produce("planted.sound.visible", CPU)
    assert known(seen["planted.sound.visible[cpu]"]).value == ""


def test_every_device_has_a_child_of_its_own_without_network(bench: Bench, heard: Heard) -> None:
    pids = {bench.call(device, "worker_faults:tell_pid", None, 20.0) for device in VISIBLE}
    assert len(pids) == 2
    for device in VISIBLE:
        assert bench.call(device, "os:getenv", "HF_HUB_OFFLINE", 20.0) == "1"
        assert bench.call(device, "os:getenv", "CUDA_DEVICE_ORDER", 20.0) == "PCI_BUS_ID"
    assert heard.runs[0] == "tell_pid[cpu]"


def test_a_scope_without_a_device_is_measured_on_the_cpu(bench: Bench) -> None:
    seen = bench.produce("planted.sound.visible", Scope())
    assert known(seen["planted.sound.visible"]).value == ""


def test_every_instrument_runs_once_per_device_and_plan(bench: Bench, heard: Heard) -> None:
    ledger = Ledger("measured", bench.produce)
    for _ in range(2):
        for plan in PLANS:
            for key in ("planted.sound.pid", "planted.sound.visible", "planted.plan.asked"):
                ledger.find(key, Scope("cpu", plan))
    assert heard.runs == [
        "planted.sound[cpu]",
        "planted.plan[cpu,small]",
        "planted.plan[cpu,large]",
    ]


@pytest.mark.parametrize("name", ["raises", "killed"])
def test_an_instrument_that_failed_is_not_tried_again(
    bench: Bench, heard: Heard, name: str
) -> None:
    ledger = Ledger("measured", bench.produce)
    for key in ("one", "two", "one"):
        found = ledger.find(f"planted.{name}.{key}", CPU)[1]
        assert isinstance(found, Unknown)
    assert heard.runs == [f"planted.{name}[cpu]"]


def test_a_closed_bench_leaves_no_child(bench: Bench) -> None:
    child = pid(bench, "sound")
    bench.close()
    assert not psutil.pid_exists(child)
