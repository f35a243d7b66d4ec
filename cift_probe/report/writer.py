"""The canonical report: put together, signed with a digest, written whole, read back."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

import cift_probe
from cift_probe.evidence import Evidence, Unknown
from cift_probe.report.markdown import render
from cift_probe.report.schema import SCHEMA_VERSION, Report, Suite, Summary
from cift_probe.verdict.answer import Answer
from cift_probe.verdict.finding import Finding, Outcome, Severity

_MACHINE = ("host.", "driver.", "storage.")
_DEVICE = (
    "device.name",
    "device.uuid",
    "device.serial",
    "device.vbios",
    "device.gsp.version",
    "device.pci.",
    "device.capability",
    "device.memory.total",
    "device.memory.reserved",
    "device.memory.kind",
    "device.pcie.",
    "device.power.limit",
    "device.clock.sm.max",
    "device.clock.memory.max",
    "device.ecc.mode",
    "device.mig.mode",
    "device.count",
)
_SOFTWARE = ("package.", "torch.")
# what MLPerf's system description asks for and no software interface tells
_UNTOLD = {
    "system.cooling": "no software interface tells how the machine is cooled",
    "system.host.memory.configuration": "modules and channels are told to root alone (dmidecode)",
}


class ReportError(ValueError):
    """A report that cannot be used; one line that says what to change."""


def build_report(
    *,
    suite: Suite,
    evidence: dict[str, dict[str, Evidence]],
    findings: list[Finding],
    answers: list[Answer],
    plans: list[dict[str, Any]],
    not_run: dict[str, str],
) -> Report:
    """Return a report with its digest; `machine` and `software` are picked from the facts."""
    facts = evidence.get("facts", {})
    untold = {key: Unknown(reason, "no source") for key, reason in _UNTOLD.items()}
    report = Report(
        schema_version=SCHEMA_VERSION,
        suite=suite,
        machine={**_picked(facts, _MACHINE + _DEVICE), **untold},
        software=_picked(facts, _SOFTWARE),
        plans=plans,
        evidence=evidence,
        findings=findings,
        answers=answers,
        summary=_summarise(findings, not_run),
    )
    return signed(report)


def signed(report: Report) -> Report:
    """Return the report with the digest of its content."""
    return msgspec.structs.replace(report, digest=digest_of(report))


def digest_of(report: Report) -> str:
    """Return "sha256:…" over the canonical bytes of the report without its digest."""
    bare = msgspec.structs.replace(report, digest="")
    return f"sha256:{hashlib.sha256(canonical_bytes(bare)).hexdigest()}"


def canonical_bytes(report: Report) -> bytes:
    """Return the one JSON text of a report: sorted keys, indented by 1, UTF-8.

    Raises ValueError for a number that JSON does not have.
    """
    plain = msgspec.to_builtins(report)
    text = json.dumps(plain, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def write_report(folder: Path, report: Report) -> None:
    """Write `report.json` and `report.md`; each appears whole or not at all. Raises OSError."""
    _write_whole(folder / "report.json", canonical_bytes(report))
    _write_whole(folder / "report.md", render(report).encode())


def read_report(path: Path) -> Report:
    """Return a stored report; raises ReportError with one line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror}); name a report.json"
        raise ReportError(message) from error
    try:
        plain = json.loads(content)
    except ValueError as error:
        message = f"{path}: is no JSON ({error}); name a report.json"
        raise ReportError(message) from error
    _check_version(path, plain)
    try:
        report = msgspec.convert(plain, Report)
    except msgspec.ValidationError as error:
        message = f"{path}: is no report of schema {SCHEMA_VERSION}: {error}"
        raise ReportError(message) from error
    if report.digest != digest_of(report):
        message = (
            f"{path}: was changed after it was written: its digest does not fit; use the original"
        )
        raise ReportError(message)
    return report


def _check_version(path: Path, plain: Any) -> None:  # noqa: ANN401 - any JSON value
    version = plain.get("schema_version") if isinstance(plain, dict) else None
    if not isinstance(version, str) or not version.partition(".")[0].isdecimal():
        message = f"{path}: has no schema_version; name a report.json"
        raise ReportError(message)
    if int(version.partition(".")[0]) > int(SCHEMA_VERSION.partition(".")[0]):
        message = (
            f"{path}: has schema {version}; cift {cift_probe.__version__} reads up to "
            f"{SCHEMA_VERSION}; upgrade cift-probe"
        )
        raise ReportError(message)


def _write_whole(path: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _picked(facts: dict[str, Evidence], prefixes: tuple[str, ...]) -> dict[str, Evidence]:
    return {key: facts[key] for key in sorted(facts) if key.startswith(prefixes)}


def _summarise(findings: list[Finding], not_run: dict[str, str]) -> Summary:
    counts = Counter(finding.outcome.value for finding in findings)
    broken = (Outcome.FAIL, Outcome.ERROR)
    failed = [f.label for f in findings if f.outcome in broken and f.severity is Severity.MUST]
    advice = [f.label for f in findings if f.outcome in broken and f.severity is not Severity.MUST]
    undecided = [f.label for f in findings if f.outcome is Outcome.UNKNOWN]
    parts = [
        f"{counts[Outcome.PASS]} passed",
        _listed(len(failed), "failed", failed),
        _listed(len(advice), "advised against", advice),
        f"{len(undecided)} undecided",
        f"{counts[Outcome.NOT_APPLICABLE]} not applicable",
        f"{len(not_run)} not run",
    ]
    return Summary(
        counts={outcome.value: counts[outcome] for outcome in Outcome},
        failed=failed,
        undecided=undecided,
        advice=advice,
        not_run=dict(sorted(not_run.items())),
        text=f"{len(findings)} checks: {', '.join(parts)}",
    )


def _listed(count: int, word: str, labels: list[str]) -> str:
    return f"{count} {word} ({', '.join(labels)})" if labels else f"{count} {word}"
