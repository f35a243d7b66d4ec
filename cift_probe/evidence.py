"""Evidence: every value that the product reasons about, and where it came from.

`Known` is a value with unit and source; `Unknown` is the reason why there is no value.
Neither has a truth value, so that no check can mistake missing evidence for an answer:

>>> bool(Unknown("the NVML library is missing"))
Traceback (most recent call last):
    ...
TypeError: evidence has no truth value; compare it with a relation from cift_probe.verdict

Base units: "B" byte, "B/s", "s" second, "FLOP/s", "W", "degC", "Hz", "1" for counts and ratios,
"version" and "capability" for dotted numbers, "" for text, flags and lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeAlias

import msgspec


class UnitMismatchError(ValueError):
    """Two values of different units were compared."""


class _NoTruth(msgspec.Struct, frozen=True):
    def __bool__(self) -> NoReturn:
        message = "evidence has no truth value; compare it with a relation from cift_probe.verdict"
        raise TypeError(message)


class Known(_NoTruth, frozen=True, tag="known", tag_field="is", omit_defaults=True):
    """A value, its unit and its source.

    `band` is the relative error that the producer vouches for (0.01 is ± 1 %).
    `absent` is set when the thing asked about does not exist on this machine (ECC on a
    GeForce, a package that is not installed): that is knowledge, not missing evidence, and
    `value` is then None.
    """

    value: Any
    unit: str = ""
    source: str = ""
    band: float = 0.0
    note: str = ""
    absent: str = ""

    @property
    def upper(self) -> float:
        """The value at the upper end of its band, in `unit`."""
        return float(self.value) * (1.0 + self.band)

    @property
    def lower(self) -> float:
        """The value at the lower end of its band, in `unit`."""
        return float(self.value) * (1.0 - self.band)


class Unknown(_NoTruth, frozen=True, tag="unknown", tag_field="is", omit_defaults=True):
    """No value, and the reason why."""

    reason: str
    source: str = ""


Evidence: TypeAlias = Known | Unknown


def absent(reason: str, source: str = "") -> Known:
    """Knowledge that the thing does not exist here, with the reason a reader is given."""
    return Known(None, source=source, absent=reason)


def json_safe(evidence: Evidence) -> Evidence:
    """Return evidence that survives JSON: NaN and infinities, which JSON lacks, become text.

    >>> json_safe(Known(float("nan"), "1")).value
    'nan'
    """
    if isinstance(evidence, Known):
        safe = _finite(evidence.value)
        if safe is not evidence.value:
            return msgspec.structs.replace(evidence, value=safe)
    return evidence


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value


class Scope(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a piece of evidence is about: a device ("gpu0", "cpu"), a plan, both or neither."""

    device: str = ""
    plan: str = ""

    @property
    def label(self) -> str:
        """The name used in brackets after a test name or an evidence key."""
        return ",".join(part for part in (self.device, self.plan) if part)

    def key(self, name: str) -> str:
        """Return the name under which evidence of this scope is stored.

        >>> Scope("gpu0").key("device.memory.free")
        'device.memory.free[gpu0]'
        """
        return f"{name}[{self.label}]" if self.label else name

    def candidates(self, name: str) -> Iterator[str]:
        """Yield stored names that may answer a request in this scope, the most special first."""
        seen = set()
        scopes = (self, Scope(self.device), Scope(plan=self.plan), Scope())
        for scope in scopes:
            key = scope.key(name)
            if key not in seen:
                seen.add(key)
                yield key


Producer: TypeAlias = Callable[[str, Scope], Mapping[str, Evidence]]


def nothing(_key: str, _scope: Scope) -> Mapping[str, Evidence]:
    """Produce no evidence: what a stored report or a fabricated machine has for a producer."""
    return {}


class Ledger(Mapping[str, Evidence]):
    """What one witness said, by stored key; the producer is asked once, on first access."""

    def __init__(
        self,
        witness: str,
        producer: Producer = nothing,
        listener: Callable[[str, str, Evidence], None] | None = None,
    ) -> None:
        """Keep evidence of `witness`; `listener(witness, key, evidence)` hears every new entry."""
        self.witness = witness
        self._producer = producer
        self._listener = listener
        self._entries: dict[str, Evidence] = {}

    def __getitem__(self, key: str) -> Evidence:
        """Return stored evidence, without asking the producer."""
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the stored keys."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Count the stored keys."""
        return len(self._entries)

    def enter(self, key: str, evidence: Evidence) -> None:
        """Store evidence under its full key and tell the listener."""
        self._entries[key] = json_safe(evidence)
        if self._listener is not None:
            self._listener(self.witness, key, self._entries[key])

    def peek(self, name: str, scope: Scope) -> tuple[str, Evidence] | None:
        """Return stored key and evidence for a name in a scope, or None; produces nothing."""
        for key in scope.candidates(name):
            if key in self._entries:
                return key, self._entries[key]
        return None

    def find(self, name: str, scope: Scope) -> tuple[str, Evidence]:
        """Return stored key and evidence, asking the producer if there is none yet."""
        found = self.peek(name, scope)
        if found is None:
            for key, evidence in self._producer(name, scope).items():
                self.enter(key, evidence)
            found = self.peek(name, scope)
        if found is None:
            self.enter(scope.key(name), Unknown(f"nothing here tells {name}", self.witness))
            found = scope.key(name), self._entries[scope.key(name)]
        return found


class Reading:
    """What a check is handed: one witness, seen in one scope; remembers what was read."""

    def __init__(self, ledger: Ledger, scope: Scope) -> None:
        """Read `ledger` in `scope`."""
        self._ledger = ledger
        self._scope = scope
        self.keys: list[str] = []

    def __getitem__(self, name: str) -> Evidence:
        """Return the evidence for a dotted name, for instance `device.memory.free`."""
        key, evidence = self._ledger.find(name, self._scope)
        self.keys.append(f"{self._ledger.witness}:{key}")
        return evidence
