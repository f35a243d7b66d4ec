"""Driver, CUDA runtime, torch build and GPU agree."""

from cift_probe.verdict import (
    Finding,
    Reading,
    at_least,
    check,
    equals,
    is_present,
    is_true,
    overlaps,
)


@check("ENV001", after=("GPU001", "ENV003"), device="gpu", domain="driver")
def test_driver_serves_the_cuda_runtime(facts: Reading, expected: Reading) -> Finding:
    """The driver is new enough for the CUDA major release that torch was built with.

    Why: within a major release any newer toolkit runs; across majors the driver refuses.

    Fix: update the driver, or install a torch wheel of an older CUDA major release.
    """
    return at_least(facts["driver.version"], expected["driver.version.min"])


@check("ENV002", after=("GPU001", "ENV003"), device="gpu")
def test_torch_has_kernels_for_the_device(facts: Reading, expected: Reading) -> Finding:
    """The torch build holds machine code, or PTX, that runs on this device.

    Why: without it every kernel ends in "no kernel image is available", although
    torch.cuda.is_available() is true.

    Fix: install a torch build whose architecture list serves this capability.
    """
    return overlaps(facts["torch.arch.list"], expected["torch.arch.accepted"])


@check("ENV003", after=("GPU001",), device="gpu")
def test_torch_is_built_with_cuda(facts: Reading) -> Finding:
    """The torch build has CUDA.

    Why: a CPU-only wheel on a GPU machine trains on the CPU, a hundred times slower.

    Fix: install torch from the wheel index of your CUDA release.
    """
    return is_present(facts["torch.cuda.version"])


@check("ENV004")
def test_imported_torch_is_the_installed_one(facts: Reading) -> Finding:
    """The torch that is imported has the version that its metadata claims.

    Why: two copies on the path, or half an upgrade, load one version's code with another's
    libraries.

    Fix: uninstall torch until pip finds none, look at PYTHONPATH, and install it once.
    """
    return equals(facts["torch.version"], facts["package.torch"])


@check("ENV007", after=("ENV001", "ENV002"), device="gpu", domain="driver")
def test_torch_sees_the_device(facts: Reading) -> Finding:
    """Torch initialises CUDA and sees the device.

    Why: library, driver and device can each be right and still not work together.

    Fix: read the reason; an unknown error (999) wants a reboot or nvidia-modprobe, 802 the fabric
    manager, 804 the removal of a forward-compatibility package.
    """
    return is_true(facts["torch.cuda.available"])
