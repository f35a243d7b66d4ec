"""Embedding, last norm, logits and loss on a tape.

- "logits": transformers/loss/loss_utils.py ForCausalLMLoss: all logits, in float32 for the loss;
- "fused": trl 1.16 trainer/utils.py _fused_forward with kernels/chunked_logprob.py: tiles of
  32,768 words, accumulated in float32.
"""

from __future__ import annotations

from cift_probe.expect.memory.layers import Forward
from cift_probe.expect.memory.operations import Weight, cast, linear, pointwise, share
from cift_probe.expect.memory.tape import FP32, HALF, Buffer, Dims, Tape, Value

LOGITS: Dims = ("tokens", "vocabulary")


class Head:
    """What follows the last decoder layer."""

    def __init__(self, forward: Forward, weight: Weight, loss: str, *, softcap: bool) -> None:
        """Write the end of the forward.

        `loss` is "logits", "kept logits" (the caller holds them), "fp32 logits" (accelerate
        converts the output too), "fused", "chunked" or "compiled chunks".
        """
        self.forward = forward
        self.tape: Tape = forward.tape
        self.weight = weight
        self.loss = loss
        self.softcap = softcap

    def run(self, x: Value, *, scaled: bool = False) -> None:
        """Norm, logits and loss of the last layer's output."""
        tape = self.tape
        outer = tape.names()
        hidden = self.forward.norm(x)
        tape.drop(x)
        tape.part = "logits and loss"
        if self.loss == "fused":
            self._fused(hidden)
        elif self.loss in {"chunked", "compiled chunks"}:
            self._chunked(hidden)
        else:
            self._logits(hidden, scaled=scaled)
        tape.leave(outer)

    def _logits(self, hidden: Value, *, scaled: bool) -> None:
        tape = self.tape
        logits = linear(tape, hidden, self.weight)
        if scaled:
            logits = self._replaced(logits, pointwise(tape, logits))
        if self.softcap:
            logits = self._replaced(logits, pointwise(tape, logits))
            logits = self._replaced(logits, pointwise(tape, logits, saves_output=True))
            logits = self._replaced(logits, pointwise(tape, logits))
        wide = cast(tape, logits, FP32)
        loss = self._cross_entropy(wide)
        if wide is not logits:
            tape.drop(wide)
        if self.loss == "kept logits":
            logits.buffer.refs += 1  # the caller holds `outputs` through the backward
        if self.loss == "fp32 logits" and tape.autocast:
            # accelerate/utils/operations.py ConvertOutputsToFp32: while the bf16 logits live
            converted = tape.new(logits.dims, FP32)
            tape.drop(logits, converted)
        loss.grad = tape.alloc(("one",), FP32)

    def _replaced(self, old: Value, new: Value) -> Value:
        self.tape.drop(old)
        return new

    def _cross_entropy(self, wide: Value) -> Value:
        """log_softmax saves its output; nll_loss's gradient has its size again."""
        tape = self.tape

        def through_softmax(_gradient: Buffer) -> None:
            tape.give(wide, tape.alloc(wide.dims, FP32))

        node = tape.node(through_softmax, packs=True)
        logs = tape.output(node, tape.new(wide.dims, FP32), save=True)

        def through_loss(_gradient: Buffer) -> None:
            tape.give(logs, tape.alloc(wide.dims, FP32))

        loss = tape.output(tape.node(through_loss, logs), tape.new(("one",), FP32))
        tape.drop(logs)
        return loss

    def _chunked(self, hidden: Value) -> None:
        """litgpt: logits and loss 128 tokens at a time; the caller keeps the list of logits.

        litgpt/model.py GPT.forward(lm_head_chunk_size), litgpt/utils.py chunked_cross_entropy:
        all in bfloat16, so that logits and log-probabilities live in pieces, but all at once.
        Compiled chunks (torchtune) need no log-probabilities, and their caller deletes its list.
        """
        tape = self.tape
        trained = self.weight.trainable
        chunk: Dims = ("chunk", self.weight.rows)

        def backward(_gradient: Buffer) -> None:
            whole = tape.alloc(LOGITS, HALF) if trained else None
            tape.pulse((chunk, HALF), (chunk, HALF))
            gradient = tape.alloc(hidden.dims, hidden.item)
            if whole is not None:
                shape = (self.weight.rows, self.weight.columns)
                tape.keep_gradient(tape.alloc(shape, self.weight.item, "gradients"))
                tape.release(whole)
            tape.give(hidden, gradient)

        logs = tape.new(LOGITS, HALF)
        if self.loss == "chunked":
            tape.new(LOGITS, HALF).buffer.refs += 1
        node = tape.node(backward, logs, *((hidden,) if trained else ()))
        loss = tape.output(node, tape.new(("tokens",), HALF))
        loss.grad = tape.alloc(("tokens",), HALF)

    def _fused(self, hidden: Value) -> None:
        """TRL's chunked loss; rows whose label is valid are gathered first."""
        tape = self.tape
        rows = self._gather(hidden)
        tile: Dims = ("tile_rows", "tile")
        shape: Dims = (self.weight.rows, self.weight.columns)
        trained = self.weight.trainable

        def backward(_gradient: Buffer) -> None:
            wide = tape.alloc(rows.dims, FP32)
            of_weight = tape.alloc(shape, FP32, "gradients") if trained else None
            buffer = tape.alloc(tile, tape.compute, "logits and loss")
            narrow = tape.alloc(rows.dims, rows.item)
            if of_weight is not None and self.weight.item == FP32:
                tape.keep_gradient(share(of_weight), waits=self.weight.tied)
            elif of_weight is not None:
                narrowed = tape.alloc(shape, self.weight.item, "gradients")
                tape.keep_gradient(narrowed, waits=self.weight.tied)
            for held in (wide, of_weight, buffer):
                if held is not None:
                    tape.release(held)
            tape.give(rows, narrow)

        node = tape.node(backward, rows)
        buffer = tape.alloc(tile, tape.compute)
        loss = tape.output(node, tape.new(("tokens",), FP32))
        tape.release(buffer)
        tape.drop(rows)
        loss.grad = tape.alloc(("tokens",), FP32)

    def _gather(self, hidden: Value) -> Value:
        tape = self.tape

        def backward(_gradient: Buffer) -> None:
            zeros = tape.alloc(hidden.dims, hidden.item)
            put = tape.alloc(hidden.dims, hidden.item)
            tape.release(zeros)
            tape.give(shifted, put)

        def through_shift(_gradient: Buffer) -> None:
            tape.give(hidden, tape.alloc(hidden.dims, hidden.item))

        shifted = tape.output(
            tape.node(through_shift), Value(hidden.buffer, hidden.dims, hidden.item)
        )
        node = tape.node(backward)
        return tape.output(node, tape.new(("labelled", hidden.dims[-1]), hidden.item))
