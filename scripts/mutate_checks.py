"""Break every check on purpose, one fault at a time, and see that its control notices.

    python scripts/mutate_checks.py [ID ...]

For each check: every relation is turned around, the sides of every relation with two sides are
swapped, every part of a joined comparison is left out, every `at_most` becomes `at_least` and
the reverse. A mutant that its control does not notice survives, is printed, and makes the exit
code 1. Controls are emptied by tests/test_controls.py.
"""

from __future__ import annotations

import ast
import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from control_runner import ControlError, read_control, run_control  # noqa: E402 - needs the path

from cift_probe.verdict.catalogue import Catalogue, load  # noqa: E402 - needs the path

ONE_SIDED = frozenset({"is_true", "is_false", "is_empty", "is_present"})
TWO_SIDED = frozenset(
    {"agrees", "at_most", "at_least", "disjoint", "equals", "is_in", "overlaps", "same_major"}
)
JOINED = frozenset({"all_of", "any_of"})
OPPOSITE = {"at_most": "at_least", "at_least": "at_most"}
# Appended to a mutated file: the names that a mutant may call, and what turns PASS into FAIL and
# FAIL into PASS, and nothing else.
TURNED = """
from cift_probe.verdict import all_of, any_of, at_least, at_most

def turned(finding: object) -> object:
    import msgspec
    from cift_probe.verdict import Outcome

    other = {Outcome.PASS: Outcome.FAIL, Outcome.FAIL: Outcome.PASS}
    outcome = other.get(finding.outcome, finding.outcome)
    return msgspec.structs.replace(finding, outcome=outcome)
"""


def main(arguments: list[str]) -> int:
    """Run the mutants of the named checks, or of all; return the number of survivors, at most 1."""
    catalogue = load(ROOT / "suites")
    wanted = arguments or list(catalogue)
    killed, survivors = 0, []
    for check_id in wanted:
        for description, source in mutants(catalogue, check_id):
            if survives(check_id, source):
                survivors.append(f"{check_id}: {description}")
            else:
                killed += 1
    for line in survivors:
        print(f"survived: {line}")
    print(f"{killed} mutants of {len(wanted)} checks noticed, {len(survivors)} survived")
    return 1 if survivors or not killed else 0


def mutants(catalogue: Catalogue, check_id: str) -> Iterator[tuple[str, str]]:
    """Yield (what was broken, source of the whole file with that fault)."""
    check = catalogue[check_id]
    tree = ast.parse(Path(check.function.__code__.co_filename).read_text())
    body = _function(tree, check.title)
    for place, call in enumerate(_relations(body)):
        for description, change in _faults(call):
            mutated = copy.deepcopy(tree)
            target = list(_relations(_function(mutated, check.title)))[place]
            change(target)
            yield f"{description} in {ast.unparse(call)}", ast.unparse(mutated) + TURNED


def survives(check_id: str, source: str) -> bool:
    """Tell whether the control of a check passes although the check is broken."""
    control = read_control(ROOT / "tests" / "controls" / f"{check_id}.toml")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutant" / "test_mutant.py"
        path.parent.mkdir()
        path.write_text(source)
        catalogue = load(Path(folder), complete=False)
        try:
            run_control(catalogue, check_id, control)
        except ControlError:
            return False
    return True


def _function(tree: ast.AST, name: str) -> ast.FunctionDef:
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return next(node for node in found if node.name == name)


def _relations(function: ast.FunctionDef) -> Iterator[ast.Call]:
    names = ONE_SIDED | TWO_SIDED | JOINED
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node


def _faults(call: ast.Call) -> Iterator[tuple[str, Callable[[Any], object]]]:
    name = call.func.id  # type: ignore[attr-defined] # _relations yields calls of names only
    yield "turned around", _turn
    if name in TWO_SIDED:
        yield "sides swapped", _swap
    if name in OPPOSITE:
        yield "opposite relation", _oppose
    if name in JOINED:
        yield "joined otherwise", _join_otherwise
    if name in JOINED and len(call.args) > 1:
        for part in range(len(call.args)):
            yield f"part {part + 1} left out", partial(_leave_out, part)


def _swap(node: ast.Call) -> None:
    node.args.reverse()


def _oppose(node: ast.Call) -> None:
    node.func = ast.Name(id=OPPOSITE[ast.unparse(node.func)], ctx=ast.Load())


def _join_otherwise(node: ast.Call) -> None:
    other = {"all_of": "any_of", "any_of": "all_of"}
    node.func = ast.Name(id=other[ast.unparse(node.func)], ctx=ast.Load())


def _leave_out(part: int, node: ast.Call) -> None:
    del node.args[part]


def _turn(node: ast.Call) -> None:
    inner = ast.Call(func=node.func, args=node.args, keywords=node.keywords)
    node.func = ast.Name(id="turned", ctx=ast.Load())
    node.args, node.keywords = [inner], []


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
