"""Tier `traced`: the installed stack's own step, on fake CUDA tensors, without a GPU.

Every allocation of two steps is recorded and replayed through a model of PyTorch's caching
allocator. It runs in a child process, which may end in a crash of C++ without taking this one
along. Nothing here imports torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import msgspec

from cift_probe.evidence import Unknown
from cift_probe.expect.estimate import STACK_REFUSES, Estimate, Holding, about_outliers
from cift_probe.models import load_model
from cift_probe.plan import Plan
from cift_probe.stack import extrapolate
from cift_probe.worker import Worker, WorkerFaultError

_CHILD = "cift_probe.expect.traced.child"
_DEADLINE_S = 600.0
# what `benchmarks/memory_table.py` found against an H200, with room for what it did not run
_BAND = 0.01
_REQUIRED_BAND = 0.04
_SEGMENT_SLACK = 40 << 20  # two segments, which order alone can make more or less
_PERIODS_BAND = 0.02
_PERIODS_REQUIRED_BAND = 0.07
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "BITSANDBYTES_NOWELCOME": "1",
}
_REFUSED = "RefusedModelError"
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "trl")


class Traced(msgspec.Struct, frozen=True):
    """What the child says of one depth; bytes, and seconds of its own work."""

    instants: dict[str, int]
    reserved: int
    required: int
    expandable: int
    instant: str
    components: dict[str, int]
    holds: list[Holding]
    num_events: int
    import_s: float
    seconds: float


def trace(
    plan: Plan,
    *,
    capability: tuple[int, int] = (9, 0),
    depth: Literal["full", "periods"] = "full",
    on_progress: Callable[[str], None] = lambda _text: None,
    on_import: Callable[[float], None] = lambda _seconds: None,
) -> Estimate | Unknown:
    """Return the memory of a plan's step as the installed stack would take it, or why not.

    `on_import` is told the seconds that each child needed to import the stack.

    Unknown with the source `STACK_REFUSES` says that the stack cannot build the model at all.

    "full" traces every decoder layer; "periods" two slices, and extrapolates each instant.
    """
    missing = [name for name in _PACKAGES if _version(name) is None]
    if missing:
        return Unknown(f"tier traced needs the stack itself; not installed: {', '.join(missing)}")
    target = f"{_CHILD}:run" if depth == "full" else f"{_CHILD}:run_periods"
    full_depth = load_model(plan.model).num_hidden_layers
    request = {
        "plan": msgspec.to_builtins(plan),
        "num_layers": full_depth,
        "capability": capability,
    }
    on_progress(f"tracing {full_depth} layers" if depth == "full" else "tracing whole periods")
    # the folder is made here: a child that is killed, as by Ctrl-C, clears nothing away
    with tempfile.TemporaryDirectory(prefix="cift-") as folder, Worker(ENVIRONMENT) as worker:
        try:
            told = request | {"folder": folder}
            answer = worker.call(target, told, _DEADLINE_S, on_progress=on_progress)
        except WorkerFaultError as fault:
            refused = _REFUSED in fault.detail
            return Unknown(f"tier traced: {fault.detail}", STACK_REFUSES if refused else "")
    if depth == "full":
        whole = msgspec.convert(answer, Traced)
        on_import(whole.import_s)
        return about_outliers(_whole(whole), plan)
    slices = msgspec.convert(answer[1], dict[int, Traced], strict=False)  # JSON's keys are text
    on_import(sum(item.import_s for item in slices.values()))
    return about_outliers(_extrapolated(slices, full_depth), plan)


def _whole(traced: Traced) -> Estimate:
    return Estimate(
        tier="traced",
        stack=stack_versions(),
        peak_allocated_bytes=max(traced.instants.values()),
        band=_BAND,
        required_bytes=traced.required,
        required_band=max(_REQUIRED_BAND, _SEGMENT_SLACK / traced.required),
        instant=traced.instant,
        instants=traced.instants,
        components=traced.components,
        expandable_bytes=traced.expandable,
        reserved_bytes=traced.reserved,
        holds=tuple(traced.holds),
    )


def _extrapolated(seen: Mapping[int, Traced], full_depth: int) -> Estimate:
    slices = {depth: item.instants for depth, item in seen.items()}
    instants = extrapolate.at_depth(slices, full_depth)
    name, peak = extrapolate.peak(instants)

    def room(field: str) -> int:
        overheads = [getattr(item, field) - max(item.instants.values()) for item in seen.values()]
        return int(peak + max(overheads))

    return Estimate(
        tier="traced",
        stack=stack_versions(),
        peak_allocated_bytes=int(peak),
        band=_PERIODS_BAND,
        required_bytes=room("required"),
        required_band=_PERIODS_REQUIRED_BAND,
        instant=name,
        instants={key: int(value) for key, value in instants.items()},
        expandable_bytes=room("expandable"),
        note=f"extrapolated from {' and '.join(map(str, seen))} of {full_depth} layers",
    )


def stack_versions() -> str:
    """Return names and versions of the installed stack."""
    return ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
