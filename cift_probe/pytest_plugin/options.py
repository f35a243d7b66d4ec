"""Command-line options, and the one-line errors for what they cannot take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import cift_probe
from cift_probe.pipeline import Settings
from cift_probe.plan import Plan, PlanError, default_plan, parse_quantity, read_plan

DEFAULT_PLAN = "llama-3.1-8b-qlora"
MARKERS = {
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
        "--resume",
        nargs="?",
        const="latest",
        metavar="RUN",
        help="go on with a session that ended early: a run folder, or the latest one",
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
        demanded = [read_plan(text) for text in config.getoption("--plan")]
        asked = [default_plan(name) for name in config.getoption("--model")]
        plans = demanded + asked or [read_plan(DEFAULT_PLAN)]
        cap = config.getoption("--vram-cap")
        vram_cap = None if cap is None else parse_quantity(cap)
    except PlanError as error:
        raise pytest.UsageError(str(error)) from error
    return Settings(
        suites=Path(config.getini("cift_suites") or suites_folder()),
        plans=_by_name(plans),
        demanded=frozenset(plan.name for plan in demanded),
        vram_cap=vram_cap,
        strict=bool(config.getoption("cift_strict")),
    )


def suites_folder() -> Path:
    """Return the folder of the suites: inside the wheel, or beside the package in a checkout."""
    package = Path(cift_probe.__file__).parent
    inside = package / "suites"
    return inside if inside.is_dir() else package.parent / "suites"


def report_folder(config: pytest.Config) -> Path:
    """Return the folder for run folders; raises UsageError where it cannot be written."""
    folder = Path(config.getoption("--report-dir")).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        message = f"--report-dir {folder}: {nearest} is a file; name a folder"
        raise pytest.UsageError(message)
    if not _may_write(nearest):
        message = f"--report-dir {folder}: no permission to write in {nearest}; name another folder"
        raise pytest.UsageError(message)
    return folder


def _may_write(folder: Path) -> bool:
    # root passes every access() but a read-only file system, so the mount is asked as well
    read_only = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    return os.access(folder, os.W_OK | os.X_OK) and not read_only


def _by_name(plans: list[Plan]) -> dict[str, Plan]:
    named: dict[str, Plan] = {}
    for plan in plans:
        if named.get(plan.name, plan) != plan:
            message = f"two different plans are called {plan.name}; rename one"
            raise pytest.UsageError(message)
        named[plan.name] = plan
    return named
