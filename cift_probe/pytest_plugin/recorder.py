"""Follows a run in the process that writes: what starts, what is found, what was left out."""

from __future__ import annotations

from typing import Any

import pytest

from cift_probe.pytest_plugin.session import State


class Recorder:
    """A plugin of the main process or the xdist controller; workers have none."""

    def __init__(self, state: State) -> None:
        """Record into the run of `state`."""
        self._state = state
        self._ids = {check.title: check.id for check in state.catalogue.values()}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Leave a name in the journal before anything can go wrong."""
        if self._state.run is not None:
            self._state.run.check_started(self._state, self._label(nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in the finding that travels with a report."""
        parcel = getattr(report, "cift_parcel", None)
        if parcel is not None:
            self._state.absorb(parcel)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember which checks have to be decided before the session is complete."""
        self._state.awaited.update(self._label(item.nodeid) for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Remember the same in the controller, which collects nothing itself."""
        self._state.awaited.update(self._label(nodeid) for nodeid in ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker did not run."""
        self._state.not_run.update(getattr(node, "workeroutput", {}).get("cift_not_run", {}))

    def _label(self, nodeid: str) -> str:
        # under xdist a node id ends in "@" and the name of its group
        name, _, case = nodeid.rpartition("::")[2].partition("@")[0].partition("[")
        label = self._ids.get(name, name)
        return f"{label}[{case}" if case else label
