"""The driver's parts are of one release, and CUDA starts."""

from cift_probe.verdict import Finding, Reading, check, equals, is_empty


@check("ENV008", after=("GPU001",), device="gpu", domain="driver")
def test_cuda_starts(facts: Reading) -> Finding:
    """The driver's own library starts CUDA, without torch in the picture.

    Why: NVML and nvidia-smi answer where CUDA does not: a fabric that is not ready (802), parts
    of two releases (803), a forward-compatibility library out of place (804), suspend (999).

    Fix: do what the reason says for its code; none of them is the training script's fault.
    """
    return is_empty(facts["driver.start.errors"])


@check("ENV009", severity="should", device="gpu", domain="driver")
def test_driver_library_and_kernel_module_are_of_one_release(facts: Reading) -> Finding:
    """The driver's user-space library has the version of the kernel module that is loaded.

    Why: after an update without a reboot, or in a container with a driver of its own, new
    processes are refused while old ones run on.

    Fix: reboot, or reload the nvidia modules; in a container remove its own driver packages.
    """
    return equals(facts["driver.library.ml.version"], facts["driver.module.version"])


@check("ENV010", after=("ENV008",), severity="info", device="gpu", domain="driver")
def test_libcuda_is_the_drivers_own(facts: Reading) -> Finding:
    """The libcuda that CUDA programs load is the driver's own, not a forward-compatibility one.

    Why: forward compatibility works on data-centre products alone, and hides how old the driver is.

    Fix: update the driver, or take the compat folder out of LD_LIBRARY_PATH and ld.so.conf.
    """
    return equals(facts["driver.library.cuda.version"], facts["driver.module.version"])
