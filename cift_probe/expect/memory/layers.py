"""The forward of one decoder layer, family by family, as transformers 5.24 writes it."""

from __future__ import annotations

from typing import NamedTuple

from cift_probe.expect.memory.attention import attend, repeat, rotate
from cift_probe.expect.memory.norms import layer_norm, rms_norm
from cift_probe.expect.memory.operations import (
    Weight,
    add,
    cast,
    clone,
    dropout,
    linear,
    linear_4bit,
    linear_8bit,
    multiply,
    picks,
    pointwise,
    slices,
    split,
    transpose,
)
from cift_probe.expect.memory.tape import FP32, HALF, Dims, Tape, Value

HIDDEN: Dims = ("tokens", "hidden")


class Layer(NamedTuple):
    """What distinguishes the decoder layers of the known architectures.

    `order` is where the norms stand: "pre", "post" (OLMo-2), "sandwich" (both), "parallel"
    (attention and feed-forward read the same input). `qk_norm` is "head", "full"
    or "", `fused_qkv` "chunk", "slices", "picks" or "".
    """

    norm: str = "llama"
    order: str = "pre"
    norms: int = 2
    qk_norm: str = ""
    fused_qkv: str = ""
    feed_forward: str = "gated"
    activation: str = "silu"
    rotary: str = "full"
    grouped: bool = True
    one_key: bool = False
    expands_keys: bool = False
    pads_adapters: bool = False
    residual_scale: bool = False
    dropout: bool = False
    kernel: str = "flash"
    masked: bool = False
    softcap: bool = False
    viewed_weights: bool = False


class Regime(NamedTuple):
    """How the stack holds weights and computes: bytes per element, and what is trained.

    `compute` is the type of products, `weight_item` that of linear layers that are not quantised,
    `norm_item` that of all other weights.
    """

    autocast: bool
    trained: bool
    norm_item: int
    weight_item: int = HALF
    compute: int = HALF
    float16: bool = False
    packed: str = ""
    double: bool = False
    adapter_item: int = FP32
    adapted: frozenset[str] = frozenset()
    keeps_packed_input: bool = False
    adapter_dropout: bool = False


class Forward:
    """One layer's forward on a tape."""

    def __init__(self, tape: Tape, layer: Layer, regime: Regime) -> None:
        """Write `layer` under `regime` onto `tape`."""
        self.tape = tape
        self.layer = layer
        self.regime = regime

    def run(self, x: Value) -> Value:
        """Return the layer's output."""
        if self.layer.order == "parallel":
            return self._parallel(x)
        middle = self._branch(x, attention=True)
        result = self._branch(middle, attention=False)
        self.tape.drop(middle)
        return result

    def _branch(self, x: Value, *, attention: bool) -> Value:
        """Add a residual branch: norm before, after or both."""
        tape, order = self.tape, self.layer.order
        inner = self.norm(x) if order != "post" else x
        result = self._attention(inner) if attention else self._feed_forward(inner)
        if inner is not x:
            tape.drop(inner)
        if order != "pre":
            normed = self.norm(result)
            tape.drop(result)
            result = normed
        if self.layer.dropout:
            result = self._replaced(result, dropout(tape, result))
        if self.layer.residual_scale:
            result = self._replaced(result, pointwise(tape, result))
        total = add(tape, x, result)
        tape.drop(result)
        return total

    def _replaced(self, old: Value, new: Value) -> Value:
        self.tape.drop(old)
        return new

    def _parallel(self, x: Value) -> Value:
        """Phi, GPT-NeoX, Falcon-7B: attention and feed-forward side by side."""
        tape = self.tape
        first = self.norm(x)
        attended = self._attention(first)
        second = first
        if self.layer.norms > 1:
            tape.drop(first)
            second = self.norm(x)
        fed = self._feed_forward(second)
        tape.drop(second)
        both = add(tape, attended, fed)
        tape.drop(attended, fed)
        total = add(tape, both, x)
        tape.drop(both)
        return total

    def norm(self, x: Value, width: str = "hidden") -> Value:
        """Apply the family's norm over `width`."""
        weight = Weight("norm", width, "one", self.regime.norm_item, self.regime.trained)
        if self.layer.norm == "layer":
            return layer_norm(self.tape, x, weight)
        return rms_norm(self.tape, x, weight, self.layer.norm)

    def project(self, x: Value, role: str, rows: str, columns: str) -> Value:
        """Run a linear layer of the base model, quantised or not, with its adapter if any."""
        regime, tape = self.regime, self.tape
        item = regime.weight_item
        weight = Weight(
            role,
            rows,
            columns,
            item,
            regime.trained,
            regime.packed,
            regime.double,
            self.layer.viewed_weights,
        )
        if regime.packed == "int8":
            result = linear_8bit(tape, x, weight)
        elif regime.packed:
            result = linear_4bit(tape, x, weight, keeps_input=regime.keeps_packed_input)
        else:
            result = linear(tape, x, weight)
        if role not in regime.adapted:
            return result
        return self._adapt(x, result, weight)

    def _adapt(self, x: Value, result: Value, weight: Weight) -> Value:
        """`peft` 0.21: tuners/lora/layer.py Linear.forward, bnb.py Linear4bit.forward."""
        tape, regime = self.tape, self.regime
        if regime.packed:
            result = self._replaced(result, clone(tape, result))
        source = x
        if not (regime.packed and regime.autocast):
            source = cast(tape, x, regime.adapter_item)
        item = regime.adapter_item
        down = Weight(f"{weight.name}.A", "rank", weight.columns, item, trainable=True)
        up = Weight(f"{weight.name}.B", weight.rows, "rank", item, trainable=True)
        if regime.adapter_dropout:
            dropped = dropout(tape, source)
            if source is not x:
                tape.drop(source)
            source = dropped
        inner = linear(tape, source, down)
        outer = linear(tape, inner, up)
        tape.drop(inner)
        if self.layer.pads_adapters and weight.name == "qkv":
            outer = self._replaced(outer, self._padded(outer))
        scaled = pointwise(tape, outer)
        tape.drop(outer)
        total = add(tape, result, scaled)
        tape.drop(scaled, result)
        if source is not x:
            tape.drop(source)
        if not regime.packed and total.item != result.item:
            total = self._replaced(total, cast(tape, total, result.item))
        return total

    def _padded(self, x: Value) -> Value:
        """litgpt/lora.py zero_pad: index_copy saves its source, the queries' and values' part."""
        tape = self.tape
        part = tape.new(("tokens", "query_value"), x.item)
        node = tape.node(lambda _gradient: tape.give(x, tape.alloc(x.dims, x.item)), part, of=(x,))
        value = tape.output(node, tape.new(x.dims, x.item))
        tape.drop(part)
        return value

    def _attention(self, x: Value) -> Value:
        tape, layer = self.tape, self.layer
        query, key, value = self._fused(x) if layer.fused_qkv else self._separate(x)
        if layer.expands_keys:
            query, key, value = (self._expanded(x) for x in (query, key, value))
        if layer.rotary:
            turned = rotate(tape, query, layer.rotary), rotate(tape, key, layer.rotary)
            tape.drop(query, key)
            query, key = turned
        # repeat_kv of a single key head is a view
        copies = layer.grouped and not (layer.one_key and layer.kernel != "flash")
        attended = attend(
            tape,
            query,
            key,
            value,
            layer.kernel,
            "query" if copies else "",
            softcap=layer.softcap,
            masked=layer.masked,
        )
        if layer.kernel == "math" or (layer.rotary == "partial" and layer.kernel == "flash"):
            # the output is laid out with heads first, in flash attention like the queries, which
            # were concatenated so: `.contiguous()` copies it
            contiguous = clone(tape, attended)
            tape.drop(attended)
            attended = contiguous
        result = self.project(attended, "o", "hidden", "query")
        tape.drop(attended, query, key, value)
        return result

    def _expanded(self, x: Value) -> Value:
        """litgpt: queries are copied out of the product, keys and values for every query head."""
        return self._replaced(x, repeat(self.tape, x, ("tokens", "query")))

    def _separate(self, x: Value) -> tuple[Value, Value, Value]:
        return (
            self._head_input(self.project(x, "q", "query", "hidden"), "query"),
            self._head_input(self.project(x, "k", "key", "hidden"), "key"),
            self.project(x, "v", "key", "hidden"),
        )

    def _head_input(self, projected: Value, width: str) -> Value:
        """Norm and transpose of queries or keys."""
        tape = self.tape
        if self.layer.qk_norm:
            of = "head" if self.layer.qk_norm == "head" else width
            projected = self._replaced(projected, self.norm(projected, of))
        turned = transpose(tape, projected)
        tape.drop(projected)
        return turned

    def _fused(self, x: Value) -> tuple[Value, Value, Value]:
        """One product for query, key and value; the parts are views of it."""
        tape = self.tape
        fused = self.project(x, "qkv", "query_key_value", "hidden")
        cut = {"chunk": split, "slices": slices, "picks": picks}[self.layer.fused_qkv]
        query, key, value = cut(tape, fused, ("query", "key", "key"))
        tape.drop(fused)
        return query, key, value

    def _feed_forward(self, x: Value) -> Value:
        kind = self.layer.feed_forward
        if kind == "plain":
            return self._plain(x)
        if kind == "gated_fused":
            return self._gated_fused(x)
        if kind == "experts":
            from cift_probe.expect.memory.experts import run_experts

            return run_experts(self, x)
        return self._gated(x)

    def activate(self, x: Value) -> Value:
        """Apply the activation; only the formulas of GELU in Python have temporaries."""
        if self.layer.activation == "gelu_new":
            return self._gelu_new(x)
        if self.layer.activation == "gelu_fast":
            return self._gelu_fast(x)
        return pointwise(self.tape, x, saves=True)

    def _gelu_fast(self, x: Value) -> Value:
        """`FastGELUActivation`: `0.5 * x * (1 + tanh(x * c * (1 + 0.044715 * x * x)))`.

        transformers/activations.py; evaluated from left to right, every product saved.
        """
        tape = self.tape
        half, scaled, small = (pointwise(tape, x) for _ in range(3))
        square = multiply(tape, small, x)
        tape.drop(small)
        wide = self._replaced(square, pointwise(tape, square))
        inner = multiply(tape, scaled, wide)
        tape.drop(scaled, wide)
        tanh = self._replaced(inner, pointwise(tape, inner, saves_output=True))
        one = self._replaced(tanh, pointwise(tape, tanh))
        result = multiply(tape, half, one)
        tape.drop(half, one)
        return result

    def _gelu_new(self, x: Value) -> Value:
        """`NewGELUActivation`: `0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3)))`.

        transformers/activations.py; the power is computed in float32 under autocast.
        """
        tape = self.tape
        wide = FP32 if tape.autocast else x.item
        half = pointwise(tape, x)
        base = cast(tape, x, wide)
        cube = pointwise(tape, base, saves=True, temporaries=2)
        if base is not x:
            tape.drop(base)
        small = self._replaced(cube, pointwise(tape, cube))
        inner = self._replaced(small, add(tape, x, small))
        scaled = self._replaced(inner, pointwise(tape, inner))
        tanh = self._replaced(scaled, pointwise(tape, scaled, saves_output=True))
        one = self._replaced(tanh, pointwise(tape, tanh))
        result = multiply(tape, half, one)
        tape.drop(half, one)
        return result

    def _gated(self, x: Value) -> Value:
        """`down(activation(gate(x)) * up(x))`."""
        tape = self.tape
        gate = self.project(x, "gate", "intermediate", "hidden")
        active = self._replaced(gate, self.activate(gate))
        up = self.project(x, "up", "intermediate", "hidden")
        product = multiply(tape, active, up)
        tape.drop(active, up)
        result = self.project(product, "down", "hidden", "intermediate")
        tape.drop(product)
        return result

    def _gated_fused(self, x: Value) -> Value:
        """Phi-3, GLM-4: gate and up in one product, then two views of it."""
        tape = self.tape
        fused = self.project(x, "gate_up", "gate_up", "hidden")
        gate, up = split(tape, fused, ("intermediate", "intermediate"))
        active = self.activate(gate)
        product = multiply(tape, up, active)
        tape.drop(active, gate, up)
        result = self.project(product, "down", "hidden", "intermediate")
        tape.drop(product, fused)
        return result

    def _plain(self, x: Value) -> Value:
        """`down(activation(up(x)))`."""
        tape = self.tape
        up = self.project(x, "up", "intermediate", "hidden")
        active = self.activate(up)
        tape.drop(up)
        result = self.project(active, "down", "hidden", "intermediate")
        tape.drop(active)
        return result
