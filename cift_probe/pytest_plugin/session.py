"""What one pytest process of the suite knows, and what it sends to its controller."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
import pytest

from cift_probe.evidence import Evidence, Scope, Unknown
from cift_probe.pipeline import Machine, Settings, gather
from cift_probe.pytest_plugin.progress import Progress
from cift_probe.pytest_plugin.run_folder import Run, check_same
from cift_probe.verdict.catalogue import Catalogue
from cift_probe.verdict.declare import Check, CheckError
from cift_probe.verdict.finding import Executed, Finding, Outcome

Role: TypeAlias = Literal["main", "controller", "worker"]


class Parcel(msgspec.Struct, frozen=True):
    """What travels with one test report: new findings, and in a distributed run evidence."""

    finding: Finding
    others: list[Finding]
    evidence: list[tuple[str, str, Evidence]]


class State:
    """The session in this process.

    `main` runs checks and writes; under xdist the `controller` writes and each `worker` runs
    checks and sends what it learns with its test reports.
    """

    def __init__(self, config: pytest.Config, settings: Settings, run: Run | None) -> None:
        """Bring witnesses and judge together; raises UsageError for a suite that is wrong."""
        self.config = config
        self.role = role_of(config)
        self.run = run
        self.not_run: dict[str, str] = {}
        self.awaited: set[str] = set()
        self.progress = Progress(config)
        self._outbox: list[tuple[str, str, Evidence]] = []
        self._sent: set[tuple[str, str]] = set()
        self.current = ""
        try:
            self.machine: Machine = gather(settings, self.progress, self._hear)
        except CheckError as error:
            raise pytest.UsageError(str(error)) from error
        if run is not None:
            check_same(run, self.machine)
            self.progress.hear_started = run.instrument_started
        self._recall(run)

    @property
    def catalogue(self) -> Catalogue:
        """All checks of the suite."""
        return self.machine.catalogue

    def decide(self, check: Check, scope: Scope) -> Finding:
        """Return the finding of one check."""
        return self.machine.court.decide(check, scope)

    def pack(self, finding: Finding) -> str:
        """Return the parcel for a test report, as JSON."""
        court = self.machine.court.findings
        mine = (finding.check, finding.case)
        others = [item for key, item in court.items() if key not in self._sent and key != mine]
        self._sent = set(court)
        parcel = Parcel(finding, others, self._outbox if self.role == "worker" else [])
        self._outbox = []
        return msgspec.json.encode(parcel).decode()

    def absorb(self, text: str) -> Finding:
        """Take in a parcel: court, ledgers and journal know it afterwards."""
        parcel = msgspec.json.decode(text, type=Parcel)
        for witness, key, evidence in parcel.evidence:
            self.machine.witnesses[witness].enter(key, evidence)
        for finding in (*parcel.others, parcel.finding):
            name = (finding.check, finding.case)
            before = self.machine.court.findings.get(name)
            if before is None or before.executed is Executed.PREREQUISITE:
                self.machine.court.findings[name] = finding
            if self.run is not None:
                self.run.finding(finding)
        return parcel.finding

    def note_missing(self) -> bool:
        """Note checks that were to run and have no finding; tell whether there are any."""
        decided = {finding.label for finding in self.machine.court.findings.values()}
        missing = self.awaited - decided - set(self.not_run)
        self.not_run.update(dict.fromkeys(missing, "the session ended before it was decided"))
        return bool(missing)

    def close(self) -> None:
        """End all child processes."""
        self.machine.bench.close()

    def _hear(self, witness: str, key: str, evidence: Evidence) -> None:
        if self.role == "worker":
            self._outbox.append((witness, key, evidence))
        elif self.run is not None:
            self.run.evidence(witness, key, evidence)

    def _recall(self, run: Run | None) -> None:
        """Take over what an earlier session of this machine decided.

        Only what was decided: an UNKNOWN or an ERROR is what a resumed session is for, and
        evidence that is Unknown is asked for again.
        """
        if run is None or run.earlier is None:
            return
        for witness, entries in run.earlier.evidence.items():
            for key, evidence in entries.items():
                if not isinstance(evidence, Unknown):
                    self.machine.witnesses[witness].enter(key, evidence)
        for finding in run.earlier.findings:
            if finding.outcome not in (Outcome.UNKNOWN, Outcome.ERROR):
                self.machine.court.recall(finding)


def role_of(config: pytest.Config) -> Role:
    """Return what part this process plays."""
    if hasattr(config, "workerinput"):
        return "worker"
    distributed = config.getoption("numprocesses", None) or config.getoption("tx", None)
    return "controller" if distributed else "main"


STATE = pytest.StashKey[State]()
FINDING = pytest.StashKey[Finding]()
