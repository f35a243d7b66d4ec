"""What attention allocates and saves: rotary positions, the kernels of SDPA, and eager.

Kernels: torch/aten/src/ATen/native/transformers/cuda/{attention,attention_backward}.cu; their
workspaces were read there and in flash_attn/flash_api.cpp (mha_bwd), and seen on an H200.
"""

from __future__ import annotations

from cift_probe.expect.memory.operations import cast, clone, pointwise
from cift_probe.expect.memory.tape import FP32, Buffer, Dims, Tape, Value

QUERY: Dims = ("tokens", "query")
KEY: Dims = ("tokens", "key")


def rotate(tape: Tape, x: Value, style: str = "full") -> Value:
    """`apply_rotary_pos_emb`: `x * cos + rotate_half(x) * sin`; cos and sin need no gradient.

    "full" turns all dimensions of a head; "partial" some, and concatenates the rest.
    """
    if style == "partial":
        return _rotate_partly(tape, x)
    return _rotate(tape, x)


def _half(x: Value) -> Dims:
    return (*x.dims[:-1], x.dims[-1] + "_half")


def _rotate(tape: Tape, x: Value) -> Value:
    def backward(_gradient: Buffer) -> None:
        _rotate_backward(tape, x)

    node = tape.node(backward, packs=True, of=(x,))
    cosine = tape.alloc(x.dims, x.item)
    half = tape.alloc(_half(x), x.item)
    turned = tape.alloc(x.dims, x.item)
    tape.release(half)
    sine = tape.alloc(x.dims, x.item)
    tape.release(turned)
    value = tape.output(node, tape.new(x.dims, x.item))
    tape.release(cosine)
    tape.release(sine)
    return value


def _rotate_backward(tape: Tape, x: Value) -> None:
    """Three steps of autograd in one: the sine's product, rotate_half, the cosine's product."""
    product = tape.alloc(x.dims, x.item)
    half = tape.alloc(_half(x), x.item)
    left = tape.alloc(x.dims, x.item)
    tape.release(half)
    right = tape.alloc(x.dims, x.item)
    tape.release(product)
    tape.release(right)  # added in place
    cosine = tape.alloc(x.dims, x.item)
    tape.release(cosine)  # as well
    tape.give(x, left)


def _rotate_partly(tape: Tape, x: Value) -> Value:
    """Turn `rotary` of each head's dimensions, then concatenate (modeling_phi.py, glm4, neox)."""
    part: Dims = (*x.dims[:-1], x.dims[-1] + "_rotary")

    def backward(_gradient: Buffer) -> None:
        first = tape.alloc(x.dims, x.item)
        second = tape.alloc(x.dims, x.item)
        tape.release(second)  # added in place
        tape.give(x, first)

    node = tape.node(backward, packs=True, of=(x,))
    held = [tape.alloc(part, x.item) for _ in range(3)]
    turned = tape.alloc(part, x.item)
    for buffer in held:
        tape.release(buffer)
    value = tape.output(node, tape.new(x.dims, x.item))
    tape.release(turned)
    return value


def attend(
    tape: Tape,
    query: Value,
    key: Value,
    value: Value,
    kernel: str,
    groups: str = "query",
    *,
    softcap: bool = False,
    masked: bool = False,
) -> Value:
    """Scaled dot product attention with "flash", "efficient", "math" or "eager".

    `groups` is "query" where keys and values are fewer than queries, "" where they are equal.
    """
    if kernel == "eager":
        return _eager(tape, query, key, value, groups, softcap=softcap)
    wide = query.item
    inputs = (query, key, value)
    if tape.autocast and wide != tape.compute:
        item = tape.compute
        inputs = (cast(tape, query, item), cast(tape, key, item), cast(tape, value, item))
    if kernel == "efficient":
        result = _efficient(tape, *inputs, groups, masked=masked)
    elif kernel == "math":
        result = _math(tape, *inputs, groups, masked=masked)
    else:
        result = _flash(tape, *inputs, groups)
    tape.drop(
        *(new for new, old in zip(inputs, (query, key, value), strict=True) if new is not old)
    )
    return result


def _flash(tape: Tape, query: Value, key: Value, value: Value, groups: str) -> Value:
    def backward(_gradient: Buffer) -> None:
        gradients = [tape.alloc(x.dims, x.item) for x in (query, key, value)]
        spaces: list[tuple[Dims, int]] = [
            (("batch", "heads", "sequence_128", "head_32"), FP32),
            (("batch", "heads", "sequence_128"), FP32),
        ]
        if groups:
            spaces += [(("tokens", "heads", "head_32"), query.item)] * 2
        tape.pulse(*spaces)
        for x, gradient in zip((query, key, value), gradients, strict=True):
            tape.give(x, gradient)

    logsumexp = Value(tape.alloc(("tokens", "heads"), FP32), ("tokens", "heads"), FP32)
    result = tape.new(query.dims, query.item)
    tape.adopt(logsumexp)
    node = tape.node(backward, query, key, value, result, logsumexp, of=(query, key, value))
    tape.drop(logsumexp)
    return tape.output(node, result)


def repeat(tape: Tape, x: Value, dims: Dims) -> Value:
    """`repeat_kv`: keys and values for every query head; its gradient sums them up."""

    def backward(_gradient: Buffer) -> None:
        tape.give(x, tape.alloc(x.dims, x.item))

    node = tape.node(backward, of=(x,))
    return tape.output(node, tape.new(dims, x.item))


def _repeat(tape: Tape, x: Value, like: Value, groups: str) -> Value:
    return repeat(tape, x, like.dims) if groups else x


def _efficient(
    tape: Tape, query: Value, key: Value, value: Value, groups: str, *, masked: bool
) -> Value:
    """Run the memory-efficient kernel, which takes no grouped heads.

    transformers/integrations/sdpa_attention.py repeats keys and values where there is a mask,
    and torch turns the mask into one number per query and key.
    """
    keys, values = _repeat(tape, key, query, groups), _repeat(tape, value, query, groups)
    shape: Dims = ("batch", "sequence", "sequence")
    bias = (tape.new(shape, query.item),) if masked else ()
    if masked:
        tape.pulse((shape, 1))  # convert_boolean_attn_mask: where the mask is false

    def backward(_gradient: Buffer) -> None:
        gradients = [tape.alloc(query.dims, query.item) for _ in range(3)]
        # 16 bits: the queries' gradient is summed up in float32, and others of a wide head;
        # float32: grad * output is
        sums: list[tuple[Dims, int]] = [(("tokens", "heads", "head"), FP32)]
        if query.item != FP32:
            sums += [(("tokens", "heads", "wide_head"), FP32)] * 2
        tape.pulse((("tokens", "heads"), FP32), *sums)
        for x, gradient in zip((query, keys, values), gradients, strict=True):
            tape.give(x, gradient)

    logsumexp = tape.new(("tokens", "heads"), FP32)
    result = tape.new(query.dims, query.item)
    node = tape.node(
        backward, query, keys, values, *bias, result, logsumexp, of=(query, keys, values)
    )
    tape.drop(logsumexp, *bias)
    tape.drop(*(x for x in (keys, values) if x is not key and x is not value))
    return tape.output(node, result)


def _math(
    tape: Tape, query: Value, key: Value, value: Value, groups: str, *, masked: bool
) -> Value:
    """`_scaled_dot_product_attention_math`: in float32, whatever the inputs' type.

    aten/src/ATen/native/transformers/attention.cpp; its local tensors live to its end.
    """
    inputs = (query, key, value)
    wide = [cast(tape, x, FP32) for x in inputs]
    scaled = pointwise(tape, wide[0])
    bias = tape.new(("batch" if masked else "one", "sequence", "sequence"), FP32)
    keys, values = (_repeat(tape, x, wide[0], groups) for x in wide[1:])
    scaled_keys = pointwise(tape, keys)
    scores = _masked_scores(tape, scaled, scaled_keys)
    soft = _softmax(tape, scores, safe=True)
    tape.drop(scores)
    second = tape.new(soft.dims, query.item) if query.item != FP32 else None
    mixed = _mix(tape, soft, values, wide[0])
    result = cast(tape, mixed, query.item)
    held = (scaled, bias, keys, values, scaled_keys, soft, second, *wide)
    kept = (*inputs, result)
    tape.drop(*(x for x in held if x is not None and all(x is not one for one in kept)))
    if result is not mixed:
        tape.drop(mixed)
    return result


def _masked_scores(tape: Tape, query: Value, keys: Value) -> Value:
    """`query @ keys` and the mask's sum, whose gradient passes through."""
    scores: Dims = ("batch", "heads", "sequence", "sequence")
    product = _product(tape, query, keys, scores, query.item)
    masked = clone(tape, product)
    tape.drop(product)
    return masked


def _eager(
    tape: Tape, query: Value, key: Value, value: Value, groups: str, *, softcap: bool
) -> Value:
    """`eager_attention_forward`: scores, float32 softmax and probabilities are real tensors."""
    scores: Dims = ("batch", "heads", "sequence", "sequence")
    keys, values = _repeat(tape, key, query, groups), _repeat(tape, value, query, groups)
    item = tape.compute if tape.autocast else query.item
    weights = _scores(tape, query, keys, scores, item, softcap=softcap)
    soft = _softmax(tape, weights)
    tape.drop(weights)
    probabilities = cast(tape, soft, query.item)
    if probabilities is not soft:
        tape.drop(soft)
    result = _mix(tape, probabilities, values, query)
    tape.drop(probabilities)
    tape.drop(*(x for x in (keys, values) if x is not key and x is not value))
    contiguous = clone(tape, result)
    tape.drop(result)
    return contiguous


def _scores(
    tape: Tape, query: Value, keys: Value, scores: Dims, item: int, *, softcap: bool
) -> Value:
    """`query @ keys * scale`, soft-capped (tanh) in Gemma-2, plus the mask."""
    result = _product(tape, query, keys, scores, item)
    steps = [False, False, True, False] if softcap else [False]
    for keeps in steps:
        following = pointwise(tape, result, saves_output=keeps)
        tape.drop(result)
        result = following
    masked = clone(tape, result)
    tape.drop(result)
    return masked


def _product(tape: Tape, query: Value, keys: Value, scores: Dims, item: int) -> Value:
    def backward(_gradient: Buffer) -> None:
        first = tape.alloc(query.dims, query.item)
        second = tape.alloc(keys.dims, keys.item)
        tape.give(query, first)
        tape.give(keys, second)

    node = tape.node(backward, query, keys, of=(query, keys))
    return tape.output(node, tape.new(scores, item))


def _softmax(tape: Tape, weights: Value, *, safe: bool = False) -> Value:
    """Softmax in float32; `safe` is torch's own, which looks for rows without a number."""

    def backward(gradient: Buffer) -> None:
        result = tape.alloc(weights.dims, FP32)
        tape.pulse((weights.dims, FP32))  # grad * output, inside _softmax_backward_data
        narrow = result
        if weights.item != FP32:
            narrow = tape.alloc(weights.dims, weights.item)
            tape.release(result)
        tape.give(weights, narrow)
        del gradient

    node = tape.node(backward, packs=True, of=(weights,))
    # Softmax.cpp turns bfloat16 to float32 first; float16 it converts inside the kernel
    first = weights.item != FP32 and not tape.float16
    wide = [tape.alloc(weights.dims, FP32, "temporaries")] if first else []
    soft = tape.new(weights.dims, FP32)
    for buffer in wide:
        tape.release(buffer)
    if safe:  # SoftMax.cpp, _safe_softmax: which scores are -inf
        tape.pulse((weights.dims, 1))
    return tape.output(node, soft, save=True)


def _mix(tape: Tape, probabilities: Value, values: Value, query: Value) -> Value:
    def backward(_gradient: Buffer) -> None:
        first = tape.alloc(probabilities.dims, probabilities.item)
        second = tape.alloc(values.dims, values.item)
        tape.give(probabilities, first)
        tape.give(values, second)

    node = tape.node(backward, probabilities, values, of=(probabilities, values))
    return tape.output(node, tape.new(query.dims, query.item))
