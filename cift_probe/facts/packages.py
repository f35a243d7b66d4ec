"""Which distributions are installed, from their metadata; none of them is imported.

Sources: the core metadata, RECORD and direct_url.json of each distribution (packaging.python.org,
"Recording installed projects"), and for FlashAttention the tags of its release wheels.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from cift_probe.evidence import Evidence, Known, Unknown, absent

NAMES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "trl",
    "datasets",
    "accelerate",
    "triton",
    "flash_attn",
    "xformers",
    "numpy",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "deepspeed",
    "diffusers",
    "pip",
)
_INFO = re.compile(r"(?P<name>[^~-][^-]*)-(?P<version>[^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")
_TAGS = re.compile(
    r"cu(?P<cuda>\d+)torch(?P<torch>\d+(?:\.\d+)+)(?:cxx11abi(?P<abi>true|false))?", re.IGNORECASE
)
_EXTENSION = re.compile(r"flash_attn_2_cuda\.(?P<tag>.*)(?:\.so|\.pyd)")
_PYTHON = re.compile(r"\bcp(?:ython-)?(?P<major>\d)(?P<minor>\d+)")
# The names an extension links to stand near the start of an ELF file, before its kernels.
_SYMBOL_BYTES = 8 << 20
_CUDART = re.compile(rb"libcudart\.so\.(\d+)")
_NEW_ABI = re.compile(rb"_ZNK?3c10\w*__cxx11\w*")
_OLD_ABI = re.compile(rb"_ZNK?3c10\w*[EK]Ss\b")  # Ss is std::string before C++11's ABI
_BUILT = (
    "flash_attn.built.cuda",
    "flash_attn.built.torch",
    "flash_attn.built.cxx11_abi",
    "flash_attn.built.python",
)


class WheelTags(NamedTuple):
    """What a FlashAttention release wheel was built for; `cxx11_abi` is None when not told."""

    cuda: str
    torch: str
    cxx11_abi: bool | None


class Found(NamedTuple):
    """One installed distribution, from the name of its metadata folder."""

    name: str
    version: str
    folder: str


def parse_wheel_tags(text: str) -> WheelTags | None:
    """Read the tags in a wheel's file name or local version; None when there are none.

    "cu12" is CUDA 12, "cu118" is 11.8, "cu130" is 13.0.

    >>> parse_wheel_tags("flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl")
    WheelTags(cuda='12', torch='2.8', cxx11_abi=True)
    """
    match = _TAGS.search(text)
    if match is None:
        return None
    digits, abi = match["cuda"], match["abi"]
    two = 2  # digits of a CUDA major
    cuda = digits if len(digits) <= two else f"{digits[:-1]}.{digits[-1]}"
    return WheelTags(cuda, match["torch"], None if abi is None else abi.lower() == "true")


def parse_version(metadata: str) -> str:
    """Return the version in core metadata; raises ValueError when there is no valid one."""
    head = metadata.partition("\n\n")[0]
    match = re.search(r"^Version:[ \t]*(\S+)[ \t]*\r?$", head, re.MULTILINE)
    if match is None:
        message = "its metadata has no version"
        raise ValueError(message)
    try:
        Version(match[1])
    except InvalidVersion as error:
        message = f"its metadata has the version {match[1]!r}, which is none"
        raise ValueError(message) from error
    return match[1]


def parse_symbols(image: bytes) -> tuple[str, bool | None]:
    """Return CUDA major ("" when not told) and C++11 ABI that a compiled extension links to."""
    cudart = _CUDART.search(image)
    cuda = cudart[1].decode() if cudart else ""
    if _NEW_ABI.search(image):
        return cuda, True
    return cuda, False if _OLD_ABI.search(image) else None


def read_packages(paths: Sequence[str] | None = None) -> dict[str, Evidence]:
    """Return versions, NVIDIA wheels, duplicates and what FlashAttention was built for.

    `paths` are the folders searched, in order; default: sys.path.
    """
    folders = list(sys.path if paths is None else paths)
    found = {f"package.{name}": read_version(name, folders) for name in NAMES}
    everything = list(_scan(folders))
    found["package.nvidia.wheels"] = _nvidia_wheels(everything)
    found["package.duplicates"] = _duplicates(everything)
    return found | read_flash_attention(folders)


def read_installed(paths: Sequence[str] | None = None) -> dict[str, str]:
    """Return versions by canonical name of all that is installed, the first on the path first."""
    installed: dict[str, str] = {}
    for item in _scan(list(sys.path if paths is None else paths)):
        installed.setdefault(item.name, item.version)
    return dict(sorted(installed.items()))


def read_metadata(name: str, paths: Sequence[str]) -> str:
    """Return the core metadata of one distribution; empty when it is not installed."""
    installed = _find(name, paths)
    return "" if installed is None else _metadata(installed)


def read_version(name: str, paths: Sequence[str] | None = None) -> Evidence:
    """Return the version of one distribution from its metadata; absent when not installed."""
    source = f"metadata of {name}"
    installed = _find(name, sys.path if paths is None else paths)
    if installed is None:
        return absent(f"{name} is not installed", source)
    try:
        return Known(parse_version(_metadata(installed)), "version", source)
    except ValueError as error:
        return Unknown(f"{name}: {error}", source)


def read_flash_attention(folders: list[str]) -> dict[str, Evidence]:
    """Return the CUDA, torch, ABI and Python that FlashAttention was built for.

    Release wheels say so in their version or in the URL they came from. A build from source says
    nothing; its compiled part still shows CUDA's major and the ABI.
    """
    installed = _find("flash_attn", folders)
    if installed is None:
        return dict.fromkeys(_BUILT, absent("flash_attn is not installed", "metadata"))
    text, source = _tagged_text(installed)
    tags = parse_wheel_tags(text)
    extension = next(filter(_EXTENSION.search, _files(installed)), "")
    reason = "flash_attn was built from source or its wheel renamed: no tag says what for"
    found: dict[str, Evidence] = dict.fromkeys(_BUILT, Unknown(reason, source))
    if extension and (tags is None or tags.cxx11_abi is None):
        found |= _linked(installed, extension)
    if tags is not None:
        found |= _tagged(tags, source)
    return found | _built_python(installed, extension)


def _tagged(tags: WheelTags, source: str) -> dict[str, Evidence]:
    release = ".".join(tags.torch.split(".")[:2])  # extensions follow torch's minor releases
    note = f"wheel tag torch{tags.torch}"
    found: dict[str, Evidence] = {
        "flash_attn.built.cuda": Known(tags.cuda, "version", source),
        "flash_attn.built.torch": Known(release, "version", source, note=note),
    }
    if tags.cxx11_abi is not None:
        found["flash_attn.built.cxx11_abi"] = Known(tags.cxx11_abi, "", source)
    return found


def _linked(installed: Distribution, extension: str) -> dict[str, Evidence]:
    path = Path(str(installed.locate_file(extension)))
    try:
        with path.open("rb") as file:
            cuda, abi = parse_symbols(file.read(_SYMBOL_BYTES))
    except OSError:
        return {}
    found: dict[str, Evidence] = {}
    if cuda:
        found["flash_attn.built.cuda"] = Known(cuda, "version", f"symbols of {path}")
    if abi is not None:
        found["flash_attn.built.cxx11_abi"] = Known(abi, "", f"symbols of {path}")
    return found


def _built_python(installed: Distribution, extension: str) -> dict[str, Evidence]:
    wheel = installed.read_text("WHEEL") or ""
    tags = re.findall(r"^Tag:\s*(\S+)", wheel, re.MULTILINE)
    for text, source in ((extension, "RECORD"), *((tag, "WHEEL") for tag in tags)):
        match = _PYTHON.search(text)
        if match is not None:
            version = f"{match['major']}.{match['minor']}"
            note = "stable ABI: this release and later ones" if "abi3" in text else ""
            return {"flash_attn.built.python": Known(version, "version", source, note=note)}
    return {}


def _tagged_text(installed: Distribution) -> tuple[str, str]:
    """Return the text that may hold wheel tags, and which file of the metadata it is from."""
    metadata = _metadata(installed)
    try:
        version = parse_version(metadata)
    except ValueError:
        version = ""
    if parse_wheel_tags(version):
        return version, "METADATA"
    try:
        told = json.loads(installed.read_text("direct_url.json") or "null")
        url = told["url"]
    except (ValueError, TypeError, KeyError):
        return "", "METADATA"
    return unquote(str(url).rpartition("/")[2]), "direct_url.json"


def _files(installed: Distribution) -> list[str]:
    rows = csv.reader((installed.read_text("RECORD") or "").splitlines())
    return [row[0] for row in rows if row]


def _find(name: str, folders: Sequence[str]) -> Distribution | None:
    # The first on the path is the one that an import finds.
    return next(iter(distributions(name=name, path=list(folders))), None)


def _metadata(installed: Distribution) -> str:
    # Not Distribution.version: without the field it is None, an error or a warning, by release.
    try:
        return installed.read_text("METADATA") or installed.read_text("PKG-INFO") or ""
    except (OSError, UnicodeDecodeError):
        return ""


def _scan(folders: list[str]) -> Iterator[Found]:
    """Yield what is installed in the folders, by the names of the metadata alone (that is fast)."""
    for folder in dict.fromkeys(os.path.realpath(folder or ".") for folder in folders):
        try:
            names = sorted(entry.name for entry in Path(folder).iterdir())
        except OSError:
            continue  # a zip file, or an entry of sys.path that does not exist
        for name in names:
            match = _INFO.fullmatch(name)
            if match is not None:
                yield Found(canonicalize_name(match["name"]), match["version"], folder)


def _nvidia_wheels(everything: list[Found]) -> Evidence:
    wheels: dict[str, str] = {}
    for item in everything:
        if item.name.startswith("nvidia-"):
            wheels.setdefault(item.name, item.version)
    source = "metadata of nvidia-*"
    if not wheels:
        return absent("no nvidia-* wheel is installed", source)
    return Known(dict(sorted(wheels.items())), "", source)


def _duplicates(everything: list[Found]) -> Evidence:
    places: dict[str, list[Found]] = {}
    for item in everything:
        places.setdefault(item.name, []).append(item)
    twice = [
        {
            "name": name,
            "versions": [item.version for item in items],
            "folders": [item.folder for item in items],
        }
        for name, items in sorted(places.items())
        if len(items) > 1
    ]
    note = "the first version of each is the one imported" if twice else ""
    return Known(twice, "", "folders of sys.path", note=note)
