"""Where the ledger depends on the version of transformers, and which one is installed."""

from __future__ import annotations

from functools import cache

from cift_probe.models import ModelShape

Version = tuple[int, int]
READ: Version = (5, 24)  # whose code the ledger was written from
# `_supports_sdpa = False`, since soft-capped scores are not sdpa's; before, sdpa left the cap out
EAGER_SINCE = {"gemma2": (5, 21)}


def transformers_for(shape: ModelShape) -> Version:
    """Return the installed version where it matters for a model, else the one that was read."""
    return _installed() if shape.model_type in EAGER_SINCE else READ


@cache
def _installed() -> Version:
    from importlib.metadata import PackageNotFoundError, version  # 10 ms that few models need

    try:
        major, minor = version("transformers").split(".")[:2]
        return int(major), int(minor)
    except (PackageNotFoundError, ValueError):
        return READ
