"""What a model is made of: tensors by dimension names, and the settings its layers depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cift_probe.expect.memory.layers import Layer
from cift_probe.models import ModelShape

REGISTERS = 128  # widest head whose gradients the memory-efficient kernel keeps in registers


class Projection(NamedTuple):
    """A linear layer: its role, module name, rows and columns as dimensions, bias or not."""

    role: str
    module: str
    rows: str
    columns: str
    bias: bool = False


class Architecture(NamedTuple):
    """What memory depends on: dimensions by name, layer kinds, and parameters per layer.

    `extras` are parameters of a layer that are no linear layers and no norms (fused experts,
    routers) as (dimension names); `norms` are widths by dimension name. `quantisable` says that
    loading in 4 or 8 bits quantises the linear layers.
    """

    dims: dict[str, int]
    kinds: tuple[Layer, ...]
    order: tuple[int, ...]
    projections: tuple[tuple[Projection, ...], ...]
    norms: tuple[str, ...]
    norm_tensors: int
    tied: bool
    vocabulary: int
    softcap: bool = False
    logit_scale: bool = False
    embedding_scale: str = ""
    head_bias: bool = False
    packed_head: bool = False
    quantisable: bool = True
    extras: tuple[tuple[str, ...], ...] = ()
    window: int = 0
    windowed: tuple[bool, ...] = ()


SILU = {"silu": "silu", "swish": "silu"}
GELUS = {"gelu_pytorch_tanh": "gelu", "gelu": "gelu"}
PLAIN = {**GELUS, "gelu_new": "gelu_new", "gelu_fast": "gelu_fast", "silu": "silu"}


class UnknownArchitectureError(ValueError):
    """A model whose layers are not written down here; the text says which."""


def dimensions_of(shape: ModelShape) -> dict[str, int]:
    """Return the dimensions of a model; raises ModelError."""
    fields = shape.fields
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    pairs = fields.get("num_key_value_heads") or heads
    head = fields.get("head_dim") or hidden // heads
    return sizes(hidden, heads, pairs, head, fields["intermediate_size"], fields["vocab_size"])


def sizes(
    hidden: int, heads: int, pairs: int, head: int, inner: int, vocabulary: int
) -> dict[str, int]:
    """Return all dimensions that follow from six numbers."""
    query, key = heads * head, pairs * head
    return {
        "one": 1,
        "hidden": hidden,
        "heads": heads,
        "head": head,
        "head_32": -(-head // 32) * 32,
        "wide_head": head if head > REGISTERS else 0,
        "query": query,
        "key": key,
        "query_half": query // 2,
        "key_half": key // 2,
        "query_key_value": query + 2 * key,
        "query_value": query + key,
        "intermediate": inner,
        "gate_up": 2 * inner,
        "vocabulary": vocabulary,
    }


def attention_parts(
    *, bias: bool = False, out: str = "o_proj", out_bias: bool = False
) -> list[Projection]:
    """Return four linear layers: queries, keys, values, and what leaves the attention."""
    return [
        Projection("q", "q_proj", "query", "hidden", bias),
        Projection("k", "k_proj", "key", "hidden", bias),
        Projection("v", "v_proj", "key", "hidden", bias),
        Projection("o", out, "hidden", "query", out_bias),
    ]


def fused_attention_parts(module: str, out: str, *, bias: bool = False) -> list[Projection]:
    """Return two linear layers: queries, keys and values in one, and what leaves."""
    return [
        Projection("qkv", module, "query_key_value", "hidden", bias),
        Projection("o", out, "hidden", "query", bias),
    ]


def gated_parts(*, bias: bool = False) -> list[Projection]:
    """Return the three linear layers of a gated feed-forward part."""
    return [
        Projection("gate", "gate_proj", "intermediate", "hidden", bias),
        Projection("up", "up_proj", "intermediate", "hidden", bias),
        Projection("down", "down_proj", "hidden", "intermediate", bias),
    ]


def plain_parts(up: str, down: str, *, bias: bool = False) -> list[Projection]:
    """Return the two linear layers of a plain feed-forward part."""
    return [
        Projection("up", up, "intermediate", "hidden", bias),
        Projection("down", down, "hidden", "intermediate", bias),
    ]


FUSED_GATED = [
    Projection("gate_up", "gate_up_proj", "gate_up", "hidden"),
    Projection("down", "down_proj", "hidden", "intermediate"),
]


def build(
    shape: ModelShape,
    layer: Layer,
    projections: list[Projection],
    norms: tuple[str, ...],
    **facts: Any,
) -> Architecture:
    """Return an architecture whose layers are all of one kind."""
    dims = facts.pop("dims", None) or dimensions_of(shape)
    layer = layer._replace(
        grouped=dims["key"] != dims["query"], one_key=dims["key"] == dims["head"]
    )
    return Architecture(
        dims=dims,
        kinds=(layer,),
        order=(0,) * shape.num_hidden_layers,
        projections=(tuple(projections),),
        norms=norms,
        norm_tensors=2 if layer.norm == "layer" else 1,
        tied=shape.fields["tie_word_embeddings"],
        vocabulary=dims["vocabulary"],
        **facts,
    )


def activation_of(shape: ModelShape, field: str, known: Mapping[str, str]) -> str:
    """Return the ledger's name of an activation; raises UnknownArchitectureError."""
    name = shape.fields[field]
    if name not in known:
        message = f"{field} {name[:40]!r} of {shape.model_type!r} is not written down"
        raise UnknownArchitectureError(message)
    return known[name]


def windowed_by(one: Architecture, fields: Mapping[str, Any], period: int = 0) -> Architecture:
    """Set which layers see a window of the sequence alone.

    By the list of layers; else all but every last of a `period`, or from `max_window_layers` on
    (Qwen), or all. `use_sliding_window` switches it off where a family has it.
    """
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    if not window:
        return one
    count = len(one.order)
    types = fields.get("layer_types")
    if types:
        if unknown := set(types) - {"sliding_attention", "full_attention"}:
            message = f"layers of type {min(unknown)[:40]!r} are not written down"
            raise UnknownArchitectureError(message)
        windowed = [name == "sliding_attention" for name in types]
    elif period:
        windowed = [bool((index + 1) % period) for index in range(count)]
    else:
        first = fields.get("max_window_layers", 0)
        windowed = [index >= first for index in range(count)]
    return one._replace(window=window, windowed=tuple(windowed))


def rotary_by(one: Architecture, factor: float) -> Architecture:
    """Set how much of each head is turned."""
    head = one.dims["head"]
    turned = int(head * factor)
    dims = dict(one.dims)
    for width in ("query", "key"):
        dims[f"{width}_rotary"] = dims[width] * turned // head
    return one._replace(dims=dims)
