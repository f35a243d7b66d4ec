"""Data that ships with the product: rows of tables, and the small embedded model."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def folder(name: str) -> Path:
    """Return the path of a data folder, for instance `embedded`.

    Raises FileNotFoundError when the installation lacks it, or runs from an archive, which
    libraries that map weight files into memory cannot read.
    """
    place = Path(str(files(__name__) / name))
    if not place.is_dir():
        message = f"{place}: no such data folder; reinstall cift-probe as an unpacked package"
        raise FileNotFoundError(message)
    return place
