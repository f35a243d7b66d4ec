"""What the fields of a config.json mean in its family: defaults, types, and older names.

A file leaves out what equals its class's default, or what its class did not have yet when it was
written. What then holds is read from `data/families.toml`, which comes from the configuration
classes themselves; a field that a family does not have is ignored, as transformers ignores it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import msgspec

from cift_probe.data import read_rows

FAMILIES = "families.toml"
MAX_COUNT: Final = 1 << 28  # far above every size that a model has
# without these a guess could be wrong a hundredfold, so they must be said
NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_NEEDED_WHERE_KNOWN = (
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
)
# older families write these names; transformers maps them in each class's `attribute_map`
_OLDER_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
}


class FieldError(ValueError):
    """A field that no model can have; the text names field and value."""


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model_type: which fields it reads, and what each is where a file does not say.

    `optional` fields may be null; `aliases` are other names that the class maps to a field.
    """

    source: str
    date: str
    optional: frozenset[str] = frozenset()
    aliases: dict[str, str] = {}
    defaults: dict[str, Any] = {}


@cache
def read_families() -> dict[str, Family]:
    """Return the families by model_type; raises DataError for a malformed row."""
    return read_rows(FAMILIES, Family)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < MAX_COUNT


def _count(value: Any) -> bool:
    return value == 0 or _whole(value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0


def _name(value: Any) -> bool:
    return isinstance(value, str)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(_count(item) for item in value)


_Kind = tuple[Callable[[Any], bool], str]
_SIZE: _Kind = (_whole, f"no whole number of 1 to {MAX_COUNT - 1}")
_COUNT: _Kind = (_count, f"no whole number of 0 to {MAX_COUNT - 1}")
_FLAG: _Kind = (_flag, "neither true nor false")
_SHARE: _Kind = (_share, "no number of 0 to 1")
_POSITIVE: _Kind = (_positive, "no number above 0")
_NAME: _Kind = (_name, "no name")
_NAMES: _Kind = (_names, "no list of names")
_COUNTS: _Kind = (_counts, "no list of whole numbers")

KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys((*NEEDED, *_NEEDED_WHERE_KNOWN), _SIZE),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "ffn_hidden_size"), _SIZE),
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), _SIZE),
    **dict.fromkeys(("sliding_window_pattern", "no_rope_layer_interval"), _SIZE),
    **dict.fromkeys(("decoder_sparse_step", "max_window_layers"), _COUNT),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias"), _FLAG),
    **dict.fromkeys(("use_sliding_window", "use_parallel_residual", "bias"), _FLAG),
    **dict.fromkeys(("new_decoder_architecture", "alibi", "parallel_attn", "multi_query"), _FLAG),
    "use_bidirectional_attention": _FLAG,
    **dict.fromkeys(("partial_rotary_factor", "residual_dropout", "embedding_dropout"), _SHARE),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), _POSITIVE),
    **dict.fromkeys(("hidden_act", "hidden_activation"), _NAME),
    "layer_types": _NAMES,
    **dict.fromkeys(("no_rope_layers", "mlp_only_layers"), _COUNTS),
}
_BY_LAYER = ("layer_types", "no_rope_layers")  # one entry per layer


def read_field(config: Mapping[str, Any], name: str, aliases: Mapping[str, str] = {}) -> Any:
    """Return what a config.json says of a field under any of its names; None for nothing."""
    others = (old for old, new in aliases.items() if new == name)
    for key in (name, *_OLDER_NAMES.get(name, ()), *others):
        if config.get(key) is not None:
            return config[key]
    return None


def checked(name: str, value: Any) -> Any:
    """Return the value of a field; raises FieldError where no model can have it."""
    holds, told = KINDS[name]
    if not holds(value):
        shown = f"{name} = {repr(value)[:40]}"
        raise FieldError(f"{name} is missing" if value is None else f"{shown} is {told}")
    return value


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return every field of a config.json's family, filled in as its class fills it in.

    Empty for a model_type that `data/families.toml` does not have: what its fields mean is its
    own affair, and the stack's. Raises FieldError.
    """
    family = read_families().get(str(config.get("model_type")))
    if family is None:
        return {}
    config = {**_legacy(config), **config, **_rotary(config)}
    for name in KINDS:
        if config.get(name) is not None:
            checked(name, config[name])
    _check_layers(config)
    filled: dict[str, Any] = {}
    for name in sorted({*family.defaults, *family.optional}):
        value = read_field(config, name, family.aliases)
        if value is None and name in (*NEEDED, *_NEEDED_WHERE_KNOWN):
            checked(name, None)
        if value is None and config.get(name, ...) is not None:
            value = family.defaults.get(name)  # not written; what is null stays null
        if value is not None or name not in family.optional:
            checked(name, value)
        filled[name] = value
    return filled


def _legacy(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what GPT-NeoX calls its share of rotary positions."""
    share = config.get("rotary_pct")
    return {} if share is None else {"partial_rotary_factor": share}


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the dictionary of rotary positions says; it precedes the outer fields."""
    for name in ("rope_scaling", "rope_parameters"):
        inner = config.get(name)
        if inner is not None and not isinstance(inner, dict):
            message = f"{name} = {repr(inner)[:40]} is no object"
            raise FieldError(message)
        if inner and inner.get("partial_rotary_factor") is not None:
            return {"partial_rotary_factor": inner["partial_rotary_factor"]}
    return {}


def _check_layers(config: Mapping[str, Any]) -> None:
    layers = checked("num_hidden_layers", read_field(config, "num_hidden_layers"))
    for name in _BY_LAYER:
        entries = config.get(name)
        if entries is not None and len(entries) != layers:
            message = f"{name} is no list of {layers} entries"
            raise FieldError(message)
