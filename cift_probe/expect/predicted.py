"""What arithmetic says that a plan takes, before anything was tried."""

from __future__ import annotations

from functools import cache

from cift_probe.evidence import Evidence, Known, Reading, Unknown
from cift_probe.expect.estimate import Estimate
from cift_probe.expect.limits import read_limits
from cift_probe.models import ModelError, load_model
from cift_probe.plan import REFERENCE_PLAN, Plan, PlanError, read_plan

PREFIX = "plan.predicted."
REFERENCE_PREFIX = "reference.predicted."  # of the small plan that every session runs whole
_HALF, _FULL = 2, 4  # bytes of a number as it is computed, and as a loss or a metric reads it


def expect_predicted(field: str, plan: Plan, facts: Reading) -> Evidence:
    """Return what is predicted of a plan on the device that the facts are about, in bytes.

    `peak` and `required` are those of a training step, `weights` what loading leaves on the
    device, `optimizer_state` what the optimizer adds, `logits` what an evaluation that keeps its
    logits adds for a batch. Each carries the band that the prediction vouches for.
    """
    if field == "logits":
        return expect_logits(plan)
    capability = facts["device.capability"]
    if isinstance(capability, Unknown) or capability.absent:
        return capability
    major, _, minor = str(capability.value).partition(".")
    estimate = _estimate(plan, (int(major), int(minor or 0)), facts)
    if isinstance(estimate, Unknown):
        return estimate
    return _part(field, estimate)


def _part(field: str, estimate: Estimate) -> Evidence:
    source, parts = f"formula for {estimate.stack}", estimate.components
    told = {
        "peak": (estimate.peak_allocated_bytes, estimate.band),
        "required": (estimate.required_bytes, estimate.required_band),
    }
    if "weights" in parts:
        packed = parts["weights"] + parts.get("quantisation constants", 0)
        told["weights"] = packed, band_of(f"{PREFIX}weights.band")
    if "optimizer state" in parts:
        told["optimizer_state"] = parts["optimizer state"], band_of(f"{PREFIX}optimizer_state.band")
    if field not in told:
        return Unknown(f"the formula says nothing of {field}", source)
    value, band = told[field]
    return Known(value, "B", source, band)


def expect_logits(plan: Plan) -> Evidence:
    """Return bytes of a batch's logits, as computed and once more as float32.

    The hidden states that they are computed from are counted in the same way.
    """
    try:
        shape = load_model(plan.model)
        vocabulary, hidden = shape.count("vocab_size"), shape.count("hidden_size")
    except ModelError as error:
        return Unknown(str(error))
    computed = _FULL if plan.dtype == "float32" else _HALF
    tokens = plan.batch_size * plan.sequence_length
    how = (
        f"batch {plan.batch_size} x sequence {plan.sequence_length} x "
        f"(vocabulary {vocabulary} + hidden size {hidden}) x ({computed} + {_FULL}) bytes"
    )
    return Known(tokens * (vocabulary + hidden) * (computed + _FULL), "B", how)


@cache
def reference_plan() -> Plan:
    """Return the small plan that every session runs whole."""
    return read_plan(REFERENCE_PLAN)


def expect_reference(field: str, facts: Reading) -> Evidence:
    """Return what is predicted of the small plan that every session runs whole."""
    try:
        return expect_predicted(field, reference_plan(), facts)
    except PlanError as error:
        return Unknown(str(error))


def band_of(name: str) -> float:
    """Return a relative band that is a row of data; raises KeyError without the row."""
    return float(str(read_limits()[name].value))


def _estimate(plan: Plan, capability: tuple[int, int], facts: Reading) -> Estimate | Unknown:
    """Return the formula's estimate, or why there is none."""
    # a session that asks for none need not load it
    from cift_probe.expect.memory import EAGER_SINCE, READ, parse_version, predict

    try:
        shape = load_model(plan.model)
    except ModelError as error:
        return Unknown(str(error))
    version = READ
    if shape.model_type in EAGER_SINCE:
        installed = facts["package.transformers"]
        if isinstance(installed, Unknown) or installed.absent:
            return Unknown(f"which attention {shape.model_type} runs depends on transformers")
        version = parse_version(str(installed.value))
    return predict(plan, shape, capability, version)
