"""How much room is left where a training run writes; nothing is created to find out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from cift_probe.evidence import Evidence, Known, Unknown, absent

_FIELDS = ("path", "free", "inodes.free", "writable", "filesystem")
_POINT = 4  # place of the mount point in a line of mountinfo, proc(5)


def read_storage(
    environment: Mapping[str, str] | None = None,
    work: Path | None = None,
    root: Path = Path("/"),
) -> dict[str, Evidence]:
    """Return what may be written where: working folder, model cache, temporary files, kernels.

    Of each its path, free bytes and inodes, file system, and whether this user may write there.
    Free is what this user may still write (f_bavail), quotas of the file system's own left out.
    """
    variables = os.environ if environment is None else environment
    folders: dict[str, tuple[Path | None, str]] = {
        "cache": parse_cache(variables),
        "temporary": parse_temporary(variables),
        "kernels": parse_kernels(variables),
    }
    try:
        folders["work"] = (work or Path.cwd(), "working folder")
    except OSError:  # the folder was removed under this process
        folders["work"] = (None, "working folder")
    found: dict[str, Evidence] = {}
    mounts = read_mounts(root)
    for name, (folder, source) in folders.items():
        read = _read(folder, source, mounts)
        found |= {f"storage.{name}.{field}": item for field, item in read.items()}
    return found


def parse_mounts(text: str) -> list[tuple[str, str]]:
    """Return (folder, kind) of every mount in /proc/self/mountinfo; other lines are skipped."""
    found = []
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if dash and len(before) > _POINT and after:
            found.append((re.sub(r"\\([0-7]{3})", _character, before[_POINT]), after[0]))
    return found


def find_kind(folder: str, mounts: list[tuple[str, str]]) -> str:
    """Return the kind of file system that a folder lies on, empty where no mount holds it.

    >>> find_kind("/data/run", [("/", "overlay"), ("/data", "nfs4"), ("/da", "ext4")])
    'nfs4'
    """
    holding = [
        (len(point), place, kind)
        for place, (point, kind) in enumerate(mounts)
        if folder == point or folder.startswith(f"{point.rstrip('/')}/")
    ]
    return max(holding, default=(0, 0, ""))[2]  # of two on one folder, the later hides the other


def read_mounts(root: Path = Path("/")) -> list[tuple[str, str]]:
    """Return (folder, kind) of every mount; empty where the system does not list them."""
    try:
        return parse_mounts((root / "proc/self/mountinfo").read_text(errors="replace"))
    except OSError:
        return []


def parse_cache(variables: Mapping[str, str]) -> tuple[Path | None, str]:
    """Return where models are kept, and what says so, as huggingface_hub decides it."""
    for name, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if variables.get(name):
            return _expand(os.path.expandvars(variables[name]), below), name
    return _expand("~/.cache/huggingface/hub"), "default of huggingface_hub"


def parse_temporary(variables: Mapping[str, str]) -> tuple[Path | None, str]:
    """Return where temporary files go; tempfile.gettempdir would write a file to find out."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        if variables.get(name) and Path(variables[name]).is_dir():
            return Path(variables[name]), name
    return Path("/tmp"), "default of the system"  # noqa: S108 - named, not written to


def parse_kernels(variables: Mapping[str, str]) -> tuple[Path | None, str]:
    """Return where Triton keeps compiled kernels (triton/knobs.py, cache_knobs)."""
    if variables.get("TRITON_CACHE_DIR"):
        return _expand(variables["TRITON_CACHE_DIR"]), "TRITON_CACHE_DIR"
    if variables.get("TRITON_HOME"):
        return _expand(variables["TRITON_HOME"], ".triton/cache"), "TRITON_HOME"
    return _expand("~/.triton/cache"), "default of triton"


def _character(match: re.Match[str]) -> str:
    return chr(int(match[1], 8))


def _expand(text: str, below: str = "") -> Path | None:
    try:
        return Path(text).expanduser() / below
    except RuntimeError:  # no home folder: a user id without an account, as in containers
        return None


def _read(folder: Path | None, origin: str, mounts: list[tuple[str, str]]) -> dict[str, Evidence]:
    if folder is None:
        return dict.fromkeys(_FIELDS, Unknown(f"{origin}: the folder cannot be told", origin))
    path = Known(str(folder), source=origin)
    try:
        existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        told = os.statvfs(existing)
    except OSError as error:
        missing = Unknown(f"{folder}: {error.strerror}", f"statvfs {folder}")
        return {**dict.fromkeys(_FIELDS, missing), "path": path}
    note = "" if existing == folder.absolute() else f"of {existing}; {folder} does not exist yet"
    source = f"statvfs {existing}"
    kind = find_kind(str(existing.resolve()), mounts)
    unlisted = Unknown("no mount is listed for it", "/proc/self/mountinfo")
    return {
        "path": path,
        "free": Known(told.f_bavail * told.f_frsize, "B", source, note=note),
        # file systems that make inodes as they go (btrfs) tell 0 of 0
        "inodes.free": (
            Known(told.f_favail, "1", source, note=note)
            if told.f_files
            else absent("this file system has no fixed number of inodes", source)
        ),
        "writable": Known(os.access(existing, os.W_OK | os.X_OK), source="access(2)", note=note),
        "filesystem": Known(kind, source="/proc/self/mountinfo") if kind else unlisted,
    }
