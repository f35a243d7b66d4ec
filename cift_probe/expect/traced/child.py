"""The child's end of a trace: run the plan's step on fake tensors, and replay its events."""

from __future__ import annotations

import gc
import os
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec

from cift_probe.expect.traced.fake_device import FakeGpu, install
from cift_probe.plan import Plan
from cift_probe.worker import progress

_NUM_HOLDINGS = 40  # tensors that are listed one by one
_NUM_PERIODS = (2, 4)
NUM_STEPS = 2  # Adam's state appears in the first, and the second meets it


class Request(msgspec.Struct, frozen=True):
    """What is asked: a plan as plain data, decoder layers, and the card to imagine.

    `folder` is the caller's, who clears it away even where this process is killed.
    """

    plan: dict[str, Any]
    num_layers: int
    folder: str
    capability: tuple[int, int] = (9, 0)


class RefusedModelError(Exception):
    """The installed stack cannot build the model, on whatever device; the text says why."""


def run(payload: Any) -> Any:
    """Trace one depth of a plan; takes and returns JSON values."""
    request = msgspec.convert(payload, Request)
    import_s = prepare(FakeGpu(capability=request.capability))
    try:
        return _answer(request, request.num_layers, import_s)
    except Exception:
        _check_model(request)
        raise


def run_periods(payload: Any) -> Any:
    """Trace two slices of whole periods; returns [full depth, {depth: answer}]."""
    from cift_probe.models import load_model
    from cift_probe.stack.pattern import depths_of, read_period

    request = msgspec.convert(payload, Request)
    import_s = prepare(FakeGpu(capability=request.capability))
    shape = load_model(request.plan["model"])
    full_depth = shape.num_hidden_layers
    seen = {}
    try:
        depths = depths_of(full_depth, *read_period(shape), _NUM_PERIODS)
    except Exception:
        _check_model(request)
        raise
    for depth in depths:
        seen[depth] = _answer(request, depth, import_s)
        import_s = 0.0
        progress(f"{depth} of {full_depth} layers traced")
    return [full_depth, seen]


def _check_model(request: Request) -> None:
    """Raise RefusedModelError where it is the model that cannot be built, fake device or not."""
    import torch
    from transformers import AutoModelForCausalLM

    from cift_probe.models import load_model
    from cift_probe.stack.pattern import config_of

    try:
        config = config_of(load_model(request.plan["model"]), 1)
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config)
    except Exception as error:
        message = f"the installed transformers cannot build it: {type(error).__name__}: {error}"
        raise RefusedModelError(message) from error


def _answer(request: Request, num_layers: int, import_s: float) -> dict[str, Any]:
    started = time.perf_counter()
    gpu = FakeGpu(capability=request.capability)
    plan = msgspec.convert(request.plan, Plan)
    told = summary(trace(plan, num_layers, gpu, Path(request.folder)))
    return told | {"import_s": import_s, "seconds": time.perf_counter() - started}


def prepare(gpu: FakeGpu) -> float:
    """Import the stack, then pretend that there is a device; return the seconds of the imports.

    In this order, since bitsandbytes looks for a device when it is imported.
    """
    started = time.perf_counter()
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # fake tensors are known to one thread only
    warnings.simplefilter("ignore")
    from cift_probe.expect.traced import patches, shortcuts, stand_ins
    from cift_probe.expect.traced.recorder import Recorder
    from cift_probe.stack import trl_stack

    del stand_ins  # imported for what it imports
    trl_stack.keep_offline()
    patches.import_stack()
    seconds = time.perf_counter() - started
    install(gpu)
    patches.install()
    shortcuts.install(Recorder)
    gc.freeze()  # what the imports made is not looked through again with every collection
    return seconds


def trace(plan: Plan, num_layers: int, gpu: FakeGpu, folder: Path) -> Any:
    """Return the recorder of two steps of the plan with `num_layers` layers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cift_probe.expect.traced import patches, stand_ins
    from cift_probe.expect.traced.recorder import Recorder
    from cift_probe.stack import slices
    from cift_probe.stack.instants import Marks
    from cift_probe.stack.step import prepare_step

    facts = stand_ins.Facts(plan.row_lengths, plan.num_labels)
    stand_ins.use_facts(facts)
    workspace = stand_ins.cublas_workspace(gpu.capability)
    recorder = Recorder(
        stand_ins.STAND_INS, stand_ins.TEMPORARIES, (stand_ins.MATRIX_PRODUCTS, workspace)
    )
    # without a device there is nothing to initialise
    setattr(FakeTensorMode, "avoid_device_init", True)  # noqa: B010 - a property is replaced
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        patches.state(facts, gpu.capability, packed=plan.packing)
        model = slices.build_slice(plan, num_layers, "cuda:0")
        gc.collect()
        recorder.loaded()
        step = prepare_step(
            plan,
            model,
            Marks(recorder.mark),
            torch_device="cuda:0",
            folder=folder,
            num_steps=NUM_STEPS,
        )
        recorder.name_modules(model)
        del model
        gc.freeze()  # nor is the model, which lives as long as the trace
        step()
    return recorder


def summary(recorder: Any) -> dict[str, Any]:
    """Return what the events say: bytes by instant, smallest caps, what holds the peak."""
    from cift_probe.expect.traced import holdings
    from cift_probe.expect.traced.allocator import ExpandableAllocator, replay, smallest_cap

    events = recorder.events
    seen = replay(events)
    instant, held = holdings.live_at_peak(events)
    operations = {name: recorder.origins[name].operation for name in held}
    largest = sorted(held.items(), key=lambda item: -item[1])[:_NUM_HOLDINGS]
    return {
        "instants": seen.instants,
        "reserved": seen.peak_reserved,
        "required": smallest_cap(events),
        "expandable": smallest_cap(events, ExpandableAllocator),
        "instant": instant,
        "components": holdings.components(events, operations, held),
        "holds": [(*recorder.origins[name], size) for name, size in largest],
        "num_events": len(events),
    }
