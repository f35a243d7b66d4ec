"""The three witnesses as fixtures.

They hand out views that the court replaces by recording ones: the court calls the check, so
that pytest, the control runner and rejudge run the same function in the same way. What the
fixtures are for is that a suite file without this plugin ends in "fixture not found", never in
a pass.
"""

from __future__ import annotations

import pytest

from cift_probe.evidence import Reading, Scope
from cift_probe.pytest_plugin.session import STATE


@pytest.fixture
def scope() -> Scope:
    """Return the scope of a check that runs once per machine; others are parametrised."""
    return Scope()


def _reading(request: pytest.FixtureRequest, witness: str, scope: Scope) -> Reading:
    return Reading(request.config.stash[STATE].machine.witnesses[witness], scope)


@pytest.fixture
def facts(request: pytest.FixtureRequest, scope: Scope) -> Reading:
    """Return what the machine says."""
    return _reading(request, "facts", scope)


@pytest.fixture
def expected(request: pytest.FixtureRequest, scope: Scope) -> Reading:
    """Return what tables and arithmetic say."""
    return _reading(request, "expected", scope)


@pytest.fixture
def measured(request: pytest.FixtureRequest, scope: Scope) -> Reading:
    """Return what happened when it was tried."""
    return _reading(request, "measured", scope)
