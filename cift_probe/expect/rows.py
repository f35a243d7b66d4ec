"""Rules as rows of `data/compat.toml`: which versions, capabilities and systems go together.

The operators are a closed set: PEP 440's specifiers for everything that has a version, compute
capabilities included, and membership for names. There are no expressions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal, TypeAlias

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from cift_probe.data import DataError, read_rows

COMPAT = "compat.toml"
Fact: TypeAlias = Version | str


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must hold (`needs`) where something holds (`when`), and what to do where it does not."""

    kind: str
    when: dict[str, str]
    needs: dict[str, str]
    why: str
    fix: str
    source: str
    date: str
    outcome: Literal["fail", "warn"] = "fail"


class Ruling(msgspec.Struct, frozen=True):
    """What one row says of a machine."""

    row: str
    kind: str
    outcome: Literal["fail", "warn", "pass", "unknown"]
    reason: str
    why: str
    fix: str
    source: str


@cache
def read_compat() -> dict[str, Row]:
    """Return the rows by name; raises DataError naming row and fault."""
    rows = read_rows(COMPAT, Row)
    for name, row in rows.items():
        for spec in (*row.when.values(), *row.needs.values()):
            try:
                holds(spec, Version("1"))
            except InvalidSpecifier as error:
                message = f"data/{COMPAT}: row {name!r}: {error}; write a specifier or names"
                raise DataError(message) from error
    return rows


def holds(spec: str, fact: Fact) -> bool:
    """Tell whether a fact is within a specifier, or one of its names; raises InvalidSpecifier.

    >>> holds(">=7.5", Version("8.6")), holds("linux|wsl", "windows")
    (True, False)
    """
    if spec[:1] in "<>=!~":
        return isinstance(fact, Version) and SpecifierSet(spec, prereleases=True).contains(fact)
    if "=" in spec or "<" in spec or ">" in spec:
        raise InvalidSpecifier(spec)
    return str(fact) in spec.split("|")


def rulings(facts: Mapping[str, Fact]) -> list[Ruling]:
    """Return what the rows say of a machine; of a row on unknown facts, nothing or "unknown".

    A row whose `when` is met and whose `needs` is not known is undecided only where the fact
    belongs to every machine (`gpu.capability`, `driver`, `torch`); a package may be absent.
    """
    found = []
    for name, row in read_compat().items():
        if not all(key in facts and holds(spec, facts[key]) for key, spec in row.when.items()):
            continue
        unknown = [key for key in row.needs if key not in facts]
        if unknown and not any(key in _OF_EVERY_MACHINE for key in unknown):
            continue
        broken = [
            key for key, spec in row.needs.items() if key in facts and not holds(spec, facts[key])
        ]
        outcome = row.outcome if broken else "unknown" if unknown else "pass"
        found.append(
            Ruling(name, row.kind, outcome, _reason(row, facts), row.why, row.fix, row.source)
        )
    return found


_OF_EVERY_MACHINE = frozenset({"gpu.capability", "driver", "torch"})


def _reason(row: Row, facts: Mapping[str, Fact]) -> str:
    told = [f"{key} {facts[key]}" for key in row.when if key in facts]
    for key, spec in row.needs.items():
        told.append(f"{key} {facts.get(key, 'is not told')} (needed: {spec})")
    return ", ".join(told)
