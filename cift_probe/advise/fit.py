"""One plan on one card: an estimate held against what is usable."""

from __future__ import annotations

import sys
from functools import cache

import msgspec

from cift_probe.devices import Device
from cift_probe.evidence import Known, Unknown
from cift_probe.expect.estimate import Estimate
from cift_probe.expect.memory import EAGER_SINCE, READ, parse_version, predict
from cift_probe.models import load_model
from cift_probe.plan import Plan
from cift_probe.verdict.answer import Verdict, fit

TIGHT = 0.9  # of what is usable: above it a plan that fits is marked tight


class Fit(msgspec.Struct, frozen=True):
    """The answer for one plan on one card; `estimate` is None where no tier could say."""

    plan: Plan
    card: str
    usable: Known
    estimate: Estimate | None
    verdict: Verdict
    reason: str

    @property
    def share(self) -> float | None:
        """What is required over what is usable."""
        if self.estimate is None or not self.usable.value:
            return None
        return float(self.estimate.required_bytes / self.usable.value)

    @property
    def tight(self) -> bool:
        """Whether a plan that fits leaves less than a tenth of the usable memory."""
        return self.verdict is Verdict.FITS and self.share is not None and self.share > TIGHT


def answer(plan: Plan, card: str, device: Device, estimate: Estimate | Unknown) -> Fit:
    """Hold an estimate against a card; without one the answer is undecided, with the reason."""
    usable = device.usable()
    if isinstance(estimate, Unknown):
        return Fit(plan, card, usable, None, Verdict.UNDECIDED, estimate.reason)
    verdict, reason = fit(estimate.required, usable, estimate.peak)
    return Fit(plan, card, usable, estimate, verdict, reason)


def formula(plan: Plan, device: Device) -> Estimate | Unknown:
    """Return the estimate of tier `formula` for a plan on a card."""
    shape = load_model(plan.model)
    version = _installed_transformers() if shape.model_type in EAGER_SINCE else READ
    return predict(plan, shape, device.compute_capability, version)


@cache
def _installed_transformers() -> tuple[int, int]:
    """Return the version that a plan would run with here; without one that which was read."""
    from cift_probe.facts.packages import read_version  # few models need it

    found = read_version("transformers", sys.path)
    if isinstance(found, Unknown) or found.absent:
        return READ
    return parse_version(str(found.value))
