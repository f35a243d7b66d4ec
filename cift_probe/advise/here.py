"""The tiers that run the step on this machine's own GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from cift_probe import facts
from cift_probe.evidence import Evidence, Known, Scope, Unknown
from cift_probe.expect.estimate import Estimate
from cift_probe.expect.traced import trace
from cift_probe.measure.bench import Bench
from cift_probe.plan import Plan

_SLICED = ("step.peak", "step.peak.instant", "step.peak.instants", "step.required")
_MEASURED = (
    "step.measured.peak",
    "step.measured.instant",
    "step.measured.instants",
    "step.measured.room",
)
_ROOM_BAND = 0.03
_LARGEST_WORKSPACE = (9, 0)


class _Progress:
    """Says which instrument runs."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def started(self, label: str, estimate_s: float) -> None:
        self._say(f"{label}, about {estimate_s:.0f} s")

    def ended(self, label: str, duration_s: float) -> None:
        """Say nothing more."""


def measure_here(
    plan: Plan,
    tier: Literal["sliced", "measured"],
    *,
    on_progress: Callable[[str], None] = lambda _text: None,
) -> Estimate | Unknown:
    """Return what the plan's step takes on the first GPU of this machine, or why not."""
    devices = facts.read_devices()
    if not devices:
        return Unknown(f"tier {tier} runs the step, and this machine has no GPU")
    plain = {plan.name: msgspec.to_builtins(plan)}
    # the card asked about need not be this one, so that trying here would tell nothing of it
    bench = Bench(facts.visible_uuid, plain, None, _Progress(on_progress), trial=False)
    scope = Scope(devices[0], plan.name)
    keys = [scope.key(key) for key in (_SLICED if tier == "sliced" else _MEASURED)]
    found: dict[str, Evidence] = {}
    try:
        for key in keys:
            if key not in found:  # an instrument tells several
                found |= bench.produce(key.partition("[")[0], scope)
    finally:
        bench.close()
    known = []
    for item in map(found.__getitem__, keys):
        if isinstance(item, Unknown):
            return item
        if item.absent:
            return Unknown(item.absent, item.source)
        known.append(item)
    found_here = _estimate(tier, *known)
    if tier == "measured":
        return found_here
    on_progress("what the allocator needs beyond the tensors: tracing all layers")
    return with_room(found_here, trace(plan, capability=_capability(devices[0])), plan)


def _capability(device: str) -> tuple[int, int]:
    told = facts.produce("device.capability", Scope(device), _no_call)
    found = told.get(Scope(device).key("device.capability"))
    if isinstance(found, Known) and not found.absent:
        major, _, minor = str(found.value).partition(".")
        return int(major), int(minor)
    return _LARGEST_WORKSPACE


def _no_call(*_: object) -> object:
    message = "the capability is NVML's to tell"
    raise RuntimeError(message)


def with_room(sliced: Estimate, traced: Estimate | Unknown, plan: Plan) -> Estimate:
    """Return an estimate from slices with the allocator's share from a trace of all layers.

    Slices give the peak at full depth, but not how fragments grow with depth: bounds from slices
    under a cap were up to 4.7 % too high.  Without a trace the upper estimate stays.
    """
    if isinstance(traced, Unknown):
        return sliced
    beyond = traced.required_bytes - traced.peak_allocated_bytes
    return msgspec.structs.replace(
        sliced,
        required_bytes=sliced.peak_allocated_bytes + beyond,
        required_band=_ROOM_BAND + plan.outlier_band,
        components=traced.components,
        note="the allocator's share is from tier traced",
    )


def _estimate(tier: str, peak: Known, instant: Known, instants: Known, room: Known) -> Estimate:
    return Estimate(
        tier=tier,
        stack=peak.source,
        peak_allocated_bytes=int(peak.value),
        band=peak.band,
        required_bytes=int(room.value),
        required_band=room.band,
        instant=str(instant.value),
        instants=dict(instants.value),
        note=room.note,
    )
