"""The whole flow on one screen: gather what the witnesses say, conclude with answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from cift_probe import expect, facts
from cift_probe.evidence import Evidence, Ledger, Scope
from cift_probe.measure.bench import Bench, Listener
from cift_probe.plan import Plan
from cift_probe.report.assemble import Asked, assemble
from cift_probe.report.schema import Report, Suite
from cift_probe.verdict.catalogue import Catalogue, load
from cift_probe.verdict.court import Court

IDENTITY = ("host.os", "driver.version", "storage.work.free", "package.torch")


class Settings(msgspec.Struct, frozen=True):
    """What a session was asked: which checks, which plans, and within which memory."""

    suites: Path
    plans: dict[str, Plan]
    demanded: frozenset[str] = frozenset()
    vram_cap: int | None = None
    strict: bool = False


class Machine(NamedTuple):
    """One machine under test: its devices, its witnesses and its judge."""

    settings: Settings
    catalogue: Catalogue
    devices: list[str]
    witnesses: dict[str, Ledger]
    court: Court
    bench: Bench


def gather(
    settings: Settings, listener: Listener, hear: Callable[[str, str, Evidence], None]
) -> Machine:
    """Bring witnesses and judge together; evidence is produced when a check first asks for it.

    `listener` is told which instrument runs, `hear(witness, key, evidence)` every new entry.
    """
    catalogue, devices = load(settings.suites), facts.read_devices()
    plans = {name: msgspec.to_builtins(plan) for name, plan in settings.plans.items()}
    bench = Bench(facts.visible_uuid, plans, settings.vram_cap, listener)
    first = devices[0] if devices else "cpu"

    def read_facts(name: str, scope: Scope) -> Mapping[str, Evidence]:
        device = scope.device if scope.device in devices else first
        return facts.produce(name, scope, lambda *call: bench.call(device, *call))

    told = Ledger("facts", read_facts, hear)
    rules = Ledger("expected", lambda n, s: expect.produce(n, s, told, settings.plans), hear)
    tried = Ledger("measured", bench.produce, hear)
    witnesses = {"facts": told, "expected": rules, "measured": tried}
    return Machine(settings, catalogue, devices, witnesses, Court(catalogue, witnesses), bench)


def conclude(machine: Machine, suite: Suite, not_run: dict[str, str]) -> Report:
    """Return the report of a session: who was tested, evidence, findings and answers."""
    wanted = [(name, Scope()) for name in IDENTITY]
    for name, scope in [*wanted, *(("device.name", Scope(gpu)) for gpu in machine.devices)]:
        machine.witnesses["facts"].find(name, scope)
    found = list(machine.court.findings.values())
    return assemble(suite, asked(machine), machine.witnesses, found, not_run)


def asked(machine: Machine) -> Asked:
    """Return what the session was asked, as the journal and the report keep it."""
    asked_for = machine.settings
    plans, demanded = list(asked_for.plans.values()), sorted(asked_for.demanded)
    return Asked(plans, demanded, machine.devices, asked_for.strict)
