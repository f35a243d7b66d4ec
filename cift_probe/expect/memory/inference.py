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

from cift_probe.expect.memory.architectures import Architecture
from cift_probe.expect.memory.inventory import packed, parameters, stored
from cift_probe.expect.memory.layers import HIDDEN, Forward, Layer, Regime
from cift_probe.expect.memory.tape import BF16, FP32, Program, Tape
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


@cache
def _forward_of(key: _Key) -> Program:
    """Return the events of one layer's forward without gradients."""
    tape = Tape(autocast=False)
    tape.saving, tape.part = False, "temporaries"
    regime = Regime(
        autocast=False, trained=False, norm_item=BF16, packed=key.packed, double=key.double
    )
    x = tape.new(HIDDEN, BF16)
    Forward(tape, key.layer, regime).run(x)
    return Program(tape)


def ledger_of_inference(plan: Plan, architecture: Architecture) -> Ledger:
    """Return the bytes of every instant of generating text, and the parts of the highest."""
    dims = dimensions(plan, architecture)
    fixed = _weights(plan, architecture)
    one_layer = 2 * dims["tokens"] * dims["key"] * BF16
    layers = len(architecture.order)
    base = sum(fixed.values())
    kind = plan.quantisation if plan.quantisation != "none" else ""
    forward = 0
    for layer in architecture.kinds:
        changes = _forward_of(_Key(layer, kind, plan.double_quantisation)).changes(dims)
        forward = max(forward, *accumulate(changes))
    # the model's forward holds the embedding's output and the rotary positions all along
    outside = (dims["tokens"] * dims["hidden"] + 2 * dims["sequence"] * dims["head"]) * BF16
    words = plan.batch_size * architecture.vocabulary
    added: dict[str, dict[str, int]] = {
        WAITING: {},
        PREFILL: {"keys and values": layers * one_layer, "temporaries": forward + outside},
        LOGITS: {
            "keys and values": layers * one_layer,
            "temporaries": dims["tokens"] * dims["hidden"] * (2 * BF16 + 2 * FP32) + outside,
            "logits and loss": words * (BF16 + FP32),
        },
        DECODE: {
            "keys and values": layers * one_layer,
            "temporaries": one_layer // 2,
            "logits and loss": words * (BF16 + FP32),
        },
    }
    instants = {name: base + sum(parts.values()) for name, parts in added.items()}
    instant = max(instants, key=lambda name: instants[name])
    return Ledger(instants, instant, fixed | added[instant])


def _weights(plan: Plan, architecture: Architecture) -> dict[str, int]:
    base = parameters(architecture)
    linear = [tensor for tensor in base if tensor.group == "linear"]
    rest = [tensor for tensor in base if tensor.group != "linear"]
    if plan.quantisation == "none":
        return {"weights": stored(base, BF16)}
    sizes = [packed(t, plan.quantisation, double=plan.double_quantisation) for t in linear]
    return {
        "weights": stored(rest, BF16) + sum(size for size, _ in sizes),
        "quantisation constants": sum(constants for _, constants in sizes),
    }
