"""What the control groups of this process allow it: memory, processor time, processes.

A container, a batch job or a systemd slice is limited by its own group and by every group above
it, in cgroup v2 (memory.max), v1 (memory.limit_in_bytes) or both at once. /proc/meminfo and psutil
show the host instead, and beyond the group's limit the kernel kills.
Source: the kernel's admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cift_probe.evidence import Evidence, Known, Unknown, absent

_NO_LIMIT = 1 << 60  # v1 writes "no limit" as the largest multiple of the page size, about 2^63


class Membership(NamedTuple):
    """One line of /proc/self/cgroup; v2 is the line without controllers."""

    controllers: frozenset[str]
    path: str


class Mount(NamedTuple):
    """A mounted cgroup file system; `root` is the group that stands at the mount point."""

    version: int
    controllers: frozenset[str]
    root: str
    point: str


class _Names(NamedTuple):
    limit: str
    usage: str
    reclaimable: str  # in memory.stat: page cache that the kernel drops before it kills


_MEMORY = {
    1: _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Names("memory.max", "memory.current", "inactive_file"),
}


class Level(NamedTuple):
    """One group on the way up that limits memory; bytes. `left` is None when usage is not told."""

    folder: Path
    limit: int
    left: int | None


def parse_memberships(text: str) -> list[Membership]:
    """Read /proc/self/cgroup; lines of another form are skipped."""
    found = []
    for line in text.splitlines():
        _, colon, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if colon and second and path.startswith("/"):
            names = frozenset(filter(None, controllers.split(",")))
            found.append(Membership(names, path.removesuffix(" (deleted)")))
    return found


def parse_mounts(text: str) -> list[Mount]:
    """Read the cgroup mounts out of /proc/self/mountinfo (proc(5)); other lines are skipped."""
    found = []
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if not dash or len(before) < 5 or len(after) < 3:  # noqa: PLR2004 - fields of proc(5)
            continue
        root, point = (_unescape(part) for part in before[3:5])
        if after[0] == "cgroup2":
            found.append(Mount(2, frozenset(), root, point))
        elif after[0] == "cgroup":
            found.append(Mount(1, frozenset(after[2].split(",")), root, point))
    return found


def parse_limit(text: str) -> int | None:
    """Read memory.max or memory.limit_in_bytes: bytes, or None for "no limit".

    Raises ValueError when it is neither.
    """
    if text.strip() == "max":
        return None
    value = int(text)
    if value < 0:
        message = f"a limit cannot be negative: {value}"
        raise ValueError(message)
    return None if value >= _NO_LIMIT else value


def parse_quota(text: str) -> float | None:
    """Read "quota period" in microseconds (cpu.max, or the two files of v1): CPUs, or None.

    Raises ValueError when it is not two such numbers.
    """
    quota, period = text.split()
    if quota == "max" or int(quota) < 0:
        return None
    if int(period) <= 0:
        message = f"a period must be positive: {period}"
        raise ValueError(message)
    return int(quota) / int(period)


def parse_stat(text: str, name: str) -> int:
    """Return one number of a memory.stat file; raises ValueError when it is not there."""
    match = re.search(rf"^{re.escape(name)} (\d+)$", text, re.MULTILINE)
    if match is None:
        message = f"memory.stat has no {name}"
        raise ValueError(message)
    return int(match[1])


def read_memory_levels(root: Path = Path("/")) -> list[Level] | Unknown:
    """Return every group above this process that limits memory, the nearest first.

    Unknown when a limit may exist and cannot be read: a controller whose files are not mounted
    here, or a file that holds no number.
    """
    levels = []
    folders = _folders(root, "memory")
    if isinstance(folders, Unknown):
        return folders
    for version, folder in folders:
        names = _MEMORY[version]
        try:
            limit = parse_limit((folder / names.limit).read_text())
            if version == 1:
                limit = _hierarchical(folder, limit)
        except FileNotFoundError:
            continue  # the root group, or the controller is not enabled at this level
        except (OSError, ValueError) as error:
            return Unknown(f"{folder / names.limit}: {error}", "cgroup")
        if limit is not None:
            levels.append(Level(folder, limit, _left(folder, names, limit)))
    return levels


def read_memory_limit(levels: list[Level] | Unknown) -> Evidence:
    """Return the smallest limit, in bytes; absent where no group limits memory."""
    if isinstance(levels, Unknown):
        return levels
    if not levels:
        return absent("no cgroup limits memory", "/proc/self/cgroup and the groups above")
    least = min(levels, key=lambda level: level.limit)
    return Known(least.limit, "B", str(least.folder))


def read_cpu_quota(root: Path = Path("/")) -> float | Unknown | None:
    """Return the smallest CPU quota above this process, in CPUs; None where there is none."""
    folders = _folders(root, "cpu")
    if isinstance(folders, Unknown):
        return folders
    quotas = []
    for version, folder in folders:
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")  # noqa: PLR2004 - cgroup v2
        try:
            quotas.append(parse_quota(" ".join((folder / name).read_text() for name in files)))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            return Unknown(f"{folder / files[0]}: {error}", "cgroup")
    return min((quota for quota in quotas if quota is not None), default=None)


def read_pids_left(root: Path = Path("/")) -> Evidence:
    """Return how many more tasks, threads included, the groups allow; absent without a limit."""
    folders = _folders(root, "pids")
    if isinstance(folders, Unknown):
        return folders
    least: tuple[int, Path] | None = None
    for _, folder in folders:
        try:
            limit = parse_limit((folder / "pids.max").read_text())
            used = int((folder / "pids.current").read_text()) if limit is not None else 0
        except FileNotFoundError:
            continue  # the root group, or the controller is not enabled at this level
        except (OSError, ValueError) as error:
            return Unknown(f"{folder / 'pids.max'}: {error}", "cgroup")
        if limit is not None and (least is None or limit - used < least[0]):
            least = limit - used, folder
    if least is None:
        return absent("no cgroup limits processes", "/proc/self/cgroup and the groups above")
    return Known(max(0, least[0]), "1", str(least[1]))


def _hierarchical(folder: Path, own: int | None) -> int | None:
    """Return the smaller of a v1 group's limit and that of groups above it, seen or not."""
    try:
        stat = (folder / "memory.stat").read_text()
        above = parse_limit(str(parse_stat(stat, "hierarchical_memory_limit")))
    except (OSError, ValueError):
        return own  # told by kernels that account by hierarchy; the own limit stands without it
    told = [limit for limit in (own, above) if limit is not None]
    return min(told, default=None)


def _left(folder: Path, names: _Names, limit: int) -> int | None:
    try:
        used = int((folder / names.usage).read_text())
    except (OSError, ValueError):
        return None
    try:
        reclaimable = parse_stat((folder / "memory.stat").read_text(), names.reclaimable)
    except (OSError, ValueError):
        reclaimable = 0  # to count no page cache as free errs on the safe side
    return max(0, limit - max(0, used - reclaimable))


def _folders(root: Path, controller: str) -> list[tuple[int, Path]] | Unknown:
    """Return (version, folder) of every group from this process up to the mount points."""
    try:
        text = (root / "proc/self/cgroup").read_text()
    except FileNotFoundError:
        return []  # a kernel without control groups cannot limit by them
    except (OSError, ValueError) as error:
        return Unknown(f"/proc/self/cgroup cannot be read: {error}", "cgroup")
    memberships = parse_memberships(text)
    if text.strip() and not memberships:
        return Unknown("/proc/self/cgroup holds no line of the form id:controllers:path", "cgroup")
    try:
        mounts = parse_mounts((root / "proc/self/mountinfo").read_text())
    except OSError as error:
        return Unknown(f"/proc/self/mountinfo: {error.strerror}", "cgroup")
    found: list[tuple[int, Path]] = []
    for member in memberships:
        version = 1 if member.controllers else 2
        if version == 1 and controller not in member.controllers:
            continue
        here = [m for m in mounts if m.version == version]
        mount = next((m for m in here if version == 2 or controller in m.controllers), None)  # noqa: PLR2004 - cgroup v2
        if mount is not None:
            found += [(version, folder) for folder in _ancestry(root, mount, member.path)]
        elif not _controlled_elsewhere(memberships, version, controller):
            reason = f"this process is in the group {member.path}, whose files are not mounted here"
            return Unknown(f"{reason}; its {controller} limits cannot be read", "cgroup")
    return found


def _controlled_elsewhere(memberships: list[Membership], version: int, controller: str) -> bool:
    # A controller belongs to one hierarchy: where v1 has it, v2 cannot limit by it.
    return version == 2 and any(controller in m.controllers for m in memberships)  # noqa: PLR2004 - cgroup v2


def _ancestry(root: Path, mount: Mount, path: str) -> Iterator[Path]:
    """Yield the folders of a group and of the groups above it, down to the mount point.

    In a container the mount's root is the container's own group, seen with or without a cgroup
    namespace: `path` begins with that root, or points outside of what is mounted ("/../.."), and
    then the mount point is the nearest group there is.
    """
    point = root / mount.point.lstrip("/")
    base = mount.root.rstrip("/")
    inside = path == base or path.startswith(f"{base}/")
    parts = [part for part in path[len(base) :].split("/") if part] if inside else []
    if ".." in parts:
        parts = []
    for length in range(len(parts), -1, -1):
        yield point.joinpath(*parts[:length])


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
