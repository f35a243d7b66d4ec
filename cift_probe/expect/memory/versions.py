"""Where the ledger depends on the version of transformers."""

from __future__ import annotations

import re
from typing import TypeAlias

Version: TypeAlias = tuple[int, int]
READ: Version = (5, 24)  # whose code the ledger was written from
# `_supports_sdpa = False`, since soft-capped scores are not sdpa's; before, sdpa left the cap out
EAGER_SINCE = {"gemma2": (5, 21)}


def parse_version(text: str) -> Version:
    """Return major and minor release; what cannot be read counts as the version that was read.

    >>> parse_version("5.17.0.dev0"), parse_version("5"), parse_version("?")
    ((5, 17), (5, 0), (5, 24))
    """
    found = re.match(r"(\d+)(?:\.(\d+))?", text)
    return (int(found[1]), int(found[2] or 0)) if found else READ
