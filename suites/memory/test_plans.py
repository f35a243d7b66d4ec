"""What is known of each plan that was asked about."""

from cift_probe.verdict import Finding, Reading, all_of, any_of, at_most, check, is_present


@check(
    "MEM013",
    after=("KRN006",),
    severity="should",
    device="gpu",
    each="plan",
    domain="configuration",
    quick=False,
)
def test_quantisation_reaches_the_linear_weights(measured: Reading, expected: Reading) -> Finding:
    """Of a plan that quantises, hardly any linear weight of the layers stays as it was.

    Why: fused experts of a mixture are no linear modules; 4-bit loading passes over them, and the
    model takes several times the memory that its plan is named after.

    Fix: take a loader that splits or quantises the experts, or plan with the memory of LoRA.
    """
    return at_most(measured["step.unquantised.share"], expected["step.unquantised.share.max"])


@check("MEM016", after=("MEM003",), device="gpu", each="plan", domain="suite", quick=False)
def test_every_plan_gets_an_answer(measured: Reading) -> Finding:
    """Of every plan it is known what it needs and what there is, or that it ran out of memory.

    Why: an answer that is missing looks like one that nobody asked for.

    Fix: read why the instrument gave up in the report, and run it again with --resume.
    """
    return any_of(
        is_present(measured["step.out_of_memory"]),
        all_of(is_present(measured["step.required"]), is_present(measured["device.usable.bytes"])),
    )
