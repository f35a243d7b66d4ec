"""Memory of the device that torch's allocator does not count."""

from cift_probe.verdict import Finding, Reading, agrees, all_of, at_most, check


@check("MEM014", after=("KRN006",), severity="should", device="gpu", quick=False)
def test_a_paged_optimizer_is_seen_on_the_device(measured: Reading, expected: Reading) -> Finding:
    """The state of a paged optimizer takes its expected size on the device, unseen by torch.

    Why: a plan with a paged optimizer needs room that torch's own numbers leave out.

    Fix: read the driver's free memory instead; if the state lies elsewhere, update bitsandbytes.
    """
    return all_of(
        agrees(measured["paged.device.added"], expected["paged.state"]),
        at_most(measured["paged.torch.added"], expected["paged.torch.added.max"]),
    )
