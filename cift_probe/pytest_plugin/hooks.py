"""Every hook of the plugin, in the order of a session's life."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterable, Sequence

import pytest

from cift_probe.evidence import Scope
from cift_probe.facts import read_devices
from cift_probe.pytest_plugin import collection, options, terminal
from cift_probe.pytest_plugin.recorder import Recorder
from cift_probe.pytest_plugin.run_folder import prepare_run
from cift_probe.pytest_plugin.session import FINDING, STATE, Role, State, role_of
from cift_probe.verdict.catalogue import cases
from cift_probe.verdict.declare import declaration
from cift_probe.verdict.display import one_line
from cift_probe.verdict.finding import Outcome, Severity
from cift_probe.verdict.summary import EXIT_FAILED


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    options.add(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Declare markers; keep the checks of one GPU on one xdist worker."""
    for name, meaning in (*options.MARKERS.items(), *collection.family_markers()):
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if config.getoption("dist", "no") == "load":
        config.option.dist = "loadgroup"
    if config.getoption("maxworkerrestart", "") is None:
        # a check that kills its worker would be handed to the next one, and kill that too
        config.option.maxworkerrestart = "0"


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start one worker per GPU under `-n auto`: the checks of one GPU stay on one worker."""
    return max(1, len(read_devices()))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Read options and declarations; whatever is wrong with them ends the session here."""
    config = session.config
    role: Role = role_of(config)
    try:
        options.check_surroundings(config)
        asked = options.settings(config)
        run = prepare_run(config, asked, writes=role != "worker")
        state = State(config, asked, run)
    except pytest.UsageError as error:
        raise pytest.UsageError(one_line(str(error))) from error
    config.stash[STATE] = state
    if role != "worker" and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # a job that is cancelled leaves a report too, and no child behind
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if role != "worker":
        config.pluginmanager.register(Recorder(state), "cift-recorder")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which machine, GPU, driver and torch are tested."""
    return terminal.header(config.stash[STATE]) if STATE in config.stash else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat a check for every device and plan that it asks to be repeated for."""
    check = declaration(metafunc.function)
    if check is None or (check.device == "host" and not check.each):
        return
    machine = metafunc.config.stash[STATE].machine
    scopes = cases(check, machine.devices, list(machine.settings.plans))
    metafunc.parametrize("scope", scopes, ids=[scope.label for scope in scopes])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark and order the checks, before -m and -k choose among them."""
    collection.arrange(config, items)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Remember what is not run, so that the report can say so."""
    if items:
        collection.note_deselected(items[0].config, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Send what was not run to the controller."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cift_not_run"] = session.config.stash[STATE].not_run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Have the court decide a check, and tell pytest what it came to."""
    check = declaration(pyfuncitem.function)
    if check is None:
        return None
    scope = pyfuncitem.funcargs["scope"]
    if not isinstance(scope, Scope):
        raise TypeError(scope)
    finding = pyfuncitem.config.stash[STATE].decide(check, scope)
    pyfuncitem.stash[FINDING] = finding
    if finding.outcome in (Outcome.UNKNOWN, Outcome.NOT_APPLICABLE):
        pytest.skip(finding.reason)
    if finding.outcome is not Outcome.PASS:
        pytest.fail(terminal.failure_text(finding), pytrace=False)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the finding to the report of the call, so that it reaches whoever writes."""
    report = yield
    finding = item.stash.get(FINDING, None)
    if call.when == "call" and finding is not None:
        # what a report carries in its __dict__ travels with it, under xdist too
        vars(report)["cift_parcel"] = item.config.stash[STATE].pack(finding)
        vars(report)["cift_outcome"] = [finding.outcome.value, finding.severity.value]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Show the five outcomes apart: `?` is neither a pass nor a skip."""
    outcome, severity = getattr(report, "cift_outcome", (None, None))
    if report.when != "call" or outcome is None:
        return None
    if outcome == Outcome.FAIL and severity != Severity.MUST:
        return "advice", "a", f"ADVICE ({severity})"
    shown = {
        Outcome.PASS: ("passed", ".", "PASSED"),
        Outcome.FAIL: ("failed", "F", "FAILED"),
        Outcome.UNKNOWN: ("undecided", "?", "UNDECIDED"),
        Outcome.NOT_APPLICABLE: ("not applicable", "-", "NOT APPLICABLE"),
        Outcome.ERROR: ("error", "E", "ERROR"),
    }
    return shown[Outcome(outcome)]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Conclude: answer the plans, write the report, set the exit code."""
    state = session.config.stash.get(STATE, None)
    if state is None:
        return
    state.close()
    if state.run is None or state.role == "worker" or not state.run.is_open:
        return
    ended = exitstatus in _RAN_TO_THE_END and not _broken(session, state)
    complete = not state.note_missing() and ended
    ours = state.run.conclude(state, complete=complete)
    if complete or state.run.unwritten:
        session.exitstatus = ours
    elif exitstatus in _RAN_TO_THE_END:
        session.exitstatus = EXIT_FAILED  # -x, --maxfail, a lost xdist worker, a broken fixture


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print answers first, then failures, then what is undecided."""
    state = terminalreporter.config.stash.get(STATE, None)
    if state is not None and state.run is not None and state.run.report is not None:
        terminal.summary(terminalreporter, state.run)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what is still running, whatever happened before."""
    state = config.stash.get(STATE, None)
    if state is not None:
        state.close()


_RAN_TO_THE_END = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def _broken(session: pytest.Session, state: State) -> bool:
    """Tell whether something failed that is no finding: a collection or a fixture."""
    failed: Iterable[Outcome] = (Outcome.FAIL, Outcome.ERROR)
    decided = sum(item.outcome in failed for item in state.machine.court.findings.values())
    return session.testsfailed > decided
