"""How much room is left where a training run writes; nothing is created to find out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from cift_probe.evidence import Evidence, Known, Unknown


def read_storage(
    environment: Mapping[str, str] | None = None, work: Path | None = None
) -> dict[str, Evidence]:
    """Return folder and free bytes of the working folder, the model cache and temporary files.

    Free is what this user may still write (f_bavail), quotas of the file system's own left out.
    """
    variables = os.environ if environment is None else environment
    folders: dict[str, tuple[Path | None, str]] = {
        "cache": parse_cache(variables),
        "temporary": parse_temporary(variables),
    }
    try:
        folders["work"] = (work or Path.cwd(), "working folder")
    except OSError:  # the folder was removed under this process
        folders["work"] = (None, "working folder")
    found: dict[str, Evidence] = {}
    for name, (folder, source) in folders.items():
        found[f"storage.{name}.path"], found[f"storage.{name}.free"] = _read(folder, source)
    return found


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


def _expand(text: str, below: str = "") -> Path | None:
    try:
        return Path(text).expanduser() / below
    except RuntimeError:  # no home folder: a user id without an account, as in containers
        return None


def _read(folder: Path | None, origin: str) -> tuple[Evidence, Evidence]:
    if folder is None:
        unknown = Unknown(f"{origin}: the folder cannot be told", origin)
        return unknown, unknown
    path = Known(str(folder), source=origin)
    try:
        existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return path, Unknown(f"{folder}: {error.strerror}", f"statvfs {folder}")
    note = "" if existing == folder.absolute() else f"of {existing}; {folder} does not exist yet"
    return path, Known(free, "B", f"statvfs {existing}", note=note)
