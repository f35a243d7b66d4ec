"""Which devices a build of torch has code for, and which wheel serves a device under a driver.

By the CUDA C++ Programming Guide, "Binary Compatibility": a binary serves devices of its own major
capability and an equal or higher minor one; PTX serves every later device, compiled by the driver.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import TypeAlias

import msgspec
from packaging.version import Version

from cift_probe.data import read_rows

Capability: TypeAlias = tuple[int, int]
WHEELS = "wheels.toml"
# only an exact match serves these: cubins of Tegra and desktop are not compatible with each other
TEGRA: frozenset[Capability] = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0)})
_NAME = re.compile(r"(sm|compute)_(\d{1,2})(\d)([af]?)")


class Wheel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published build of torch: release, CUDA, capabilities with a binary, PTX."""

    torch: str
    cuda: str
    archs: tuple[str, ...]
    source: str
    date: str
    ptx: str = ""

    @property
    def names(self) -> list[str]:
        """The architecture list as torch.cuda.get_arch_list() writes it."""
        listed = [f"sm_{arch.replace('.', '')}" for arch in self.archs]
        return listed + ([f"compute_{self.ptx.replace('.', '')}"] if self.ptx else [])

    @property
    def index(self) -> str:
        """The address of the package index that has it."""
        return f"https://download.pytorch.org/whl/cu{self.cuda.replace('.', '')}"


@cache
def read_wheels() -> dict[str, Wheel]:
    """Return the wheels by "release+cuXXX"; raises DataError for a malformed row."""
    return read_rows(WHEELS, Wheel)


def find_wheel(torch: Version, cuda: Version) -> Wheel | None:
    """Return the wheel of a release and CUDA; the nearest earlier release with that CUDA else.

    The lists change seldom, and only ever lose old architectures within one CUDA.
    """
    same = [
        wheel
        for wheel in read_wheels().values()
        if Version(wheel.cuda) == Version(f"{cuda.major}.{cuda.minor}")
        and Version(wheel.torch) <= Version(f"{torch.major}.{torch.minor}")
    ]
    return max(same, key=lambda wheel: Version(wheel.torch), default=None)


def serving(capability: Capability, names: Iterable[str]) -> str | None:
    """Return the entry of an architecture list that serves a device; None for none.

    >>> serving((8, 9), ["sm_80", "sm_90"]), serving((6, 1), ["sm_70"])
    ('sm_80', None)
    """
    binary: list[tuple[int, str]] = []
    ptx: list[tuple[Capability, str]] = []
    for name in names:
        found = _NAME.fullmatch(str(name).strip())
        if found is None:
            continue
        arch = (int(found[2]), int(found[3]))
        exact = found[4] == "a" or capability in TEGRA or arch in TEGRA
        if found[1] == "compute":
            if arch <= capability and not found[4]:
                ptx.append((arch, name))
        elif arch == capability or (not exact and arch[0] == capability[0] and arch <= capability):
            binary.append((arch[1], name))
    if binary:
        return max(binary)[1]
    return max(ptx)[1] if ptx else None


def wheels_for(capability: Capability, driver_cuda: Version | None) -> list[Wheel]:
    """Return the wheels that serve a device under a driver, the newest release and CUDA first.

    `driver_cuda` is the CUDA of the driver; inside a major any minor release runs.
    """
    found = [
        wheel
        for wheel in read_wheels().values()
        if serving(capability, wheel.names) is not None
        and (driver_cuda is None or Version(wheel.cuda).major <= driver_cuda.major)
    ]
    return sorted(
        found, key=lambda wheel: (Version(wheel.torch), Version(wheel.cuda)), reverse=True
    )
