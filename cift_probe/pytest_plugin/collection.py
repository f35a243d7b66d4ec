"""Marks, order and groups of the checks, and which are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from cift_probe.evidence import Scope
from cift_probe.pytest_plugin.session import STATE, State
from cift_probe.verdict.catalogue import FAMILIES
from cift_probe.verdict.declare import Check, declaration


def family_markers() -> Iterator[tuple[str, str]]:
    """Yield a marker for every family of checks."""
    for family in FAMILIES:
        if family != "multigpu":  # this one is a marker of its own already
            yield family, f"checks of suites/{family}"


def arrange(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every check, put prerequisites first, and leave out what --quick leaves out."""
    state = config.stash[STATE]
    for item in items:
        _mark(item, check_of(item), scope_of(item), state)
    rank = {check_id: place for place, check_id in enumerate(state.catalogue.order)}
    items.sort(key=lambda item: (rank[check_of(item).id], scope_of(item).label))
    left_out = [item for item in items if _leave_out(item, config)]
    if left_out:
        items[:] = [item for item in items if not _leave_out(item, config)]
        config.hook.pytest_deselected(items=left_out)


def check_of(item: pytest.Item) -> Check:
    """Return what an item's function declares; raises UsageError where it declares nothing."""
    check = declaration(getattr(item, "function", None))
    if check is None:
        message = f"{item.nodeid} is no check; declare it with @check"
        raise pytest.UsageError(message)
    return check


def scope_of(item: pytest.Item) -> Scope:
    """Return the scope of an item: its parameter, or the whole machine."""
    callspec = getattr(item, "callspec", None)
    scope = callspec.params.get("scope") if callspec is not None else None
    return scope if isinstance(scope, Scope) else Scope()


def note_deselected(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Remember why each of these checks was not run."""
    state = config.stash[STATE]
    expression = [config.getoption("markexpr", ""), config.getoption("keyword", "")]
    reason = "deselected" + "".join(
        f" by {flag} {text!r}" for flag, text in zip(("-m", "-k"), expression, strict=True) if text
    )
    for item in items:
        check, label = check_of(item), scope_of(item).label
        name = f"{check.id}[{label}]" if label else check.id
        state.not_run[name] = _left_out_by(check, config) or reason


def _mark(item: pytest.Item, check: Check, scope: Scope, state: State) -> None:
    if check.id not in state.catalogue:
        folder = state.machine.settings.suites
        message = f"{item.nodeid}: {check.id} is not in {folder}; set cift_suites to its folder"
        raise pytest.UsageError(message)
    item.extra_keyword_matches.add(check.id)  # `-k MEM016` names a check as reports do
    item.add_marker(state.catalogue.family(check.id))
    if scope.device != "cpu":
        item.add_marker("gpu")
    if check.device == "host" or scope.device == "cpu":
        item.add_marker("cpu")
    for name in ("quick", "soak", "multigpu"):
        if getattr(check, name) and state.catalogue.family(check.id) != name:
            item.add_marker(name)
    # host checks and the CPU ride with the first GPU, so that prerequisites stay in one process
    device = scope.device if scope.device.startswith("gpu") else "gpu0"
    item.add_marker(pytest.mark.xdist_group(device))


def _leave_out(item: pytest.Item, config: pytest.Config) -> bool:
    return bool(_left_out_by(check_of(item), config))


def _left_out_by(check: Check, config: pytest.Config) -> str:
    if config.getoption("--quick") and not check.quick:
        return "left out by --quick"
    if check.soak and "soak" not in config.getoption("markexpr", ""):
        return "a soak check; select it with -m soak"
    return ""
