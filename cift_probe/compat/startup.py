"""Kinds of driver and CUDA start-up, and of a device's modes."""

from __future__ import annotations

import re

from packaging.version import Version

from cift_probe.compat.case import Case, Judgement, parse_version
from cift_probe.expect.compat import read_drivers
from cift_probe.expect.wheels import read_wheels

# cudaError_t and CUresult of the CUDA runtime and driver API reference: what start-up returns
_CODES = {
    2: ("gpu_oom_driver_level", "out of memory in the driver itself"),
    35: ("driver_too_old", "the driver is older than the runtime"),
    46: ("compute_mode_exclusive", "the device is busy or may not be used"),
    209: ("arch_missing", "no kernel image for this device"),
    214: ("ecc_uncorrectable", "an uncorrectable memory error"),
    802: ("fabric_not_ready", "the system is not ready: NVSwitch fabric"),
    803: ("driver_library_mismatch", "driver library and kernel module differ"),
    804: ("forward_compat_unsupported", "forward compatibility is not offered by this device"),
}
_UNKNOWN_ERROR = 999
_SMI = re.compile(r"Driver Version:\s*([\d.]+).*?CUDA Version:\s*(\d+\.\d+)", re.DOTALL)
# forward compatibility is offered on data-centre boards and NGC-ready RTX PRO alone
_DATA_CENTRE = re.compile(
    r"\b(tesla|a2|a10|a16|a30|a40|a100|a800|h100|h200|h800|gh200|b100|b200|gb200|l4|l40s?|t4|v100|p100)\b",
    re.IGNORECASE,
)
_SLOW_START_S = 5.0


def driver_too_old(case: Case) -> Judgement | None:
    """Hold the driver's CUDA, or its version, against the major of the runtime."""
    runtime = case.cuda()
    driver, cuda = _driver_of(case)
    if cuda is None and driver is None:
        if runtime is not None and case.has("driver_cuda_int", "driver_cuda"):
            return Judgement("driver_too_old", "unknown", "the driver's CUDA cannot be read")
        return None
    if runtime is None:
        # a tool's own report of driver and CUDA is held against the oldest CUDA still published
        if not any(_SMI.search(text) for text in case.texts()):
            return None
        newest = max(Version(wheel.torch) for wheel in read_wheels().values())
        runtime = min(Version(w.cuda) for w in read_wheels().values() if Version(w.torch) == newest)
    what = f"driver's CUDA {cuda}" if cuda else f"driver {driver}"
    if cuda is not None:
        old = cuda.major < runtime.major
    else:
        row = read_drivers().get(str(runtime.major))
        if row is None or driver is None:
            return Judgement("driver_too_old", "unknown", f"no driver minimum for CUDA {runtime}")
        old = driver < Version(row.driver_min)
    compares = "is of an older major than" if old else "serves"
    return Judgement(
        "driver_too_old", "fail" if old else "pass", f"{what} {compares} CUDA {runtime}"
    )


def _driver_of(case: Case) -> tuple[Version | None, Version | None]:
    """Return the driver's version and its CUDA, from fields or from nvidia-smi's header."""
    driver = case.version("driver", "driver_version")
    cuda = case.version("driver_cuda", "driver_cuda_version", "cuda_driver", "max_cuda")
    code = case.number("driver_cuda_int", "cuda_driver_version_int", "cuDriverGetVersion")
    if code is not None and code >= 1000:  # noqa: PLR2004 - 1000 x major + 10 x minor
        cuda = Version(f"{int(code) // 1000}.{int(code) % 1000 // 10}")
    elif cuda is not None and cuda.major >= 1000:  # noqa: PLR2004 - as above
        cuda = Version(f"{cuda.major // 1000}.{cuda.major % 1000 // 10}")
    for text in case.texts():
        found = _SMI.search(text)
        if found:
            driver, cuda = driver or Version(found[1]), cuda or Version(found[2])
    return driver, cuda


def cuda_start(case: Case) -> Judgement | None:
    """Read the error code with which CUDA's start-up ended."""
    code = case.number(
        "code", "cuda_error", "error_code", "cu_init", "cuinit", "cuInit", "cuda_init"
    )
    if code is None or case.has("xid"):
        return None
    if code == 0:
        return None
    if int(code) == _UNKNOWN_ERROR:
        if case.flag("nvml_ok", "nvidia_smi_ok", "nvidia_smi_lists_gpu") is False:
            reason = "error 999, and the driver does not answer either"
            return Judgement("uvm_broken_after_suspend", "unknown", reason)
        return Judgement(
            "uvm_broken_after_suspend", "fail", "error 999 at start-up while the driver answers"
        )
    known = _CODES.get(int(code))
    if known is None:
        return None
    return Judgement(known[0], "fail", f"CUDA error {int(code)}: {known[1]}")


def fabric(case: Case) -> Judgement | None:
    """Hold fabric state and fabric manager against the driver; counts for one GPU too."""
    state = case.get("fabric_state", "fabric")
    manager = case.version(
        "fabricmanager", "fabric_manager", "fabricmanager_version", "fabric_manager_version"
    )
    driver = case.version("driver", "driver_version")
    wants = case.flag("nvswitch", "has_nvswitch")
    running = case.flag("fabricmanager_running", "fabric_manager_running", "fabricmanager_active")
    raw = case.get("fabricmanager", "fabric_manager", "fabricmanager_version")
    lacking = {"missing", "none", "not installed", "not found"}
    if running is None and raw is not None and str(raw).strip().lower() in lacking:
        running = False
    told = (state, manager, running)
    if all(item is None for item in told) and not case.has("fabricmanager", "fabric_manager"):
        return None
    if wants is False:
        return Judgement("fabric_not_ready", "not_applicable", "the board has no NVSwitch")
    if state is not None and str(state).strip().lower() not in {"completed", "success", "ready"}:
        none = str(state).strip().lower() in {"n/a", "[n/a]", "not supported"}
        if none and not wants:
            return Judgement("fabric_not_ready", "not_applicable", "the board has no fabric")
        return Judgement("fabric_not_ready", "fail", f"fabric state is {state}")
    if manager is not None and driver is not None and manager != driver:
        return Judgement("fabric_not_ready", "fail", f"fabric manager {manager}, driver {driver}")
    if running is False or (
        wants and case.has("fabricmanager", "fabric_manager") and not manager and running is None
    ):
        return Judgement("fabric_not_ready", "fail", "the fabric manager does not run")
    return Judgement("fabric_not_ready", "pass", "fabric state and fabric manager are in order")


def forward_compatibility(case: Case) -> Judgement | None:
    """Look at which libcuda is loaded: a compatibility library serves some products alone."""
    loaded = case.get("libcuda", "libcuda_path", "loaded_libcuda")
    compat = case.flag("compat_libcuda", "cuda_compat", "cuda_compat_installed", "forward_compat")
    if loaded is None and compat is None:
        return None
    library, driver = parse_version(loaded), case.version("driver", "driver_version")
    if compat is None:
        # a library of the driver is of the driver's version; a newer one is from cuda-compat
        newer = library is not None and driver is not None and library > driver
        compat = "compat" in str(loaded).lower() or newer
    if isinstance(case.get("compat_libcuda"), str):
        compat = True
    name = str(case.get("gpu", "name", "product", "gpu_name") or "")
    if not compat:
        return Judgement("forward_compat_unsupported", "pass", "the driver's own libcuda is loaded")
    if name and not _DATA_CENTRE.search(name):
        reason = f"a compatibility libcuda is loaded, and {name} does not offer it"
        return Judgement("forward_compat_unsupported", "fail", reason)
    reason = f"a compatibility libcuda on {name or 'an unnamed device'}"
    return Judgement("forward_compat_unsupported", "pass" if name else "unknown", reason)


def driver_library(case: Case) -> Judgement | None:
    """Hold the loaded kernel module against the driver's libraries."""
    error = str(case.get("error", "nvml_error") or "")
    module = case.version(
        "kernel_module", "kernel_module_version", "module_version", "kernel_driver", "kmd"
    )
    library = case.version(
        "userspace",
        "userspace_version",
        "library_version",
        "nvml_library",
        "libcuda_version",
        "umd",
    )
    if module is not None and library is not None:
        same = module == library
        return Judgement(
            "driver_library_mismatch",
            "pass" if same else "fail",
            f"kernel module {module}, libraries {library}",
        )
    if "mismatch" in error.lower():
        return Judgement("driver_library_mismatch", "fail", error)
    return None


def device_cgroup(case: Case) -> Judgement | None:
    """Tell a container that lost its device nodes: NVML fails inside, the host is fine."""
    error = str(case.get("error", "nvml_error") or "").lower()
    inside = case.flag("in_container", "container", "containerised")
    if "unknown error" not in error and "unspecified" not in error:
        return None
    host = case.flag("host_ok", "host_nvml_ok", "host_nvidia_smi_ok")
    if inside and host is not False:
        return Judgement(
            "device_cgroup_lost", "fail", "NVML fails in the container, not on the host"
        )
    return None


def persistence(case: Case) -> Judgement | None:
    """Hold the first start of the driver against the second, without persistence mode."""
    mode = case.flag("mode", "persistence_mode", "persistence")
    first = case.number("first_init_s", "first_start_s", "cold_init_s", "first_init")
    second = case.number("second_init_s", "second_start_s", "warm_init_s", "second_init")
    if not case.has("persistence_mode", "persistence") and first is None:
        return None
    if mode:
        return Judgement("persistence_mode_off", "pass", "persistence mode is on")
    if first is None or second is None:
        said = "persistence mode is off" if mode is False else "persistence mode is not told"
        return Judgement("persistence_mode_off", "warn" if mode is False else "unknown", said)
    slow = first - second >= _SLOW_START_S
    reason = f"the first start takes {first:g} s, the second {second:g} s"
    return Judgement("persistence_mode_off", "warn" if slow or mode is False else "pass", reason)


def compute_mode(case: Case) -> Judgement | None:
    """Tell whether another context keeps this one out."""
    mode = str(case.get("mode", "compute_mode") or "").lower().replace(" ", "_")
    about = case.has("compute_mode", "other_context")
    if "exclusive" not in mode and "prohibited" not in mode and not about:
        return None
    if "prohibited" in mode:
        return Judgement("compute_mode_exclusive", "fail", "compute mode is Prohibited")
    if "exclusive" not in mode:
        return Judgement("compute_mode_exclusive", "pass", f"compute mode is {mode or 'unknown'}")
    other = case.flag("other_context", "other_process", "busy", "in_use")
    count = case.number(
        "num_contexts", "contexts", "num_processes", "world_size_per_gpu", "processes_per_gpu"
    )
    if other or (count is not None and count > (0 if other is None else 1)):
        return Judgement("compute_mode_exclusive", "fail", f"{mode}, and another context is there")
    if other is None and count is None:
        return Judgement("compute_mode_exclusive", "warn", f"{mode}: one context at a time")
    return Judgement("compute_mode_exclusive", "pass", f"{mode}, and no other context")


JUDGES = (
    cuda_start,
    fabric,
    forward_compatibility,
    driver_library,
    device_cgroup,
    driver_too_old,
    persistence,
    compute_mode,
)
