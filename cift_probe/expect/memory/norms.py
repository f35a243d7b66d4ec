"""What normalisation layers allocate and save, forward and backward."""

from __future__ import annotations

from cift_probe.expect.memory.operations import Weight, cast
from cift_probe.expect.memory.tape import FP32, Buffer, Tape, Value


def rms_norm(tape: Tape, x: Value, weight: Weight, style: str = "llama") -> Value:
    """`LlamaRMSNorm` and its relatives: the root of the mean square, in float32.

    "llama" multiplies with the weight after the cast back; "olmo2" before it; "gemma" with
    `1 + weight.float()` before it (transformers 5.24, modeling_{llama,olmo2,gemma2}.py).
    """
    wide = cast(tape, x, FP32)
    scaled = _scale(tape, wide)
    if wide is not x and style == "llama":
        tape.drop(wide)
    if style == "llama":
        narrow = cast(tape, scaled, x.item)
        value = _weigh(tape, narrow, weight, max(x.item, weight.item))
        tape.drop(narrow, scaled)
        return value
    value = _weigh(tape, scaled, weight, FP32)
    tape.drop(scaled)
    narrow = cast(tape, value, x.item)
    if narrow is not value:
        tape.drop(value)
    tape.drop(*((wide,) if wide is not x else ()))
    return narrow


def _scale(tape: Tape, wide: Value) -> Value:
    """`x * rsqrt(mean(x ** 2) + eps)`."""
    squares = _square(tape, wide)
    root = _inverse_root(tape, squares)
    tape.drop(squares)

    def backward(_gradient: Buffer) -> None:
        # mul_tensor_backward for the root comes first: a product as large as the input, summed
        product = tape.alloc(wide.dims, FP32)
        gradient = tape.alloc(wide.dims, FP32)
        small = tape.alloc(root.dims, FP32)
        tape.release(product)
        tape.give(wide, gradient)
        tape.give(root, small)

    node = tape.node(backward, wide, root, of=(wide,))
    value = tape.output(node, tape.new(wide.dims, FP32))
    tape.drop(root)
    return value


def _square(tape: Tape, wide: Value) -> Value:
    def backward(_gradient: Buffer) -> None:
        power = tape.alloc(wide.dims, FP32)  # FunctionsManual.cpp, pow_backward
        twice = tape.alloc(wide.dims, FP32)
        product = tape.alloc(wide.dims, FP32)
        tape.release(twice)
        tape.release(power)
        tape.give(wide, product)

    node = tape.node(backward, wide, of=(wide,))
    return tape.output(node, tape.new(wide.dims, FP32))


def _inverse_root(tape: Tape, squares: Value) -> Value:
    def backward(_gradient: Buffer) -> None:
        # mean_backward divides the expanded gradient: as large as the input
        tape.give(squares, tape.alloc(squares.dims, FP32))

    node = tape.node(backward, of=(squares,))
    return tape.output(node, tape.new(squares.dims[:1], FP32))


def _weigh(tape: Tape, x: Value, weight: Weight, item: int) -> Value:
    """Multiply with the weight of the norm."""

    def backward(_gradient: Buffer) -> None:
        gradient = tape.alloc(x.dims, item)
        if weight.trainable:
            tape.pulse((x.dims, item))
            tape.keep_gradient(tape.alloc((weight.rows,), weight.item, "gradients"))
        if x.item != item:
            narrow = tape.alloc(x.dims, x.item)
            tape.release(gradient)
            gradient = narrow
        tape.give(x, gradient)

    saved = (x,) if weight.trainable else ()
    node = tape.node(backward, *saved, packs=True, of=() if weight.trainable else (x,))
    return tape.output(node, tape.new(x.dims, item))


def layer_norm(tape: Tape, x: Value, weight: Weight) -> Value:
    """`torch.nn.LayerNorm`: one kernel that saves its input; float32 under autocast.

    torch/aten/src/ATen/autocast_mode.h lists layer_norm among the float32 operations.
    """
    source = cast(tape, x, FP32) if tape.autocast else x

    def backward(_gradient: Buffer) -> None:
        gradient = tape.alloc(source.dims, source.item)
        if weight.trainable:
            for _ in range(2):
                tape.keep_gradient(tape.alloc((weight.rows,), weight.item, "gradients"))
        tape.give(source, gradient)

    node = tape.node(backward, source, of=() if weight.trainable else (source,))
    value = tape.output(node, tape.new(x.dims, source.item))
    if source is not x:
        tape.drop(source)
    return value
