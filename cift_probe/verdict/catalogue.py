"""The catalogue: all checks of a folder, found by reading it. No list is kept by hand."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from pathlib import Path

from cift_probe.evidence import Scope
from cift_probe.verdict.declare import Check, CheckError, declaration

FAMILIES = (
    "host",
    "device",
    "environment",
    "kernels",
    "memory",
    "gradients",
    "convergence",
    "performance",
    "stability",
    "multigpu",
)


class Catalogue(Mapping[str, Check]):
    """Checks by id, prerequisites before their dependents, families in folder order."""

    def __init__(self, checks: Iterator[tuple[str, Check]], *, complete: bool = True) -> None:
        """Order `(family, check)` pairs; raises CheckError for what cannot be ordered.

        `complete=False` takes a part of a suite: prerequisites outside it are not looked for.
        """
        self._checks: dict[str, Check] = {}
        self._families: dict[str, str] = {}
        for family, check in checks:
            self._add(family, check)
        self.order = self._ordered(complete=complete)

    def __getitem__(self, check_id: str) -> Check:
        """Return the check with this id."""
        return self._checks[check_id]

    def __iter__(self) -> Iterator[str]:
        """Iterate over ids, prerequisites first."""
        return iter(self.order)

    def __len__(self) -> int:
        """Count the checks."""
        return len(self._checks)

    def family(self, check_id: str) -> str:
        """Return the name of the folder that a check lives in."""
        return self._families[check_id]

    def _add(self, family: str, check: Check) -> None:
        other = self._checks.get(check.id)
        if other is not None:
            message = f"{check.place}: {check.id} is taken by {other.place}; choose a free number"
            raise CheckError(message)
        self._checks[check.id] = check
        self._families[check.id] = family

    def _ordered(self, *, complete: bool) -> tuple[str, ...]:
        for check in self._checks.values():
            for name in check.after:
                if complete and name not in self._checks:
                    message = (
                        f"{check.place}: {check.id} comes after {name}, which no check is called; "
                        "correct the id or remove it"
                    )
                    raise CheckError(message)
        sorter = TopologicalSorter(
            {
                check.id: [name for name in check.after if name in self._checks]
                for check in self._checks.values()
            }
        )
        try:
            sorter.prepare()
        except CycleError as error:
            circle = " after ".join(error.args[1])
            message = f"checks wait for one another: {circle}; remove one `after`"
            raise CheckError(message) from error
        # among the checks that may run, cheap families first: a broken driver is told in seconds
        waiting: list[tuple[int, str]] = []
        order: list[str] = []
        while sorter.is_active():
            for name in sorter.get_ready():
                heappush(waiting, (_rank(self._families[name]), name))
            _, chosen = heappop(waiting)
            order.append(chosen)
            sorter.done(chosen)
        return tuple(order)


def load(folder: Path, *, complete: bool = True) -> Catalogue:
    """Read every `test_*.py` below `folder` and return its checks.

    Raises CheckError for a declaration that is wrong, a duplicate id, an unknown prerequisite
    or a test function that is no check.
    """
    return Catalogue(_found(folder), complete=complete)


def cases(check: Check, devices: list[str], plans: list[str]) -> list[Scope]:
    """Return the scopes that a check runs in.

    A machine without a GPU still gets the case "gpu0": it is how the report can say that the
    check was undecided, and why.
    """
    gpus = devices or ["gpu0"]
    labels = {"host": [""], "gpu": gpus, "any": ["cpu", *gpus]}[check.device]
    names = plans if check.each == "plan" else [""]
    return [Scope(device=label, plan=name) for label in labels for name in names]


def _rank(family: str) -> int:
    return FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)


def _found(folder: Path) -> Iterator[tuple[str, Check]]:
    for path in sorted(folder.rglob("test_*.py")):
        for name, value in vars(_load_module(path, folder)).items():
            check = declaration(value)
            if check is not None and value.__name__ == name:
                yield path.parent.name, check
            elif name.startswith("test_") and callable(value):
                message = f"{path}: {name} is no check; declare it with @check"
                raise CheckError(message)


def _load_module(path: Path, folder: Path) -> object:
    name = "_".join(("cift_suite", *path.relative_to(folder).with_suffix("").parts))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        message = f"{path}: cannot be read as Python"
        raise CheckError(message)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except CheckError:
        raise
    except Exception as error:  # a suite may break in any way; it is told in one line
        message = f"{path}: cannot be read as Python: {type(error).__name__}: {error}"
        raise CheckError(message) from error
    finally:
        del sys.modules[name]
    return module
