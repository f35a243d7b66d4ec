"""What the environment asks for is what happens."""

from cift_probe.verdict import Finding, Reading, check, equals, is_empty, is_true


@check("ENV016", after=("ENV007",), severity="should", device="gpu", domain="configuration")
def test_the_allocator_does_as_it_was_asked(facts: Reading) -> Finding:
    """Expandable segments are on in torch's allocator where a variable asks for them.

    Why: torch before 2.10 does not read PYTORCH_ALLOC_CONF for CUDA, and says nothing.

    Fix: set PYTORCH_CUDA_ALLOC_CONF before torch 2.10, PYTORCH_ALLOC_CONF from 2.10 on.
    """
    return equals(
        facts["torch.device.expandable_segments"], facts["environment.allocator.expandable"]
    )


@check("ENV017", after=("GPU001",), severity="should", device="gpu", domain="configuration")
def test_every_selected_device_exists(facts: Reading) -> Finding:
    """Every entry of CUDA_VISIBLE_DEVICES names a device of this machine.

    Why: CUDA drops the first entry that names none and all behind it, and says nothing.

    Fix: name devices as nvidia-smi -L lists them, best by UUID.
    """
    return is_empty(facts["environment.selection.unmatched"])


@check("ENV018", after=("ENV007",), severity="info", device="gpu", domain="driver")
def test_segments_can_grow(measured: Reading) -> Finding:
    """Torch's allocator can grow its segments on this device.

    Why: expandable_segments:True saves what fragmentation takes; virtual GPUs, Jetson and Windows
    lack what it needs, and there the setting has no effect or ends the run.

    Fix: leave the setting out here.
    """
    return is_true(measured["allocator.expandable.works"])
