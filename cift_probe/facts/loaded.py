"""Which copy of each CUDA library a process with torch has loaded.

The variable LD_LIBRARY_PATH says what might be loaded; /proc/<pid>/maps what was. A wheel's
RUNPATH loses to the variable, so that an older copy of the system can take the place of the one
that torch was built with (pytorch/pytorch#80637, #103832).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath
from typing import Any, TypeAlias

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.worker import WorkerFaultError

Call: TypeAlias = Callable[[str, Any, float], Any]

NATIVE_KEYS = ("bitsandbytes.native", "bitsandbytes.native.errors")
KEYS = ("library.loaded", "library.doubled", "library.shadowed", "library.split")
_TARGET = "cift_probe.stack.loaded:read_loaded"
_NATIVE = "cift_probe.stack.loaded:read_native"
_DEADLINE_S = 180.0
_SOURCE = "/proc/self/maps after import torch, in a child process"
_STEMS = (
    *("libcublas", "libcublasLt", "libcudart", "libcudnn", "libcufft", "libcurand"),
    *("libcusolver", "libcusparse", "libcusparseLt", "libnccl", "libnvJitLink", "libnvrtc"),
    *("libcuda", "libnvidia-ml", "libcupti", "libnvshmem_host"),
)
_NAME = re.compile(r"(?P<stem>lib[A-Za-z_\-]{2,30})\.so(?:\.(?P<major>\d{1,4}))?(?:\.[\d.]{1,40})?")
_PAIR = ("libcublas", "libcublasLt")  # one release: each calls functions of the other


def parse_maps(text: str) -> list[str]:
    """Return the paths of the shared libraries in the text of /proc/<pid>/maps, in its order."""
    found: dict[str, None] = {}
    for line in text.splitlines():
        start = line.find("/")
        path = line[start:].removesuffix(" (deleted)") if start >= 0 else ""
        if ".so" in path.rpartition("/")[2]:
            found[path] = None
    return list(found)


def parse_library(path: str) -> str:
    """Return the name of a CUDA library, "libcublas", from its path; empty for any other."""
    match = _NAME.fullmatch(PurePosixPath(path).name)
    return match["stem"] if match and match["stem"] in _STEMS else ""


def compare_copies(loaded: Iterable[str], shipped: Iterable[str]) -> dict[str, list[Any]]:
    """Return what is wrong with the copies that were loaded, by the last part of our key.

    doubled: more than one copy of a library is loaded. shadowed: a wheel of this environment
    carries the library, and another copy was loaded. split: cuBLAS and cuBLASLt come from
    different folders.
    """
    copies, carried = _by_name(loaded), _by_name(shipped)
    doubled = [{"name": n, "paths": paths} for n, paths in copies.items() if len(paths) > 1]
    shadowed = [
        {"name": name, "loaded": path, "shipped": carried[name][0]}
        for name, paths in copies.items()
        for path in paths
        if name in carried and path not in carried[name]
    ]
    first, second = (copies.get(name, []) for name in _PAIR)
    apart = bool(first and second) and not set(map(_folder, first)) & set(map(_folder, second))
    return {"doubled": doubled, "shadowed": shadowed, "split": [*first, *second] if apart else []}


def parse_loaded(told: Any) -> dict[str, Evidence]:
    """Return the child's answer as evidence."""
    if not isinstance(told, dict) or not isinstance(told.get("maps"), str):
        return dict.fromkeys(KEYS, Unknown(f"the child answered {told!r}", _SOURCE))
    paths = parse_maps(told["maps"])
    named = {name: ", ".join(found) for name, found in _by_name(paths).items()}
    wrong = compare_copies(paths, told.get("shipped") or [])
    return {
        "library.loaded": Known(named, source=_SOURCE),
        **{f"library.{name}": Known(items, source=_SOURCE) for name, items in wrong.items()},
    }


def read_loaded(call: Call | None) -> dict[str, Evidence]:
    """Return which CUDA libraries are loaded where torch is, and what is wrong with them."""
    if call is None:
        reason = "loaded libraries are read in a child process, and here is none"
        return dict.fromkeys(KEYS, Unknown(reason, _SOURCE))
    try:
        return parse_loaded(call(_TARGET, {}, _DEADLINE_S))
    except WorkerFaultError as fault:
        return dict.fromkeys(KEYS, Unknown(fault.detail, _SOURCE))


def parse_native(told: Any) -> dict[str, Evidence]:
    """Return the child's answer about bitsandbytes' native library as evidence."""
    source = "dlopen after import torch, in a child process"
    if isinstance(told, dict) and "missing" in told:
        return dict.fromkeys(NATIVE_KEYS, absent(str(told["missing"]), source))
    if not isinstance(told, dict) or not isinstance(told.get("error"), str):
        return dict.fromkeys(NATIVE_KEYS, Unknown(f"the child answered {told!r}", source))
    name, error = str(told.get("chosen") or ""), told["error"]
    chosen = Known(name, source=source) if name else absent(error, source)
    return {
        "bitsandbytes.native": chosen,
        "bitsandbytes.native.errors": Known([error] if error else [], source=source),
    }


def read_native(call: Call | None) -> dict[str, Evidence]:
    """Return which native library bitsandbytes loads beside this torch, and the loader's words."""
    if call is None:
        reason = "native libraries are loaded in a child process, and here is none"
        return dict.fromkeys(NATIVE_KEYS, Unknown(reason))
    try:
        return parse_native(call(_NATIVE, {}, _DEADLINE_S))
    except WorkerFaultError as fault:
        return dict.fromkeys(NATIVE_KEYS, Unknown(fault.detail))


def _by_name(paths: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        name = parse_library(path)
        if name and path not in found.setdefault(name, []):
            found[name].append(path)
    return dict(sorted(found.items()))


def _folder(path: str) -> str:
    return str(PurePosixPath(path).parent)
