"""The canonical report: put together, signed with a digest, written whole, read back."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import msgspec

import cift_probe
from cift_probe.evidence import Evidence, Unknown
from cift_probe.report.canonical import (
    canonical_text,
    digest_of,
    storable,
    storable_answer,
    storable_evidence,
    storable_finding,
)
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


_MAX_REPORT_BYTES = 256 << 20
_MAX_DIGITS = 6


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
    """Return a report with its digest; `machine` and `software` are picked from the facts.

    What JSON lacks is written as `storable` says; an answer's number that is none is None.
    """
    kept = {
        witness: {key: storable_evidence(item) for key, item in entries.items()}
        for witness, entries in evidence.items()
    }
    facts = kept.get("facts", {})
    findings = [storable_finding(item) for item in findings]
    untold = {key: Unknown(reason, "no source") for key, reason in _UNTOLD.items()}
    report = Report(
        schema_version=SCHEMA_VERSION,
        suite=suite,
        machine={**_picked(facts, _MACHINE + _DEVICE), **untold},
        software=_picked(facts, _SOFTWARE),
        plans=plans,
        evidence=kept,
        findings=findings,
        answers=[storable_answer(item) for item in answers],
        summary=_summarise(findings, not_run),
    )
    return signed(report)


def signed(report: Report) -> Report:
    """Return a report in stored form, with its digest.

    Numbers take the type that the schema gives them (1 becomes 1.0 seconds), so that the digest
    of what is in memory is the digest of what is read back.
    """
    typed = msgspec.convert(storable(report), Report)
    return msgspec.structs.replace(typed, digest=digest_of(storable(typed)))


def canonical_bytes(report: Report) -> bytes:
    """Return the one JSON text of a report: sorted keys, indented by 1, UTF-8."""
    return canonical_text(storable(report)).encode()


def write_report(folder: Path, report: Report) -> None:
    """Write `report.json` and `report.md`; each appears whole or not at all. Raises OSError."""
    _write_whole(folder / "report.json", canonical_bytes(report))
    _write_whole(folder / "report.md", render(report).encode())


def read_report(path: Path) -> Report:
    """Return a stored report.

    Raises ReportError, one line, for a file that is missing, no JSON, of another shape, of a
    newer schema, or changed after it was written.
    """
    plain = _read_json(path)
    _check_version(path, plain)
    try:
        report = msgspec.convert(plain, Report)
    except msgspec.ValidationError as error:
        _refuse(path, f"is no report of schema {SCHEMA_VERSION}: {error}; use the original", error)
    if digest_of(plain) != report.digest:
        _refuse(path, "was changed after it was written: its digest does not fit; use the original")
    return report


def _refuse(path: Path, what: str, cause: Exception | None = None) -> NoReturn:
    message = f"{path}: {what}"
    raise ReportError(message) from cause


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_REPORT_BYTES:
            _refuse(path, "is no file of at most 256 MiB; name a report.json")
        plain = json.loads(path.read_bytes())
        canonical_text(plain)  # NaN, and numbers beyond a float, are no JSON
    except OSError as error:
        _refuse(path, f"cannot be read ({error.strerror}); name a report.json", error)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"is no JSON ({error}); name a report.json", error)
    if not isinstance(plain, dict):
        _refuse(path, "holds no JSON object; name a report.json")
    return plain


def _check_version(path: Path, plain: dict[str, Any]) -> None:
    version = plain.get("schema_version")
    parts = version.split(".") if isinstance(version, str) else []
    if not parts or not all(part.isdecimal() and len(part) <= _MAX_DIGITS for part in parts):
        _refuse(path, "has no schema_version; name a report.json")
    if [int(part) for part in parts] > [int(part) for part in SCHEMA_VERSION.split(".")]:
        own = f"this is cift {cift_probe.__version__}, which reads up to {SCHEMA_VERSION}"
        _refuse(path, f"has schema {version}, {own}; upgrade cift-probe")


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
