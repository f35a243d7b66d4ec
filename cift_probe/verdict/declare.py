"""`@check`: what a test of the machine says about itself."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from cift_probe.verdict.finding import Domain, Finding, Severity

Device: TypeAlias = Literal["host", "gpu", "any"]
Each: TypeAlias = Literal["", "plan"]
CheckFunction: TypeAlias = Callable[..., Finding]
_Function = TypeVar("_Function", bound=CheckFunction)

WITNESSES = ("facts", "expected", "measured")
_ID = re.compile(r"[A-Z]{3}[0-9]{3}")


class CheckError(Exception):
    """A check is declared wrongly; the message says where and what to do."""


class Check(msgspec.Struct, frozen=True):
    """Declaration of one check.

    `device` "host" runs once per machine, "gpu" once per GPU, "any" once per GPU and once on
    the CPU. `each="plan"` repeats it for every plan of the session.
    """

    id: str
    title: str
    requirement: str
    why: str
    fix: str
    after: tuple[str, ...]
    severity: Severity
    device: Device
    each: Each
    domain: Domain
    quick: bool
    soak: bool
    multigpu: bool
    witnesses: tuple[str, ...]
    function: CheckFunction
    place: str


def check(
    id: str,  # noqa: A002 - "id" is the word of the design and of every report
    *,
    after: tuple[str, ...] = (),
    severity: str = "must",
    device: Device = "host",
    each: Each = "",
    domain: str = "environment",
    quick: bool = True,
    soak: bool = False,
    multigpu: bool = False,
) -> Callable[[_Function], _Function]:
    """Declare the decorated test function as the check `id`.

    The docstring states the requirement, then "Why:", then "Fix:". The function takes any of
    `facts`, `expected`, `measured` and returns a Finding. Raises CheckError with one sentence
    that says what to change.
    """

    def register(function: _Function) -> _Function:
        place = f"{inspect.getsourcefile(function)}:{function.__code__.co_firstlineno}"
        requirement, why, fix = _sections(id, function, place)
        declared = Check(
            id=id,
            title=function.__name__,
            requirement=requirement,
            why=why,
            fix=fix,
            after=after,
            severity=_member(Severity, severity, id, place),
            device=device,
            each=each,
            domain=_member(Domain, domain, id, place),
            quick=quick,
            soak=soak,
            multigpu=multigpu,
            witnesses=_arguments(id, function, place),
            function=function,
            place=place,
        )
        function.__check__ = declared  # type: ignore[attr-defined]
        return function

    return register


def declaration(function: Any) -> Check | None:
    """Return what `@check` said about a function, or None for anything else."""
    found = getattr(function, "__check__", None)
    return found if isinstance(found, Check) else None


_Member = TypeVar("_Member", Severity, Domain)


def _member(kind: type[_Member], text: str, check_id: str, place: str) -> _Member:
    try:
        return kind(text)
    except ValueError as error:
        options = ", ".join(kind)
        message = f"{place}: {check_id}: {text!r} is no {kind.__name__.lower()}; use {options}"
        raise CheckError(message) from error


def _sections(check_id: str, function: CheckFunction, place: str) -> tuple[str, str, str]:
    if not _ID.fullmatch(check_id):
        message = f"{place}: {check_id!r} is no check id; write three capitals and three digits"
        raise CheckError(message)
    if not function.__name__.startswith("test_"):
        message = f"{place}: {check_id}: the function's name must begin with test_"
        raise CheckError(message)
    text = inspect.getdoc(function) or ""
    parts = re.split(r"\n\s*\n(Why|Fix):\s*", "\n" + text)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    requirement = " ".join(parts[0].split())
    for name, content in (("requirement", requirement), ("Why", found.get("Why", ""))):
        if not content.strip():
            message = f"{place}: {check_id}: the docstring lacks its {name} section; write it"
            raise CheckError(message)
    if not found.get("Fix", "").strip():
        message = f"{place}: {check_id}: the docstring lacks its Fix section; write it"
        raise CheckError(message)
    return requirement, " ".join(found["Why"].split()), " ".join(found["Fix"].split())


def _arguments(check_id: str, function: CheckFunction, place: str) -> tuple[str, ...]:
    names = tuple(inspect.signature(function).parameters)
    wrong = [name for name in names if name not in WITNESSES]
    if wrong or not names:
        message = (
            f"{place}: {check_id}: takes {', '.join(wrong) or 'no evidence'}; "
            f"a check takes one or more of {', '.join(WITNESSES)}"
        )
        raise CheckError(message)
    source = textwrap.dedent(inspect.getsource(function))
    definition = next(node for node in ast.walk(ast.parse(source)) if _is_function(node))
    returns = any(isinstance(node, ast.Return) and node.value for node in ast.walk(definition))
    if not returns:
        message = f"{place}: {check_id}: the body returns no finding; return a comparison"
        raise CheckError(message)
    return names


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef)
