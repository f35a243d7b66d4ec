"""The folder of one run: its journal while it goes on, its report at the end.

Runs that ended early are found again by their journal: it has no end, and the process that
wrote it is gone. They get a report that names what was in flight, and can be resumed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

import cift_probe
from cift_probe.evidence import Evidence, Scope, Unknown
from cift_probe.pipeline import Machine, Settings, asked, conclude
from cift_probe.pytest_plugin.options import report_folder
from cift_probe.report.assemble import JOURNAL, REPORT, open_report
from cift_probe.report.journal import Journal, JournalContents, JournalError, read_journal
from cift_probe.report.schema import Report, Suite
from cift_probe.report.writer import write_report
from cift_probe.verdict.finding import Executed, Finding

if TYPE_CHECKING:  # the session holds a run
    from cift_probe.pytest_plugin.session import State

STACK_ORIGIN = "CIFT_STACK_ORIGIN"  # set by `make report`, which builds the stack it tests


class Run:
    """One run's folder; the journal is opened when the first check starts."""

    def __init__(self, folder: Path, suite: Suite, earlier: JournalContents | None) -> None:
        """Prepare a run in `folder`, which need not exist yet; `earlier` is what it resumes."""
        self.folder = folder
        self.suite = suite
        self.earlier = earlier
        self.report: Report | None = None
        self.notices: list[str] = []
        self.in_flight = ""
        self.unwritten = ""
        self._journal: Journal | None = None

    @property
    def is_open(self) -> bool:
        """Whether anything has been written."""
        return self._journal is not None or bool(self.unwritten)

    def check_started(self, state: State, label: str) -> None:
        """Write that a check has begun; the first one opens the journal."""
        if self._journal is None:
            with self._room():
                self._open(state)
        self.in_flight = label
        if self._journal is not None:
            with self._room():
                self._journal.started(label, "check")

    def instrument_started(self, label: str) -> None:
        """Write that an instrument has begun."""
        if self._journal is not None:
            with self._room():
                self._journal.started(label, "instrument")

    def evidence(self, witness: str, key: str, evidence: Evidence) -> None:
        """Write a new piece of evidence."""
        if self._journal is not None:
            with self._room():
                self._journal.evidence(witness, key, evidence)

    def finding(self, finding: Finding) -> None:
        """Write a finding."""
        self.in_flight = ""
        if self._journal is not None:
            with self._room():
                self._journal.finding(finding)

    def conclude(self, state: State, *, complete: bool) -> int:
        """Write the report; return the exit code that it states."""
        machine = state.machine
        findings = list(machine.court.findings.values())
        resumed = sum(item.executed is Executed.RESUMED for item in findings)
        suite = msgspec.structs.replace(
            self.suite,
            finished=_now(),
            complete=complete,
            in_flight="" if complete else self.in_flight,
            instruments={item.name: item.version for item in machine.bench.instruments.values()},
            num_resumed=resumed,
        )
        self.report = conclude(machine, suite, state.not_run)
        code = self.report.suite.exit_code
        try:
            write_report(self.folder, self.report)
            if self._journal is not None:
                self._journal.not_run(state.not_run)
                if code is not None:
                    self._journal.end(code)
                self._journal.close()
        except OSError as error:
            self.unwritten = f"{self.folder}: {error.strerror}; free room or name another folder"
            return int(pytest.ExitCode.INTERNAL_ERROR)
        return code or 0

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """End the session with one line when the journal cannot be written any more."""
        try:
            yield
        except OSError as error:
            self._journal = None
            self.unwritten = f"{self.folder}: {error.strerror}; free room or name another folder"
            message = f"the journal cannot be written: {self.unwritten}"
            raise pytest.exit.Exception(message, int(pytest.ExitCode.INTERNAL_ERROR)) from error

    def _open(self, state: State) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._journal = Journal(self.folder / JOURNAL)
        except OSError as error:
            message = f"--report-dir {self.folder.parent}: {error.strerror}; name another folder"
            raise pytest.UsageError(message) from error
        self._journal.header(_header(self.suite, state.machine))
        for witness, ledger in state.machine.witnesses.items():
            for key, evidence in ledger.items():
                self._journal.evidence(witness, key, evidence)


def check_same(run: Run, machine: Machine) -> None:
    """Raise UsageError when a run is resumed with other plans, cap, devices or packages."""
    if run.earlier is None:
        return
    header = run.earlier.header
    now, then = msgspec.to_builtins(asked(machine)), header["asked"]
    changed = sorted(key for key in now if now[key] != then.get(key))
    changed += ["cap"] if machine.settings.vram_cap != run.suite.vram_cap_bytes else []
    facts = run.earlier.evidence.get("facts", {})
    for key, before in facts.items():
        if key.startswith("package.") or key == "host.python.version":
            today = machine.witnesses["facts"].find(key, Scope())[1]
            changed += [key] if plain_value(today) != plain_value(before) else []
    if changed:
        message = (
            f"--resume {run.folder}: {', '.join(changed)} changed since it was begun; "
            "give the same options in the same environment, or start a new run"
        )
        raise pytest.UsageError(message)


def plain_value(evidence: Evidence) -> object:
    """Return what a fact says, apart from where it was read."""
    return None if isinstance(evidence, Unknown) else evidence.value


def prepare_run(config: pytest.Config, settings: Settings, *, writes: bool) -> Run:
    """Return the run of this session, new or resumed; raises UsageError for bad input.

    Reports of runs that ended early are written on the way.
    """
    base = report_folder(config)
    unfinished = list(_unfinished(base)) if writes else []
    named = config.getoption("--resume-from")
    if named is not None or config.getoption("--resume"):
        run = _resumed(_latest(base) if named is None else Path(named))
    else:
        run = _new(config, settings, base)
    for folder in unfinished:
        if folder != run.folder:
            run.notices.append(_recover(folder))
    return run


def _new(config: pytest.Config, settings: Settings, base: Path) -> Run:
    started = datetime.now(UTC)
    run_id = f"{started:%Y%m%dT%H%M%SZ}-{os.getpid()}"
    suite = Suite(
        name=cift_probe.SUITE,
        version=cift_probe.__version__,
        run_id=run_id,
        started=started.isoformat(timespec="seconds"),
        selection=_selection(config),
        stack_origin=os.environ.get(STACK_ORIGIN, "environment as it is"),
        vram_cap_bytes=settings.vram_cap,
    )
    return Run(base / run_id, suite, None)


def _selection(config: pytest.Config) -> str:
    """Return what was asked, as options; what is at its default is left out."""
    named = ("--plan", "--model")
    asked = [f"{option} {value}" for option in named for value in config.getoption(option)]
    if config.getoption("markexpr", ""):
        asked.insert(0, f"-m {config.getoption('markexpr')!r}")
    if config.getoption("keyword", ""):
        asked.insert(0, f"-k {config.getoption('keyword')!r}")
    if config.getoption("--vram-cap"):
        asked.append(f"--vram-cap {config.getoption('--vram-cap')}")
    flags = (("--quick", "--quick"), ("cift_strict", "--strict-severity"))
    return " ".join([*asked, *(text for option, text in flags if config.getoption(option))])


def _resumed(folder: Path) -> Run:
    try:
        earlier = read_journal(folder / JOURNAL)
    except (OSError, JournalError) as error:
        message = f"--resume-from {folder}: {error}"
        raise pytest.UsageError(message) from error
    try:
        suite = msgspec.convert(earlier.header["suite"], Suite)
        begun_on, _asked = earlier.header["machine"], earlier.header["asked"]
    except (KeyError, msgspec.ValidationError) as error:
        message = f"--resume {folder}: its header is of another version ({error}); start a new run"
        raise pytest.UsageError(message) from error
    if suite.version != cift_probe.__version__:
        message = f"--resume {folder}: was begun by cift {suite.version}; start a new run"
        raise pytest.UsageError(message)
    if begun_on != _fingerprint():
        message = f"--resume {folder}: was begun on another machine; start a new run here"
        raise pytest.UsageError(message)
    if _goes_on(folder / JOURNAL):
        message = f"--resume {folder}: is still running; wait for it, or start a new run"
        raise pytest.UsageError(message)
    return Run(folder, suite, earlier)


def _latest(base: Path) -> Path:
    journals = (path for path in base.glob(f"*/{JOURNAL}") if path.is_file())
    folders = [path.parent for path in journals if not _ended(path) and not _goes_on(path)]
    if not folders:
        message = f"--resume: no run in {base} ended early; leave --resume out for a new one"
        raise pytest.UsageError(message)
    return max(folders, key=lambda folder: folder.name)


def _unfinished(base: Path) -> Iterator[Path]:
    """Yield folders of runs that ended early and have no report yet."""
    for path in sorted(base.glob(f"*/{JOURNAL}")):
        if (
            path.is_file()
            and not (path.parent / REPORT).exists()
            and not _ended(path)
            and not _goes_on(path)
        ):
            yield path.parent


def _recover(folder: Path) -> str:
    try:
        report = open_report(folder)
        write_report(folder, report)
    except (OSError, ValueError) as error:
        return f"a run in {folder} ended early and cannot be read: {error}"
    where = report.suite.in_flight or "between two checks"
    return f"a run ended early ({where}): {folder}/report.md, go on with --resume-from {folder}"


def _ended(journal: Path) -> bool:
    try:
        return read_journal(journal).ended
    except (OSError, JournalError):
        return False


def _goes_on(journal: Path) -> bool:
    try:
        header = read_journal(journal).header
        process = psutil.Process(int(header["pid"]))
        apart: float = abs(process.create_time() - float(header["pid_started"]))
    except (OSError, JournalError, KeyError, TypeError, ValueError, OverflowError, psutil.Error):
        return False
    return apart < 1.0


def _header(suite: Suite, machine: Machine) -> dict[str, Any]:
    process = psutil.Process()
    return {
        "suite": msgspec.to_builtins(suite),
        "asked": msgspec.to_builtins(asked(machine)),
        "machine": _fingerprint(),
        "pid": process.pid,
        "pid_started": process.create_time(),
    }


def _fingerprint() -> str:
    """Return a digest that tells machines apart and says nothing about them."""
    # images of containers have no machine-id, or one for all; the node name tells those apart
    identity = os.uname().nodename
    with contextlib.suppress(OSError):
        identity += Path("/etc/machine-id").read_text(encoding="utf-8")
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
