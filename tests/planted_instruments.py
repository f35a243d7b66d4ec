"""Instruments that the bench's tests run in the child: each is a planted fault, or tells a fact."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from cift_probe.evidence import Evidence, Known
from cift_probe.measure import inside
from cift_probe.measure.declare import Measure, Task, instrument

LEFT_BYTES = 4096


def planted(name: str, *keys: str, **changed: Any) -> Callable[[Measure], Measure]:
    """Declare an instrument `planted.NAME` that produces `planted.NAME.KEY`."""
    fields: dict[str, Any] = {"version": 1, "estimate_s": 0.1, "deadline_s": 30.0}
    produces = tuple(f"planted.{name}.{key}" for key in keys)
    return instrument(f"planted.{name}", produces=produces, faults=("any",), **(fields | changed))


def tell_pid(key: str) -> dict[str, Evidence]:
    return {key: Known(os.getpid(), "1")}


@planted("sound", "pid", "visible", version=3)
def sound(_task: Task) -> Mapping[str, Evidence]:
    visible = Known(os.environ.get("CUDA_VISIBLE_DEVICES", "not set"), "", "the environment")
    return tell_pid("planted.sound.pid") | {"planted.sound.visible": visible}


@planted("plan", "asked", per_plan=True)
def plan(task: Task) -> Mapping[str, Evidence]:
    return {"planted.plan.asked": Known([task.plan, task.vram_cap])}


@planted("raises", "one", "two")
def raises(_task: Task) -> Mapping[str, Evidence]:
    message = "the planted error"
    raise ValueError(message)


@planted("hangs", "one", "two", deadline_s=1.0)
def hangs(_task: Task) -> Mapping[str, Evidence]:
    time.sleep(600)
    return {}


@planted("killed", "one", "two")
def killed(_task: Task) -> Mapping[str, Evidence]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


@planted("misshapen", "one", "two")
def misshapen(_task: Task) -> Mapping[str, Evidence]:
    return {"planted.misshapen.one": 5}  # type: ignore[dict-item]  # the planted fault


@planted("silent", "told", "forgotten")
def silent(_task: Task) -> Mapping[str, Evidence]:
    return {"planted.silent.told": Known(1, "1"), "planted.silent.undeclared": Known(2, "1")}


@planted("leaves", "pid")
def leaves(_task: Task) -> Mapping[str, Evidence]:
    """Let this process report allocated bytes from now on, as one that leaks on a GPU does."""
    inside.allocated_after_cleaning = lambda: LEFT_BYTES
    return tell_pid("planted.leaves.pid")


@planted("clean", "pid", clean=True)
def clean(_task: Task) -> Mapping[str, Evidence]:
    return tell_pid("planted.clean.pid")


@planted("careless", "pid")
def careless(_task: Task) -> Mapping[str, Evidence]:
    return tell_pid("planted.careless.pid")
