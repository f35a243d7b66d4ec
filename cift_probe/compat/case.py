"""A situation as somebody describes it: fields by name, in the units that their names end in.

People, log parsers and bug trackers name the same thing differently; a judge asks for a thing by
all of its names. What is not said is missing, and what is said to be null is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from packaging.version import InvalidVersion, Version

from cift_probe.compat.names import named
from cift_probe.devices import read_devices

Capability: TypeAlias = tuple[int, int]
Outcome = Literal["fail", "warn", "unknown", "not_applicable", "pass"]

_FACTORS = {
    "b": 1,
    "bytes": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_QUANTITY = re.compile(r"\s*(-?[\d.]+)\s*([KMGT]?i?B|bytes)?\s*", re.IGNORECASE)
_CAPABILITY = re.compile(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)[af]?")
_NOTHING = re.compile(r"\s*(\[?\s*(n/?a|not supported|unknown|none|-)\s*\]?)?\s*", re.IGNORECASE)


class Judgement(NamedTuple):
    """What is said of a situation: a kind of the closed set, an outcome, and the reason."""

    kind: str
    outcome: Outcome
    reason: str


class Case:
    """The fields of a situation; nested ones are looked through as well."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Take the fields; of several `cases` the first is the situation."""
        cases = fields.get("cases")
        first = cases[0] if isinstance(cases, list) and cases else {}
        self.fields = named({**fields, **(first if isinstance(first, Mapping) else {})})

    def has(self, *names: str) -> bool:
        """Tell whether any of the names is said, be it as null."""
        return any(name in self.fields for name in names)

    def get(self, *names: str) -> Any:
        """Return the first that is said and not null; None for none."""
        for name in names:
            value = self.fields.get(name)
            if value is not None:
                return value
        return None

    def flag(self, *names: str) -> bool | None:
        """Return a yes or no, however it is written; None where it is not said."""
        value = self.get(*names)
        if isinstance(value, str):
            word = value.strip().lower()
            if word in {"true", "yes", "on", "ok", "enabled", "1"}:
                return True
            return (
                False
                if word in {"false", "no", "off", "disabled", "0", "", "denied", "refused"}
                else None
            )
        return bool(value) if isinstance(value, bool | int | float) else None

    def number(self, *names: str) -> float | None:
        """Return a number; None where it is not said or none."""
        value = self.get(*names)
        if isinstance(value, bool):
            return None
        if isinstance(value, int | float):
            return float(value)
        found = (
            re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*\S*\s*", value)
            if isinstance(value, str)
            else None
        )
        return float(found[1]) if found else None

    def size(self, *names: str) -> float | None:
        """Return bytes: `name_gib`, `name_mb`, `name_bytes`, or a text with its unit."""
        for name in names:
            for key, value in self.fields.items():
                base, _, unit = key.rpartition("_")
                if base == name and unit in _FACTORS and value is not None:
                    found = _quantity(value, _FACTORS[unit])
                elif key == name and value is not None:
                    found = _quantity(value, 1)
                else:
                    continue
                if found is not None:
                    return found
        return None

    def version(self, *names: str) -> Version | None:
        """Return a version without its local part; None where it is not said or none."""
        return parse_version(self.get(*names))

    def capability(self) -> Capability | None:
        """Return the lowest compute capability of all devices; None where none is told."""
        names = ("capability", "compute_capability", "compute_cap", "capabilities", "sm")
        found = list(_capabilities(self.get(*names)))
        rows = self.get("gpus", "devices")
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, Mapping):
                found += _capabilities(next((row[name] for name in names if name in row), None))
        return min(found, default=None) or self._by_name()

    def _by_name(self) -> Capability | None:
        """Return the capability of a card that is named, where the table has one of that name."""
        told = [self.fields.get(name) for name in ("gpu", "name")]
        listed = self.fields.get("gpus")
        told += listed if isinstance(listed, list) else []
        found = [known for text in told if isinstance(text, str) and (known := by_name(text))]
        return min(found, default=None)

    def cuda(self) -> Version | None:
        """Return the CUDA that torch is built for: told, or from its version's local part."""
        told = self.version("torch_cuda", "cuda_runtime", "runtime_cuda", "wheel_cuda")
        local = re.search(r"\+cu(\d{2})(\d)", str(self.get("torch") or ""))
        return told or (Version(f"{local[1]}.{local[2]}") if local else None)

    def texts(self) -> Iterator[str]:
        """Yield texts of logs and tools."""
        for name in (
            "text",
            "log",
            "stderr",
            "stdout",
            "output",
            "message",
            "traceback",
            "dmesg",
            "lines",
        ):
            value = self.fields.get(name)
            if isinstance(value, str):
                yield value
            elif isinstance(value, list) and value and all(isinstance(x, str) for x in value):
                yield "\n".join(value)


def parse_version(value: Any) -> Version | None:
    """Return what of a text or number is a version, its local part left out.

    >>> str(parse_version("2.3.0+cu121")), str(parse_version("CUDA 12.1 (container)"))
    ('2.3.0', '12.1')
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    found = re.search(r"\d+(?:\.\d+)*(?:\.?(?:dev|rc|a|b|post)\d+)?", str(value))
    try:
        return Version(found[0]) if found else None
    except InvalidVersion:
        return None


def parse_capability(value: Any) -> Capability | None:
    """Return a compute capability, from (8, 6), "8.6", "sm_86" or 86.

    >>> parse_capability([12, 1]), parse_capability("sm_90a"), parse_capability(86)
    ((12, 1), (9, 0), (8, 6))
    """
    if isinstance(value, list | tuple):
        whole = all(isinstance(x, int) and not isinstance(x, bool) for x in value)
        return (value[0], value[1]) if len(value) == 2 and whole else None  # noqa: PLR2004 - a pair
    found = _CAPABILITY.fullmatch(str(value).strip())
    return (int(found[1]), int(found[2])) if found else None


def by_name(text: str) -> Capability | None:
    """Return the compute capability of a card whose row's name is part of a text, longest first."""
    wanted = re.sub(r"[^a-z0-9]", "", text.lower())
    rows = sorted(read_devices().items(), key=lambda row: -len(row[0]))
    for name, device in rows:
        short = re.sub(r"-(pcie|sxm\d?|nvl|\d+gb)\b", "", name)
        if any(re.sub(r"[^a-z0-9]", "", item) in wanted for item in (name, short)):
            return device.compute_capability
    return None


def is_nothing(value: Any) -> bool:
    """Tell whether a field is a tool's word for "this I do not have"."""
    return value is None or (isinstance(value, str) and _NOTHING.fullmatch(value) is not None)


def _capabilities(value: Any) -> Iterator[Capability]:
    one = parse_capability(value)
    if one is not None:
        yield one
    elif isinstance(value, list | tuple):
        for item in value:
            inner = parse_capability(item)
            if inner is not None:
                yield inner


def _quantity(value: Any, factor: float) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) * factor
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    try:
        return float(found[1]) * (_FACTORS[found[2].lower()] if found[2] else factor)
    except ValueError:
        return None


def gib(num_bytes: float) -> str:
    """Return bytes for a reader."""
    return f"{num_bytes / (1 << 30):.2f} GiB"
