"""Architectures: the tensors of a model and the make of its decoder layers.

From the fields of config.json, as transformers 5.24 reads them (models/*/configuration_*.py and
modeling_*.py); what a configuration leaves out has the default of that family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


class UnknownArchitectureError(ValueError):
    """A model whose layers are not written down here; the text says which."""


def describe(shape: ModelShape, kernel: str) -> Architecture:
    """Return what is known of a model; raises UnknownArchitectureError."""
    family = FAMILIES.get(shape.model_type)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        message = f"the ledger has no layers for model_type {shape.model_type!r}; it has {known}"
        raise UnknownArchitectureError(message)
    return family(shape, kernel)


def _dimensions(shape: ModelShape) -> dict[str, int]:
    config = shape.config
    hidden, heads = shape.count("hidden_size"), shape.count("num_attention_heads")
    pairs = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    inner = config.get("intermediate_size") or 4 * hidden
    return sizes(hidden, heads, pairs, head, inner, shape.count("vocab_size"))


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


def _attention(
    *, bias: bool = False, out: str = "o_proj", out_bias: bool = False
) -> list[Projection]:
    return [
        Projection("q", "q_proj", "query", "hidden", bias),
        Projection("k", "k_proj", "key", "hidden", bias),
        Projection("v", "v_proj", "key", "hidden", bias),
        Projection("o", out, "hidden", "query", out_bias),
    ]


def _fused_attention(module: str, out: str, *, bias: bool = False) -> list[Projection]:
    return [
        Projection("qkv", module, "query_key_value", "hidden", bias),
        Projection("o", out, "hidden", "query", bias),
    ]


def _gated(*, bias: bool = False) -> list[Projection]:
    return [
        Projection("gate", "gate_proj", "intermediate", "hidden", bias),
        Projection("up", "up_proj", "intermediate", "hidden", bias),
        Projection("down", "down_proj", "hidden", "intermediate", bias),
    ]


def _plain(up: str, down: str, *, bias: bool = False) -> list[Projection]:
    return [
        Projection("up", up, "intermediate", "hidden", bias),
        Projection("down", down, "hidden", "intermediate", bias),
    ]


_FUSED_GATED = [
    Projection("gate_up", "gate_up_proj", "gate_up", "hidden"),
    Projection("down", "down_proj", "hidden", "intermediate"),
]


def _build(
    shape: ModelShape,
    layer: Layer,
    projections: list[Projection],
    norms: tuple[str, ...],
    **facts: Any,
) -> Architecture:
    """Return an architecture whose layers are all of one kind."""
    dims = facts.pop("dims", None) or _dimensions(shape)
    layer = layer._replace(
        grouped=dims["key"] != dims["query"], one_key=dims["key"] == dims["head"]
    )
    tied = bool(shape.config.get("tie_word_embeddings", facts.pop("tied_default", False)))
    return Architecture(
        dims=dims,
        kinds=(layer,),
        order=(0,) * shape.num_hidden_layers,
        projections=(tuple(projections),),
        norms=norms,
        norm_tensors=2 if layer.norm == "layer" else 1,
        tied=tied,
        vocabulary=dims["vocabulary"],
        **facts,
    )


def _llama(shape: ModelShape, kernel: str) -> Architecture:
    config = shape.config
    bias = bool(config.get("attention_bias", shape.model_type == "qwen2"))
    out_bias = bias and shape.model_type != "qwen2"
    head = ("head", "head") if shape.model_type == "qwen3" else ()
    layer = Layer(
        kernel=kernel,
        qk_norm="head" if head else "",
        residual_scale=shape.model_type == "granite",
    )
    granite = shape.model_type == "granite"
    parts = _attention(bias=bias, out_bias=out_bias) + _gated(bias=bool(config.get("mlp_bias")))
    tied = shape.model_type in {"granite", "smollm3"}
    return _build(
        shape,
        layer,
        parts,
        ("hidden", "hidden", *head),
        logit_scale=granite,
        embedding_scale="outside" if granite else "",
        tied_default=tied,
    )


def _smollm3(shape: ModelShape, kernel: str) -> Architecture:
    """Every fourth layer has no rotary positions."""
    one = _llama(shape, kernel)
    every = int(shape.config.get("no_rope_layer_interval") or 4)
    flags = shape.config.get("no_rope_layers") or [
        int((index + 1) % every != 0) for index in range(shape.num_hidden_layers)
    ]
    kinds = (one.kinds[0], one.kinds[0]._replace(rotary=""))
    return one._replace(
        kinds=kinds,
        order=tuple(0 if flag else 1 for flag in flags[: shape.num_hidden_layers]),
        projections=one.projections * 2,
    )


def _olmo2(shape: ModelShape, kernel: str) -> Architecture:
    layer = Layer(norm="olmo2", order="post", qk_norm="full", kernel=kernel)
    return _build(shape, layer, _attention() + _gated(), ("hidden", "hidden", "query", "key"))


def _gemma(shape: ModelShape, kernel: str) -> Architecture:
    """Gemma 2 and 3: norms on both sides; windows on most layers."""
    third = shape.model_type != "gemma2"
    norms = ("hidden",) * 4 + (("head", "head") if third else ())
    layer = Layer(
        norm="gemma",
        order="sandwich",
        qk_norm="head" if third else "",
        activation="gelu",
        kernel=kernel,
    )
    config = shape.config
    defaults = {"tied_default": True, "embedding_scale": "inside"}
    if not third:
        defaults["softcap"] = config.get("final_logit_softcapping", 30.0) is not None
        layer = layer._replace(softcap=config.get("attn_logit_softcapping", 50.0) is not None)
    one = _build(shape, layer, _attention() + _gated(), norms, **defaults)
    count = shape.num_hidden_layers
    period = int(config.get("sliding_window_pattern") or (6 if third else 2))
    types = config.get("layer_types")
    windowed = tuple(
        (types[index] == "sliding_attention") if types else bool((index + 1) % period)
        for index in range(count)
    )
    return one._replace(window=int(config.get("sliding_window") or 0), windowed=windowed)


def _phi(shape: ModelShape, kernel: str) -> Architecture:
    layer = Layer(
        norm="layer",
        order="parallel",
        norms=1,
        feed_forward="plain",
        activation=_gelu(shape.config.get("hidden_act", "gelu_new")),
        rotary="partial",
        kernel=kernel,
    )
    parts = _attention(bias=True, out="dense", out_bias=True) + _plain("fc1", "fc2", bias=True)
    one = _build(shape, layer, parts, ("hidden",), head_bias=True)
    return _rotary(one, float(shape.config.get("partial_rotary_factor", 0.5)))


def _phi3(shape: ModelShape, kernel: str) -> Architecture:
    factor = float(shape.config.get("partial_rotary_factor", 1.0))
    layer = Layer(fused_qkv="slices", feed_forward="gated_fused", rotary="partial", kernel=kernel)
    parts = _fused_attention("qkv_proj", "o_proj") + _FUSED_GATED
    one = _build(shape, layer, parts, ("hidden", "hidden"))
    window = shape.config.get("sliding_window")
    return _rotary(one, factor)._replace(
        window=int(window or 0), windowed=(bool(window),) * shape.num_hidden_layers
    )


def _glm4(shape: ModelShape, kernel: str) -> Architecture:
    layer = Layer(order="sandwich", feed_forward="gated_fused", rotary="partial", kernel=kernel)
    bias = bool(shape.config.get("attention_bias", False))
    one = _build(shape, layer, _attention(bias=bias) + _FUSED_GATED, ("hidden",) * 4)
    return _rotary(one, float(shape.config.get("partial_rotary_factor", 0.5)))


def _starcoder2(shape: ModelShape, kernel: str) -> Architecture:
    bias = bool(shape.config.get("use_bias", True))
    layer = Layer(
        norm="layer",
        feed_forward="plain",
        activation=_gelu(shape.config.get("hidden_act", "gelu_pytorch_tanh")),
        dropout=bool(shape.config.get("residual_dropout", 0.0)),
        kernel=kernel,
    )
    parts = _attention(bias=bias, out_bias=bias) + _plain("c_fc", "c_proj", bias=bias)
    drops = float(shape.config.get("embedding_dropout", 0.0)) > 0
    one = _build(
        shape,
        layer,
        parts,
        ("hidden", "hidden"),
        tied_default=True,
        embedding_scale="dropout" if drops else "",
    )
    window = shape.config.get("sliding_window")
    return one._replace(window=int(window or 0), windowed=(bool(window),) * len(one.order))


def _neox(shape: ModelShape, kernel: str) -> Architecture:
    parallel = bool(shape.config.get("use_parallel_residual", True))
    layer = Layer(
        norm="layer",
        order="parallel" if parallel else "pre",
        feed_forward="plain",
        activation=_gelu(shape.config.get("hidden_act", "gelu")),
        fused_qkv="chunk",
        rotary="partial",
        kernel=kernel,
    )
    parts = _fused_attention("query_key_value", "dense", bias=True)
    parts += _plain("dense_h_to_4h", "dense_4h_to_h", bias=True)
    one = _build(shape, layer, parts, ("hidden", "hidden"))
    return _rotary(one, float(shape.config.get("rotary_pct", 0.25)))


def _falcon(shape: ModelShape, kernel: str) -> Architecture:
    config = shape.config
    newer = bool(config.get("new_decoder_architecture", False))
    if config.get("alibi") or newer or not config.get("parallel_attn", True):
        message = "of model_type 'falcon' only the layers of Falcon-7B are written down"
        raise UnknownArchitectureError(message)
    hidden, heads = shape.count("hidden_size"), shape.count("num_attention_heads")
    pairs = 1 if config.get("multi_query", True) else heads
    inner = config.get("ffn_hidden_size") or 4 * hidden
    dims = sizes(hidden, heads, pairs, hidden // heads, inner, shape.count("vocab_size"))
    layer = Layer(
        norm="layer",
        order="parallel",
        norms=1,
        feed_forward="plain",
        activation="gelu",
        fused_qkv="picks",
        kernel=kernel,
        viewed_weights=True,
    )
    bias = bool(config.get("bias", False))
    parts = _fused_attention("query_key_value", "dense", bias=bias)
    parts += _plain("dense_h_to_4h", "dense_4h_to_h", bias=bias)
    # FalconLinear is a subclass, and transformers/integrations/bitsandbytes.py replaces
    # `type(module) is nn.Linear` alone: nothing of this model is quantised
    return _build(shape, layer, parts, ("hidden",), dims=dims, tied_default=True, quantisable=False)


def _experts(shape: ModelShape, kernel: str) -> Architecture:
    """Mixtral, OLMoE, Qwen3-MoE: experts fused in two tensors per layer, never quantised."""
    config = shape.config
    if config.get("mlp_only_layers") or int(config.get("decoder_sparse_step") or 1) != 1:
        message = f"dense layers between the experts of {shape.model_type!r} are not written down"
        raise UnknownArchitectureError(message)
    dims = _dimensions(shape)
    inner = config.get("moe_intermediate_size") or config.get("intermediate_size")
    dims["expert"] = int(inner or 0)
    dims["expert_gate_up"] = 2 * dims["expert"]
    dims["experts"] = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    dims["chosen"] = int(config.get("num_experts_per_tok") or 0)
    qk_norm = {"qwen3_moe": "head", "olmoe": "full"}.get(shape.model_type, "")
    layer = Layer(qk_norm=qk_norm, feed_forward="experts", kernel=kernel)
    norms = {"head": ("head", "head"), "full": ("query", "key"), "": ()}[qk_norm]
    extras = (
        ("experts", "expert_gate_up", "hidden"),
        ("experts", "hidden", "expert"),
        ("experts", "hidden"),
    )
    return _build(
        shape, layer, _attention(), ("hidden", "hidden", *norms), dims=dims, extras=extras
    )


def _gelu(name: str) -> str:
    return {"gelu_new": "gelu_new", "silu": "silu"}.get(name, "gelu")


def _rotary(one: Architecture, factor: float) -> Architecture:
    """Set how much of each head is turned."""
    head = one.dims["head"]
    turned = int(head * factor)
    dims = dict(one.dims)
    for width in ("query", "key"):
        dims[f"{width}_rotary"] = dims[width] * turned // head
    return one._replace(dims=dims)


FAMILIES: Mapping[str, Callable[[ModelShape, str], Architecture]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "granite"), _llama),
    **dict.fromkeys(("gemma2", "gemma3_text"), _gemma),
    **dict.fromkeys(("mixtral", "olmoe", "qwen3_moe"), _experts),
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "phi": _phi,
    "phi3": _phi3,
    "glm4": _glm4,
    "starcoder2": _starcoder2,
    "gpt_neox": _neox,
    "falcon": _falcon,
}
