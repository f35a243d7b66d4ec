"""Limits that are rows of data: value, unit, source, date and who may change them."""

from __future__ import annotations

from functools import cache

import msgspec

from cift_probe.data import read_rows
from cift_probe.evidence import Evidence, Known

TABLE = "thresholds.toml"


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of `data/thresholds.toml`; its name is the evidence key that asks for it.

    `band` is the relative distance that a value which is to agree with the row may keep.
    """

    value: float | int | bool | str | list[str]
    unit: str
    source: str
    date: str
    owner: str
    why: str
    band: float = 0.0


@cache
def read_limits() -> dict[str, Limit]:
    """Return all rows by name; raises DataError for a row that does not fit `Limit`."""
    return read_rows(TABLE, Limit)


def expect_limit(name: str) -> Evidence | None:
    """Return the limit called `name`, or None where no row has that name."""
    row = read_limits().get(name)
    if row is None:
        return None
    return Known(row.value, row.unit, f"data/{TABLE}: {row.source} ({row.date})", row.band)
