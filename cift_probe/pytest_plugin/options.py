"""Command-line options, and the one-line errors for what they cannot take."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import cift_probe
from cift_probe.data import DataError
from cift_probe.expect import check_tables
from cift_probe.expect.memory import wrong_targets
from cift_probe.models import load_model
from cift_probe.pipeline import Settings
from cift_probe.plan import (
    REFERENCE_PLAN,
    Plan,
    PlanError,
    default_plan,
    parse_quantity,
    read_plan,
)

DEFAULT_PLANS = ("llama-3.1-8b-qlora", "llama-3.2-1b-full")  # answered where none is asked for
MARKERS = {
    "xdist_group": "checks that stay on one worker (pytest-xdist's own marker)",
    "gpu": "acceptance run of a machine with a GPU",
    "cpu": "everything that runs without an accelerator",
    "quick": "answers in seconds; what --quick keeps",
    "soak": "runs for many minutes; only on request (-m soak)",
    "multigpu": "needs two GPUs or more",
}


def add(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("cift", "can-i-fine-tune")
    group.addoption(
        "--plan",
        action="append",
        default=[],
        metavar="NAME|FILE",
        help="a plan that must fit on this machine: a built-in name or a TOML file; repeatable",
    )
    group.addoption(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="answer the default QLoRA plan for this model (a row of data/models.toml); repeatable",
    )
    group.addoption(
        "--vram-cap",
        metavar="SIZE",
        help="let the device stand in for a smaller one, for instance 24GiB",
    )
    group.addoption(
        "--report-dir",
        default="reports",
        metavar="DIR",
        help="where run folders are written (default: %(default)s)",
    )
    group.addoption(
        "--resume", action="store_true", help="go on with the latest run that ended early"
    )
    group.addoption(
        "--resume-from", metavar="RUN", help="go on with the run in this folder, which ended early"
    )
    group.addoption("--quick", action="store_true", help="only checks that answer in seconds")
    group.addoption(
        "--strict-severity",
        action="store_true",
        dest="cift_strict",
        help="let `should` and `info` checks decide the exit code too",
    )

    parser.addini("cift_suites", "folder of the suites, if not the ones that came with cift")


def settings(config: pytest.Config) -> Settings:
    """Return what the session was asked; raises UsageError with one line for bad input."""
    try:
        check_tables()
        demanded = [read_plan(text) for text in config.getoption("--plan")]
        asked = [default_plan(name) for name in config.getoption("--model")]
        # the small plan has a budget: its memory is asserted on every machine
        defaults = [read_plan(name) for name in DEFAULT_PLANS]
        plans = [*(demanded + asked or defaults), read_plan(REFERENCE_PLAN)]
        _check_targets(demanded)
        cap = config.getoption("--vram-cap")
        vram_cap = None if cap is None else parse_quantity(cap)
    except (PlanError, DataError) as error:
        raise pytest.UsageError(str(error)) from error
    return Settings(
        suites=Path(config.getini("cift_suites") or suites_folder()),
        plans=_by_name(plans),
        demanded=frozenset(plan.name for plan in demanded),
        vram_cap=vram_cap,
        strict=bool(config.getoption("cift_strict")),
    )


def _check_targets(plans: Sequence[Plan]) -> None:
    """Raise PlanError for modules that a plan's model does not have."""
    for plan in plans:
        if wrong := wrong_targets(plan, load_model(plan.model)):
            message = f"plan {plan.name}: targets: {wrong}"
            raise PlanError(message)


def check_surroundings(config: pytest.Config) -> None:
    """Raise UsageError for ways of running in which nothing could be judged."""
    if sys.flags.optimize > 1:
        message = "python drops docstrings (-OO), which describe the checks; unset PYTHONOPTIMIZE"
        raise pytest.UsageError(message)
    for option in ("setuponly", "setupplan"):
        if config.getoption(option, default=False):
            message = f"--{option.replace('setup', 'setup-')} judges nothing; leave it out"
            raise pytest.UsageError(message)


def suites_folder() -> Path:
    """Return the folder of the suites: inside the wheel, or beside the package in a checkout."""
    package = Path(cift_probe.__file__).parent
    inside = package / "suites"
    return inside if inside.is_dir() else package.parent / "suites"


def report_folder(config: pytest.Config) -> Path:
    """Return the folder for run folders; raises UsageError where it cannot be written."""
    folder = Path(config.getoption("--report-dir")).absolute()
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder.lstat()  # a name that is too long is neither
        nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not nearest.is_dir():
            message = f"--report-dir {folder}: {nearest} is a file; name a folder"
            raise pytest.UsageError(message)
        # root passes every access() check, so that only a file tells
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        message = f"--report-dir {folder}: cannot be written ({reason}); name another folder"
        raise pytest.UsageError(message) from error
    return folder


def _by_name(plans: list[Plan]) -> dict[str, Plan]:
    named: dict[str, Plan] = {}
    for plan in plans:
        if named.get(plan.name, plan) != plan:
            message = f"two different plans are called {plan.name}; rename one"
            raise pytest.UsageError(message)
        named[plan.name] = plan
    return named
