"""`cift diagnose`: which failure a log tells of, where it shows, and what to change first."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec

from cift_probe.cli import machine_file
from cift_probe.cli.machine_file import MachineFileError
from cift_probe.diagnose.bearing import bearing
from cift_probe.diagnose.diagnosis import Diagnosis, diagnose
from cift_probe.diagnose.kinds import read_kinds
from cift_probe.evidence import Evidence
from cift_probe.verdict.display import bytes_text, one_line

EXIT_KNOWN, EXIT_UNKNOWN, EXIT_USAGE = 0, 10, 4
_WIDTH = 160
_SURE = {
    "certain": "the text names it",
    "likely": "likely; the same words can have another cause",
    "aside": "a consequence of another failure, or harmless",
}
_DESCRIPTION = """\
Reads a training log, a traceback, a kernel log or NCCL's output, and says which failure it tells
of, the likeliest cause first. What is not recognised is said to be unknown, never guessed.

  cift diagnose train.log
  python train.py 2>&1 | cift diagnose -
  dmesg | cift diagnose - --json
  cift diagnose train.log --report reports/latest     what a report of the machine says to it

exit codes: 0 a failure was recognised, 10 none was, 4 wrong call
"""


class FileError(ValueError):
    """The file cannot be read; one line that says what to change."""


def parser(kind: type[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Return the command's options in a parser of `kind`."""
    made = kind(
        prog="cift diagnose",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("file", metavar="FILE", help="a log of any size; - is standard input")
    made.add_argument(
        "--report",
        metavar="FILE",
        help="a report, the folder of a run, or the output of cift facts --json",
    )
    made.add_argument("--json", action="store_true", help="one JSON object")
    return made


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    try:
        machine = machine_file.read_machine(options.report) if options.report else None
        found = _read(options.file)
    except (FileError, MachineFileError) as error:
        print(f"cift diagnose: {one_line(str(error))}", file=sys.stderr)  # noqa: T201 - a tool prints
        return EXIT_USAGE
    if machine is not None:
        found = _with_machine(found, *machine)
    text = json.dumps(_plain(found), indent=2) if options.json else _page(found)
    print(text)  # noqa: T201 - a command-line tool prints
    return EXIT_KNOWN if found else EXIT_UNKNOWN


def _read(name: str) -> list[Diagnosis]:
    if name == "-":
        return diagnose(sys.stdin.buffer)
    try:
        with _opened(name) as stream:
            return diagnose(stream)
    except OSError as error:
        message = f"{name}: cannot be read ({error.strerror}); name a log file, or - for stdin"
        raise FileError(message) from error


def _with_machine(
    found: list[Diagnosis],
    findings: list[Mapping[str, Any]],
    evidence: Mapping[str, Evidence],
) -> list[Diagnosis]:
    """Add what a report says; of the likely ones those come first that it confirms."""
    kinds = read_kinds()
    told = [
        msgspec.structs.replace(
            item,
            machine=bearing(kinds[item.kind].checks, kinds[item.kind].facts, findings, evidence),
        )
        for item in found
    ]
    ranks = ("confirmed", "", "not confirmed")
    sure = {item.kind: list(_SURE).index(item.sure) for item in told}
    return sorted(
        told,
        key=lambda item: (
            sure[item.kind],
            ranks.index(item.machine.stands if item.machine else ""),
        ),
    )


def _opened(name: str) -> BinaryIO:
    """Open a file or a pipe; a device would never end."""
    stream = open(name, "rb")  # noqa: PTH123, SIM115 - the caller closes it
    mode = os.fstat(stream.fileno()).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        stream.close()
        message = f"{name}: is neither a file nor a pipe; name a log file, or - for stdin"
        raise FileError(message)
    return stream


def _plain(found: list[Diagnosis]) -> dict[str, Any]:
    rows = [msgspec.to_builtins(item) for item in found]
    for row in rows:
        row["lines"] = [{"number": number, "text": text} for number, text in row["lines"]]
    return {"kind": rows[0]["kind"] if rows else None, "diagnoses": rows}


def _page(found: list[Diagnosis]) -> str:
    if not found:
        return "unknown: no failure that is known here; nothing is guessed"
    first, rest = found[0], found[1:]
    lines = [f"{first.kind}: {first.title}", f"  how sure: {first.sure}, {_SURE[first.sure]}"]
    lines += [_shown(number, text) for number, text in first.lines]
    if first.count > len(first.lines):
        lines.append(f"  and {first.count - len(first.lines)} more such lines")
    if first.figures:
        told = ", ".join(f"{name} {bytes_text(size)}" for name, size in first.figures.items())
        lines.append(f"  figures: {told}")
    lines += _machine_lines(first)
    lines.append(f"  change first: {first.fix}")
    if rest:
        lines += ["", "also seen:"]
        lines += [f"  {item.kind} ({item.sure}): {_shown(*item.lines[0]).strip()}" for item in rest]
    return "\n".join(lines)


def _machine_lines(item: Diagnosis) -> list[str]:
    if item.machine is None:
        return []
    told = item.machine
    if not told.findings and not told.facts:
        return ["  the report says nothing to it"]
    lines = [f"  the report: {told.stands}"] if told.stands else ["  the report:"]
    return lines + [f"    {one_line(text)[:_WIDTH]}" for text in (*told.findings, *told.facts)]


def _shown(number: int, text: str) -> str:
    clean = one_line(text)
    return f"  line {number}: {clean if len(clean) <= _WIDTH else clean[:_WIDTH] + ' …'}"
