"""The exit code of a session, and the counts behind it."""

from __future__ import annotations

from collections.abc import Iterable

from cift_probe.verdict.answer import Answer, Verdict
from cift_probe.verdict.finding import Finding, Outcome, Severity

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 4  # the number pytest gives to a wrong call
EXIT_UNDECIDED = 10  # 0 to 6 are taken by pytest


def exit_code(
    findings: Iterable[Finding], answers: Iterable[Answer], *, strict: bool = False
) -> int:
    """Return the session's exit code.

    1 when a `must` check failed or broke, or a demanded plan does not fit; 10 when one is
    undecided; else 0. With `strict`, `should` and `info` count like `must`.
    """
    counted = {
        finding.outcome for finding in findings if strict or finding.severity is Severity.MUST
    }
    demanded = {answer.verdict for answer in answers if answer.demanded}
    if counted & {Outcome.FAIL, Outcome.ERROR} or Verdict.DOES_NOT_FIT in demanded:
        return EXIT_FAILED
    if Outcome.UNKNOWN in counted or Verdict.UNDECIDED in demanded:
        return EXIT_UNDECIDED
    return EXIT_OK
