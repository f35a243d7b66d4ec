"""The journal of a run: what started, what was heard, what was found, line by line.

Every line is flushed before the next thing happens, so that a run that dies leaves what it knew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from cift_probe.evidence import Evidence
from cift_probe.report.canonical import storable, storable_evidence, storable_finding
from cift_probe.verdict.finding import Executed, Finding

Started: TypeAlias = Literal["check", "instrument"]


class JournalError(ValueError):
    """A journal that cannot be read; one line with file, line number and what to do."""


class _Header(msgspec.Struct, frozen=True, tag="header", tag_field="entry"):
    content: dict[str, Any]


class _Started(msgspec.Struct, frozen=True, tag="started", tag_field="entry"):
    label: str
    what: Started


class _Heard(msgspec.Struct, frozen=True, tag="evidence", tag_field="entry"):
    witness: str
    key: str
    evidence: Evidence


class _Found(msgspec.Struct, frozen=True, tag="finding", tag_field="entry"):
    finding: Finding


class _NotRun(msgspec.Struct, frozen=True, tag="not_run", tag_field="entry"):
    reasons: dict[str, str]


class _Ended(msgspec.Struct, frozen=True, tag="end", tag_field="entry"):
    exit_code: int


_Entry: TypeAlias = _Header | _Started | _Heard | _Found | _NotRun | _Ended


class JournalContents(msgspec.Struct):
    """What a journal says.

    `evidence` is by witness and stored key. `in_flight` names the checks that had started
    without a finding, and the instrument that had started after them and said nothing yet.
    `num_resumed` counts the findings that an earlier session of the run decided. `exit_code` is
    None unless the run `ended`.
    """

    header: dict[str, Any]
    evidence: dict[str, dict[str, Evidence]]
    findings: list[Finding]
    not_run: dict[str, str]
    in_flight: str
    ended: bool
    exit_code: int | None
    num_resumed: int = 0


class Journal:
    """Appends to the journal of one run; every call is one line on disk when it returns."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending, after what an earlier session wrote completely."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._drop_torn_line()

    def header(self, content: dict[str, Any]) -> None:
        """Note what the session is; a resumed run has one header per session."""
        self._write(_Header(content))

    def started(self, label: str, what: Started) -> None:
        """Note that a check or an instrument begins now."""
        self._write(_Started(label, what))

    def evidence(self, witness: str, key: str, evidence: Evidence) -> None:
        """Note what a witness said under its stored key."""
        self._write(_Heard(witness, key, storable_evidence(evidence)))

    def finding(self, finding: Finding) -> None:
        """Note what a check came to; it survives a power cut from here on."""
        self._write(_Found(storable_finding(finding)))
        os.fsync(self._file.fileno())

    def not_run(self, reasons: dict[str, str]) -> None:
        """Note why checks were left out, by label."""
        self._write(_NotRun(reasons))

    def end(self, exit_code: int) -> None:
        """Note that the session came to its end."""
        self._write(_Ended(exit_code))
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, entry: _Entry) -> None:
        text = json.dumps(storable(entry), ensure_ascii=False, allow_nan=False)
        self._file.write(text.encode() + b"\n")
        self._file.flush()

    def _drop_torn_line(self) -> None:
        # a line that an earlier session did not finish would spoil the first line of this one
        self._file.seek(0)
        whole, newline, _ = self._file.read().rpartition(b"\n")
        self._file.truncate(len(whole) + len(newline))


def read_journal(path: Path) -> JournalContents:
    """Return what a journal says; a torn last line is left out.

    Raises JournalError for a file that cannot be read, a broken line before the last one, or a
    journal whose session died before it said what it was.
    """
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror}); name the folder of a run"
        raise JournalError(message) from error
    story = _Story()
    del torn  # empty after a whole line; what was being written when the run died otherwise
    for number, line in enumerate(lines, 1):
        try:
            entry = msgspec.json.decode(line, type=_Entry)
        except msgspec.DecodeError as error:
            if number == len(lines):
                break
            message = f"{path}:{number}: broken line ({error}); delete that line and try again"
            raise JournalError(message) from error
        story.hear(entry)
    if not story.begun:
        message = f"{path}:1: no header, the session died before it began; start a new run"
        raise JournalError(message)
    return story.contents()


class _Story:
    """Follows the lines of a journal."""

    def __init__(self) -> None:
        self.begun = False
        self._header: dict[str, Any] = {}
        self._evidence: dict[str, dict[str, Evidence]] = {}
        self._findings: dict[tuple[str, str], Finding] = {}
        self._not_run: dict[str, str] = {}
        self._checks: dict[str, None] = {}
        self._instrument = ""
        self._ended: _Ended | None = None
        self._decided_now: set[tuple[str, str]] = set()

    def hear(self, entry: _Entry) -> None:
        """Take in one line."""
        match entry:
            case _Header():
                self._begin(entry.content)
            case _Started(what="check"):
                self._checks[entry.label] = None
                self._instrument = ""
            case _Started():
                self._instrument = entry.label
            case _Heard():
                self._evidence.setdefault(entry.witness, {})[entry.key] = entry.evidence
                self._instrument = ""  # a session waits for its instrument, so this one is done
            case _Found():
                self._find(entry.finding)
            case _NotRun():
                self._not_run.update(entry.reasons)
            case _Ended():
                self._ended = entry

    def _begin(self, header: dict[str, Any]) -> None:
        self.begun = True
        self._header = header
        self._checks.clear()
        self._instrument, self._ended = "", None
        self._decided_now.clear()

    def _find(self, finding: Finding) -> None:
        key = (finding.check, finding.case)
        self._checks.pop(finding.label, None)
        self._instrument = ""
        if finding.executed is Executed.PREREQUISITE and key in self._decided_now:
            return  # another process asked it silently; what was selected says more
        self._findings[key] = finding
        self._decided_now.add(key)

    def contents(self) -> JournalContents:
        """Return what was taken in."""
        resumed = [
            key
            for key, finding in self._findings.items()
            if finding.executed is Executed.RESUMED or key not in self._decided_now
        ]
        running = list(self._checks)
        if self._instrument:
            running.append(f"instrument {self._instrument}")
        return JournalContents(
            header=self._header,
            evidence=self._evidence,
            findings=list(self._findings.values()),
            not_run=self._not_run,
            in_flight="" if self._ended else ", ".join(running),
            ended=self._ended is not None,
            exit_code=None if self._ended is None else self._ended.exit_code,
            num_resumed=len(resumed),
        )
