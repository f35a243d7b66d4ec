"""Findings: what one comparison came to, with everything a reader needs to follow it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cift_probe.evidence import Evidence


class Outcome(StrEnum):
    """What a check came to. Only PASS says that something was compared and holds."""

    PASS = "PASS"  # noqa: S105 - an outcome, no password
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"
    NOT_APPLICABLE = "NOT_APPLICABLE"
    ERROR = "ERROR"


class Severity(StrEnum):
    """`must` decides the exit code; `should` and `info` stand in the summary."""

    MUST = "must"
    SHOULD = "should"
    INFO = "info"


class Domain(StrEnum):
    """Where to look first when the check fails."""

    HARDWARE = "hardware"
    DRIVER = "driver"
    ENVIRONMENT = "environment"
    CONFIGURATION = "configuration"
    SUITE = "suite"


class Executed(StrEnum):
    """How the finding came to be, apart from what it says."""

    SELECTED = "selected"
    PREREQUISITE = "prerequisite"
    RESUMED = "resumed"


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One comparison: outcome, both sides, the relation between them, and the reason.

    A comparator fills the first six fields (`parts` when it joins others); the court adds who
    asked, in which scope, and which evidence was read (`witness:key`).
    """

    outcome: Outcome
    relation: str = ""
    found: Evidence | None = None
    limit: Evidence | None = None
    reason: str = ""
    parts: tuple[Finding, ...] = ()
    check: str = ""
    case: str = ""
    requirement: str = ""
    why: str = ""
    fix: str = ""
    family: str = ""
    severity: Severity = Severity.MUST
    domain: Domain = Domain.ENVIRONMENT
    executed: Executed = Executed.SELECTED
    blocked_by: str = ""
    evidence: tuple[str, ...] = ()
    duration_s: float = 0.0

    @property
    def label(self) -> str:
        """Check id and case, as they are printed: `GPU003[gpu0]`."""
        return f"{self.check}[{self.case}]" if self.case else self.check
