"""Where the ledger depends on the version of transformers."""

from __future__ import annotations

from typing import TypeAlias

Version: TypeAlias = tuple[int, int]
READ: Version = (5, 24)  # whose code the ledger was written from
# `_supports_sdpa = False`, since soft-capped scores are not sdpa's; before, sdpa left the cap out
EAGER_SINCE = {"gemma2": (5, 21)}


def parse_version(text: str) -> Version:
    """Return major and minor release; raises ValueError for what is none.

    >>> parse_version("5.17.0.dev0")
    (5, 17)
    """
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
