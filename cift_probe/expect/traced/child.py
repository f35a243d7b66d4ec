"""The child's end of a trace: run the plan's step on fake tensors, and replay its events."""

from __future__ import annotations

import gc
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec

from cift_probe.expect.traced.fake_device import FakeGpu, install
from cift_probe.plan import Plan

_NUM_HOLDINGS = 40  # tensors that are listed one by one
_NUM_PERIODS = (2, 4)
NUM_STEPS = 2  # Adam's state appears in the first, and the second meets it


class Request(msgspec.Struct, frozen=True):
    """What is asked: a plan as plain data, decoder layers, and the card to imagine."""

    plan: dict[str, Any]
    num_layers: int
    capability: tuple[int, int] = (9, 0)


def run(payload: Any) -> Any:
    """Trace one depth of a plan; takes and returns JSON values."""
    request = msgspec.convert(payload, Request)
    started = time.perf_counter()
    plan = msgspec.convert(request.plan, Plan)
    recorder = trace(plan, request.num_layers, FakeGpu(capability=request.capability))
    return summary(recorder, time.perf_counter() - started)


def depths(model: Any) -> Any:
    """Return the depths of the slices that are traced, and at the end the model's own."""
    from cift_probe.models import load_model
    from cift_probe.stack.pattern import depths_of, read_period

    shape = load_model(model)
    full = shape.num_hidden_layers
    slices = depths_of(full, *read_period(shape), _NUM_PERIODS)
    return [*slices, full] if full not in slices else slices


def trace(plan: Plan, num_layers: int, gpu: FakeGpu) -> Any:
    """Return the recorder of two steps of the plan with `num_layers` layers."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # fake tensors are known to one thread only
    warnings.simplefilter("ignore")
    # bitsandbytes chooses its libraries when it is imported: before there seems to be a device
    from cift_probe.expect.traced import patches, stand_ins
    from cift_probe.expect.traced.recorder import Recorder
    from cift_probe.stack import slices, trl_stack
    from cift_probe.stack.instants import Marks
    from cift_probe.stack.step import prepare_step

    trl_stack.keep_offline()
    patches.import_stack()
    install(gpu)
    from torch._subclasses.fake_tensor import FakeTensorMode

    facts = facts_of(plan)
    stand_ins.use_facts(facts, gpu.capability)
    workspace = stand_ins.cublas_workspace(gpu.capability)
    recorder = Recorder(
        stand_ins.STAND_INS, stand_ins.TEMPORARIES, (stand_ins.MATRIX_PRODUCTS, workspace)
    )
    # without a device there is nothing to initialise
    setattr(FakeTensorMode, "avoid_device_init", True)  # noqa: B010 - a property is replaced
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
        tempfile.TemporaryDirectory() as folder,
    ):
        patches.apply(facts, packed=plan.packing)
        model = slices.build_slice(plan, num_layers, "cuda:0")
        gc.collect()
        recorder.loaded()
        step = prepare_step(
            plan,
            model,
            Marks(recorder.mark),
            torch_device="cuda:0",
            folder=Path(folder),
            num_steps=NUM_STEPS,
        )
        del model
        step()
    return recorder


def facts_of(plan: Plan) -> Any:
    """Return the lengths of a batch's rows, as `stack.slices.random_rows` makes them."""
    from cift_probe.expect.traced.stand_ins import Facts

    full = plan.sequence_length
    lengths = [
        full if index % 2 == 0 or not plan.padding else max(1, full // 2)
        for index in range(plan.batch_size)
    ]
    return Facts(tuple(lengths), full)


def summary(recorder: Any, seconds: float) -> dict[str, Any]:
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
        "seconds": seconds,
    }
