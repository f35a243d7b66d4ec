"""The device while it works: its link, its and its clocks."""

from cift_probe.verdict import (
    Finding,
    Reading,
    all_of,
    at_least,
    check,
    disjoint,
    is_false,
)


@check("GPU021", after=("ENV007",), severity="should", device="gpu", domain="hardware")
def test_link_runs_at_its_best_during_a_copy(facts: Reading, measured: Reading) -> Finding:
    """During a copy the PCIe link runs at the generation and width that device and slot allow.

    Why: a link that trained down (riser, seat, bent pin, firmware) makes every copy slow. At rest
    a link shows its first generation, which proves nothing.

    Fix: reseat the card, try another slot or riser, look at the firmware's link settings.
    """
    return all_of(
        at_least(measured["pcie.generation"], facts["device.pcie.generation.max"]),
        at_least(measured["pcie.width"], facts["device.pcie.width.max"]),
    )


@check("GPU022", after=("ENV007",), severity="should", device="gpu", domain="hardware")
def test_link_carries_what_it_should(measured: Reading, expected: Reading) -> Finding:
    """Copies of pinned memory reach the larger part of what the PCIe link could carry.

    Why: offloading, loading and saving are as fast as this; errors on the link, a far memory node
    or a sandbox between process and driver hold it down.

    Fix: look for PCIe errors in the kernel log, bind the process near the device, compare another
    slot.
    """
    return at_least(measured["pcie.share"], expected["pcie.share.min"])


@check("GPU023", after=("ENV007",), severity="should", device="gpu", domain="hardware", quick=False)
def test_clocks_are_not_held_down_by_a_fault(measured: Reading, expected: Reading) -> Finding:
    """Under load, neither heat nor the power supply holds the clocks down.

    Why: a device that slows down for heat or the power brake within seconds never reaches its
    speed; its own power cap is no fault.

    Fix: look at fans, air flow, dust, power cables and the supply.
    """
    return disjoint(measured["load.throttle.reasons"], expected["load.throttle.refused"])


@check("GPU024", after=("ENV007",), severity="should", device="gpu", domain="hardware", quick=False)
def test_clocks_rise_under_load(measured: Reading, expected: Reading) -> Finding:
    """Under load the SM clock is above half of the device's highest.

    Why: a clock that was locked low, or a power limit far below the default, costs time in every
    step and shows in no error.

    Fix: have the administrator reset locked clocks (nvidia-smi -rgc) and the power limit.
    """
    return at_least(measured["load.clock.sm"], expected["load.clock.sm.min"])


@check("GPU025", after=("ENV007",), severity="should", device="gpu", domain="driver")
def test_device_memory_is_the_devices_own(measured: Reading) -> Finding:
    """Memory that is allocated on the device is written at the device's speed.

    Why: Windows and WSL serve from host memory what the card does not have, so that a plan "fits"
    and runs many times slower, without an error.

    Fix: choose "Prefer No Sysmem Fallback" in the driver's settings, and plan with what is free.
    """
    return is_false(measured["device.spilled"])
