"""The closed set of kinds of failure: `data/kinds.toml`."""

from __future__ import annotations

from functools import cache
from typing import Literal

import msgspec

from cift_probe.data import read_rows


class KindRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `data/kinds.toml`: what a failure is, and what to change first.

    `outcome` is what a check answers where a text tells of it: most do not work, some work at a
    cost, and some are false alarms. `told` says whether a text can tell of it at all. `source` is
    a ground besides reports of others, where those that are known are not confirmed. `checks` and
    `facts` of a machine bear on it.
    """

    title: str
    fix: str
    outcome: Literal["fail", "warn", "unknown", "not_applicable", "pass"] = "fail"
    told: bool = True
    source: str = ""
    checks: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()


@cache
def read_kinds() -> dict[str, KindRow]:
    """Return every kind by name; raises DataError for a malformed row."""
    return read_rows("kinds.toml", KindRow)
