"""Kinds of architecture, builds and native libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from packaging.version import Version

from cift_probe.compat.case import Case, Judgement, is_nothing, parse_version
from cift_probe.expect.wheels import find_wheel, serving

_SONAME = re.compile(r"lib(\w+?)\.so\.(\d+)")
_CUDA_LIBRARIES = frozenset(
    {"cudart", "cublas", "cublasLt", "cusparse", "cusolver", "cufft", "nvJitLink", "nvrtc", "cupti"}
)
_CUDA_MAJORS = frozenset({11, 12, 13, 14})
# libraries whose major is that of CUDA; cufft and the like count on their own
_WITH_CUDA = frozenset({"cudart", "nvJitLink", "cublas", "cublasLt", "nvrtc", "cupti"})
_CUDNN_DROPPED = ((91100, (7, 5)),)  # cuDNN 9.11 release notes: Maxwell, Pascal, Volta removed


def architecture(case: Case) -> Judgement | None:
    """Tell whether an architecture list serves the lowest of the devices."""
    ran = case.flag("kernel_ran", "kernel_ok", "kernel_runs")
    if case.has("library", "torch_kernel_ok"):
        ran = None  # then it is another library's kernel
    asked = case.has(
        "capability", "compute_cap", "compute_capability", "compute_cap_field", "gpus", "devices"
    )
    listed = case.get("arch_list", "archs", "arch_flags", "wheel_archs", "architectures")
    capability = case.capability()
    if capability is None:
        if not asked or not (listed is not None or case.has("compute_cap_field", "capability")):
            return None
        field = case.get("compute_cap_field", "capability", "compute_cap", "compute_capability")
        if ran is None and is_nothing(field):
            reason = f"the compute capability reads {field}, and no kernel was tried"
            return Judgement("capability_unreadable", "unknown", reason)
        return None
    names = _arch_names(case, listed)
    if names is None:
        if ran and warned_of(case):
            return Judgement("arch_false_alarm", "pass", "torch warned, and a kernel ran")
        return None
    text = f"{capability[0]}.{capability[1]}"
    literal = f"sm_{capability[0]}{capability[1]}"
    warned = case.flag("torch_warned", "warned", "warning")
    served = serving(capability, names)
    if ran is False:
        return Judgement("arch_missing", "fail", f"a kernel of {', '.join(names)} does not run")
    if served is None and not ran:
        return Judgement("arch_missing", "fail", f"{', '.join(names)} has no code for {text}")
    if literal in {name.rstrip("af") for name in names} and not warned:
        return Judgement("arch_missing", "pass", f"{literal} is in the list")
    how = f"{served} serves capability {text}" if served else "a kernel ran"
    return Judgement("arch_false_alarm", "pass", how)


def warned_of(case: Case) -> bool:
    """Tell whether torch warned about the architecture."""
    return bool(case.flag("torch_warned", "warned", "warning"))


def rocm_architecture(case: Case) -> Judgement | None:
    """Hold an AMD architecture against a list, where only its own name serves it."""
    name, listed = case.get("gfx", "gfx_arch", "gcn_arch"), case.get("arch_list")
    if name is None or not isinstance(listed, list):
        return None
    there = str(name).partition(":")[0] in [str(item).partition(":")[0] for item in listed]
    reason = f"{name} is {'' if there else 'not '}in {', '.join(map(str, listed))}"
    return Judgement("arch_missing", "pass" if there else "fail", reason)


def _arch_names(case: Case, listed: Any) -> list[str] | None:
    """Return the list as told, or that of the wheel that is named."""
    if isinstance(listed, str):
        listed = re.split(r"[\s,;]+", listed.strip())
    if isinstance(listed, list | tuple):
        return [_arch_name(item) for item in listed]
    torch, cuda = case.version("torch", "torch_version"), _cuda_of(case)
    if torch is None or cuda is None:
        return None
    wheel = find_wheel(torch, cuda)
    return None if wheel is None else wheel.names


def _arch_name(item: Any) -> str:
    text = str(item).strip()
    if text.endswith("+PTX"):
        return "compute_" + text[:-4].replace(".", "")
    return text if "_" in text else "sm_" + text.replace(".", "")


def _cuda_of(case: Case) -> Version | None:
    """Return the CUDA of torch's build: told, or read from its local version part."""
    told = case.version("torch_cuda", "cuda_runtime", "wheel_cuda")
    found = re.search(r"\+cu(\d{2})(\d)", str(case.get("torch", "torch_version") or ""))
    return told or (Version(f"{found[1]}.{found[2]}") if found else None)


def cpu_only(case: Case) -> Judgement | None:
    """Tell a torch without CUDA on a machine with an NVIDIA GPU; "+cpu" may be absent."""
    count = case.number("nvidia_gpus", "num_gpus", "gpu_count", "n_gpus")
    listed = case.get("gpus")
    if count is None and isinstance(listed, list):
        count = float(len(listed))
    told = case.has("torch_cuda") or "+cpu" in str(case.get("torch") or "")
    if not told or count is None:
        return None
    if isinstance(listed, list) and all(_of_amd(item) for item in listed) and listed:
        return Judgement("cpu_only_wheel", "not_applicable", "the GPUs are not NVIDIA's")
    if case.version("torch_cuda") is not None:
        return Judgement(
            "cpu_only_wheel", "pass", f"torch is built for CUDA {case.get('torch_cuda')}"
        )
    if count < 1:
        return Judgement("cpu_only_wheel", "not_applicable", "the machine has no NVIDIA GPU")
    return Judgement("cpu_only_wheel", "fail", f"torch has no CUDA, and {count:g} GPUs are there")


def _of_amd(item: object) -> bool:
    return any(word in str(item).lower() for word in ("amd", "radeon", "instinct", "intel"))


def libraries(case: Case) -> Judgement | None:
    """Tell CUDA libraries of a wrong major, of two origins, missing, or older than compiled."""
    for judged in (_missing(case), _needed(case), _origins(case), _cudnn(case)):
        if judged is not None:
            return judged
    return None


def _missing(case: Case) -> Judgement | None:
    missing = case.get("missing", "missing_library", "not_found", "missing_soname")
    if missing is None or (isinstance(missing, list) and not missing):
        if not case.has("missing", "missing_library", "missing_soname"):
            return None
        return Judgement("cuda_library_mismatch", "pass", "the loader finds every library")
    where = case.get("found_in", "present_in")
    reason = f"the loader does not find {missing}" + (f", which is in {where}" if where else "")
    return Judgement("cuda_library_mismatch", "fail", reason)


def _needed(case: Case) -> Judgement | None:
    needed = case.get("extension_needed", "needed", "elf_needed", "dt_needed")
    cuda = _cuda_of(case)
    if not isinstance(needed, list | tuple) or cuda is None:
        return None
    for name in needed:
        found = _SONAME.match(str(name))
        if found and found[1] in _WITH_CUDA and int(found[2]) not in _sonames(found[1], cuda):
            reason = f"{name} is needed beside a torch of CUDA {cuda}"
            return Judgement("cuda_library_mismatch", "fail", reason)
    return Judgement("cuda_library_mismatch", "pass", f"what is needed is of CUDA {cuda.major}")


def _sonames(library: str, cuda: Version) -> set[int]:
    """Return the majors that a library of a CUDA release has in its name."""
    if library == "cudart" and cuda.major == 11:  # noqa: PLR2004 - libcudart.so.11.0 since CUDA 11
        return {11}
    if library == "nvrtc" and cuda.major == 11:  # noqa: PLR2004 - libnvrtc.so.11.2
        return {11}
    return {cuda.major}


def _origins(case: Case) -> Judgement | None:
    maps = case.get("maps", "loaded", "libraries", "loaded_libraries", "resolved")
    if isinstance(maps, list) and all(isinstance(item, str) for item in maps):
        maps = {PurePosixPath(item).name: item for item in maps if "/" in item}
    if not isinstance(maps, Mapping) or not maps:
        return None
    origins = {_origin(str(place)) for place in maps.values()}
    told = ", ".join(f"{name} from {place}" for name, place in maps.items())
    mixed = len(origins) > 1
    return Judgement("cuda_library_mismatch", "fail" if mixed else "pass", told[:300])


def _origin(place: str) -> str:
    """Return where a library comes from: the environment's packages, conda, or the system."""
    low = place.lower()
    if "site-packages" in low or "dist-packages" in low:
        return "python packages"
    if "conda" in low:
        return "conda"
    if "system" in low or low.startswith(("/usr", "/lib", "/opt", "/cm")) or "cuda" in low:
        return "system"
    return str(PurePosixPath(low).parent)


def _cudnn(case: Case) -> Judgement | None:
    compiled = _cudnn_version(case.get("compiled", "compiled_cudnn", "cudnn_compiled"))
    runtime = _cudnn_version(case.get("runtime", "runtime_cudnn", "cudnn_runtime"))
    if compiled is None and runtime is None:
        compiled = _cudnn_version(case.get("built_with", "compiled_with"))
        runtime = _cudnn_version(case.get("loaded", "loaded_version"))
    if compiled is None or runtime is None:
        return None
    old = runtime < compiled or runtime[0] != compiled[0]
    reason = f"compiled against {_dotted(compiled)}, {_dotted(runtime)} is loaded"
    return Judgement("cuda_library_mismatch", "fail" if old else "pass", reason)


def _cudnn_version(value: Any) -> tuple[int, ...] | None:
    """Return (9, 11, 0) from a list, a text, or cuDNN's own number 91100 (or 8902)."""
    if isinstance(value, list | tuple):
        whole = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        return tuple(value) if value and whole else None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1000:  # noqa: PLR2004
        scale = 10_000 if value >= 90_000 else 1000  # noqa: PLR2004 - cudnn_version.h: 9 has five digits
        return value // scale, value % scale // 100, value % 100
    version = parse_version(value) if isinstance(value, str) else None
    return None if version is None else version.release


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def library_architecture(case: Case) -> Judgement | None:
    """Tell a native library beside torch that has dropped this GPU, or whose kernel fails."""
    cudnn, capability = _cudnn_version(case.get("cudnn", "cudnn_version")), case.capability()
    if cudnn is not None and capability is not None:
        number = cudnn[0] * 10_000 + (cudnn[1] if len(cudnn) > 1 else 0) * 100
        least = next((low for since, low in _CUDNN_DROPPED if number >= since), (0, 0))
        reason = f"cuDNN {_dotted(cudnn)} on capability {capability[0]}.{capability[1]}"
        return Judgement("library_arch_missing", "warn" if capability < least else "pass", reason)
    listed = case.get("library_arch_list", "library_archs")
    if isinstance(listed, list) and capability is not None:
        served = serving(capability, [_arch_name(item) for item in listed])
        reason = f"{case.get('library') or 'the library'} has {', '.join(map(str, listed))}"
        return Judgement("library_arch_missing", "pass" if served else "fail", reason)
    ran = case.flag("library_kernel_ok", "bnb_kernel_ok", "kernel_of_library_ok")
    if ran is None and case.has("torch_kernel_ok"):
        ran = case.flag("kernel_ok")
    torch_ran = case.flag("torch_kernel_ok", "torch_kernels_ok")
    if ran is None:
        return None
    if ran:
        return Judgement("library_arch_missing", "pass", "a kernel of the library runs")
    if torch_ran is False:
        return None
    return Judgement("library_arch_missing", "fail", "torch's kernels run, the library's do not")


def glibc(case: Case) -> Judgement | None:
    """Hold the system's C library against what a binary needs."""
    have = case.version("glibc", "glibc_version", "system_glibc", "libc")
    need = case.version("required", "required_glibc", "glibc_required", "needs_glibc", "glibc_min")
    several = case.get("required", "needs")
    if isinstance(several, list):
        need = max((v for v in map(parse_version, several) if v is not None), default=None)
    if have is None or need is None:
        return None
    reason = f"glibc {have}, {need} is needed"
    return Judgement("glibc_too_old", "fail" if have < need else "pass", reason)


def toolchain(case: Case) -> Judgement | None:
    """Tell what a just-in-time build lacks; counts only where something compiles."""
    lacking = []
    if case.has("cc", "compiler", "gcc") and not _present(case, "cc", "compiler", "gcc"):
        lacking.append("a C compiler")
    if case.flag("python_h", "python_headers", "has_python_h") is False:
        lacking.append("Python.h")
    if case.flag("libcuda_linkable", "libcuda_so", "lcuda", "links_libcuda") is False:
        lacking.append("a linkable libcuda")
    nvcc, cuda = case.version("nvcc", "nvcc_version", "cuda_home_version"), _cuda_of(case)
    if case.has("nvcc") and not _present(case, "nvcc"):
        lacking.append("nvcc")
    if nvcc is not None and cuda is not None and nvcc.major != cuda.major:
        lacking.append(f"nvcc of CUDA {cuda.major} (it is {nvcc})")
    told = case.has(
        "cc", "compiler", "gcc", "python_h", "python_headers", "libcuda_linkable", "nvcc"
    )
    if not told and not lacking:
        return None
    if case.flag("compiles", "needs_jit", "builds_extensions", "jit") is False:
        return Judgement("jit_toolchain_missing", "not_applicable", "nothing compiles just in time")
    if lacking:
        return Judgement("jit_toolchain_missing", "fail", "missing: " + ", ".join(lacking))
    return Judgement("jit_toolchain_missing", "pass", "what a just-in-time build needs is there")


def _present(case: Case, *names: str) -> bool:
    value = case.get(*names)
    return (
        value is not None
        and value is not False
        and str(value).strip().lower() not in {"", "none", "missing"}
    )


JUDGES = (
    architecture,
    rocm_architecture,
    cpu_only,
    library_architecture,
    libraries,
    glibc,
    toolchain,
)
