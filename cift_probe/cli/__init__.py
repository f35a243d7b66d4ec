"""The command `cift`: arguments in, pipeline out. Imports nothing heavy at start."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

import cift_probe

EXIT_USAGE = 4
_OWN_PARSERS = ("compat", "diagnose", "estimate", "facts")

_RUN_HELP = """\
Runs the suite in this environment and writes a report; all further arguments are pytest's and
the suite's own, for instance:

  cift run -m gpu                     acceptance run of a machine with a GPU
  cift run -m cpu                     everything that runs without an accelerator
  cift run --quick                    only what answers in seconds
  cift run --plan my-plan.toml        this plan must fit
  cift run --vram-cap 24GiB           let the device stand in for a smaller one
  cift run --resume                   go on with a run that ended early

exit codes: 0 good, 1 a check or a demanded plan failed, 10 something stayed undecided,
4 wrong call, 2 interrupted, 3 internal error
"""


def run_command(arguments: list[str]) -> int:
    """Carry out one command line and return its exit code."""
    if arguments[:1] == ["run"] and not {"-h", "--help"} & set(arguments[1:2]):
        return _run(arguments[1:])
    if arguments and arguments[0] in _OWN_PARSERS:
        command = import_module(f"cift_probe.cli.{arguments[0]}")  # only what is asked for
        return int(command.run(command.parser(_Parser).parse_args(arguments[1:])))
    options = _parser().parse_args(arguments)
    if options.command == "report":
        return _report(options)
    _parser().print_help()
    return 0


class _Parser(argparse.ArgumentParser):
    """argparse with one line per error and the exit code of the product."""

    def error(self, message: str) -> None:  # type: ignore[override] # exits, as its parent does
        print(f"{self.prog}: {message}; hint: {self.prog} --help", file=sys.stderr)  # noqa: T201
        raise SystemExit(EXIT_USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cift",
        description="Can I fine-tune this model on this machine, and how sure is that?",
    )
    version = f"cift {cift_probe.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser(
        "run",
        help="test this machine and write a report",
        description=_RUN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands.add_parser("estimate", help="say whether a plan fits on a card, without the card")
    commands.add_parser("compat", help="say whether a described machine works, and why not")
    commands.add_parser("diagnose", help="say which failure a log tells of, and what to change")
    commands.add_parser("facts", help="print what this machine says of itself")
    report = commands.add_parser(
        "report",
        help="print a report; for a run that ended early, what is known so far",
    )
    report.add_argument("file", metavar="FILE", help="report.json, or the folder of a run")
    report.add_argument(
        "--format", choices=("md", "json"), default="md", help="one page, or the whole report"
    )
    report.add_argument(
        "--redact", action="store_true", help="leave out serials, UUIDs, host and user names"
    )
    return parser


def _run(arguments: list[str]) -> int:
    try:
        from cift_probe.pytest_plugin.launch import launch  # pytest is loaded for a run alone
    except ModuleNotFoundError as error:
        hint = "install cift-probe's own needs into this environment: pip install cift-probe"
        print(f"cift run: {error}; {hint}", file=sys.stderr)  # noqa: T201 - a tool prints
        return EXIT_USAGE
    return launch(arguments)


def _report(options: argparse.Namespace) -> int:
    from cift_probe.report.assemble import open_report
    from cift_probe.report.journal import JournalError
    from cift_probe.report.markdown import render
    from cift_probe.report.redact import read_names, redact
    from cift_probe.report.writer import ReportError, canonical_bytes
    from cift_probe.verdict.display import one_line

    try:
        report = open_report(Path(options.file))
    except (ReportError, JournalError) as error:
        print(f"cift report: {one_line(str(error))}", file=sys.stderr)  # noqa: T201 - a command-line tool prints
        return EXIT_USAGE
    if options.redact:
        report = redact(report, read_names())
    if options.format == "json":
        sys.stdout.write(canonical_bytes(report).decode())
    else:
        _show(render(report))
    return 0


def _show(page: str) -> None:
    """Print a Markdown page: laid out for a person's terminal, as it is for a file or a pipe."""
    if not sys.stdout.isatty():
        sys.stdout.write(page)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(page))
