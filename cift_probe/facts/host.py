"""What the operating system says of the host: system, processor, memory, container.

Every reader takes the root of the file system, so that a recorded tree stands in for a machine.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.facts import cgroup

_ROOT = Path("/")
_MEMINFO = "/proc/meminfo"
_PROBE_BYTES = 4096  # one page: an empty file would be made even on a full /dev/shm
# Kernel string that gVisor shows to every sandbox (pkg/sentry/syscalls/linux/sys_utsname.go)
_GVISOR = "#1 SMP Sun Jan 10 15:06:54 PST 2016"
# words in the path of a control group, and the manager that puts them there
_GROUP_WORDS = (
    ("kubepods", "kubernetes"),
    ("docker", "docker"),
    ("libpod", "podman"),
    ("containerd", "containerd"),
    ("lxc", "lxc"),
)


def parse_meminfo(text: str) -> dict[str, int]:
    """Return the sizes of /proc/meminfo in bytes, by name; lines of another form are skipped."""
    rows = re.findall(r"^(\S+):\s+(\d+) kB\s*$", text, re.MULTILINE)
    return {name: int(number) * 1024 for name, number in rows}


def parse_cpuinfo(text: str) -> dict[str, str | int]:
    """Return what /proc/cpuinfo tells: "model", "num_logical", "num_physical"; each may lack."""
    blocks = [
        dict(re.findall(r"^([^\t:]+)\s*:[ \t]*(.*)$", block, re.MULTILINE))
        for block in text.split("\n\n")
    ]
    blocks = [{k.strip(): v.strip() for k, v in block.items()} for block in blocks]
    threads = [block for block in blocks if block.get("processor", "").isdecimal()]
    found: dict[str, str | int] = {}
    if threads:
        found["num_logical"] = len(threads)
        cores = {(b.get("physical id"), b.get("core id")) for b in threads}
        if all(None not in pair for pair in cores):
            found["num_physical"] = len(cores)
    names = (next((b[k] for b in blocks if b.get(k)), "") for k in ("model name", "Model"))
    implementer, part = (
        next((b[k] for b in threads if b.get(k)), "") for k in ("CPU implementer", "CPU part")
    )
    arm = f"Arm implementer {implementer}, part {part}" if implementer and part else ""
    model = next(filter(None, (*names, arm)), "")
    return found | ({"model": model} if model else {})


def parse_os_release(text: str) -> str:
    """Return the name of the distribution from /etc/os-release; empty when it has none."""
    match = re.search(r"^PRETTY_NAME=(\"?)(.+?)\1\s*$", text, re.MULTILINE)
    return match[2] if match else ""


def parse_wsl(version: str) -> bool:
    """Tell from /proc/version whether the kernel is the one of Windows' subsystem for Linux."""
    return "microsoft" in version.lower()


def parse_container(files: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Return the kind of container, empty for none, from the texts of some files and variables.

    `files` has the texts of those that exist among /.dockerenv, /run/.containerenv,
    /proc/self/cgroup and /proc/version.
    """
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    if "APPTAINER_CONTAINER" in environment or "SINGULARITY_CONTAINER" in environment:
        return "apptainer"
    groups = [
        member.path for member in cgroup.parse_memberships(files.get("/proc/self/cgroup", ""))
    ]
    for word, name in _GROUP_WORDS:
        if any(word in path for path in groups):
            return name
    for path, name in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if path in files:
            return name
    if _GVISOR in files.get("/proc/version", ""):
        return "gvisor"
    return environment.get("container", "")  # systemd's convention, kept by nspawn and lxc


def read_host(root: Path = _ROOT) -> dict[str, Evidence]:
    """Return everything about the host, by name; "B" for sizes, "1" for counts."""
    return {
        **_read_system(root),
        **_read_processor(root),
        **read_memory(root),
        **read_shared_memory(root / "dev/shm"),
    }


def read_memory(root: Path = _ROOT) -> dict[str, Evidence]:
    """Return host memory, and what of it this process may still take, in bytes.

    Available is the smallest of MemAvailable and, for every group above this process, its limit
    less its use, where page cache that the kernel would drop does not count as used.
    """
    told = read_meminfo(root)
    levels = cgroup.read_memory_levels(root)
    return {
        "host.memory.total": _size(told, "MemTotal"),
        "host.memory.available": _available(_size(told, "MemAvailable"), levels),
        "host.memory.limit": cgroup.read_memory_limit(levels),
        "host.swap.total": _size(told, "SwapTotal"),
    }


def read_meminfo(root: Path = _ROOT) -> dict[str, int]:
    """Return the sizes of /proc/meminfo in bytes; on a system without it, psutil's."""
    text = _text(root, "proc/meminfo")
    if text is not None or root != _ROOT:
        return parse_meminfo(text or "")
    memory = psutil.virtual_memory()
    return {
        "MemTotal": memory.total,
        "MemAvailable": memory.available,
        "SwapTotal": psutil.swap_memory().total,
    }


def read_shared_memory(folder: Path) -> dict[str, Evidence]:
    """Return size and free room of /dev/shm in bytes, and whether a file can be made there."""
    names = ("host.shm.size", "host.shm.free", "host.shm.writable")
    if not folder.exists():
        if sys.platform != "linux":
            return dict.fromkeys(names, absent(f"{sys.platform} has no /dev/shm", "stat"))
        note = f"{folder} does not exist"
        values: tuple[tuple[int | bool, str], ...] = ((0, "B"), (0, "B"), (False, ""))
        pairs = zip(names, values, strict=True)
        return {k: Known(value, unit, "stat", note=note) for k, (value, unit) in pairs}
    source = f"statvfs {folder}"
    found: dict[str, Evidence] = {"host.shm.writable": _read_writable(folder)}
    try:
        told = os.statvfs(folder)
    except OSError as error:
        return found | dict.fromkeys(names[:2], Unknown(f"{folder}: {error.strerror}", source))
    return found | {
        "host.shm.size": Known(told.f_blocks * told.f_frsize, "B", source),
        "host.shm.free": Known(told.f_bavail * told.f_frsize, "B", source),
    }


def _read_writable(folder: Path) -> Evidence:
    source = f"a file created in {folder} and removed"
    try:
        # Named: a file without a name (O_TMPFILE) is not what shm_open makes
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"\0" * _PROBE_BYTES)
            file.flush()
    except OSError as error:
        return Known(value=False, source=source, note=f"{error.strerror}")
    return Known(value=True, source=source)


def _read_system(root: Path) -> dict[str, Evidence]:
    version = _text(root, "proc/version")
    release = _text(root, "proc/sys/kernel/osrelease")
    name = parse_os_release(_text(root, "etc/os-release") or "")
    return {
        "host.os": Known(name or platform.platform(), source="/etc/os-release"),
        "host.kernel": Known((release or platform.release()).strip(), source="uname"),
        "host.python.version": Known(platform.python_version(), "version", sys.executable),
        "host.wsl": Known(parse_wsl(version or ""), source="/proc/version"),
        "host.container": _read_container(root),
    }


def _read_container(root: Path) -> Evidence:
    paths = ("/.dockerenv", "/run/.containerenv", "/proc/self/cgroup", "/proc/version")
    texts = {path: _text(root, path.lstrip("/")) for path in paths}
    files = {path: text for path, text in texts.items() if text is not None}
    source = f"{', '.join(paths)} and the environment"
    name = parse_container(files, os.environ if root == _ROOT else {})
    return Known(name, source=source) if name else absent("not in a container", source)


def _read_processor(root: Path) -> dict[str, Evidence]:
    source = "/proc/cpuinfo"
    told = parse_cpuinfo(_text(root, "proc/cpuinfo") or "")
    if root == _ROOT:
        told.setdefault("model", platform.processor())
        told.setdefault("num_physical", psutil.cpu_count(logical=False) or 0)
        told.setdefault("num_logical", os.cpu_count() or 0)
    missing = Unknown("the system does not tell", source)
    return {
        "host.cpu.model": Known(told["model"], source=source) if told.get("model") else missing,
        **{
            f"host.cpu.{name}": Known(told[name], "1", source) if told.get(name) else missing
            for name in ("num_physical", "num_logical")
        },
        "host.cpu.num_usable": _read_usable(root, int(told.get("num_logical", 0))),
    }


def _read_usable(root: Path, num_logical: int) -> Evidence:
    quota = cgroup.read_cpu_quota(root)
    if isinstance(quota, Unknown):
        return quota
    affine = num_logical
    if root == _ROOT and hasattr(os, "sched_getaffinity"):
        affine = len(os.sched_getaffinity(0))
    if not affine:
        return Unknown("the number of processors is not told", "sched_getaffinity")
    if quota is not None and quota < affine:
        return Known(quota, "1", "cgroup", note=f"quota of a cgroup; {affine} by affinity")
    return Known(affine, "1", "sched_getaffinity")


def _available(host: Evidence, levels: list[cgroup.Level] | Unknown) -> Evidence:
    if isinstance(levels, Unknown) or isinstance(host, Unknown):
        return levels if isinstance(levels, Unknown) else host
    best = host
    for level in levels:
        if level.left is None:
            reason = f"{level.folder} limits memory, but does not tell how much is in use"
            return Unknown(reason, "cgroup")
        if level.left < best.value:
            note = f"limit {level.limit} B of a cgroup, less what it uses; host {host.value} B"
            best = Known(level.left, "B", str(level.folder), note=note)
    return best


def _size(told: Mapping[str, int], name: str) -> Evidence:
    if name not in told:
        return Unknown(f"there is no {name}", _MEMINFO)
    return Known(told[name], "B", f"{_MEMINFO} {name}")


def _text(root: Path, path: str) -> str | None:
    try:
        return (root / path).read_text(errors="replace")
    except OSError:
        return None
