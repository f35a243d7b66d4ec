"""Inference of a plan: weights, the keys and values of all tokens, and one forward.

transformers 5.24 generation/utils.py keeps the logits of the last position only and copies them to
float32; cache_utils.py DynamicLayer.update concatenates, so that one layer's keys exist twice
while a token is added. `sequence_length` counts prompt and answer together, and the prompt is taken
to be nearly all of it.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import NamedTuple

from cift_probe.expect.memory.anatomy import Architecture
from cift_probe.expect.memory.inventory import packed, parameters, stored
from cift_probe.expect.memory.layers import HIDDEN, Forward, Layer, Regime
from cift_probe.expect.memory.tape import FP32, HALF, Program, Tape
from cift_probe.expect.memory.training import Ledger, dimensions
from cift_probe.plan import Plan

WAITING = "between steps"
PREFILL = "forward of the layers"
LOGITS = "logits of the last position"
DECODE = "one more token"


class _Key(NamedTuple):
    layer: Layer
    packed: str
    double: bool
    item: int
    float16: bool


@cache
def _forward_of(key: _Key) -> Program:
    """Return the events of one layer's forward without gradients."""
    tape = Tape(autocast=False, compute=key.item, float16=key.float16)
    tape.saving, tape.part = False, "temporaries"
    regime = Regime(
        autocast=False,
        trained=False,
        norm_item=key.item,
        weight_item=key.item,
        compute=key.item,
        packed=key.packed,
        double=key.double,
    )
    x = tape.new(HIDDEN, key.item)
    x.needs_grad = False
    Forward(tape, key.layer, regime).run(x)
    return Program(tape)


def ledger_of_inference(plan: Plan, architecture: Architecture) -> Ledger:
    """Return the bytes of every instant of generating text, and the parts of the highest."""
    dims = dimensions(plan, architecture)
    item = FP32 if plan.dtype == "float32" else HALF
    kind = plan.quantisation if architecture.quantisable and plan.quantisation != "none" else ""
    fixed = _weights(plan, architecture, kind, item)
    one_layer = 2 * dims["tokens"] * dims["key"] * item
    layers = len(architecture.order)
    base = sum(fixed.values())
    float16 = plan.dtype == "float16"
    forward = 0
    for layer in architecture.kinds:
        changes = _forward_of(_Key(layer, kind, plan.double_quantisation, item, float16)).changes(
            dims
        )
        forward = max(forward, *accumulate(changes))
    # the model's forward holds the embedding's output and the rotary positions all along
    outside = (dims["tokens"] * dims["hidden"] + 2 * dims["sequence"] * dims["head"]) * item
    words = plan.batch_size * architecture.vocabulary
    added: dict[str, dict[str, int]] = {
        WAITING: {},
        PREFILL: {"keys and values": layers * one_layer, "temporaries": forward + outside},
        LOGITS: {
            "keys and values": layers * one_layer,
            "temporaries": dims["tokens"] * dims["hidden"] * (2 * item + 2 * FP32) + outside,
            "logits and loss": words * (item + FP32),
        },
        DECODE: {
            "keys and values": layers * one_layer,
            "temporaries": one_layer // 2,
            "logits and loss": words * (item + FP32),
        },
    }
    instants = {name: base + sum(parts.values()) for name, parts in added.items()}
    instant = max(instants, key=lambda name: instants[name])
    return Ledger(instants, instant, fixed | added[instant])


def _weights(plan: Plan, architecture: Architecture, kind: str, item: int) -> dict[str, int]:
    base = parameters(architecture)
    if not kind:
        return {"weights": stored(base, item)}
    linear = [tensor for tensor in base if tensor.group == "linear"]
    rest = [tensor for tensor in base if tensor.group != "linear"]
    sizes = [packed(t, kind, double=plan.double_quantisation) for t in linear]
    return {
        "weights": stored(rest, item) + sum(size for size, _ in sizes),
        "quantisation constants": sum(constants for _, constants in sizes),
    }
