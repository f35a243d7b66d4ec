"""Rules and rows of what is expected."""

from __future__ import annotations

from datetime import date
from typing import Any, ClassVar

import pytest

from cift_probe import expect
from cift_probe.evidence import Evidence, Known, Ledger, Scope, Unknown, absent
from cift_probe.expect import memory, predicted
from cift_probe.expect.compat import RULES
from cift_probe.expect.limits import read_limits
from cift_probe.models import ModelShape
from cift_probe.plan import Budget, Plan


def rule(name: str, **facts: Evidence) -> Evidence:
    """Return what a rule expects on a machine with these facts (dots written as __)."""
    ledger = Ledger("facts")
    for key, evidence in facts.items():
        ledger.enter(key.replace("__", "."), evidence)
    [found] = expect.produce(name, Scope(), ledger, {}).values()
    return found


@pytest.mark.parametrize(
    ("capability", "accepted", "refused"),
    [
        ("6.1", {"sm_61", "sm_60", "compute_61", "compute_50"}, {"sm_62", "sm_70", "compute_70"}),
        ("9.0", {"sm_90", "sm_90a", "compute_80"}, {"sm_80", "sm_100"}),
        ("12.1", {"sm_121", "sm_120", "sm_120f", "compute_120"}, {"sm_120a", "sm_100"}),
        ("8.7", {"sm_87"}, {"sm_86", "sm_80", "compute_80"}),
        ("8.9", {"sm_89", "sm_86", "sm_80", "compute_75"}, {"sm_75", "sm_90"}),
    ],
)
def test_an_architecture_list_is_read_by_nvidia_s_rules(
    capability: str, accepted: set[str], refused: set[str]
) -> None:
    found = rule("torch.arch.accepted", device__capability=Known(capability, "capability"))
    assert isinstance(found, Known)
    assert accepted <= set(found.value)
    assert not refused & set(found.value)


@pytest.mark.parametrize(
    ("runtime", "driver"), [("11.8", "450.80.02"), ("12.9", "525"), ("13.1", "580")]
)
def test_the_major_release_decides_about_the_driver(runtime: str, driver: str) -> None:
    found = rule("driver.version.min", torch__cuda__version=Known(runtime, "version"))
    assert isinstance(found, Known)
    assert found.value == driver


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("missing", [Unknown("no NVML"), absent("no CUDA")])
def test_no_rule_makes_something_of_nothing(name: str, missing: Evidence) -> None:
    keys = (
        "torch__cuda__version",
        "torch__version",
        "device__capability",
        "device__memory__total",
        "device__memory__kind",
        "device__clock__sm__max",
        "device__count",
    )
    assert rule(name, **dict.fromkeys(keys, missing)) == missing


def test_unified_memory_is_not_held_against_host_memory() -> None:
    found = rule(
        "host.memory.total.min",
        device__memory__total=Known(128, "B"),
        device__memory__kind=Known("unified"),
    )
    assert isinstance(found, Known)
    assert found.absent


def test_a_budget_is_expected_of_its_plan_alone() -> None:
    plan = Plan(name="p", model="qwen3-8b", budget=Budget(peak_allocated=5))
    plans, ledger = {"p": plan}, Ledger("facts")
    name = "plan.budget.peak_allocated"
    found = expect.produce(name, Scope("gpu0", "p"), ledger, plans)
    assert found == {f"{name}[p]": Known(5, "B", "[budget] of the plan p")}
    host = Plan(name="h", model="qwen3-8b", budget=Budget(host_ram=7))
    [ram] = expect.produce("plan.budget.host_ram", Scope("gpu0", "h"), ledger, {"h": host}).values()
    assert ram == Known(7, "B", "[budget] of the plan h")
    none = expect.produce("plan.budget.step_s", Scope("gpu0", "p"), ledger, plans)
    assert [item.absent for item in none.values() if isinstance(item, Known)] != [""]
    assert expect.produce(name, Scope("gpu0", "other"), ledger, plans) == {}


GIB = 1 << 30
CAPABILITY = Known("9.0", "capability")
PREDICTED = ("peak", "required", "weights", "optimizer_state")


class Estimate:
    """What the formula answers, as far as it is read."""

    peak_allocated_bytes, band = 5 * GIB, 0.05
    required_bytes, required_band = 6 * GIB, 0.07
    components: ClassVar = {
        "weights": 4 * GIB,
        "quantisation constants": 7,
        "optimizer state": 100,
        "logits and loss": 9,
    }
    stack = "trl (1.16)"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, int]]]:
    """Let the formula answer at once, and note what it was asked."""
    questions: list[tuple[str, tuple[int, int]]] = []

    def predict(
        plan: Plan, shape: ModelShape, capability: tuple[int, int], _transformers: tuple[int, int]
    ) -> type[Estimate]:
        assert shape.num_hidden_layers > 0
        questions.append((plan.name, capability))
        return Estimate

    monkeypatch.setattr(memory, "predict", predict)
    return questions


def expected_of(field: str, *, plan: str = "", capability: Evidence = CAPABILITY) -> Evidence:
    """Return what is predicted of a plan "p", or of the reference plan, on gpu0."""
    ledger = Ledger("facts")
    ledger.enter("device.capability[gpu0]", capability)
    plans = {"p": Plan(name="p", model="qwen3-8b", sequence_length=1000, batch_size=3)}
    name = ("plan" if plan else "reference") + f".predicted.{field}"
    [(key, found)] = expect.produce(name, Scope("gpu0", plan), ledger, plans).items()
    assert key == f"{name}[gpu0,{plan}]" if plan else key == f"{name}[gpu0]"
    return found


def test_a_prediction_carries_the_band_that_it_vouches_for(
    asked: list[tuple[str, tuple[int, int]]],
) -> None:
    source = "formula for trl (1.16)"
    assert expected_of("peak", plan="p") == Known(5 * GIB, "B", source, 0.05)
    assert expected_of("required", plan="p") == Known(6 * GIB, "B", source, 0.07)
    assert expected_of("weights", plan="p") == Known(4 * GIB + 7, "B", source, 0.01)
    assert expected_of("optimizer_state", plan="p") == Known(100, "B", source, 0.02)
    assert asked == [("p", (9, 0))] * 4


@pytest.mark.usefixtures("asked")
def test_what_the_formula_does_not_tell_is_unknown() -> None:
    found = expected_of("colour", plan="p")
    assert isinstance(found, Unknown)
    assert "nothing of colour" in found.reason


def test_the_reference_plan_is_asked_about_without_a_plan(
    asked: list[tuple[str, tuple[int, int]]],
) -> None:
    assert isinstance(expected_of("peak", capability=Known("12.1", "capability")), Known)
    assert asked == [("smollm2-135m-qlora", (12, 1))]


@pytest.mark.parametrize("missing", [Unknown("no NVML"), absent("no CUDA")])
@pytest.mark.parametrize("field", PREDICTED)
@pytest.mark.usefixtures("asked")
def test_without_a_capability_nothing_is_predicted(field: str, missing: Evidence) -> None:
    assert expected_of(field, capability=missing) == missing


def test_a_formula_that_gives_no_number_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    none = Unknown("not checked for this architecture")
    monkeypatch.setattr(memory, "predict", lambda *_: none)
    assert expected_of("weights", plan="p") == Unknown("not checked for this architecture")


def test_logits_are_counted_as_computed_and_as_float32() -> None:
    found = expected_of("logits", plan="p")
    assert isinstance(found, Known)
    assert found.value == 3 * 1000 * (151_936 + 4096) * 6
    assert "batch 3 x sequence 1000" in found.source
    single = predicted.expect_logits(Plan(name="q", model="qwen3-8b", dtype="float32"))
    assert isinstance(single, Known)
    assert single.value == 2048 * (151_936 + 4096) * 8


def test_logits_of_a_model_that_cannot_be_read_are_unknown() -> None:
    found = predicted.expect_logits(Plan(name="q", model="no-such-model"))
    assert isinstance(found, Unknown)
    assert "no-such-model" in found.reason


def test_a_prediction_for_a_plan_that_was_not_asked_is_no_other_plans() -> None:
    ledger = Ledger("facts")
    assert expect.produce("plan.predicted.peak", Scope("gpu0", "other"), ledger, {}) == {}


def test_a_row_may_carry_a_band() -> None:
    found = expect.produce("paged.state", Scope("gpu0"), Ledger("facts"), {})["paged.state"]
    assert isinstance(found, Known)
    assert (found.value, found.band) == (2 * 4 * 2**25, 0.05)


def test_every_limit_says_where_it_comes_from() -> None:
    for name, row in read_limits().items():
        assert row.source, name
        assert row.why, name
        assert row.owner, name
        assert date.fromisoformat(row.date) >= date(2026, 1, 1), name


@pytest.mark.parametrize(
    ("installed", "asked_with"),
    [(Known("5.17.0", "version"), (5, 17)), (Known("5.24.0.dev0", "version"), (5, 24))],
)
def test_gemma_2_is_predicted_for_the_installed_transformers(
    monkeypatch: pytest.MonkeyPatch, installed: Evidence, asked_with: tuple[int, int]
) -> None:
    versions = []

    def predict(*given: Any) -> type[Estimate]:
        versions.append(given[-1])
        return Estimate

    monkeypatch.setattr(memory, "predict", predict)
    assert isinstance(predicted_of_gemma(installed), Known)
    assert versions == [asked_with]


def test_without_transformers_nothing_is_predicted_of_gemma_2() -> None:
    for missing in (Unknown("no metadata"), absent("not installed")):
        found = predicted_of_gemma(missing)
        assert isinstance(found, Unknown)
        assert "depends on transformers" in found.reason


def predicted_of_gemma(installed: Evidence) -> Evidence:
    ledger = Ledger("facts")
    ledger.enter("device.capability[gpu0]", CAPABILITY)
    ledger.enter("package.transformers", installed)
    plans = {"g": Plan(name="g", model="gemma-2-2b", sequence_length=512)}
    [found] = expect.produce("plan.predicted.peak", Scope("gpu0", "g"), ledger, plans).values()
    return found
