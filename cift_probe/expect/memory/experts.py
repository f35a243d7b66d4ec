"""Mixture of experts: transformers 5.24 integrations/moe.py, grouped_mm_experts_forward.

The fused expert tensors are no linear layers: never quantised. With targets "all-linear" peft 0.21
adapts them as parameters (tuners/lora/layer.py ParamWrapper): each forward adds the product of the
adapters to a copy of all experts, which the backward needs. Every token is counted with its chosen
experts; how they spread over the experts changes no size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cift_probe.expect.memory.operations import Weight as Matrix
from cift_probe.expect.memory.operations import cast, linear, multiply, split
from cift_probe.expect.memory.tape import FP32, Buffer, Dims, Tape, Value

if TYPE_CHECKING:
    from cift_probe.expect.memory.layers import Forward

ROWS = "routed"
EXPERTS = "experts"


def run_experts(forward: Forward, x: Value) -> Value:
    """Router, experts and the weighted sum of one layer."""
    tape = forward.tape
    scores = _route(forward, x)
    chosen = _select(tape, x)
    shape: Dims = ("experts", "expert_gate_up", "hidden")
    fused = _grouped(forward, chosen, shape, "experts_rank_up")
    gate, up = split(tape, fused, ("expert", "expert"))
    active = forward.activate(gate)
    product = multiply(tape, active, up)
    tape.drop(active, gate, up, fused)
    down = _grouped(forward, product, ("experts", "hidden", "expert"), "experts_rank_down")
    tape.drop(product)
    weighted = _weigh(tape, down, scores)
    tape.drop(down)
    ordered = _reorder(tape, weighted)
    tape.drop(weighted)
    result = _sum(tape, ordered, x)
    tape.drop(ordered, chosen, scores)
    return result


def _route(forward: Forward, x: Value) -> Value:
    tape, regime = forward.tape, forward.regime
    router = Matrix("router", "experts", "hidden", regime.weight_item, regime.trained)
    logits = linear(tape, x, router)

    def backward(_gradient: Buffer) -> None:
        tape.give(logits, tape.alloc(logits.dims, logits.item))

    node = tape.node(backward, packs=True)
    soft = tape.output(node, tape.new(logits.dims, FP32), save=True)
    tape.drop(logits)
    return soft


def _select(tape: Tape, x: Value) -> Value:
    """`hidden_states[perm // num_top_k]`: its gradient is an index_put over zeros."""

    def backward(_gradient: Buffer) -> None:
        zeros = tape.alloc(x.dims, x.item)
        put = tape.alloc(x.dims, x.item)
        tape.release(zeros)
        tape.give(x, put)

    node = tape.node(backward)
    return tape.output(node, tape.new((ROWS, "hidden"), x.item))


def _grouped(forward: Forward, x: Value, shape: Dims, rank: str) -> Value:
    """`torch._grouped_mm`; the weight's gradient is as large as all experts."""
    tape, regime = forward.tape, forward.regime
    item = regime.norm_item
    source = cast(tape, x, item)
    summed = _adapt(forward, shape, rank) if EXPERTS in regime.adapted else None

    def backward(_gradient: Buffer) -> None:
        of_weight = None
        if regime.trained:
            of_weight = tape.alloc(shape, item, "gradients")
        elif summed is not None:
            of_weight = tape.alloc(shape, item)
        if source.needs_grad:
            tape.give(source, tape.alloc(source.dims, source.item))
        if summed is not None and of_weight is not None:
            tape.give(summed, of_weight)
        elif of_weight is not None:
            tape.keep_gradient(of_weight)

    learns = regime.trained or summed is not None
    saved = (source,) if learns else ()
    more = (summed,) if summed is not None else ()
    node = tape.node(backward, *saved, *more, packs=True, of=() if learns else (source,))
    value = tape.output(node, tape.new((ROWS, shape[1]), item))
    tape.drop(*more)
    if source is not x:
        tape.drop(source)
    return value


def _adapt(forward: Forward, shape: Dims, rank: str) -> Value:
    """Return a copy of all experts with the adapters' product added (torch.baddbmm)."""
    tape, regime = forward.tape, forward.regime
    item = regime.norm_item
    halves = ((shape[1], rank), (rank, shape[2]))
    copies = [_copy_adapter(tape, half, regime.adapter_item, item) for half in halves]

    def backward(_gradient: Buffer) -> None:
        for half, copy in zip(halves, copies, strict=True):
            product = tape.alloc(half, item, "gradients")
            scaled = tape.alloc(half, item, "gradients")
            tape.release(product)
            if copy is None:
                tape.keep_gradient(scaled)
            else:
                tape.give(copy, scaled)

    held = [copy for copy in copies if copy is not None]
    node = tape.node(backward, *held, packs=True)
    value = tape.output(node, tape.new(shape, item))
    tape.drop(*held)
    return value


def _copy_adapter(tape: Tape, dims: Dims, adapter_item: int, item: int) -> Value | None:
    """Return an adapter in the experts' type, where it has another."""
    if adapter_item == item:
        return None

    def backward(_gradient: Buffer) -> None:
        tape.keep_gradient(tape.alloc(dims, adapter_item, "gradients"))

    node = tape.node(backward)
    return tape.output(node, tape.new(dims, item))


def _weigh(tape: Tape, x: Value, scores: Value) -> Value:
    """Multiply with the router's probabilities; both are saved."""

    def backward(_gradient: Buffer) -> None:
        gradient = tape.alloc(x.dims, x.item)
        tape.pulse((x.dims, x.item))
        small = tape.alloc(scores.dims, FP32)
        tape.give(x, gradient)
        tape.give(scores, small)

    node = tape.node(backward, x, scores)
    return tape.output(node, tape.new(x.dims, x.item))


def _reorder(tape: Tape, x: Value) -> Value:
    def backward(_gradient: Buffer) -> None:
        zeros = tape.alloc(x.dims, x.item)
        put = tape.alloc(x.dims, x.item)
        tape.release(zeros)
        tape.give(x, put)

    node = tape.node(backward)
    return tape.output(node, tape.new(x.dims, x.item))


def _sum(tape: Tape, x: Value, like: Value) -> Value:
    """Sum over the chosen experts: the gradient is an expanded view."""

    def backward(gradient: Buffer) -> None:
        gradient.refs += 1
        tape.give(x, gradient)

    node = tape.node(backward)
    return tape.output(node, tape.new(like.dims, x.item))
