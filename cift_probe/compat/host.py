"""Kinds of host memory, pinned memory, shared memory and disk."""

from __future__ import annotations

from cift_probe.compat.case import Case, Judgement, gib

_GIB = 1 << 30
_SHM_LEAST = 1 * _GIB  # NVIDIA deep learning frameworks user guide: --shm-size=1g
_SHM_PER_WORKER = 128 << 20
_MIXED = 12.0  # bytes a parameter: fp32 master weights and two moments of AdamW
_PER_PARAMETER = {
    "adamw": 12.0,
    "adam": 12.0,
    "sgd": 4.0,
    "adafactor": 4.0,
    "lion": 8.0,
    "none": 2.0,
    "adamw_8bit": 6.0,
}


def host_memory(case: Case) -> Judgement | None:
    """Hold available host memory against the checkpoint, for every rank that loads it."""
    available = case.size("available", "mem_available", "host_available", "ram_available")
    swap = case.size("swap", "swap_free") or 0.0
    checkpoint = case.size("checkpoint", "model", "weights", "checkpoint_size")
    if available is None or checkpoint is None:
        return None
    ranks = case.number("ranks", "world_size", "num_ranks", "processes") or 1.0
    need = checkpoint * ranks * (2.0 if case.flag("fp32_load", "loads_fp32") else 1.0)
    reason = f"{gib(available + swap)} are available, loading takes {gib(need)}"
    return Judgement("host_oom_killer", "fail" if need > available + swap else "pass", reason)


def killed(case: Case) -> Judgement | None:
    """Read how a process ended: the kernel's kill, or the limit of a container."""
    code = case.number("exit_code", "returncode", "exit_status", "rc")
    number = case.number("signal", "killed_by_signal")
    kills = case.number("oom_kill", "oom_kills", "memory_events_oom_kill")
    if case.number("errno", "os_errno") == 12 and case.has("bytes", "size"):  # noqa: PLR2004 - ENOMEM
        return Judgement("host_oom_alloc", "fail", "a host allocation was refused (ENOMEM)")
    if kills:
        return Judgement("host_oom_cgroup", "fail", f"the memory cgroup counts {kills:g} kills")
    if code in {137.0, -9.0} or number == 9:  # noqa: PLR2004 - SIGKILL
        return Judgement("host_oom_killer", "fail", "the process was killed by SIGKILL")
    return None


def cgroup(case: Case) -> Judgement | None:
    """Take the limit of the container or job as the budget, not the host's memory."""
    levels = case.get("ancestry", "limits", "memory_max_ancestry")
    numbers = (
        [int(item) for item in levels if str(item).isdigit()] if isinstance(levels, list) else []
    )
    limit = (
        float(min(numbers))
        if numbers
        else case.size("memory_max", "cgroup_limit", "limit", "memory_limit", "slurm_mem")
    )
    used = case.size("memory_current", "cgroup_current", "current", "memory_usage")
    host = case.size("meminfo_available", "host_available", "mem_available", "available")
    if str(case.get("memory_max") or "").strip() == "max":
        return Judgement("host_oom_cgroup", "pass", "the cgroup has no limit")
    if limit is None or (used is None and host is None):
        return None
    budget = limit - (used or 0.0)
    need = case.size("needed", "need", "checkpoint", "required")
    reason = f"the limit leaves {gib(budget)}" + (
        f" of the host's {gib(host)}" if host is not None else ""
    )
    if need is not None:
        return Judgement("host_oom_cgroup", "fail" if need > budget else "pass", reason)
    tighter = host is None or budget < host
    return Judgement("host_oom_cgroup", "warn" if tighter else "pass", reason)


def pinned(case: Case) -> Judgement | None:
    """Hold the largest page-locked allocation that works against the need."""
    works = case.size(
        "pinned_ok", "pinned_max", "largest_pinned", "pinned", "pinned_limit", "memlock"
    )
    need = case.size("needed", "need", "offload", "required")
    if works is None or need is None:
        return None
    reason = f"{gib(works)} can be pinned, {gib(need)} are needed"
    return Judgement("pinned_memory_limit", "fail" if works < need else "pass", reason)


def shared(case: Case) -> Judgement | None:
    """Look at /dev/shm: writable at all, and large enough for workers and ranks."""
    total = case.size("total", "shm", "shm_size", "shm_total", "dev_shm")
    writable = case.flag("writable", "shm_writable")
    ranks = case.number("world_size", "ranks", "num_gpus") or 1.0
    workers = case.number("num_workers", "workers", "dataloader_workers") or 0.0
    about = case.has(
        "world_size",
        "num_workers",
        "workers",
        "dataloader_workers",
        "shm_size_mib",
        "shm_mib",
        "shm_gib",
        "writable",
        "shm_writable",
        "per_segment_bytes",
        "shm",
    )
    if not about or (total is None and writable is None):
        return None
    if writable is False:
        return Judgement("shm_not_writable", "fail", "/dev/shm may not be written")
    if total is None:
        return Judgement("shm_not_writable", "pass", "/dev/shm may be written")
    alone = ranks <= 1 and workers == 0
    need = max(_SHM_LEAST, (ranks + workers * ranks) * _SHM_PER_WORKER)
    segment = case.number("per_segment_bytes", "segment_bytes")
    if segment is not None:
        need = max(need, segment * ranks * ranks)
    reason = f"/dev/shm has {gib(total)}, {ranks:g} ranks and {workers:g} workers want {gib(need)}"
    return Judgement("shm_too_small", "fail" if total < need and not alone else "pass", reason)


def disk(case: Case) -> Judgement | None:
    """Hold free disk against one checkpoint more than are kept."""
    free = case.size("free", "disk_free", "free_disk")
    one = case.size("checkpoint", "checkpoint_size")
    parameters = case.number("params", "num_params", "parameters")
    if free is None or (one is None and parameters is None) or case.has("vocab", "seq"):
        return None
    if one is None:
        name = str(case.get("optimizer") or "none").lower()
        one = (parameters or 0.0) * (_PER_PARAMETER.get(name, _MIXED) + 2.0)
    kept = case.number("save_total_limit", "kept", "kept_checkpoints", "keep")
    need = one * (1 + (kept if kept is not None else 1))
    reason = (
        f"{gib(free)} are free, a checkpoint takes {gib(one)}, {gib(need)} with those that are kept"
    )
    return Judgement("disk_full", "fail" if free < need else "pass", reason)


JUDGES = (killed, pinned, cgroup, host_memory, shared, disk)
