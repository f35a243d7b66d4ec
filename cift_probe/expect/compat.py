"""Which driver, wheel and device go together, from NVIDIA's published rules.

Checked against the CUDA Compatibility guide (driver per major release) and the CUDA C++
Programming Guide, "Binary Compatibility" and "PTX Compatibility".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import msgspec
from packaging.version import Version

from cift_probe.data import read_rows
from cift_probe.evidence import Evidence, Known, Reading, Unknown, absent
from cift_probe.expect.wheels import TEGRA

Rule: TypeAlias = Callable[[Reading], Evidence]
RULES: dict[str, Rule] = {}
DRIVERS = "cuda.toml"

_GUIDE = "CUDA C++ Programming Guide, Binary Compatibility and PTX Compatibility"


class DriverRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of `data/cuda.toml`: the oldest driver of a CUDA major release."""

    driver_min: str
    source: str
    date: str


@cache
def read_drivers() -> dict[str, DriverRow]:
    """Return the oldest driver by CUDA major release; raises DataError for a malformed row."""
    return read_rows(DRIVERS, DriverRow)


def rule(name: str) -> Callable[[Rule], Rule]:
    """Register the decorated function as what is expected under `name`."""

    def register(function: Rule) -> Rule:
        RULES[name] = function
        return function

    return register


@rule("driver.version.min")
def expect_driver_minimum(facts: Reading) -> Evidence:
    """Return the oldest driver that runs the CUDA major release of the installed torch.

    Inside a major release any minor release runs (minor version compatibility), so the row of
    the major decides; the exact minor release matters to PTX alone.
    """
    runtime = facts["torch.cuda.version"]
    if isinstance(runtime, Unknown) or runtime.absent:
        return runtime
    major = str(Version(str(runtime.value)).major)
    row = read_drivers().get(major)
    if row is None:
        reason = f"no row for CUDA {major} in data/cuda.toml; add one from NVIDIA's release notes"
        return Unknown(reason, "data/cuda.toml")
    return Known(
        row.driver_min,
        "version",
        source=f"data/{DRIVERS}: {row.source} ({row.date})",
        note=f"for CUDA {runtime.value}",
    )


@rule("torch.arch.accepted")
def expect_accepted_architectures(facts: Reading) -> Evidence:
    """Return the entries of an architecture list that serve this device, best first.

    A cubin serves devices of its own major capability and an equal or higher minor one; PTX
    ("compute_XY") serves every later device, compiled by the driver at start. Entries with the
    suffix "a" serve exactly their device, with "f" their family (same major, from that minor).
    """
    capability = facts["device.capability"]
    if isinstance(capability, Unknown) or capability.absent:
        return capability
    text = str(capability.value)
    major, minor = (int(part) for part in text.split("."))
    exact = [f"sm_{major}{minor}a", f"sm_{major}{minor}f", f"sm_{major}{minor}"]
    if (major, minor) in TEGRA:
        return Known(exact, source=_GUIDE, note="Tegra: only an exact match serves")
    lower = [f"sm_{major}{m}{s}" for m in range(minor - 1, -1, -1) for s in ("f", "")]
    ptx = [
        f"compute_{a}{b}"
        for a in range(major, 2, -1)
        for b in range(9, -1, -1)
        if (a, b) <= (major, minor)
    ]
    note = f"for capability {text}; compute_NN is PTX, which the driver compiles at first use"
    return Known(exact + lower + ptx, source=_GUIDE, note=note)


@rule("torch.version.release")
def expect_release(facts: Reading) -> Evidence:
    """Return major and minor release of the imported torch, which extensions must match."""
    version = facts["torch.version"]
    if isinstance(version, Unknown) or version.absent:
        return version
    release = Version(str(version.value))
    return Known(f"{release.major}.{release.minor}", "version", source=version.source)


@rule("host.memory.total.min")
def expect_host_memory(facts: Reading) -> Evidence:
    """Return the host memory that goes with the device's memory, in bytes.

    On unified memory there is one memory, and nothing to hold against it.
    """
    device, kind = facts["device.memory.total"], facts["device.memory.kind"]
    for side in (device, kind):
        if isinstance(side, Unknown) or side.absent:
            return side
    if isinstance(kind, Known) and kind.value == "unified":
        return absent("host and device share one memory", kind.source)
    share = 0.95  # vast.ai's host requirement: system RAM >= 0.95 x total VRAM
    total = device.value if isinstance(device, Known) else 0
    return Known(
        int(share * total), "B", source="vast-cli check_requirements: 0.95 x device memory"
    )
