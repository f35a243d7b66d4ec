"""Which native libraries an import of torch brings in, and whether bitsandbytes' own loads.

Carried out in a child process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sysconfig
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

_BINARY = re.compile(r"libbitsandbytes_cuda(\d{3,4})\.so")
_NEAREST = Version("0.50.0.dev0")  # from here on the nearest binary serves
_OWN = ("torch/lib",)
_NVIDIAS = ("nvidia/*/lib", "nvidia/*/*/lib")


def read_loaded(_payload: Any) -> dict[str, Any]:
    """Return paths of mapped libraries, and of those that wheels carry.

    Asks whether CUDA is available first, which loads the driver's library. Raises ImportError
    with the loader's words where torch cannot be imported: that is the answer then.
    """
    root = Path(sysconfig.get_path("purelib"))
    with suppress(ModuleNotFoundError):
        import torch

        torch.cuda.is_available()
        root = Path(torch.__file__).parent.parent
    return {
        "maps": Path("/proc/self/maps").read_text(errors="replace"),
        "shipped": shipped(root, read_folders()),
    }


def read_folders() -> tuple[str, ...]:
    """Return the folders whose libraries belong to torch, below the one it is installed in.

    NVIDIA's wheels belong to it where it asks for them. A build of a container or of conda is
    made for the system's libraries, whatever wheels another package has brought in.
    """
    try:
        asked = requires("torch") or []
    except PackageNotFoundError:
        asked = []
    return (*_NVIDIAS, *_OWN) if any(item.startswith("nvidia-") for item in asked) else _OWN


def shipped(root: Path, folders: tuple[str, ...]) -> list[str]:
    """Return the shared libraries in folders (patterns) below `root`, links resolved.

    The kernel shows resolved paths too: some installers link every file from a store.
    """
    found = (path for pattern in folders for path in root.glob(f"{pattern}/*.so*"))
    return sorted({str(path.resolve()) for path in found})


def read_native(_payload: Any) -> dict[str, Any]:
    """Return which of bitsandbytes' native libraries suits torch's CUDA, and why it fails to load.

    {"missing": reason} without bitsandbytes, or where torch is built without CUDA. bitsandbytes
    is not imported: that takes seconds, starts CUDA, and hides the loader's words.
    """
    spec = importlib.util.find_spec("bitsandbytes")
    if spec is None or spec.origin is None:
        return {"missing": "bitsandbytes is not installed"}
    import torch

    if not torch.version.cuda:
        return {"missing": "this torch was built without CUDA"}
    folder = Path(spec.origin).parent
    names = [path.name for path in folder.glob("libbitsandbytes_cuda*.so")]
    override = os.environ.get("BNB_CUDA_VERSION")
    chosen = choose(names, torch.version.cuda, override, exact=_is_exact())
    if not chosen:
        return {"chosen": "", "error": f"none of {len(names)} is for CUDA {torch.version.cuda}"}
    try:
        ctypes.CDLL(str(folder / chosen))
    except OSError as error:
        return {"chosen": chosen, "error": str(error)}
    return {"chosen": chosen, "error": ""}


def choose(names: list[str], runtime: str, override: str | None, *, exact: bool = False) -> str:
    """Return the library that bitsandbytes loads for a CUDA runtime; empty for none.

    The one that BNB_CUDA_VERSION names; else that of the runtime's version. From 0.50 on, where
    that is missing, the highest of the same major that is not newer, or the lowest of that major
    (bitsandbytes/cextension.py, pull request 1980); before, `exact`, none.
    """
    if override is not None and (override or not exact):  # an empty one meant none before 0.50
        name = f"libbitsandbytes_cuda{override}.so"
        return name if override.isdigit() and name in names else ""
    wanted = _split(runtime.replace(".", ""))
    versions = {_split(match[1]): match[0] for match in map(_BINARY.fullmatch, names) if match}
    if exact:
        return versions.get(wanted, "")
    same = sorted(number for number in versions if number[0] == wanted[0])
    older = [number for number in same if number <= wanted]
    best = older[-1] if older else same[0] if same else None
    return "" if best is None else versions[best]


def _is_exact() -> bool:
    try:
        return Version(version("bitsandbytes")) < _NEAREST
    except (InvalidVersion, PackageNotFoundError):
        return False  # a source tree without metadata: the kinder rule, a binary must be there


def _split(digits: str) -> tuple[int, int]:
    return int(digits[:2]), int(digits[2:] or 0)
