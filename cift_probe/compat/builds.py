"""Kinds of architecture, builds, libraries and versions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
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
_TORCHVISION = 15  # torchvision 0.(n + 15) is built for torch 2.n (pytorch/vision, README)
_CUDNN_DROPPED = ((91100, (7, 5)),)  # cuDNN 9.11 release notes: Maxwell, Pascal, Volta removed


def architecture(case: Case) -> Judgement | None:
    """Tell whether an architecture list serves the lowest of the devices."""
    ran = case.flag("kernel_ran", "kernel_ok", "kernel_runs")
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
        return None
    text = f"{capability[0]}.{capability[1]}"
    literal = f"sm_{capability[0]}{capability[1]}"
    warned = case.flag("torch_warned", "warned", "warning")
    served = serving(capability, names)
    if ran is False and served is None:
        return Judgement("arch_missing", "fail", f"no kernel ran, and {names} has none for {text}")
    if served is None and not ran:
        return Judgement("arch_missing", "fail", f"{', '.join(names)} has no code for {text}")
    if literal in {name.rstrip("af") for name in names} and not warned:
        return Judgement("arch_missing", "pass", f"{literal} is in the list")
    how = f"{served} serves capability {text}" if served else "a kernel ran"
    return Judgement("arch_false_alarm", "pass", how)


def _arch_names(case: Case, listed: Any) -> list[str] | None:
    """Return the list as told, or that of the wheel that is named."""
    if isinstance(listed, str):
        listed = re.split(r"[\s,;]+", listed.strip())
    if isinstance(listed, list | tuple):
        return [_arch_name(item) for item in listed]
    torch, cuda = case.version("torch", "torch_version"), _cuda_of(case)
    if torch is None or cuda is None or not case.has("gpu", "gpus", "wheel", "judge_wheel"):
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
    if not case.has("torch_cuda") or count is None:
        return None
    if case.get("torch_cuda") is not None:
        return Judgement(
            "cpu_only_wheel", "pass", f"torch is built for CUDA {case.get('torch_cuda')}"
        )
    if count < 1:
        return Judgement("cpu_only_wheel", "not_applicable", "the machine has no NVIDIA GPU")
    return Judgement("cpu_only_wheel", "fail", f"torch has no CUDA, and {count:g} GPUs are there")


def requirements(case: Case) -> Judgement | None:
    """Hold requirement bounds against what is installed, and what the GPU needs at least."""
    rows = case.get("requires", "requirements", "bounds")
    if not isinstance(rows, list):
        return None
    installed = case.get("installed", "versions", "packages") or {}
    bad = list(_conflicts(case, rows, installed if isinstance(installed, Mapping) else {}))
    if bad:
        return Judgement("package_version_conflict", "fail", "; ".join(bad))
    return Judgement("package_version_conflict", "pass", "the bounds leave a version")


def _conflicts(case: Case, rows: list[Any], installed: Mapping[str, Any]) -> Iterator[str]:
    bounds: dict[str, list[tuple[str, SpecifierSet]]] = {}
    for row in rows:
        if not isinstance(row, list | tuple) or len(row) != 3:  # noqa: PLR2004 - who, what, bound
            continue
        who, what, bound = (str(item) for item in row)
        try:
            bounds.setdefault(what, []).append((who, SpecifierSet(bound, prereleases=True)))
        except InvalidSpecifier:
            continue
    for what, asked in bounds.items():
        least = case.version(f"min_{what}_for_gpu", f"min_{what}", f"{what}_min")
        present = parse_version(installed.get(what)) or case.version(what)
        for name, allowed in asked:
            if present is not None and present not in allowed:
                yield f"{name} needs {what}{allowed}, and {present} is installed"
        if least is not None and not _reaches(least, [bound for _, bound in asked]):
            who = " and ".join(name for name, _ in asked)
            yield f"{who} keeps {what} below {least}, which is needed at least"
        if not _possible([bound for _, bound in asked]):
            yield f"no {what} is within " + " and ".join(f"{n}'s {b}" for n, b in asked)


def _edges(bounds: list[SpecifierSet]) -> list[Version]:
    found = [parse_version(str(item.version)) for bound in bounds for item in bound]
    return [item for item in found if item is not None]


def _around(version: Version) -> list[Version]:
    """Return versions just below, at and just above one: bounds change nowhere else."""
    release = list(version.release) + [0] * (3 - len(version.release))
    above = [*release[:-1], release[-1] + 1]
    wider = [release[0], release[1] + 1, 0]
    return [
        version,
        Version(".".join(map(str, above))),
        Version(".".join(map(str, wider))),
        Version(f"{version.base_version}.dev0"),
        Version(f"{release[0] + 1}.0.0"),
    ]


def _possible(bounds: list[SpecifierSet]) -> bool:
    tries = [Version("0"), *(near for edge in _edges(bounds) for near in _around(edge))]
    return any(all(item in bound for bound in bounds) for item in tries)


def _reaches(least: Version, bounds: list[SpecifierSet]) -> bool:
    tries = [least, *(near for edge in _edges(bounds) for near in _around(edge))]
    return any(item >= least and all(item in bound for bound in bounds) for item in tries)


def interface(case: Case) -> Judgement | None:
    """Tell an argument or name that the installed version's real signature lacks."""
    wanted = case.get("argument", "keyword", "attribute", "import_name", "kwarg")
    offered = case.get("signature", "parameters", "accepts", "available", "exports")
    if wanted is None or not isinstance(offered, list | tuple):
        return None
    there = wanted in offered
    reason = f"{wanted!r} is {'' if there else 'not '}among what the installed version takes"
    return Judgement("package_version_conflict", "pass" if there else "fail", reason)


def compiled_pair(case: Case) -> Judgement | None:
    """Hold compiled packages against the torch or NumPy that they were built for."""
    torch, vision = case.version("torch"), case.version("torchvision")
    if torch is not None and vision is not None:
        wanted = Version(f"0.{torch.minor + _TORCHVISION}") if torch.major == 2 else None  # noqa: PLR2004
        cuda = [re.search(r"\+(\w+)", str(case.get(name))) for name in ("torch", "torchvision")]
        locals_ = {found[1] for found in cuda if found}
        other = wanted is not None and (vision.major, vision.minor) != (0, wanted.minor)
        bad = other or len(locals_) > 1
        reason = f"torch {case.get('torch')}, torchvision {case.get('torchvision')}"
        return Judgement("compiled_package_mismatch", "fail" if bad else "pass", reason)
    header = case.number("header", "header_size", "expected_size", "c_header")
    runtime = case.number("runtime", "runtime_size", "got_size", "pyobject")
    if header is not None and runtime is not None and case.has("header", "header_size", "c_header"):
        reason = f"{header:g} bytes from the C header, {runtime:g} at run time"
        return Judgement(
            "compiled_package_mismatch", "fail" if header != runtime else "pass", reason
        )
    return _built_for(case) or _leaves_out(case)


def _leaves_out(case: Case) -> Judgement | None:
    """Tell xformers' note: it imports, and leaves its compiled extensions out."""
    for text in case.texts():
        if "was built for" in text and "you have" in text:
            reason = " ".join(text.split())[:200]
            return Judgement("compiled_package_mismatch", "warn", reason)
    return None


def _built_for(case: Case) -> Judgement | None:
    built = case.version("built_for_torch", "built_torch", "compiled_torch", "built_for")
    have = case.version("torch", "torch_version", "have_torch", "installed_torch")
    if built is None or have is None or case.has("flash_attn"):
        return None
    same = built.release[:2] == have.release[:2]
    reason = f"built for torch {built}, and {have} is installed"
    if same:
        return Judgement("compiled_package_mismatch", "pass", reason)
    imports = case.flag("imports", "import_ok", "imported")
    return Judgement("compiled_package_mismatch", "warn" if imports else "fail", reason)


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
    ran = case.flag("library_kernel_ok", "bnb_kernel_ok", "kernel_of_library_ok")
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
    cpu_only,
    requirements,
    interface,
    compiled_pair,
    library_architecture,
    libraries,
    glibc,
    toolchain,
)
