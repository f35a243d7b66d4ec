"""Kinds of GPU memory that figures decide."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.version import Version

from cift_probe.compat.case import Case, Judgement, gib

_GIB = 1 << 30
_MIB = 1 << 20
_SLACK = 0.10  # of what is reserved: reference/kinds, "slack > 10 % at the peak"
_FAILED_SLACK = 0.05  # of what is allocated: below it, what is held and free is no cause
_CONTEXT = 2 * _GIB  # above any CUDA context: 0.14 to 0.8 GiB were measured
_LOGITS_RISK = 0.5 * _GIB  # one tensor of it, several of which live at the peak of a loss
_UPCAST_RISK = 0.25 * _GIB
_COLLAPSE = 3.0  # times: host memory is slower by the ratio of PCIe to device memory, 10 and more
_RENAMED = Version("2.10")  # PYTORCH_ALLOC_CONF: torch 2.10, docs/source/notes/cuda.rst
_OLD_NAME, _NEW_NAME = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
_SINCE = {
    "expandable_segments": "2.0",
    "garbage_collection_threshold": "1.12",
    "roundup_power2_divisions": "1.12",
}
_LACKING = ("jetson", "tegra", "vgpu", "grid", "virtual")


def out_of_memory(case: Case) -> Judgement | None:
    """Read a failed allocation from its figures, as the message would be read."""
    asked = case.size("tried", "requested", "tried_to_allocate", "request", "allocation")
    free = case.size("free", "device_free", "gpu_free")
    if asked is None or free is None or case.has("text"):
        return None
    allocated, reserved = case.size("allocated") or 0.0, case.size("reserved")
    total, other = (
        case.size("total", "capacity", "device_total"),
        case.size("other_processes", "others"),
    )
    cap = case.size("cap", "limit", "memory_limit", "per_process_limit")
    slack = max(0.0, reserved - allocated) if reserved is not None else 0.0
    if cap is not None and (total is None or cap < total):
        return Judgement("gpu_oom_capped", "fail", f"a cap of {gib(cap)} was the limit")
    if free >= asked:
        return Judgement(
            "gpu_oom_despite_free", "fail", f"{gib(free)} are free, {gib(asked)} were asked"
        )
    if total is not None:
        mine = case.size("process", "this_process") or max(reserved or 0.0, allocated)
        other = other if other is not None else total - free - mine
        if other > _CONTEXT and (free + other) >= asked and slack < asked:
            return Judgement(
                "gpu_oom_other_process", "fail", f"{gib(other)} are held by somebody else"
            )
    if free + slack >= asked and allocated and slack >= _FAILED_SLACK * allocated:
        return Judgement(
            "gpu_oom_fragmentation", "fail", f"{gib(slack)} are reserved and not allocated"
        )
    return Judgement("gpu_oom", "fail", f"{gib(free)} are free, {gib(asked)} were asked")


def fragmentation(case: Case) -> Judgement | None:
    """Hold what the allocator keeps and cannot use against what it reserved."""
    allocated, reserved = (
        case.size("allocated", "peak_allocated"),
        case.size("reserved", "peak_reserved"),
    )
    if (
        allocated is None
        or reserved is None
        or case.has("total", "total_gib", "total_mib", "tried", "tried_gib", "tried_mib")
    ):
        return None
    share = (reserved - allocated) / reserved if reserved else 0.0
    reason = f"{gib(reserved - allocated)} of {gib(reserved)} reserved are not allocated"
    return Judgement("gpu_oom_fragmentation", "warn" if share > _SLACK else "pass", reason)


def other_process(case: Case) -> Judgement | None:
    """Hold used memory against what the listed processes take."""
    used, listed = (
        case.size("used", "memory_used"),
        case.size("listed", "listed_processes", "processes"),
    )
    if used is None or listed is None:
        return None
    if case.flag("in_container") and not listed:
        reason = f"{gib(used)} are used, and a container does not see whose they are"
        return Judgement("gpu_oom_other_process", "unknown", reason)
    lost = used - listed
    reason = f"{gib(used)} are used, listed processes take {gib(listed)}"
    return Judgement("gpu_oom_other_process", "warn" if lost > _CONTEXT else "pass", reason)


def host_fallback(case: Case) -> Judgement | None:
    """Tell memory beyond the card's total, which Windows and WSL take from the host: slow."""
    allocated, total = case.size("allocated", "used"), case.size("total", "capacity")
    slower = _slower(case)
    system = str(case.get("os", "platform") or "").lower()
    if (
        slower is not None
        and slower >= _COLLAPSE
        and any(name in system for name in ("win", "wsl"))
    ):
        reason = f"{slower:.0f} times slower where memory is full, on {system}"
        return Judgement("sysmem_fallback", "warn", reason)
    if allocated is None or total is None:
        return None
    if allocated > total:
        return Judgement(
            "sysmem_fallback", "warn", f"{gib(allocated)} allocated on a card of {gib(total)}"
        )
    if not system and slower is None:
        return None
    return Judgement("sysmem_fallback", "pass", "what is allocated is on the card")


def _slower(case: Case) -> float | None:
    """Return by how much a step or a copy is slower once memory is full."""
    told = case.number("slowdown", "step_slowdown", "times_slower")
    before = case.number("step_s_before", "step_s_normal", "normal_step_s")
    after = case.number("step_s_after", "step_s_full", "slow_step_s")
    if told is None and before and after:
        told = after / before
    wide = case.number("copy_gbps_before", "bandwidth_before", "device_gbps")
    narrow = case.number("copy_gbps_after", "bandwidth_after", "copy_gbps")
    if told is None and wide and narrow:
        told = wide / narrow
    return told


def logits(case: Case) -> Judgement | None:
    """Weigh tensors of batch x sequence x vocabulary, of a loss or of kept evaluation outputs."""
    rows = case.number("batch", "batch_size", "rows", "eval_rows", "per_device_batch")
    length = case.number("seq", "sequence", "seq_len", "sequence_length", "tokens")
    vocabulary = case.number("vocab", "vocab_size", "vocabulary")
    if length is None or vocabulary is None or case.has("max_token_id", "hidden"):
        return None
    size = (rows or 1.0) * length * vocabulary * 4
    free = case.size("free", "available", "budget")
    happened = case.flag("oom", "happened", "ran_out_of_memory")
    reason = f"logits in float32 are {gib(size)}"
    if happened:
        return Judgement("gpu_oom_logits", "fail", reason)
    requested = case.size("requested", "tried")
    if requested is not None and requested >= size / 4:
        return Judgement("gpu_oom_logits", "fail", f"{reason}; {gib(requested)} were asked for")
    risky = size > free / 2 if free is not None else size >= _LOGITS_RISK
    return Judgement("gpu_oom_logits", "warn" if risky else "pass", reason)


def upcast(case: Case) -> Judgement | None:
    """Weigh the 16-bit tensors that preparing for k-bit training casts to float32."""
    before, after = case.size("before", "load"), case.size("after", "prepared")
    if before is not None and after is not None:
        reason = f"preparing adds {gib(after - before)}"
        risky = after - before >= _UPCAST_RISK
        return Judgement("kbit_upcast_memory", "warn" if risky else "pass", reason)
    vocabulary, hidden = case.number("vocab", "vocab_size"), case.number("hidden", "hidden_size")
    if vocabulary is None or hidden is None:
        return None
    tensors = 2 if case.flag("untied") or case.flag("tie_word_embeddings", "tied") is False else 1
    extra = tensors * vocabulary * hidden * 2
    reason = f"embeddings in float32 take {gib(extra)} more"
    return Judgement("kbit_upcast_memory", "warn" if extra >= _UPCAST_RISK else "pass", reason)


def capped(case: Case) -> Judgement | None:
    """Hold what is needed against a cap on this process."""
    total, need = case.size("total", "capacity"), case.size("needed", "need")
    share, cap = case.number("memory_fraction"), case.size("cap", "memory_limit")
    if cap is None and share is not None and total is not None:
        cap = share * total
    if cap is None or need is None or (total is not None and cap >= total):
        return None
    reason = f"a cap of {gib(cap)}, {gib(need)} are needed"
    return Judgement("gpu_oom_capped", "fail" if need > cap else "pass", reason)


def phases(case: Case) -> Judgement | None:
    """Hold the peak of each phase, and what is alive together, against the capacity."""
    total = case.size("total", "capacity", "device_total", "usable")
    alive = sum(_table(case, ("alive", "together", "alive_together", "models")).values())
    if alive and total is not None:
        reason = f"what is alive together takes {gib(alive)} of {gib(total)}"
        return Judgement("phase_peak_oom", "fail" if alive > total else "pass", reason)
    found = _phases(case)
    if not found:
        return None
    step = next(
        (found[name] for name in ("step", "train", "training", "train_step") if name in found), None
    )
    beyond = {name: size for name, size in found.items() if total is not None and size > total}
    if beyond and (step is None or total is None or step <= total):
        name, size = max(beyond.items(), key=lambda item: item[1])
        return Judgement("phase_peak_oom", "fail", f"{name} takes {gib(size)} of {gib(total or 0)}")
    load, prepare = found.get("load"), found.get("prepare", found.get("prepare_kbit"))
    if load is not None and prepare is not None:
        grown = prepare - load
        reason = f"preparing adds {gib(grown)}"
        return Judgement("kbit_upcast_memory", "warn" if grown >= _UPCAST_RISK else "pass", reason)
    if beyond:
        return Judgement("gpu_oom", "fail", "the step itself needs more than there is")
    if total is None:
        return Judgement("phase_peak_oom", "unknown", "the capacity is not told")
    return Judgement("phase_peak_oom", "pass", "every phase is within the capacity")


_PHASES = ("load", "prepare", "step", "train", "eval", "evaluation", "save", "merge", "generate")


def _phases(case: Case) -> dict[str, float]:
    """Return bytes by phase: a table with its unit in the name, or one field for each phase."""
    bases = ("reserved", "peaks", "phases", "phase_peaks", "peak", "allocated")
    table = _table(case, bases)
    if table:
        return table
    flat = {name: case.size(name, f"{name}_peak", f"peak_{name}") for name in _PHASES}
    found = {name: size for name, size in flat.items() if size is not None}
    return found if len(found) > 1 else {}


def _table(case: Case, bases: tuple[str, ...]) -> dict[str, float]:
    """Return bytes by name from the first table whose name ends in a unit; empty without one."""
    for unit, factor in (("mib", _MIB), ("gib", _GIB), ("bytes", 1), ("mb", 10**6), ("gb", 10**9)):
        rows = case.get(*(f"{base}_{unit}" for base in bases))
        if isinstance(rows, Mapping):
            told = {str(key): value for key, value in rows.items()}
            return {
                key: float(value) * factor
                for key, value in told.items()
                if isinstance(value, int | float)
            }
    return {}


def allocator_setting(case: Case) -> Judgement | None:
    """Tell a setting of the allocator that this torch or system does not heed."""
    settings = case.get("env", "environment", "alloc_conf")
    torch = case.version("torch", "torch_version")
    if isinstance(settings, str):
        name, equals, value = settings.partition("=")
        settings = {name: value} if equals else {_OLD_NAME: settings}
    named = (
        {k: v for k, v in (settings or {}).items() if k in {_OLD_NAME, _NEW_NAME}}
        if isinstance(settings, Mapping)
        else {}
    )
    system = str(case.get("os", "platform") or "").lower()
    wants = any(
        "expandable_segments:true" in str(value).lower().replace(" ", "")
        for value in named.values()
    )
    if not named and not (
        torch is not None and "windows" in system and case.has("cases", "expandable_segments")
    ):
        return None
    if "win" in system and "wsl" not in system and (wants or not named):
        return Judgement("alloc_conf_ignored", "fail", "expandable segments are not on Windows")
    if torch is None:
        return Judgement("alloc_conf_ignored", "unknown", "the version of torch is not told")
    if set(named) == {_NEW_NAME} and torch < _RENAMED:
        return Judgement("alloc_conf_ignored", "fail", f"torch {torch} reads {_OLD_NAME} alone")
    for text in named.values():
        for key, since in _SINCE.items():
            if key in str(text) and torch < Version(since):
                return Judgement("alloc_conf_ignored", "fail", f"{key} came with torch {since}")
    effect = case.get("in_effect", "effective_setting", "setting_in_effect")
    if effect is not None and not case.flag("in_effect", "effective_setting", "setting_in_effect"):
        return Judgement("alloc_conf_ignored", "fail", "the setting in effect is another")
    return Judgement("alloc_conf_ignored", "pass", f"torch {torch} heeds {', '.join(named)}")


def _asks_to_grow(case: Case) -> bool:
    text = str(case.get("env", "environment", "alloc_conf") or "").lower().replace(" ", "")
    return "expandable_segments:true" in text


def expandable(case: Case) -> Judgement | None:
    """Tell expandable segments where the driver lacks virtual memory management."""
    on = case.flag("expandable_segments")
    if on is None and _asks_to_grow(case):
        on = True
    vmm = case.flag(
        "vmm_supported",
        "attr_vmm",
        "vmm_attr",
        "vmm_attribute",
        "virtual_memory_management_supported",
        "vmm",
        "virtual_memory_management",
        "cu_vmm",
        "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    )
    works = case.flag("alloc_ok", "allocation_ok", "allocates", "expandable_alloc_ok")
    place = " ".join(
        str(case.get(n) or "") for n in ("platform", "virtualization", "gpu", "name", "os")
    ).lower()
    lacking = any(word in place for word in _LACKING)
    tried = vmm is not None or works is not None
    if on is None or not (tried or lacking or case.has("expandable_segments")):
        return None
    if not on:
        return Judgement("expandable_segments_unsupported", "pass", "expandable segments are off")
    if vmm is False or works is False or (lacking and not vmm and not works):
        return Judgement(
            "expandable_segments_unsupported", "fail", "the driver cannot grow segments here"
        )
    if vmm is None and works is None:
        risky = any(word in place for word in _LACKING)
        return Judgement(
            "expandable_segments_unsupported",
            "warn" if risky else "unknown",
            "no allocation was tried",
        )
    return Judgement("expandable_segments_unsupported", "pass", "an allocation works")


def token_ids(case: Case) -> Judgement | None:
    """Hold the largest token id against the vocabulary before blaming memory for cuBLAS."""
    largest, vocabulary = (
        case.number("max_token_id", "largest_token_id", "max_input_id"),
        case.number("vocab", "vocab_size", "num_embeddings", "embedding_rows"),
    )
    if largest is None or vocabulary is None:
        return None
    if largest >= vocabulary:
        return Judgement(
            "cublas_alloc_failed", "fail", f"token id {largest:g} is outside {vocabulary:g}"
        )
    free = case.size("free", "device_free")
    if free is not None and free < 64 * _MIB:
        return Judgement(
            "cublas_alloc_failed", "fail", f"{gib(free)} are free for cuBLAS's workspace"
        )
    return Judgement("cublas_alloc_failed", "pass", "every token id is in the vocabulary")


JUDGES = (
    token_ids,
    capped,
    out_of_memory,
    phases,
    upcast,
    logits,
    fragmentation,
    other_process,
    host_fallback,
    allocator_setting,
    expandable,
)
