"""Rules and rows of what is expected."""

from __future__ import annotations

from datetime import date

import pytest

from cift_probe import expect
from cift_probe.evidence import Evidence, Known, Ledger, Scope, Unknown, absent
from cift_probe.expect.compat import RULES
from cift_probe.expect.limits import read_limits
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
    none = expect.produce("plan.budget.step_s", Scope("gpu0", "p"), ledger, plans)
    assert [item.absent for item in none.values() if isinstance(item, Known)] != [""]
    assert expect.produce(name, Scope("gpu0", "other"), ledger, plans) == {}


def test_every_limit_says_where_it_comes_from() -> None:
    for name, row in read_limits().items():
        assert row.source, name
        assert row.why, name
        assert row.owner, name
        assert date.fromisoformat(row.date) >= date(2026, 1, 1), name
