"""Which decoder layers of a model are alike, so that a slice holds whole periods of its pattern.

Layers differ in some architectures: sliding and global attention (Gemma), rotary and no rotary
positions (SmolLM3), dense and sparse (Qwen MoE). What a layer is, is read from the built modules,
not from a list of known architectures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cift_probe.models import ModelShape
from cift_probe.stack.extrapolate import DepthError
from cift_probe.stack.instants import decoder_layers

_SETTING = (bool, int, float, str, type(None))
_BY_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")  # one entry per layer in configs


def config_of(shape: ModelShape, num_layers: int | None = None) -> Any:
    """Return the model's transformers configuration, with `num_layers` decoder layers."""
    from transformers import AutoConfig

    fields = {key: value for key, value in shape.config.items() if key != "model_type"}
    config = AutoConfig.for_model(shape.model_type, **fields)
    if num_layers is not None:
        for name in _BY_LAYER:
            entries = getattr(config, name, None)
            if isinstance(entries, list | tuple) and len(entries) > num_layers:
                setattr(config, name, list(entries[:num_layers]))
        config.num_hidden_layers = num_layers
    return config


def read_period(shape: ModelShape) -> tuple[int, int]:
    """Return how many layers come before the pattern, and the length of the pattern.

    (0, 1) where all layers are alike. Builds the model without memory, on the meta device.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = decoder_layers(model)
    return period_of([_signature(layer, index) for index, layer in enumerate(layers)])


def period_of(signatures: Sequence[object]) -> tuple[int, int]:
    """Return (prefix, period) of a sequence: the shortest period, then the shortest prefix.

    >>> period_of("aaaa"), period_of("ssgssgs"), period_of("dssss")
    ((0, 1), (0, 3), (1, 1))
    """
    found = []
    for period in range(1, len(signatures) + 1):
        prefix = len(signatures) - period
        while prefix and signatures[prefix - 1] == signatures[prefix - 1 + period]:
            prefix -= 1
        found.append((prefix + period, prefix, period))
    _, prefix, period = min(found)
    return prefix, period


def depths_of(full_depth: int, prefix: int, period: int, num_periods: Sequence[int]) -> list[int]:
    """Return the depths of slices with whole periods, none deeper than the model.

    Raises DepthError when the model has fewer than two such depths.
    """
    asked = {prefix + count * period for count in num_periods}
    depths = sorted({min(depth, full_depth) for depth in asked})
    if len(depths) < 2 and depths != [full_depth]:  # noqa: PLR2004 - a line needs two points
        message = f"a model of {full_depth} layers in periods of {period} has no two slices"
        raise DepthError(message)
    return depths


def _signature(layer: Any, index: int) -> tuple[object, ...]:
    """Return what a layer is made of: classes, settings and shapes, without its own index."""
    parts: list[object] = [type(layer).__name__]
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, _SETTING) and key != "layer_idx" and not key.startswith("_")
        }
        parts.append((name, type(module).__name__, tuple(sorted(settings.items(), key=str))))
    parts.extend((name, tuple(item.shape)) for name, item in layer.named_parameters())
    config = getattr(layer, "config", None)
    for field in _BY_LAYER if config is not None else ():
        entries = getattr(config, field, None)
        if entries:
            parts.append(entries[index])
    return tuple(parts)
