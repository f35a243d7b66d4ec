"""One plan on one card: an estimate held against what is usable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache

import msgspec

from cift_probe.devices import Device
from cift_probe.evidence import Known, Unknown
from cift_probe.expect.estimate import Estimate
from cift_probe.expect.memory import (
    EAGER_SINCE,
    READ,
    left_unquantised,
    parse_version,
    predict,
)
from cift_probe.models import load_model
from cift_probe.plan import Plan
from cift_probe.verdict.answer import Verdict, fit

_NATIVE_BF16 = (8, 0)  # CUDA C++ Programming Guide, "Arithmetic Instructions": bfloat16
TIGHT = 0.9  # of what is usable: above it a plan that fits is marked tight


class Fit(msgspec.Struct, frozen=True):
    """The answer for one plan on one card; `estimate` is None where no tier could say.

    `limited_by` says of the largest plan what keeps it from being larger; `remarks` are what
    somebody who reads the verdict alone would miss.
    """

    plan: Plan
    card: str
    usable: Known
    estimate: Estimate | None
    verdict: Verdict
    reason: str
    limited_by: str = ""
    remarks: tuple[str, ...] = ()

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
    remarks = tuple(_remarks(plan, device))
    if isinstance(estimate, Unknown):
        reason = estimate.reason
        return Fit(plan, card, usable, None, Verdict.UNDECIDED, reason, remarks=remarks)
    verdict, reason = fit(estimate.required, usable, estimate.peak)
    return Fit(plan, card, usable, estimate, verdict, reason, remarks=remarks)


def _remarks(plan: Plan, device: Device) -> Iterator[str]:
    share = left_unquantised(plan, load_model(plan.model))
    if share:
        what = "all" if share == 1 else f"{share:.0%}"
        yield (
            f"{what} of the layers' weights stay unquantised: transformers replaces nn.Linear "
            "alone, and neither its subclasses nor fused experts"
        )
    if plan.dtype == "bfloat16" and device.compute_capability < _NATIVE_BF16:
        yield (
            f"bfloat16 is emulated on compute capability {device.capability}, and slow; "
            "--dtype float16 is native"
        )


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
