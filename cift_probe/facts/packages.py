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
    ("flash_attn.built.cuda", "version"),
    ("flash_attn.built.torch", "version"),
    ("flash_attn.built.cxx11_abi", ""),
    ("flash_attn.built.python", "version"),
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


def read_packages(
    paths: Sequence[str] | None = None, also: Sequence[str] = ()
) -> dict[str, Evidence]:
    """Return versions, NVIDIA wheels, duplicates and what FlashAttention was built for.

    `paths` are the folders searched, in order (default: sys.path); `also` are further names.
    """
    folders = list(sys.path if paths is None else paths)
    found: dict[str, Evidence] = {
        f"package.{name}": _read_version(name, folders) for name in (*NAMES, *also)
    }
    everything = list(_scan(folders))
    found["package.nvidia.wheels"] = _nvidia_wheels(everything)
    found["package.duplicates"] = _duplicates(everything)
    return found | read_flash_attention(folders)


def read_flash_attention(folders: list[str]) -> dict[str, Evidence]:
    """Return the CUDA, torch, ABI and Python that FlashAttention was built for.

    Release wheels say so in their version or in the URL they came from. A build from source says
    nothing; its compiled part still shows CUDA's major and the ABI.
    """
    installed = _find("flash_attn", folders)
    if installed is None:
        return dict.fromkeys(dict(_BUILT), absent("flash_attn is not installed", "metadata"))
    text, source = _tagged_text(installed)
    tags = parse_wheel_tags(text)
    name = next(filter(_EXTENSION.search, _files(installed)), "")
    values: list[Evidence | None] = [None, None, None, _built_python(installed, name)]
    if tags is not None:
        torch = ".".join(tags.torch.split(".")[:2])  # extensions follow torch's minor releases
        values[0] = Known(tags.cuda, "version", source)
        values[1] = Known(torch, "version", source, note=f"wheel tag torch{tags.torch}")
        values[2] = None if tags.cxx11_abi is None else Known(tags.cxx11_abi, "", source)
    if name and None in (values[0], values[2]):
        cuda, abi = parse_symbols(_image(installed, name))
        linked = f"symbols of {name}"
        values[0] = values[0] or (Known(cuda, "version", linked) if cuda else None)  # type: ignore[truthy-bool] - never reached
        values[2] = values[2] or (None if abi is None else Known(abi, "", linked))
    reason = "flash_attn was built from source or renamed: no wheel tag says what it was built for"
    return {
        key: Unknown(reason, source) if value is None else value
        for (key, _), value in zip(_BUILT, values, strict=True)
    }
