"""What tables, plans and arithmetic say: pure functions of facts and of rows with a source."""

from __future__ import annotations

from collections.abc import Mapping

from cift_probe.evidence import Evidence, Ledger, Reading, Scope
from cift_probe.expect import budget, compat, limits, machine, predicted
from cift_probe.plan import Plan


def produce(
    name: str, scope: Scope, facts: Ledger, plans: Mapping[str, Plan]
) -> Mapping[str, Evidence]:
    """Return what is expected under `name`, by stored key.

    A row of `data/thresholds.toml` holds for every scope; a rule of `expect.compat` is worked
    out from the facts of the scope asked about, a budget from the plan of the scope. What is
    predicted of a plan, or of the small plan of every session, holds for one device.
    """
    if name in compat.RULES:
        return {scope.key(name): compat.RULES[name](Reading(facts, scope))}
    if name.startswith(budget.PREFIX) and scope.plan in plans:
        return {Scope(plan=scope.plan).key(name): budget.expect_budget(name, plans[scope.plan])}
    device = Reading(facts, scope)
    if name.startswith(predicted.REFERENCE_PREFIX):
        field = name.removeprefix(predicted.REFERENCE_PREFIX)
        found = predicted.expect_reference(field, device)
        return {Scope(scope.device).key(name): found}
    if name.startswith(predicted.PREFIX) and scope.plan in plans:
        field = name.removeprefix(predicted.PREFIX)
        plan = plans[scope.plan]
        found = predicted.expect_predicted(field, plan, device)
        return {scope.key(name): found}
    if name == machine.HARDWARE:
        return {name: machine.expect_hardware_xids()}
    limit = limits.expect_limit(name)
    return {} if limit is None else {name: limit}


def check_tables() -> None:
    """Read every table that expectations rest on; raises DataError for a malformed row."""
    limits.read_limits()
    compat.read_drivers()
    machine.read_xids()
