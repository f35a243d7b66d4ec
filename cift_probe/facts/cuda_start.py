"""Whether CUDA starts at all, asked of the driver's library without torch.

Sources: stack/cuda_start.py, which asks cuInit; data/cuda_errors.toml for what its codes mean.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from cift_probe.data import read_rows
from cift_probe.evidence import Evidence, Known, Scope, Unknown, absent

TABLE = "cuda_errors.toml"
MACHINE_KEYS = (
    "driver.start.code",
    "driver.start.errors",
    "driver.start.duration",
    "driver.library.cuda.path",
    "driver.library.cuda.version",
)
DEVICE_KEYS = {
    "device.integrated": "integrated",
    "device.managed": "managed",
    "device.managed.concurrent": "managed_concurrent",
    "device.pageable": "pageable",
    "device.virtual_memory": "virtual_memory",
}
_PROGRAM = Path(__file__).parent.parent / "stack" / "cuda_start.py"
_DEADLINE_S = 60.0  # without persistence mode a first start takes tens of seconds on large nodes
_SOURCE = "cuInit, in a process of its own"
_VERSION = re.compile(r"\.so\.(\d{3,4}\.\d{1,4}(?:\.\d{1,4})?)$")


class ErrorRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of `data/cuda_errors.toml`; its name is the code."""

    name: str
    meaning: str
    fix: str
    source: str
    date: str


def parse_library_version(path: str) -> str:
    """Return the driver version in the name of a driver's library; empty where it has none.

    >>> parse_library_version("/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05")
    '580.95.05'
    """
    match = _VERSION.search(path)
    return match[1] if match else ""


def parse_start(told: Any) -> dict[str, Evidence]:
    """Return what the program's answer says of the machine, by name."""
    code = told.get("code") if isinstance(told, dict) else None
    if not isinstance(code, int):
        problem = told.get("problem") if isinstance(told, dict) else None
        return dict.fromkeys(MACHINE_KEYS, Unknown(str(problem or "no answer"), _SOURCE))
    path = str(told.get("path") or "")
    version = parse_library_version(path)
    where = Unknown("the system does not show loaded libraries", "/proc/self/maps")
    unnamed = absent("the library's name has no version, as under WSL", path)
    return {
        "driver.start.code": Known(code, source=_SOURCE),
        "driver.start.errors": Known([_meaning(code)] if code else [], source=_SOURCE),
        "driver.start.duration": _duration(told.get("seconds")),
        "driver.library.cuda.path": Known(path, source="/proc/self/maps") if path else where,
        "driver.library.cuda.version": (
            Known(version, "version", path) if version else unnamed if path else where
        ),
    }


def parse_attributes(told: Any, uuid: str) -> dict[str, Evidence]:
    """Return what the answer says of the device with this UUID, by name; flags."""
    devices = told.get("devices", {}) if isinstance(told, dict) else {}
    digits = uuid.partition("-")[2]
    found = devices.get(digits, {}) if isinstance(devices, dict) else {}
    source = "cuDeviceGetAttribute"
    return {
        key: Known(bool(found[name]), source=source)
        if isinstance(found, dict) and name in found
        else Unknown("CUDA does not tell it of this device", source)
        for key, name in DEVICE_KEYS.items()
    }


@cache
def read_answer() -> Any:
    """Return the program's answer, asked once per process; a text that says why there is none."""
    command = [sys.executable, "-I", str(_PROGRAM)]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, on a program of this package
            command, capture_output=True, timeout=_DEADLINE_S, check=True
        )
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"code": None, "problem": f"CUDA has not started after {_DEADLINE_S:.0f} s"}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"code": None, "problem": f"the program that starts CUDA failed: {error}"}


def read_machine() -> dict[str, Evidence]:
    """Return code and errors of CUDA's start, and which libcuda answered."""
    return parse_start(read_answer())


def read_device(uuid: str, label: str) -> dict[str, Evidence]:
    """Return the attributes of one device under its stored keys."""
    found = parse_attributes(read_answer(), uuid)
    return {Scope(label).key(key): item for key, item in found.items()}


@cache
def read_errors() -> dict[str, ErrorRow]:
    """Return the rows by code; raises DataError for a malformed one."""
    return read_rows(TABLE, ErrorRow)


def _duration(seconds: Any) -> Evidence:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return Unknown("the program does not tell how long the start took", _SOURCE)
    return Known(float(seconds), "s", _SOURCE, note="without persistence mode it takes longer")


def _meaning(code: int) -> str:
    row = read_errors().get(str(code))
    if row is None:
        return f"{code}: not listed in data/{TABLE}"
    return f"{code} ({row.name}): {row.meaning}; hint: {row.fix}"
