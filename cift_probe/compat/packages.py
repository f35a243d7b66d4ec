"""Kinds of Python packages: versions that exclude each other, and compiled pairs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from cift_probe.compat.case import Case, Judgement, parse_version

_TORCHVISION = 15  # torchvision 0.(n + 15) is built for torch 2.n (pytorch/vision, README)


def requirements(case: Case) -> Judgement | None:
    """Hold requirement bounds against what is installed, and what the GPU needs at least."""
    rows = case.get("requires", "requirements", "bounds")
    if not isinstance(rows, list):
        return None
    installed = case.get("installed", "versions", "packages") or {}
    bad = list(_conflicts(case, rows, installed if isinstance(installed, Mapping) else {}))
    if bad:
        return Judgement("package_version_conflict", "fail", "; ".join(bad))
    return Judgement("package_version_conflict", "pass", "the bounds leave a version")


def _conflicts(case: Case, rows: list[Any], installed: Mapping[str, Any]) -> Iterator[str]:
    bounds: dict[str, list[tuple[str, SpecifierSet]]] = {}
    for written in rows:
        row = _split(written) if isinstance(written, str) else written
        if not isinstance(row, list | tuple) or len(row) != 3:  # noqa: PLR2004 - who, what, bound
            continue
        who, what, bound = (str(item) for item in row)
        try:
            bounds.setdefault(what, []).append((who, SpecifierSet(bound, prereleases=True)))
        except InvalidSpecifier:
            continue
    for what, asked in bounds.items():
        least = case.version(f"min_{what}_for_gpu", f"min_{what}", f"{what}_min")
        present = parse_version(installed.get(what)) or case.version(what)
        for name, allowed in asked:
            if present is not None and present not in allowed:
                yield f"{name} needs {what}{allowed}, and {present} is installed"
        if least is not None and not _reaches(least, [bound for _, bound in asked]):
            who = " and ".join(name for name, _ in asked)
            yield f"{who} keeps {what} below {least}, which is needed at least"
        if not _possible([bound for _, bound in asked]):
            yield f"no {what} is within " + " and ".join(f"{n}'s {b}" for n, b in asked)


def _split(text: str) -> tuple[str, str, str]:
    """Return who, what and bound of a requirement as pip writes it."""
    found = re.match(r"\s*([\w.-]+)\s*(.*)", text)
    return ("a requirement", found[1], found[2]) if found else ("", "", "")


def _edges(bounds: list[SpecifierSet]) -> list[Version]:
    found = [parse_version(str(item.version)) for bound in bounds for item in bound]
    return [item for item in found if item is not None]


def _around(version: Version) -> list[Version]:
    """Return versions just below, at and just above one: bounds change nowhere else."""
    release = list(version.release) + [0] * (3 - len(version.release))
    above = [*release[:-1], release[-1] + 1]
    wider = [release[0], release[1] + 1, 0]
    return [
        version,
        Version(".".join(map(str, above))),
        Version(".".join(map(str, wider))),
        Version(f"{version.base_version}.dev0"),
        Version(f"{release[0] + 1}.0.0"),
    ]


def _possible(bounds: list[SpecifierSet]) -> bool:
    tries = [Version("0"), *(near for edge in _edges(bounds) for near in _around(edge))]
    return any(all(item in bound for bound in bounds) for item in tries)


def _reaches(least: Version, bounds: list[SpecifierSet]) -> bool:
    tries = [least, *(near for edge in _edges(bounds) for near in _around(edge))]
    return any(item >= least and all(item in bound for bound in bounds) for item in tries)


def interface(case: Case) -> Judgement | None:
    """Tell an argument or name that the installed version's real signature lacks."""
    wanted = case.get("argument", "keyword", "attribute", "import_name", "kwarg")
    offered = case.get("signature", "parameters", "accepts", "available", "exports")
    passed = case.get("passed", "arguments_passed")
    if isinstance(passed, list) and isinstance(offered, list | tuple):
        wanted = next((item for item in passed if item not in offered), None)
        if wanted is None:
            reason = "everything that is passed is taken"
            return Judgement("package_version_conflict", "pass", reason)
    if wanted is None or not isinstance(offered, list | tuple):
        return None
    there = wanted in offered
    reason = f"{wanted!r} is {'' if there else 'not '}among what the installed version takes"
    return Judgement("package_version_conflict", "pass" if there else "fail", reason)


def compiled_pair(case: Case) -> Judgement | None:
    """Hold compiled packages against the torch or NumPy that they were built for."""
    torch, vision = case.version("torch"), case.version("torchvision")
    if torch is not None and vision is not None:
        wanted = Version(f"0.{torch.minor + _TORCHVISION}") if torch.major == 2 else None  # noqa: PLR2004
        cuda = [re.search(r"\+(\w+)", str(case.get(name))) for name in ("torch", "torchvision")]
        locals_ = {found[1] for found in cuda if found}
        other = wanted is not None and (vision.major, vision.minor) != (0, wanted.minor)
        bad = other or len(locals_) > 1
        reason = f"torch {case.get('torch')}, torchvision {case.get('torchvision')}"
        return Judgement("compiled_package_mismatch", "fail" if bad else "pass", reason)
    audio = case.get("torchaudio")
    if torch is not None and audio is not None:
        built = [str(case.get(name)).partition("+") for name in ("torch", "torchaudio")]
        other = built[0][0].split(".")[:2] != built[1][0].split(".")[:2]
        mixed = bool(built[0][2] and built[1][2]) and built[0][2] != built[1][2]
        reason = f"torch {case.get('torch')}, torchaudio {audio}"
        return Judgement("compiled_package_mismatch", "fail" if other or mixed else "pass", reason)
    header = case.number("header", "header_size", "expected_size", "c_header")
    runtime = case.number("runtime", "runtime_size", "got_size", "pyobject")
    if header is not None and runtime is not None and case.has("header", "header_size", "c_header"):
        reason = f"{header:g} bytes from the C header, {runtime:g} at run time"
        return Judgement(
            "compiled_package_mismatch", "fail" if header != runtime else "pass", reason
        )
    return _built_for(case) or _leaves_out(case)


def _leaves_out(case: Case) -> Judgement | None:
    """Tell xformers' note: it imports, and leaves its compiled extensions out."""
    for text in case.texts():
        if "was built for" in text and "you have" in text:
            reason = " ".join(text.split())[:200]
            return Judgement("compiled_package_mismatch", "warn", reason)
    return None


def _built_for(case: Case) -> Judgement | None:
    built = case.version("built_for_torch", "built_torch", "compiled_torch", "built_for")
    have = case.version("torch", "torch_version", "have_torch", "installed_torch", "installed")
    library = str(case.get("library") or "")
    if built is None or have is None or case.has("flash_attn") or "flash" in library:
        return None
    same = built.release[:2] == have.release[:2]
    reason = f"built for torch {built}, and {have} is installed"
    if same:
        return Judgement("compiled_package_mismatch", "pass", reason)
    imports = case.flag("imports", "import_ok", "imported") or library == "xformers"
    return Judgement("compiled_package_mismatch", "warn" if imports else "fail", reason)


JUDGES = (requirements, interface, compiled_pair)
