"""What a build at run time would find: compilers, headers, nvcc. Nothing is compiled.

Sources: triton/runtime/build.py (CC, else gcc, else clang; Python.h of this interpreter);
torch/utils/cpp_extension.py (CUDA_HOME, else the folder of nvcc, else /usr/local/cuda).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeAlias

from cift_probe.evidence import Evidence, Known, Unknown, absent

Ask: TypeAlias = Callable[[str], str]

_DEADLINE_S = 15.0
_NUMBER = re.compile(r"(?<![\w.])(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?)(?![\d.])")
_NVCC = re.compile(r"release (\d{1,3}\.\d{1,3})")
_CUDA_HOMES = ("/usr/local/cuda", "/opt/cuda")
# packages that compile CUDA sources when they are used, from their documentation
_BUILDERS = ("deepspeed", "flashinfer-python", "exllamav2", "apex")


def parse_tool_version(text: str) -> str:
    """Return the version in what a tool prints for --version; empty where there is none.

    >>> parse_tool_version("gcc (Debian 12.2.0-14) 12.2.0")
    '12.2.0'
    """
    line = next((line for line in text.splitlines() if line.strip()), "")
    found = _NUMBER.findall(re.sub(r"\([^()]{0,80}\)", " ", line)) or _NUMBER.findall(line)
    return found[0] if found else ""


def parse_nvcc_version(text: str) -> str:
    """Return "12.4" from what nvcc --version prints; empty where it does not say so."""
    match = _NVCC.search(text)
    return match[1] if match else ""


def read_toolchain(
    variables: Mapping[str, str] | None = None, ask: Ask | None = None
) -> dict[str, Evidence]:
    """Return compilers, headers and nvcc with versions, and who would use nvcc.

    `ask` runs a tool with --version and returns what it prints; it raises OSError.
    """
    told = os.environ if variables is None else variables
    path, question = told.get("PATH"), ask or _ask
    found = {f"toolchain.{name}.version": _tool(name, path, question) for name in ("gcc", "clang")}
    found["toolchain.cmake.version"] = _tool("cmake", path, question)
    found["toolchain.ninja.version"] = _tool("ninja", path, question)
    return {
        **found,
        "toolchain.compiler": _compiler(told, path),
        "toolchain.python.headers": _headers(),
        **_nvcc(told, path, question),
        "toolchain.builders": _builders(),
    }


def _tool(name: str, path: str | None, ask: Ask) -> Evidence:
    place = shutil.which(name, path=path)
    if place is None:
        return absent(f"no {name} on the PATH", "PATH")
    return _version(place, ask, parse_tool_version)


def _version(place: str, ask: Ask, parse: Callable[[str], str]) -> Evidence:
    source = f"{place} --version"
    try:
        number = parse(ask(place))
    except (OSError, subprocess.SubprocessError) as error:
        return Unknown(f"{place} cannot be asked: {error}", source)
    return Known(number, "version", source) if number else Unknown("prints no version", source)


def _compiler(told: Mapping[str, str], path: str | None) -> Evidence:
    if told.get("CC"):
        place = shutil.which(told["CC"].split()[0], path=path)
        if place is None:
            return absent(f"CC names {told['CC']}, which does not exist", "CC")
        return Known(place, source="CC")
    place = shutil.which("gcc", path=path) or shutil.which("clang", path=path)
    return Known(place, source="PATH") if place else absent("no gcc and no clang", "PATH")


def _headers() -> Evidence:
    folder = Path(sysconfig.get_path("include"))
    header = folder / "Python.h"
    if header.is_file():
        return Known(str(header), source="sysconfig")
    return absent(f"{folder} has no Python.h", "sysconfig")


def _nvcc(told: Mapping[str, str], path: str | None, ask: Ask) -> dict[str, Evidence]:
    home = told.get("CUDA_HOME") or told.get("CUDA_PATH")
    on_path = shutil.which("nvcc", path=path)
    if not home and on_path:
        home = str(Path(on_path).resolve().parent.parent)
    if not home:
        home = next((place for place in _CUDA_HOMES if Path(place).is_dir()), None)
    if not home:
        nothing = absent("no CUDA toolkit: no CUDA_HOME, no nvcc, no /usr/local/cuda", "PATH")
        return dict.fromkeys(("toolchain.cuda.home", "toolchain.nvcc.version"), nothing)
    tool = Path(home) / "bin" / "nvcc"
    missing = absent(f"{home} has no bin/nvcc", home)
    return {
        "toolchain.cuda.home": Known(home, source="CUDA_HOME, nvcc on the PATH, usual folders"),
        "toolchain.nvcc.version": (
            _version(str(tool), ask, parse_nvcc_version) if tool.is_file() else missing
        ),
    }


def _builders() -> Evidence:
    there = [name for name in _BUILDERS if _is_installed(name)]
    if there:
        return Known(there, source="installed packages")
    return absent("no installed package compiles CUDA sources when used", "installed packages")


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _ask(place: str) -> str:
    done = subprocess.run(  # noqa: S603 - a compiler that the PATH names, asked for its version
        [place, "--version"], capture_output=True, timeout=_DEADLINE_S, check=False
    )
    return done.stdout.decode(errors="replace")
