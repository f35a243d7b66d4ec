"""Architectures: the make of the decoder layers of each family of models.

From the fields of config.json, as transformers 5.24 reads them (models/*/modeling_*.py); what a
configuration leaves out has the default of its class (`cift_probe/models/families.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cift_probe.expect.memory.anatomy import (
    FUSED_GATED,
    GELUS,
    PLAIN,
    SILU,
    Architecture,
    UnknownArchitectureError,
    activation_of,
    attention_parts,
    build,
    dimensions_of,
    fused_attention_parts,
    gated_parts,
    plain_parts,
    rotary_by,
    sizes,
    windowed_by,
)
from cift_probe.expect.memory.layers import Layer
from cift_probe.models import ModelShape


def describe(shape: ModelShape, kernel: str) -> Architecture:
    """Return what is known of a model; raises UnknownArchitectureError."""
    family = FAMILIES.get(shape.model_type)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        message = f"the ledger has no layers for model_type {shape.model_type!r}; it has {known}"
        raise UnknownArchitectureError(message)
    return family(shape, kernel)


def _llama(shape: ModelShape, kernel: str) -> Architecture:
    fields = shape.fields
    qwen2 = shape.model_type == "qwen2"  # its three biases are no setting
    bias = qwen2 or fields.get("attention_bias", False)
    head = ("head", "head") if shape.model_type == "qwen3" else ()
    granite = shape.model_type == "granite"
    layer = Layer(
        activation=activation_of(shape, "hidden_act", SILU),
        kernel=kernel,
        qk_norm="head" if head else "",
        residual_scale=granite,
    )
    parts = attention_parts(bias=bias, out_bias=bias and not qwen2)
    one = build(
        shape,
        layer,
        parts + gated_parts(bias=fields.get("mlp_bias", False)),
        ("hidden", "hidden", *head),
        logit_scale=granite,
        embedding_scale="outside" if granite else "",
    )
    return windowed_by(one, fields)


def _smollm3(shape: ModelShape, kernel: str) -> Architecture:
    """Every fourth layer has no rotary positions."""
    one = _llama(shape, kernel)
    fields = shape.fields
    if fields["use_sliding_window"]:
        message = "windows beside layers without rotary positions are not written down"
        raise UnknownArchitectureError(message)
    every = fields["no_rope_layer_interval"]
    flags = fields["no_rope_layers"] or [
        (index + 1) % every for index in range(shape.num_hidden_layers)
    ]
    kinds = (one.kinds[0], one.kinds[0]._replace(rotary=""))
    return one._replace(
        kinds=kinds,
        order=tuple(0 if flag else 1 for flag in flags),
        projections=one.projections * 2,
    )


def _olmo2(shape: ModelShape, kernel: str) -> Architecture:
    silu = activation_of(shape, "hidden_act", SILU)
    layer = Layer(norm="olmo2", order="post", qk_norm="full", activation=silu, kernel=kernel)
    bias = shape.fields["attention_bias"]
    parts = attention_parts(bias=bias, out_bias=bias) + gated_parts()
    return build(shape, layer, parts, ("hidden", "hidden", "query", "key"))


def _gemma(shape: ModelShape, kernel: str) -> Architecture:
    """Gemma 2 and 3: norms on both sides; windows on most layers."""
    fields = shape.fields
    if fields.get("use_bidirectional_attention"):
        message = f"attention in both directions of {shape.model_type!r} is not written down"
        raise UnknownArchitectureError(message)
    third = shape.model_type != "gemma2"
    norms = ("hidden",) * 4 + (("head", "head") if third else ())
    layer = Layer(
        norm="gemma",
        order="sandwich",
        qk_norm="head" if third else "",
        activation=activation_of(shape, "hidden_activation", GELUS),
        softcap=not third and fields["attn_logit_softcapping"] is not None,
        kernel=kernel,
    )
    bias = fields["attention_bias"]
    one = build(
        shape,
        layer,
        attention_parts(bias=bias, out_bias=bias) + gated_parts(),
        norms,
        embedding_scale="inside",
        softcap=not third and fields["final_logit_softcapping"] is not None,
    )
    return windowed_by(one, fields, period=fields["sliding_window_pattern"] if third else 2)


def _phi(shape: ModelShape, kernel: str) -> Architecture:
    layer = Layer(
        norm="layer",
        order="parallel",
        norms=1,
        feed_forward="plain",
        activation=activation_of(shape, "hidden_act", PLAIN),
        rotary="partial",
        kernel=kernel,
    )
    parts = attention_parts(bias=True, out="dense", out_bias=True) + plain_parts(
        "fc1", "fc2", bias=True
    )
    one = build(shape, layer, parts, ("hidden",), head_bias=True)
    return rotary_by(one, shape.fields["partial_rotary_factor"])


def _phi3(shape: ModelShape, kernel: str) -> Architecture:
    layer = Layer(
        fused_qkv="slices",
        feed_forward="gated_fused",
        activation=activation_of(shape, "hidden_act", SILU),
        rotary="partial",
        kernel=kernel,
    )
    parts = fused_attention_parts("qkv_proj", "o_proj") + FUSED_GATED
    one = build(shape, layer, parts, ("hidden", "hidden"))
    one = rotary_by(one, shape.fields["partial_rotary_factor"])
    return windowed_by(one, shape.fields)


def _glm4(shape: ModelShape, kernel: str) -> Architecture:
    layer = Layer(
        order="sandwich",
        feed_forward="gated_fused",
        activation=activation_of(shape, "hidden_act", SILU),
        rotary="partial",
        kernel=kernel,
    )
    parts = attention_parts(bias=shape.fields["attention_bias"]) + FUSED_GATED
    one = build(shape, layer, parts, ("hidden",) * 4)
    return rotary_by(one, shape.fields["partial_rotary_factor"])


def _starcoder2(shape: ModelShape, kernel: str) -> Architecture:
    fields = shape.fields
    bias = fields["use_bias"]
    layer = Layer(
        norm="layer",
        feed_forward="plain",
        activation=activation_of(shape, "hidden_act", PLAIN),
        dropout=fields["residual_dropout"] > 0,
        kernel=kernel,
    )
    parts = attention_parts(bias=bias, out_bias=bias) + plain_parts("c_fc", "c_proj", bias=bias)
    drops = fields["embedding_dropout"] > 0
    one = build(
        shape, layer, parts, ("hidden", "hidden"), embedding_scale="dropout" if drops else ""
    )
    return windowed_by(one, fields)


def _neox(shape: ModelShape, kernel: str) -> Architecture:
    layer = Layer(
        norm="layer",
        order="parallel" if shape.fields["use_parallel_residual"] else "pre",
        feed_forward="plain",
        activation=activation_of(shape, "hidden_act", PLAIN),
        fused_qkv="chunk",
        rotary="partial",
        kernel=kernel,
    )
    bias = shape.fields["attention_bias"]
    parts = fused_attention_parts("query_key_value", "dense", bias=bias)
    parts += plain_parts("dense_h_to_4h", "dense_4h_to_h", bias=True)
    one = build(shape, layer, parts, ("hidden", "hidden"))
    return rotary_by(one, shape.fields["partial_rotary_factor"])


def _falcon(shape: ModelShape, kernel: str) -> Architecture:
    fields = shape.fields
    if fields["alibi"] or fields["new_decoder_architecture"] or not fields["parallel_attn"]:
        message = "of model_type 'falcon' only the layers of Falcon-7B are written down"
        raise UnknownArchitectureError(message)
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    pairs = 1 if fields["multi_query"] else heads
    inner = fields["ffn_hidden_size"] or 4 * hidden  # configuration_falcon.py
    dims = sizes(hidden, heads, pairs, hidden // heads, inner, fields["vocab_size"])
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
    bias = bool(fields["bias"])
    parts = fused_attention_parts("query_key_value", "dense", bias=bias)
    parts += plain_parts("dense_h_to_4h", "dense_4h_to_h", bias=bias)
    # FalconLinear is a subclass, and transformers/integrations/bitsandbytes.py replaces
    # `type(module) is nn.Linear` alone: nothing of this model is quantised
    return build(shape, layer, parts, ("hidden",), dims=dims, quantisable=False)


def _experts(shape: ModelShape, kernel: str) -> Architecture:
    """Mixtral, OLMoE, Qwen3-MoE: experts fused in two tensors per layer, never quantised."""
    fields = shape.fields
    if fields.get("mlp_only_layers") or fields.get("decoder_sparse_step", 1) != 1:
        message = f"dense layers between the experts of {shape.model_type!r} are not written down"
        raise UnknownArchitectureError(message)
    dims = dimensions_of(shape)
    dims["expert"] = fields.get("moe_intermediate_size") or fields["intermediate_size"]
    dims["expert_gate_up"] = 2 * dims["expert"]
    dims["experts"] = fields.get("num_local_experts") or fields["num_experts"]
    dims["chosen"] = fields["num_experts_per_tok"]
    bias = fields.get("attention_bias", False)
    qk_norm = {"qwen3_moe": "head", "olmoe": "full"}.get(shape.model_type, "")
    silu = activation_of(shape, "hidden_act", SILU)
    layer = Layer(qk_norm=qk_norm, feed_forward="experts", activation=silu, kernel=kernel)
    norms = {"head": ("head", "head"), "full": ("query", "key"), "": ()}[qk_norm]
    extras = (
        ("experts", "expert_gate_up", "hidden"),
        ("experts", "hidden", "expert"),
        ("experts", "hidden"),
    )
    parts = attention_parts(bias=bias, out_bias=bias)
    one = build(shape, layer, parts, ("hidden", "hidden", *norms), dims=dims, extras=extras)
    return windowed_by(one, fields)


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
