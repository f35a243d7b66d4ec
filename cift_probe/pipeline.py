"""The whole flow on one screen: gather what the witnesses say, answer plans, conclude."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cift_probe import expect, facts
from cift_probe.evidence import Evidence, Ledger, Scope, nothing
from cift_probe.measure.bench import Bench, Listener
from cift_probe.plan import Plan
from cift_probe.verdict.answer import Answer, answer_plan
from cift_probe.verdict.catalogue import Catalogue, load
from cift_probe.verdict.court import Court

Hear = Callable[[str, str, Evidence], None]


class Settings(msgspec.Struct, frozen=True):
    """What a session was asked: which checks, which plans, and within which memory."""

    suites: Path
    plans: dict[str, Plan]
    demanded: frozenset[str] = frozenset()
    vram_cap: int | None = None


class Machine(NamedTuple):
    """One machine under test: its devices, its witnesses and its judge."""

    settings: Settings
    catalogue: Catalogue
    devices: list[str]
    witnesses: dict[str, Ledger]
    court: Court
    bench: Bench


def gather(settings: Settings, listener: Listener, hear: Hear, *, live: bool = True) -> Machine:
    """Bring witnesses and judge together; evidence is produced when a check first asks for it.

    `hear(witness, key, evidence)` is told every new entry. With `live=False` nothing is
    produced: the ledgers hold only what is entered (a resumed, replayed or distributed session).
    """
    catalogue = load(settings.suites)
    devices = facts.read_devices()
    plans: dict[str, dict[str, Any]] = {
        k: msgspec.to_builtins(v) for k, v in settings.plans.items()
    }
    bench = Bench(facts.visible_uuid, plans, settings.vram_cap, listener)
    first = devices[0] if devices else "cpu"

    def read_facts(name: str, scope: Scope) -> Any:  # noqa: ANN401 - a mapping of evidence
        device = scope.device if scope.device in devices else first
        return facts.produce(name, scope, lambda *call: bench.call(device, *call))

    told = Ledger("facts", read_facts if live else nothing, hear)
    rules = Ledger(
        "expected", lambda n, s: expect.produce(n, s, told, settings.plans) if live else {}, hear
    )
    tried = Ledger("measured", bench.produce if live else nothing, hear)
    witnesses = {"facts": told, "expected": rules, "measured": tried}
    return Machine(settings, catalogue, devices, witnesses, Court(catalogue, witnesses), bench)


def answer(machine: Machine, plan: Plan) -> Answer:
    """Answer one plan on the first device, from what the session has measured."""
    device = machine.devices[0] if machine.devices else "gpu0"
    return answer_plan(
        plan.name,
        Scope(device, plan.name),
        machine.witnesses["measured"],
        demanded=plan.name in machine.settings.demanded,
        num_tokens=plan.sequence_length * plan.batch_size * plan.gradient_accumulation,
    )
