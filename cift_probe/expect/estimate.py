"""An estimate of the device memory of one training step, whatever tier it comes from."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from cift_probe.evidence import Known
from cift_probe.plan import Plan

# source of an Unknown: the stack cannot build the model, so that no other tier may answer for it
STACK_REFUSES = "the installed stack refuses the model"


class Holding(NamedTuple):
    """Something that is allocated at the peak: who made it, its shape, dtype and bytes."""

    operation: str
    shape: tuple[int, ...]
    dtype: str
    module: str
    num_bytes: int


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one step of a plan, and how sure they are.

    `peak_allocated_bytes` is the largest instant of `instants`, whose name is `instant`;
    `components` sum to it. `required_bytes` is the smallest room in which the allocator can run
    the step, loading included; `expandable_bytes` the same with expandable segments;
    `reserved_bytes` what it takes of a card where nothing bounds it. The bands
    are relative errors. `stack` names the code that the numbers are about, with versions. `holds`
    are the largest tensors at the peak, where the tier knows them.
    """

    tier: str
    stack: str
    peak_allocated_bytes: int
    band: float
    required_bytes: int
    required_band: float
    instant: str
    instants: dict[str, int]
    components: dict[str, int] = {}
    expandable_bytes: int | None = None
    reserved_bytes: int | None = None
    holds: tuple[Holding, ...] = ()
    note: str = ""

    @property
    def required(self) -> Known:
        """The smallest room as evidence."""
        return Known(self.required_bytes, "B", self.source, self.required_band, self.note)

    @property
    def peak(self) -> Known:
        """The peak of allocated bytes as evidence."""
        return Known(self.peak_allocated_bytes, "B", self.source, self.band, self.note)

    @property
    def source(self) -> str:
        """Tier and stack in words."""
        return f"tier {self.tier}: {self.stack}"


def about_outliers(estimate: Estimate, plan: Plan) -> Estimate:
    """Return an estimate without outliers with a band for those that trained weights have."""
    if not plan.outlier_band:
        return estimate
    note = "int8: of input columns beyond the threshold, up to one in twenty is in the band"
    return msgspec.structs.replace(
        estimate,
        band=estimate.band + plan.outlier_band,
        required_band=estimate.required_band + plan.outlier_band,
        note=f"{estimate.note}; {note}" if estimate.note else note,
    )
