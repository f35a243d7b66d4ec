"""What single operations allocate, save and hand back, on a tape.

Each function is one call of the model's Python code; the order of allocations in its backward is
that of torch 2.13's derivatives (tools/autograd/derivatives.yaml). Statistics of one number per
token (means, norms) are left out: under 0.01 % of any step.
"""

from __future__ import annotations

from typing import NamedTuple

from cift_probe.expect.memory.tape import FP32, HALF, Buffer, Dims, Tape, Value


class Weight(NamedTuple):
    """A linear layer's weight: output and input dimension, bytes per element, trainable or not.

    `name` keys autocast's cache of casts, which a `viewed` weight (`x @ weight.T`) does not enter;
    `packed` says 4-bit ("nf4", "fp4") or "int8". `tied`: it is the embedding as well.
    """

    name: str
    rows: str
    columns: str
    item: int
    trainable: bool
    packed: str = ""
    double: bool = False
    viewed: bool = False
    tied: bool = False


def cast(tape: Tape, x: Value, item: int) -> Value:
    """`x.to(dtype)`: nothing where the type is the same, else a copy."""
    if x.item == item:
        return x

    def backward(gradient: Buffer) -> None:
        tape.give(x, _recast(tape, x, gradient, item))

    node = tape.node(backward, of=(x,))
    return tape.output(node, tape.new(x.dims, item))


def _recast(tape: Tape, x: Value, gradient: Buffer, item: int) -> Buffer:
    """Return a gradient in the type of `x`, copied where it differs."""
    if x.item == item:
        gradient.refs += 1
        return gradient
    return tape.alloc(x.dims, x.item)


def share(gradient: Buffer) -> Buffer:
    """Return the gradient for one more reader."""
    gradient.refs += 1
    return gradient


def pointwise(
    tape: Tape, x: Value, *, saves: bool = False, saves_output: bool = False, temporaries: int = 0
) -> Value:
    """Apply a function of each element with one gradient of the same size.

    `temporaries` counts tensors of that size that live only inside its backward.
    """

    def backward(_gradient: Buffer) -> None:
        held = [tape.alloc(x.dims, x.item) for _ in range(temporaries)]
        gradient = tape.alloc(x.dims, x.item)
        for buffer in held:
            tape.release(buffer)
        tape.give(x, gradient)

    node = tape.node(backward, *((x,) if saves else ()), packs=saves_output, of=(x,))
    return tape.output(node, tape.new(x.dims, x.item), save=saves_output)


def clone(tape: Tape, x: Value) -> Value:
    """Copy; the gradient passes through."""
    node = tape.node(lambda gradient: tape.give(x, share(gradient)), of=(x,))
    return tape.output(node, tape.new(x.dims, x.item))


def transpose(tape: Tape, x: Value) -> Value:
    """Heads before tokens: a view forward; the gradient is copied to be contiguous again."""

    def backward(_gradient: Buffer) -> None:
        tape.give(x, tape.alloc(x.dims, x.item))

    node = tape.node(backward, of=(x,))
    value = Value(share(x.buffer), x.dims, x.item)
    tape.adopt(value)
    return tape.output(node, value)


def add(tape: Tape, left: Value, right: Value) -> Value:
    """Add; the wider type wins, and the narrower operand's gradient is cast back."""
    item = max(left.item, right.item)

    def backward(gradient: Buffer) -> None:
        for operand in (left, right):
            tape.give(operand, _recast(tape, operand, gradient, item))

    node = tape.node(backward, of=(left, right))
    return tape.output(node, tape.new(left.dims, item))


def multiply(tape: Tape, left: Value, right: Value) -> Value:
    """Multiply two tensors of one shape; both are saved."""

    def backward(_gradient: Buffer) -> None:
        first = tape.alloc(left.dims, left.item)
        second = tape.alloc(right.dims, right.item)
        tape.give(left, first)
        tape.give(right, second)

    node = tape.node(backward, left, right, of=(left, right))
    return tape.output(node, tape.new(left.dims, max(left.item, right.item)))


def cast_weight(tape: Tape, weight: Weight) -> Value:
    """Autocast's copy of a weight; kept to the end of the context where the weight is trained.

    torch/aten/src/ATen/autocast_mode.cpp, cached_cast: leaves that require gradients only.
    """
    known = tape.casts.get(weight.name)
    if known is not None:
        return known
    dims = (weight.rows, weight.columns)

    def backward(_gradient: Buffer) -> None:
        tape.keep_gradient(tape.alloc(dims, weight.item, "gradients"), waits=weight.tied)

    node = tape.node(backward)
    value = tape.new(dims, tape.compute, "weights cast by autocast")
    value.needs_grad = weight.trainable
    tape.output(node, value)
    if weight.trainable and not weight.viewed:
        tape.casts[weight.name] = value
    return value


def linear(tape: Tape, x: Value, weight: Weight) -> Value:
    """`torch.nn.functional.linear`, with autocast's casts of input and weight."""
    dims: Dims = (*x.dims[:-1], weight.rows)
    source, copy = x, None
    if tape.autocast and weight.item != tape.compute:
        copy = cast_weight(tape, weight)
    if tape.autocast:
        source = cast(tape, x, tape.compute)
    shape: Dims = (weight.rows, weight.columns)

    def backward(_gradient: Buffer) -> None:
        _linear_gradients(tape, source, weight, copy, shape)

    saved = (source,) if weight.trainable else ()
    held = (*saved, *((copy,) if copy is not None else ()))
    node = tape.node(backward, *held, packs=True, of=() if weight.trainable else (source,))
    value = tape.output(node, tape.new(dims, source.item))
    if source is not x:
        tape.drop(source)
    if copy is not None and (weight.viewed or not weight.trainable):
        tape.drop(copy)
    return value


def _linear_gradients(
    tape: Tape, source: Value, weight: Weight, copy: Value | None, shape: Dims
) -> None:
    """First the weight's gradient, then the input's (torch/csrc/autograd/FunctionsManual.cpp)."""
    of_weight = tape.alloc(shape, source.item, "gradients") if weight.trainable else None
    if source.needs_grad:
        gradient = tape.alloc(source.dims, source.item)
        gradient.viewed = True  # a product of two dimensions, seen as three
        tape.give(source, gradient)
    if of_weight is not None and copy is not None:
        tape.give(copy, of_weight)
    elif of_weight is not None:
        tape.keep_gradient(of_weight, waits=weight.tied)


def linear_4bit(tape: Tape, x: Value, weight: Weight, *, keeps_input: bool = False) -> Value:
    """Bitsandbytes 0.50 `Linear4bit`: nn/modules.py forward and autograd/_functions.py MatMul4Bit.

    Nothing is saved (`ctx.tensors`); backward unpacks the weight to the compute type.
    """
    item = tape.compute
    source = cast(tape, x, item)
    shape: Dims = (weight.rows, weight.columns)
    scales: Dims = (f"{weight.name}_blocks",)

    def backward(_gradient: Buffer) -> None:
        constants = tape.alloc(scales, FP32, "temporaries") if weight.double else None
        unpacked = tape.alloc(shape, item, "temporaries")
        if constants is not None:
            tape.release(constants)
        gradient = tape.alloc(source.dims, item)
        tape.release(unpacked)
        tape.give(source, gradient)

    node = tape.node(backward, *((source,) if keeps_input else ()), of=(source,))
    product = tape.output(node, tape.new((*x.dims[:-1], weight.rows), item))
    tape.pulse((shape, item), *(((scales, FP32),) if weight.double else ()))
    value = cast(tape, product, x.item)
    if value is not product:
        tape.drop(product)
    if source is not x:
        tape.drop(source)
    return value


def linear_8bit(tape: Tape, x: Value, weight: Weight) -> Value:
    """Bitsandbytes 0.50 `Linear8bitLt`: autograd/_functions.py MatMul8bitLt, no outliers.

    Its input is kept on `ctx`, out of reach of checkpointing: from the first pass it lives as long
    as the graph does. Kernels: backends/cuda/ops.py and backends/default/ops.py.
    """
    shape: Dims = (weight.rows, weight.columns)
    rows: Dims = (*x.dims[:-1], weight.rows)

    def backward(_gradient: Buffer) -> None:
        unpacked = tape.alloc(shape, x.item, "temporaries")
        gradient = tape.alloc(x.dims, x.item)
        gradient.viewed = True  # a product of two dimensions, seen as three
        tape.release(unpacked)
        tape.give(x, gradient)

    node = tape.node(backward, packs=False, of=(x,))
    if not node.inert:
        tape.keep(x)
    packed = tape.alloc(x.dims, 1, "temporaries")
    copies = 0 if tape.float16 and x.item == HALF else 1
    # a copy in float16, its absolute values, and which are beyond the threshold
    tape.pulse(*[(x.dims, HALF)] * copies, (x.dims, HALF), (x.dims, 1))
    value = tape.new(rows, x.item)
    tape.pulse((rows, FP32), *[(rows, HALF)] * copies)  # sums in int32, then float16
    tape.release(packed)
    return tape.output(node, value)


def slices(tape: Tape, x: Value, widths: tuple[str, ...]) -> list[Value]:
    """`x[..., a:b]` several times: each gradient fills zeros of the full size."""
    parts = []
    for width in widths:
        node = tape.node(lambda _gradient: tape.give(x, tape.alloc(x.dims, x.item)), of=(x,))
        part = Value(share(x.buffer), (*x.dims[:-1], width), x.item)
        tape.adopt(part)
        parts.append(tape.output(node, part))
    return parts


def picks(tape: Tape, x: Value, widths: tuple[str, ...]) -> list[Value]:
    """Take the first part as a view, the others as copies: `x[..., [-2], :]` (Falcon)."""
    parts = slices(tape, x, widths[:1])
    for width in widths[1:]:
        node = tape.node(lambda _gradient: tape.give(x, tape.alloc(x.dims, x.item)), of=(x,))
        parts.append(tape.output(node, tape.new((*x.dims[:-1], width), x.item)))
    return parts


def split(tape: Tape, x: Value, widths: tuple[str, ...]) -> list[Value]:
    """`x.chunk(n)`: the gradients are concatenated once."""
    parts = [Value(share(x.buffer), (*x.dims[:-1], width), x.item) for width in widths]
    for part in parts:
        tape.adopt(part)

    def backward(_gradient: Buffer) -> None:
        total = tape.alloc(x.dims, x.item)
        for part in parts[1:]:
            if part.grad is not None:
                tape.release(part.grad)
                part.grad = None
        tape.give(x, total)

    tape.output(tape.node(backward, of=(x,)), parts[0])
    for part in parts[1:]:
        part.needs_grad = x.needs_grad
    return parts


def dropout(tape: Tape, x: Value) -> Value:
    """`torch.nn.functional.dropout` with p > 0: native_dropout keeps a mask of one byte each."""
    mask = tape.new(x.dims, 1)

    def backward(_gradient: Buffer) -> None:
        tape.give(x, tape.alloc(x.dims, x.item))

    node = tape.node(backward, mask, of=(x,))
    value = tape.output(node, tape.new(x.dims, x.item))
    tape.drop(mask)
    return value
