"""What installed wheels carry and need: CUDA libraries, native binaries, conda's packages.

Sources: names and folders of NVIDIA's wheels on PyPI (nvidia-cublas-cu12 in nvidia/cublas; from
CUDA 13 on nvidia-cublas in nvidia/cu13); bitsandbytes/cuda_specs.py and cextension.py for its
binaries; xformers/cpp_lib.json; the GNU symbol versions in an ELF file's strings.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from cift_probe.evidence import Evidence, Known, Unknown, absent

_CUDA_WHEEL = re.compile(r"nvidia-(?P<name>[a-z0-9-]{2,40})-cu(?P<major>\d{2})")
_BINARY = re.compile(r"libbitsandbytes_(?P<kind>cuda|rocm|xpu|cpu)(?P<version>\d{0,5})\.so")
_GLIBC = re.compile(rb"GLIBC_(\d\.\d{1,3}(?:\.\d{1,3})?)(?![\d.])")
_CONDA = re.compile(r"(?P<name>.{1,100})-(?P<version>[^-]{1,60})-[^-]{1,60}\.json")
_RELATED = re.compile(
    r"torch.*|numpy|triton.*|optree|nvidia-.*|mypy|flake8|onnx.*|mkl.*|.*oneapi.*|intel-.*|cuda-.*"
)
_STRINGS_BYTES = 8 << 20  # an ELF file's symbol versions stand before its code
_MAX_JSON_BYTES = 1 << 18


def parse_cuda_wheels(wheels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the libraries of which wheels for more than one CUDA major are installed.

    Wheels named for their major unpack into one folder (nvidia/cudnn/lib), so that the later one
    has overwritten the other, and uninstalling either breaks both. Those without a major in their
    name (CUDA 13's nvidia-cublas) have a folder of their own, nvidia/cu13, and harm none.
    """
    found: dict[str, list[str]] = {}
    for wheel, version in sorted(wheels.items()):
        match = _CUDA_WHEEL.fullmatch(wheel)
        if match is not None:
            found.setdefault(match["name"], []).append(f"{wheel} {version}")
    return [{"library": name, "wheels": named} for name, named in found.items() if len(named) > 1]


def parse_glibc(image: bytes) -> str:
    """Return the highest GLIBC version that a binary names; empty where it names none.

    >>> parse_glibc(b"GLIBC_2.2.5 GLIBC_2.34 GLIBC_2.17")
    '2.34'
    """
    found = {match.decode() for match in _GLIBC.findall(image)}
    return max(found, key=Version, default="")


def parse_binaries(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the versions of bitsandbytes' native libraries by platform, from their file names.

    >>> parse_binaries(["libbitsandbytes_cuda130.so", "libbitsandbytes_cpu.so", "x.py"])
    {'cuda': ['13.0'], 'cpu': ['']}
    """
    found: dict[str, list[str]] = {}
    for name in names:
        match = _BINARY.fullmatch(name)
        if match is not None:
            digits = match["version"]
            split = {"cuda": 2, "rocm": 1}.get(match["kind"], 0)  # digits of the major release
            dotted = f"{digits[:split]}.{digits[split:]}" if split else digits
            found.setdefault(match["kind"], []).append(dotted)
    return found


def parse_xformers(text: str) -> dict[str, str]:
    """Return what xformers' cpp_lib.json says of its build; {} where it is none."""
    try:
        told = json.loads(text)
        version, env = told.get("version", {}), told.get("env", {})
        found = {f"version.{name}": value for name, value in version.items()}
        found |= {f"env.{name}": value for name, value in env.items()}
    except (ValueError, AttributeError, RecursionError):
        return {}
    return {name: str(value) for name, value in found.items() if value is not None}


def parse_conda(names: Iterable[str]) -> dict[str, str]:
    """Return versions by package from the file names in conda-meta."""
    matches = (_CONDA.fullmatch(name) for name in names)
    return {match["name"]: match["version"] for match in matches if match}


def read_wheels(
    installed: Mapping[str, str], folders: Iterable[str] | None = None, prefix: str | None = None
) -> dict[str, Evidence]:
    """Return doubled CUDA wheels, native binaries and what they need, and conda's packages.

    `installed` has the versions of all distributions by canonical name; `folders` are those of
    sys.path, `prefix` is that of the environment.
    """
    places = [Path(folder or ".") for folder in (sys.path if folders is None else folders)]
    wheels = {name: number for name, number in installed.items() if name.startswith("nvidia-")}
    related = {name: number for name, number in installed.items() if _RELATED.fullmatch(name)}
    bitsandbytes, xformers = _first(places, "bitsandbytes"), _first(places, "xformers")
    return {
        "package.nvidia.doubled": Known(parse_cuda_wheels(wheels), source="metadata of nvidia-*"),
        "package.related": Known(related, source="metadata"),
        "package.conda": _read_conda(Path(sys.prefix if prefix is None else prefix)),
        **_read_bitsandbytes(bitsandbytes),
        "xformers.built": _read_xformers(xformers),
        "package.glibc.needed": _read_glibc(bitsandbytes, xformers, _first(places, "torch")),
    }


def _first(places: Iterable[Path], package: str) -> Path | None:
    found = (place / package for place in places)
    return next((folder for folder in found if (folder / "__init__.py").is_file()), None)


def _read_bitsandbytes(folder: Path | None) -> dict[str, Evidence]:
    keys = ("bitsandbytes.folder", "bitsandbytes.binaries", "bitsandbytes.cuda.versions")
    if folder is None:
        return dict.fromkeys(keys, absent("bitsandbytes is not installed", "sys.path"))
    source = str(folder)
    found = parse_binaries(sorted(_names(folder)))
    told = {kind: ", ".join(filter(None, versions)) for kind, versions in found.items()}
    return {
        "bitsandbytes.folder": Known(source, source="the first on sys.path"),
        "bitsandbytes.binaries": Known(told, source=source),
        "bitsandbytes.cuda.versions": Known(found.get("cuda", []), source=source),
    }


def _read_xformers(folder: Path | None) -> Evidence:
    if folder is None:
        return absent("xformers is not installed", "sys.path")
    path = folder / "cpp_lib.json"
    try:
        with path.open("rb") as file:
            told = parse_xformers(file.read(_MAX_JSON_BYTES).decode(errors="replace"))
    except OSError:
        return absent("xformers has no compiled part", str(path))
    return Known(told, source=str(path)) if told else Unknown("it is no JSON object", str(path))


def _read_glibc(*folders: Path | None) -> Evidence:
    needed: dict[str, str] = {}
    for path in _binaries(folder for folder in folders if folder is not None):
        try:
            with path.open("rb") as file:
                version = parse_glibc(file.read(_STRINGS_BYTES))
        except OSError:
            continue
        if version:
            needed[version] = str(path)
    if not needed:
        return absent("no native library of a training package names a GLIBC version", "sys.path")
    highest = max(needed, key=Version)
    return Known(highest, "version", needed[highest])


def _binaries(folders: Iterable[Path]) -> Iterator[Path]:
    # of bitsandbytes one binary is loaded; those for other vendors' devices are none of it
    for folder in folders:
        for pattern in ("libbitsandbytes_c*.so", "_C*.so", "lib/libc10*.so"):
            yield from (path for path in sorted(folder.glob(pattern)) if path.is_file())


def _read_conda(prefix: Path) -> Evidence:
    folder = prefix / "conda-meta"
    if not folder.is_dir():
        return absent("not a conda environment", str(folder))
    return Known(parse_conda(sorted(_names(folder))), source=str(folder))


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
