"""The GPU is there, whole and not shared."""

from cift_probe.verdict import (
    Finding,
    Reading,
    all_of,
    at_least,
    at_most,
    check,
    equals,
    is_empty,
    is_false,
)


@check("GPU001", device="gpu", domain="hardware")
def test_device_is_present(facts: Reading, expected: Reading) -> Finding:
    """The driver reports at least one GPU to this process.

    Why: nothing else about a GPU can be decided without one.

    Fix: check that nvidia-smi lists the GPU, that the container was started with GPUs, and that
    CUDA_VISIBLE_DEVICES does not hide it.
    """
    return at_least(facts["device.count"], expected["device.count.min"])


@check("GPU002", after=("GPU001", "ENV007"), device="gpu", domain="configuration")
def test_driver_and_torch_mean_the_same_device(facts: Reading) -> Finding:
    """The device that NVML describes is the one that torch computes on.

    Why: NVML and CUDA number devices differently; a matching index proves nothing, a UUID does.

    Fix: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name devices by UUID in CUDA_VISIBLE_DEVICES.
    """
    return equals(facts["torch.device.uuid"], facts["device.uuid"])


@check("GPU003", after=("GPU001",), device="gpu", domain="hardware")
def test_memory_has_no_uncorrectable_errors(facts: Reading, expected: Reading) -> Finding:
    """The device memory has had no uncorrectable ECC error since the driver was loaded.

    Why: an uncorrectable error ends the process it hits, and the next one is more likely.

    Fix: reset the GPU when idle; if errors come back, have the card replaced.
    """
    return at_most(facts["device.ecc.uncorrected"], expected["device.ecc.uncorrected.max"])


@check("GPU004", after=("GPU001",), device="gpu", domain="hardware")
def test_no_row_remap_is_due(facts: Reading) -> Finding:
    """No memory row waits to be remapped, and no remap has failed.

    Why: a pending remap means that a damaged row is in use until the next reset.

    Fix: reset the GPU or reboot; a failed remap means the card has to be replaced.
    """
    return all_of(is_false(facts["device.remap.pending"]), is_false(facts["device.remap.failed"]))


@check("GPU005", after=("GPU001",), severity="should", device="gpu", domain="configuration")
def test_nobody_else_computes_on_the_device(facts: Reading) -> Finding:
    """No other process computes on the device.

    Why: it holds memory and takes time, so that neither fits nor speeds measured here are true.

    Fix: end the listed processes, or choose another device with CUDA_VISIBLE_DEVICES.
    """
    return is_empty(facts["device.processes.foreign"])


@check("GPU006", after=("GPU001",), device="gpu", domain="hardware")
def test_no_device_is_lost(facts: Reading) -> Finding:
    """Every device that the driver lists answers it.

    Why: a GPU that has fallen off the bus is in no other check, and its neighbours hide it.

    Fix: read the kernel log for Xid 79, reseat or power-cycle; if it comes back, replace the card.
    """
    return is_empty(facts["device.lost"])
