"""How an instrument says what it produces; read by the session, carried out in the worker.

An instrument is a function that runs in a child process, on one device, and returns evidence by
name. Declaring it costs nothing: a module of instruments imports torch inside its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from cift_probe.evidence import Evidence


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one run of an instrument is asked to do.

    `device` is "cpu" or "gpu<N>". The child sees no other device, so to torch it is always
    "cpu" or "cuda:0". `plan` is a `cift_probe.plan.Plan` as plain data. `vram_cap` is the
    number of bytes that the allocator may hold, or None. `fault` names a planted fault from the
    instrument's declaration: only tests set it, and the instrument must then report a worse value.
    `trial` lets the whole step be tried where slices leave open whether it fits this device.
    """

    device: str
    plan: dict[str, Any] | None = None
    vram_cap: int | None = None
    fault: str = ""
    trial: bool = True

    @property
    def torch_device(self) -> str:
        """The device as torch names it in the child."""
        return "cpu" if self.device == "cpu" else "cuda:0"


Measure: TypeAlias = Callable[[Task], Mapping[str, Evidence]]


class Instrument(msgspec.Struct, frozen=True):
    """Declaration of one instrument.

    `version` is raised whenever the way of measuring changes. `clean` asks for a process whose
    allocated bytes have returned to the base line (every memory truth needs that).
    `estimate_s` is what a run costs on a current card, shown before it starts.
    """

    name: str
    version: int
    produces: tuple[str, ...]
    target: str
    per_plan: bool
    clean: bool
    estimate_s: float
    deadline_s: float
    faults: tuple[str, ...]


REGISTRY: dict[str, Instrument] = {}
FUNCTIONS: dict[str, Measure] = {}


def instrument(
    name: str,
    *,
    version: int,
    produces: tuple[str, ...],
    estimate_s: float,
    deadline_s: float,
    per_plan: bool = False,
    clean: bool = False,
    faults: tuple[str, ...],
) -> Callable[[Measure], Measure]:
    """Declare the decorated function as the instrument `name`.

    Raises ValueError when two instruments share a name or produce the same evidence, or when
    one has no planted fault: an instrument that cannot be seen to fail proves nothing.
    """

    def register(function: Measure) -> Measure:
        taken = {key: other.name for other in REGISTRY.values() for key in other.produces}
        clashes = sorted(set(produces) & set(taken))
        if name in REGISTRY or clashes:
            message = f"instrument {name}: already declared: {', '.join(clashes) or name}"
            raise ValueError(message)
        if not faults:
            message = f"instrument {name}: declare at least one planted fault that it must see"
            raise ValueError(message)
        REGISTRY[name] = Instrument(
            name=name,
            version=version,
            produces=produces,
            target=f"{function.__module__}:{function.__name__}",
            per_plan=per_plan,
            clean=clean,
            estimate_s=estimate_s,
            deadline_s=deadline_s,
            faults=faults,
        )
        FUNCTIONS[name] = function
        return function

    return register
