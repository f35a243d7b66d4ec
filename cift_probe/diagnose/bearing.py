"""What a report of the machine says to a failure: the checks and facts that bear on its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from cift_probe.evidence import Evidence, Known
from cift_probe.verdict.display import evidence_text

_HOLDS, _FAILS = "PASS", "FAIL"


class Bearing(msgspec.Struct, frozen=True):
    """Lines of a report that bear on a failure.

    `stands` is "confirmed" where one of the checks fails on the machine, "not confirmed" where
    all that were decided pass: the machine was in order then. Empty where none was decided.
    """

    stands: str
    findings: tuple[str, ...]
    facts: tuple[str, ...]


def bearing(
    checks: Iterable[str],
    facts: Iterable[str],
    findings: Iterable[Mapping[str, Any]],
    evidence: Mapping[str, Evidence],
) -> Bearing:
    """Return what bears on a kind; findings are a report's, evidence is by key with its scope."""
    wanted = set(checks)
    about = [item for item in findings if item.get("check") in wanted]
    outcomes = {str(item.get("outcome")) for item in about}
    stands = "confirmed" if _FAILS in outcomes else "not confirmed" if _HOLDS in outcomes else ""
    lines = [f"{item.get('check')} {item.get('outcome')}: {item.get('reason')}" for item in about]
    told = [
        f"{key}: {evidence_text(value)}"
        for name in facts
        for key, value in sorted(evidence.items())
        if key.partition("[")[0] == name and isinstance(value, Known)
    ]
    return Bearing(stands, tuple(lines), tuple(told))
