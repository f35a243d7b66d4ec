"""`cift compat`: whether a machine that is only described will work, and why not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from cift_probe.cli import machine_file
from cift_probe.cli.machine_file import MachineFileError
from cift_probe.compat import Judgement, judge
from cift_probe.compat.machine import (
    PACKAGES,
    Machine,
    MachineError,
    described,
    from_evidence,
    install_line,
    judge_machine,
)
from cift_probe.devices import find_family
from cift_probe.diagnose.kinds import read_kinds
from cift_probe.expect.rows import Ruling
from cift_probe.plan import PlanError
from cift_probe.verdict.display import one_line

EXIT_USAGE = 4
EXIT_CODES = {"pass": 0, "not_applicable": 0, "warn": 0, "fail": 1, "unknown": 10}
_DESCRIPTION = """\
Judges a machine that is only described: will this driver, torch and card go together?

  cift compat --gpu v100 --driver 535.104 --torch 2.13+cu130
  cift compat --gpu rtx-5090 --torch 2.6+cu124 --bitsandbytes 0.45.0 --json
  cift compat --facts facts.json          what `cift facts --json`, or a report, tells of a machine
  cift compat --case situation.json       fields of one situation, as a bug report describes it

exit codes: 0 nothing fails (advice included), 1 something does, 10 undecided, 4 wrong call
"""


def parser(kind: type[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Return the command's options in a parser of `kind`."""
    made = kind(
        prog="cift compat",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--gpu", action="append", default=[], metavar="NAME", help="a card; several by comma")
    add("--driver", metavar="VERSION", help="as nvidia-smi shows it")
    add("--driver-cuda", metavar="VERSION", help="the CUDA of nvidia-smi's header")
    add("--torch", metavar="VERSION", help="with its build: 2.13+cu130, 2.13+cpu")
    add("--torch-cuda", metavar="VERSION", help="torch.version.cuda, where the version lacks it")
    add("--os", choices=("linux", "windows", "wsl"), help="default linux")
    add("--python", metavar="VERSION")
    for name in PACKAGES:
        add(f"--{name.replace('_', '-')}", dest=name, metavar="VERSION")
    add("--facts", metavar="FILE", help="a report, or the output of cift facts --json")
    add("--case", metavar="FILE", help="JSON: the fields of one situation, or a list; - is stdin")
    add("--json", action="store_true", help="one JSON object")
    return made


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    try:
        if options.case:
            return _cases(options)
        machine = _machine(options)
    except (MachineError, MachineFileError, PlanError) as error:
        print(f"cift compat: {one_line(str(error))}", file=sys.stderr)  # noqa: T201 - a tool prints
        return EXIT_USAGE
    found = judge_machine(machine)
    rows = [_row(machine, item) for item in found]
    worst = _worst([row["outcome"] for row in rows])
    if options.json:
        text = json.dumps({"outcome": worst, "findings": rows}, indent=2)
    else:
        text = _page(worst, rows)
    print(text)  # noqa: T201 - a command-line tool prints
    return EXIT_CODES[worst]


def _machine(options: argparse.Namespace) -> Machine:
    names = [name for text in options.gpu for name in text.split(",") if name.strip()]
    cards = {row: card for name in names for row, card in find_family(name).items()}
    told = described(vars(options), {k: card.compute_capability for k, card in cards.items()})
    if options.facts:
        told = _merged(from_evidence(machine_file.read_values(options.facts)), told)
    if told == Machine(system=told.system):
        message = "describe the machine: --gpu v100 --driver 535.104 --torch 2.13+cu130, or --facts"
        raise MachineError(message)
    return told


def _merged(base: Machine, over: Machine) -> Machine:
    """Return a machine of facts with what the command line says instead."""
    changes = {
        name: value
        for name, value in msgspec.structs.asdict(over).items()
        if value and name not in {"packages", "system"}
    }
    if over.torch is not None:
        changes |= {"torch_cuda": over.torch_cuda, "cpu_torch": over.cpu_torch, "arch_list": ()}
    packages = base.packages | over.packages
    return msgspec.structs.replace(base, packages=packages, **changes)


def _cases(options: argparse.Namespace) -> int:
    """Judge situations that are told by their fields."""
    told = machine_file.read_json(options.case)
    cases = told if isinstance(told, list) else [told]
    if not all(isinstance(item, Mapping) for item in cases):
        message = f"{options.case}: is no object of fields, and no list of such"
        raise MachineError(message)
    answers = [_answer(item) for item in cases]
    worst = _worst([answer["outcome"] for answer in answers])
    if options.json:
        text = json.dumps(answers if isinstance(told, list) else answers[0], indent=2)
    else:
        text = "\n".join(_case_line(answer) for answer in answers)
    print(text)  # noqa: T201 - a command-line tool prints
    return EXIT_CODES[worst]


def _answer(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return kind and outcome of one situation; of a record, the fields are its `input`."""
    fields = item.get("input", item)
    found = judge(fields if isinstance(fields, Mapping) else item)
    rows = [{**said._asdict(), "fix": read_kinds()[said.kind].fix} for said in found]
    first = found[0] if found else Judgement("", "unknown", "")
    return {"kind": first.kind or None, "outcome": first.outcome, "findings": rows}


def _case_line(answer: Mapping[str, Any]) -> str:
    if answer["kind"] is None:
        return "unknown: no rule knows these fields; nothing is guessed"
    first = answer["findings"][0]
    said = f"{first['outcome']}: {first['kind']}: {one_line(first['reason'])}"
    return f"{said}\n  change: {first['fix']}"


def _row(machine: Machine, item: Ruling) -> dict[str, Any]:
    mends = item.outcome in {"fail", "warn"}
    line = install_line(machine, item) if mends else ""
    return {
        "kind": item.kind,
        "outcome": item.outcome,
        "reason": item.reason,
        "why": item.why,
        "fix": item.fix,
        "install": line,
        "source": item.source,
    }


def _worst(outcomes: list[str]) -> str:
    order = ("fail", "unknown", "warn", "pass", "not_applicable")
    return min(outcomes, key=order.index, default="unknown")


_WORDS = {
    "fail": "does not work",
    "unknown": "undecided",
    "warn": "works, with advice",
    "pass": "nothing speaks against it",
    "not_applicable": "nothing speaks against it",
}


def _page(worst: str, rows: list[dict[str, Any]]) -> str:
    lines = [_WORDS[worst], ""]
    for row in rows:
        lines.append(f"{row['outcome'].upper():<8}{row['kind']}: {row['reason']}")
        if row["outcome"] == "pass":
            continue
        lines += [f"        why: {row['why']}", f"        change: {row['fix']}"]
        if row["install"]:
            lines.append(f"        install: {row['install']}")
        lines.append(f"        source: {row['source']}")
    return "\n".join(lines)
