"""Whether Triton compiles a kernel here: compiler, headers and assembler really used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure.declare import Task, instrument
from cift_probe.worker import is_sticky

_COUNT = 4096
_NO_COMPILER = "/nonexistent/compiler"

PRODUCES = ("triton.compiles", "triton.c_compiler", "triton.python_headers", "triton.ptxas")


@instrument(
    "triton",
    version=1,
    produces=PRODUCES,
    estimate_s=6.0,
    deadline_s=180.0,
    faults=("no_compiler",),
)
def measure_triton(task: Task) -> dict[str, Evidence]:
    """Compile and run one kernel with an empty cache, and look at its result.

    The cache is a temporary folder: a warm one would hide a missing compiler, and the user's
    stays as it was.
    """
    parts = {
        "triton.c_compiler": _c_compiler(),
        "triton.python_headers": _python_headers(),
        "triton.ptxas": _ptxas(),
    }
    if find_spec("triton") is None:
        return {**parts, "triton.compiles": absent("triton is not installed")}
    if task.device == "cpu":
        return {**parts, "triton.compiles": absent("on the CPU triton has nothing to compile for")}
    with tempfile.TemporaryDirectory() as cache, _surroundings(task, cache):
        return {**parts, "triton.compiles": _compile()}


@contextmanager
def _surroundings(task: Task, cache: str) -> Iterator[None]:
    changed = {"TRITON_CACHE_DIR": cache}
    if task.fault == "no_compiler":
        changed["CC"] = _NO_COMPILER
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _compile() -> Evidence:
    import torch

    from cift_probe.measure.triton_kernel import add_one

    values = torch.randn(_COUNT, device="cuda")
    result = torch.empty_like(values)
    try:
        add_one(values, result)
        torch.cuda.synchronize()
    except Exception as error:
        if is_sticky(str(error)):
            raise  # the device's fault, not the compiler's
        text = str(error).strip().splitlines()
        return Known(value=False, note=f"{type(error).__name__}: {text[-1] if text else ''}")
    right = bool(torch.equal(result, values + 1))
    return Known(right, note="" if right else "the kernel ran and its result is wrong")


def _c_compiler() -> Evidence:
    named = os.environ.get("CC")
    candidates = [named] if named else ["cc", "gcc", "clang"]
    found = next((path for name in candidates if (path := shutil.which(name))), None)
    if found is None:
        return absent(f"none of {', '.join(candidates)} is on the path", "PATH and CC")
    return Known(found, "", "PATH and CC")


def _python_headers() -> Evidence:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return absent(f"{header} is missing", "sysconfig")
    return Known(str(header), "", "sysconfig")


def _ptxas() -> Evidence:
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return absent("triton is not installed")
    override = os.environ.get("TRITON_PTXAS_PATH")
    bundled = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    path = Path(override) if override else bundled
    try:
        told = subprocess.run(  # noqa: S603 - the assembler that Triton itself would run
            [str(path), "--version"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Unknown(f"{path}: {error}", "ptxas --version")
    return Known(f"{path}: {told.stdout.strip().splitlines()[-1]}", "", "ptxas --version")
