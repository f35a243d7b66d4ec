"""Kinds of bitsandbytes, managed memory, FlashAttention and Triton."""

from __future__ import annotations

import re
from collections.abc import Mapping

from packaging.version import Version

from cift_probe.compat.case import Capability, Case, Judgement, parse_version

# oldest ptxas that knows an architecture: PTX ISA, "Release Notes", by CUDA release
_PTXAS: Mapping[Capability, str] = {
    (7, 5): "10.0",
    (8, 0): "11.0",
    (8, 6): "11.1",
    (8, 7): "11.4",
    (8, 9): "11.8",
    (9, 0): "11.8",
    (10, 0): "12.8",
    (10, 1): "12.8",
    (12, 0): "12.8",
    (10, 3): "12.9",
    (12, 1): "12.9",
    (11, 0): "13.0",
}
_TRITON_LEAST = (
    7,
    0,
)  # triton README, "Compatibility": NVIDIA GPUs of capability 8.0; 7.0 before 3.3
_FLASH_LEAST = {1: (7, 5), 2: (8, 0), 3: (9, 0)}  # Dao-AILab/flash-attention README
_FLASH_HEAD = 256  # as above, "head dim up to 256"
# backward of heads above 192 needed an A100 or H100 before 2.5.5 (README)
_WIDE_HEAD, _WIDE_FROM = 192, Version("2.5.5")
# what a model asks for, and the release that brought it (README, Changelog)
_SINCE = {
    "sliding_window": Version("2.3.0"),
    "alibi": Version("2.4.0"),
    "softcap": Version("2.6.0"),
}
_WIDE_CARDS = frozenset({(8, 0), (9, 0)})
_ON_CHIP = 1 << 20  # bytes: no device has as much shared memory in a multiprocessor


def bnb_binary(case: Case) -> Judgement | None:
    """Tell whether the imported bitsandbytes has a library for this CUDA beside it."""
    present = case.get("present", "binaries", "libraries_present", "bnb_binaries")
    inside = case.flag("in_site_packages")
    wanted = case.get("bnb_cuda_version", "BNB_CUDA_VERSION") or case.get("torch_cuda")
    if not case.has("present", "binaries", "bnb_binaries", "libraries_present", "module_dir"):
        return None
    digits = re.sub(r"\D", "", str(wanted or ""))
    names = [str(name) for name in present] if isinstance(present, list | tuple) else []
    fitting = [name for name in names if digits and re.search(rf"cuda{digits}(?:\D|$)", name)]
    if fitting:
        return Judgement("bnb_binary_missing", "pass", f"{fitting[0]} is there")
    where = (
        "" if inside is not False else f"; imported from {case.get('module_dir')}, a source tree"
    )
    have = ", ".join(names) or "none"
    if not digits and names:
        return Judgement("bnb_binary_missing", "unknown", "the CUDA of torch is not told")
    return Judgement(
        "bnb_binary_missing", "fail", f"no library for CUDA {wanted}; there are {have}{where}"
    )


def bnb_platform(case: Case) -> Judgement | None:
    """Hold the platform of a native wheel against the machine's, or a kernel after import."""
    wheel = case.get(
        "wheel_platform", "wheel_machine", "binary_platform", "library_platform", "built_platform"
    )
    machine = case.get("machine", "platform", "machine_platform")
    if wheel is not None and machine is not None:
        same = _flavour(str(wheel)) == _flavour(str(machine))
        reason = f"built for {wheel}, the machine is {machine}"
        return Judgement("bnb_platform_mismatch", "pass" if same else "fail", reason)
    imports, ran = (
        case.flag("import_ok", "imports"),
        case.flag("bnb_kernel", "quantize_ok", "real_kernel_ok", "kernel_ok", "kernel_runs"),
    )
    if imports and ran is False and case.flag("arch_ok", "arch_listed") is not False:
        return Judgement("bnb_platform_mismatch", "fail", "the import succeeds, a kernel does not")
    return None


def _flavour(text: str) -> tuple[str, str]:
    low = text.lower()
    arm = any(word in low for word in ("aarch64", "arm64", "tegra", "jetson", "sbsa"))
    kind = "tegra" if any(word in low for word in ("tegra", "jetson", "l4t")) else ""
    kind = kind or ("sbsa" if "sbsa" in low else "")
    for system in ("win", "macos", "darwin"):
        if system in low:
            kind = system
    return ("arm" if arm else "x86", kind)


def managed_memory(case: Case) -> Judgement | None:
    """Read a managed allocation of the size needed, which paged optimizers make."""
    works = case.flag(
        "managed_alloc_ok",
        "managed_ok",
        "managed_memory_ok",
        "cudaMallocManaged_ok",
        "managed_memory",
    )
    bounded = case.size("managed_limit") is not None
    told = case.has("managed_alloc_ok", "managed_memory_ok", "managed_ok") or bounded
    if works is None and not told:
        supported = case.flag("concurrent_managed_access", "managed_supported", "managedMemory")
        if supported is None:
            return None
        works = supported
    limit, need = (
        case.size("managed_ok", "managed_limit", "managed_max"),
        case.size("needed", "need"),
    )
    if limit is not None and need is not None:
        works = limit >= need
    if works is None:
        return Judgement("managed_memory_unavailable", "unknown", "no managed allocation was tried")
    reason = "a managed allocation " + ("works" if works else "is refused")
    return Judgement("managed_memory_unavailable", "pass" if works else "fail", reason)


def flash_attention_build(case: Case) -> Judgement | None:
    """Hold FlashAttention's binary against torch: version, C++ ABI, undefined symbol."""
    symbol = case.get("symbol", "undefined_symbol", "missing_symbol")
    abi, built_abi = (
        case.flag("torch_cxx11_abi", "cxx11_abi"),
        case.flag("wheel_cxx11_abi", "fa_cxx11_abi", "built_cxx11_abi"),
    )
    torch = case.version("torch", "torch_version")
    tag = re.search(
        r"torch(\d+\.\d+).*?(?:cxx11abi(TRUE|FALSE))?",
        str(case.get("wheel", "fa_wheel", "flash_attn_wheel") or ""),
    )
    built = case.version("wheel_torch", "fa_torch", "built_torch", "flash_attn_built_torch")
    built = built or (parse_version(tag[1]) if tag else None)
    named = re.search(
        r"cxx11abi(TRUE|FALSE)",
        str(case.get("wheel", "fa_wheel", "flash_attn_wheel") or ""),
        re.IGNORECASE,
    )
    if built_abi is None and named:
        built_abi = named[1].upper() == "TRUE"
    wheel = str(case.get("wheel", "fa_wheel", "flash_attn_wheel") or "")
    about = (
        "flash" in wheel
        or "flash" in str(case.get("library") or "")
        or case.has(
            "flash_attn",
            "wheel_cxx11_abi",
            "fa_wheel",
            "flash_attn_wheel",
            "wheel_torch",
            "fa_torch",
        )
    )
    if symbol is None and not about:
        return None
    if abi is not None and built_abi is not None and abi != built_abi:
        return Judgement(
            "flash_attn_abi_mismatch", "fail", f"C++ ABI: torch {abi}, wheel {built_abi}"
        )
    if built is not None and torch is not None and built.release[:2] != torch.release[:2]:
        return Judgement(
            "flash_attn_abi_mismatch", "fail", f"built for torch {built}, {torch} is there"
        )
    if symbol:
        return Judgement("flash_attn_abi_mismatch", "fail", f"undefined symbol {symbol}")
    if built is None and built_abi is None and not case.has("symbol", "undefined_symbol"):
        return None
    return Judgement("flash_attn_abi_mismatch", "pass", "built for this torch and ABI")


def flash_attention_device(case: Case) -> Judgement | None:
    """Hold capability and model shape against the limits of the installed FlashAttention."""
    version = case.version("flash_attn", "flash_attn_version", "fa_version")
    asked = str(case.get("attention", "attn_implementation", "requested_attention") or "")
    capability, head = case.capability(), case.number("head_dim", "head_size", "headdim")
    forward, backward = case.flag("forward_ok", "fwd_ok"), case.flag("backward_ok", "bwd_ok")
    if version is None and "flash" not in asked and head is None:
        return None
    if forward is False or backward is False:
        which = "forward" if forward is False else "backward"
        return Judgement("flash_attn_unsupported", "fail", f"its {which} pass does not run here")
    if capability is None or (version is None and "flash" not in asked):
        return None
    major = version.major if version is not None else (3 if "3" in asked else 2)
    least = _FLASH_LEAST.get(major, (8, 0))
    text = f"{capability[0]}.{capability[1]}"
    if capability < least:
        reason = f"FlashAttention {major} begins at {least[0]}.{least[1]}, the device is {text}"
        return Judgement("flash_attn_unsupported", "fail", reason)
    if head is not None and head > _FLASH_HEAD:
        return Judgement(
            "flash_attn_unsupported", "fail", f"head size {head:g} is above {_FLASH_HEAD}"
        )
    old = version is not None and version < _WIDE_FROM
    if head is not None and head > _WIDE_HEAD and old and capability not in _WIDE_CARDS:
        reason = f"the backward pass of head size {head:g} needs an A100 or H100 before 2.5.5"
        return Judgement("flash_attn_unsupported", "fail", reason)
    if str(case.get("dtype") or "") in {"float32", "fp32"}:
        return Judgement("flash_attn_unsupported", "fail", "it takes 16-bit types alone")
    for name, since in _SINCE.items():
        if case.flag(name) and version is not None and version < since:
            reason = f"{name} came with {since}, {version} is installed"
            return Judgement("flash_attn_unsupported", "fail", reason)
    return Judgement("flash_attn_unsupported", "pass", f"within its limits on capability {text}")


def packing(case: Case) -> Judgement | None:
    """Tell packed or padding-free batches whose attention does not separate the rows."""
    packed = case.flag("packing", "packed", "padding_free", "padding_free_batches")
    effective = case.get(
        "effective", "effective_attention", "attn_in_effect", "attn_implementation"
    )
    if packed is None:
        return None
    if not packed:
        return Judgement("packing_without_varlen_attention", "pass", "rows are not packed")
    separates = effective is not None and any(
        w in str(effective).lower() for w in ("flash", "flex", "varlen")
    )
    if effective is None:
        reason = "rows are packed, and the attention in effect is not told"
        return Judgement("packing_without_varlen_attention", "unknown", reason)
    masks = case.flag("block_diagonal_mask", "position_ids_mask", "separates_sequences")
    reason = f"packed rows, and the attention in effect is {effective}"
    sound = separates or masks
    return Judgement("packing_without_varlen_attention", "pass" if sound else "fail", reason)


def ptxas(case: Case) -> Judgement | None:
    """Hold Triton's assembler against the architecture."""
    bundled = case.version("bundled_ptxas", "ptxas", "ptxas_version", "triton_ptxas")
    capability = case.capability()
    if bundled is None or capability is None:
        return None
    least = Version(_PTXAS.get(capability, "0"))
    if capability not in _PTXAS and capability > (12, 1):
        return Judgement("triton_ptxas_too_old", "unknown", "no row for this architecture")
    used = case.version("triton_ptxas_path_version", "used_ptxas") or bundled
    reason = f"ptxas {used}, sm_{capability[0]}{capability[1]} needs {least}"
    return Judgement("triton_ptxas_too_old", "fail" if used < least else "pass", reason)


def triton_device(case: Case) -> Judgement | None:
    """Hold the capability against the least that Triton compiles for."""
    version, capability = case.version("triton", "triton_version"), case.capability()
    compiled = case.flag("triton_compiles", "compiles_kernel", "triton_ok")
    if capability is None or (version is None and compiled is None and not case.has("triton")):
        return None
    if case.has("bundled_ptxas", "ptxas"):
        return None
    text = f"capability {capability[0]}.{capability[1]}"
    if capability < _TRITON_LEAST:
        return Judgement(
            "triton_gpu_too_old", "fail", f"Triton begins at 7.0, the device has {text}"
        )
    if compiled is False:
        return None
    return Judgement("triton_gpu_too_old", "pass", text)


def shared_memory(case: Case) -> Judgement | None:
    """Hold what a kernel needs of on-chip memory against what the device has."""
    need = case.size(
        "required_shared", "shared_required", "shared_memory_required", "shared", "required"
    )
    limit = case.size("shared_limit", "shared_memory_limit", "hardware_limit", "limit")
    if need is None or limit is None or max(need, limit) > _ON_CHIP:
        return None
    reason = f"{need:g} bytes of shared memory, the device has {limit:g}"
    return Judgement("triton_shared_memory", "fail" if need > limit else "pass", reason)


JUDGES = (
    bnb_binary,
    bnb_platform,
    managed_memory,
    flash_attention_build,
    flash_attention_device,
    packing,
    ptxas,
    shared_memory,
    triton_device,
)
