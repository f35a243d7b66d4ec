"""A real QLoRA run of the embedded model, end to end."""

from cift_probe.verdict import Finding, Reading, all_of, at_least, at_most, check


@check("CVG001", after=("KRN006",), device="any", quick=False)
def test_qlora_learns(measured: Reading, expected: Reading) -> Finding:
    """QLoRA on the embedded data set brings the loss below its limit, with finite numbers only.

    Why: a machine can load a model, run every kernel and still train nothing.

    Fix: read CVG002 and CVG003 first: adapters that do not move, or weights that do, say where.
    """
    return all_of(
        at_most(measured["training.loss.ratio"], expected["training.loss.ratio.max"]),
        at_most(measured["training.num_nonfinite"], expected["training.num_nonfinite.max"]),
    )


@check("CVG002", after=("KRN006",), device="any", quick=False)
def test_every_adapter_changes(measured: Reading, expected: Reading) -> Finding:
    """Training changes every adapter matrix.

    Why: adapters without a gradient stay at their start while the loss still wobbles.

    Fix: with re-entrant checkpointing call enable_input_require_grads(); look for a detach.
    """
    return at_least(
        measured["training.adapters.changed"], expected["training.adapters.changed.min"]
    )


@check("CVG003", after=("KRN006",), device="any", quick=False)
def test_frozen_weights_stay(measured: Reading, expected: Reading) -> Finding:
    """Training leaves every frozen tensor as it was, bit for bit.

    Why: a frozen weight that moves is memory corruption, or a wrong set of trainable parameters.

    Fix: print the names in the report; check requires_grad; test the memory of the device.
    """
    return at_most(measured["training.frozen.changed"], expected["training.frozen.changed.max"])
