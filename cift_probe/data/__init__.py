"""Data that ships with the product: rows of tables, and the small embedded model."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

_HERE = Path(__file__).parent


class DataError(ValueError):
    """A table of this folder is broken; the message is one line and names table, row and fault."""


def folder(name: str) -> Path:
    """Return the path of a data folder, for instance `embedded`.

    Raises FileNotFoundError when the installation lacks it, or runs from an archive, which
    libraries that map weight files into memory cannot read.
    """
    place = _HERE / name
    if not place.is_dir():
        message = f"{place}: no such data folder; reinstall cift-probe as an unpacked package"
        raise FileNotFoundError(message)
    return place


@cache
def load_toml(name: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a table by name; raises DataError where it is no table of rows."""
    place = _HERE / name
    try:
        table = tomllib.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"data/{name}: cannot be read ({error.strerror}); reinstall cift-probe"
        raise DataError(message) from error
    except tomllib.TOMLDecodeError as error:
        message = f"data/{name}: {error}; correct that line"
        raise DataError(message) from error
    for row, content in table.items():
        if not isinstance(content, dict):
            message = f'data/{name}: {row!r} is no row; write ["{row}"] and its columns below'
            raise DataError(message)
    return table


_Row = TypeVar("_Row", bound=msgspec.Struct)


def read_rows(name: str, kind: type[_Row]) -> dict[str, _Row]:
    """Return the rows of a table as structs; raises DataError naming table, row and fault."""
    rows = {}
    for row, content in load_toml(name).items():
        try:
            rows[row] = msgspec.convert(content, kind)
        except msgspec.ValidationError as error:
            message = f"data/{name}: row {row!r}: {error}; correct the row"
            raise DataError(message) from error
    return rows
