"""What a config.json leaves out: the defaults of its class, and never a guess."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cift_probe.evidence import Unknown
from cift_probe.expect.estimate import Estimate
from cift_probe.expect.memory import predict
from cift_probe.models import ModelError, ModelShape, parse_config
from cift_probe.models.families import KINDS, complete, read_families
from cift_probe.plan import Plan

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64},
}


def bare(name: str) -> dict[str, Any]:
    """Return the shortest configuration of a family that is answered."""
    config = {"model_type": name, **SMALL}
    if name != "falcon":
        config["intermediate_size"] = 768
    if name in OF_EXPERTS:
        config |= EXPERTS | OF_EXPERTS[name]
    return config


def weights_of(config: dict[str, Any]) -> int:
    """Return what the formula says for the weights, in bf16."""
    plan = Plan(name="p", model="m", method="lora", quantisation="none")
    found = predict(plan, ModelShape(config, "made up"))
    assert isinstance(found, Estimate), found
    return found.components["weights"]


def built(config: dict[str, Any]) -> int:
    """Return the number of parameters that transformers builds for a configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in config.items() if key != "model_type"}
    fields["pad_token_id"] = 0  # some classes have one beyond a small vocabulary
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **fields)
        )
    return sum(item.numel() for item in model.parameters())


@pytest.mark.parametrize("name", sorted(read_families()))
def test_what_is_left_out_is_what_the_class_takes(name: str) -> None:
    config = bare(name)
    assert weights_of(config) == pytest.approx(2 * built(config), rel=0.002)


@pytest.mark.parametrize("name", sorted(read_families()))
def test_the_table_is_what_the_installed_classes_say(name: str) -> None:
    place = ROOT / "scripts" / "family_defaults.py"
    spec = importlib.util.spec_from_file_location("family_defaults", place)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    made, kept = script.family_of(name), read_families()[name]
    assert set(made["optional"]) == set(kept.optional)
    assert made["aliases"] == kept.aliases
    assert made["defaults"] == kept.defaults


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("llama", "intermediate_size"),
        ("gpt_neox", "intermediate_size"),
        ("mixtral", "num_local_experts"),
        ("olmoe", "num_experts"),
        ("qwen3_moe", "moe_intermediate_size"),
        ("qwen3_moe", "num_experts_per_tok"),
        ("phi3", "vocab_size"),
    ],
)
def test_a_size_that_decides_the_weights_must_be_said(name: str, field: str) -> None:
    config = bare(name)
    del config[field]
    with pytest.raises(ModelError, match=f"{field} is missing"):
        parse_config(json.dumps(config).encode(), "here")


@pytest.mark.parametrize(
    "stray",
    [
        ("mixtral", {"moe_intermediate_size": 8}),
        ("olmoe", {"moe_intermediate_size": 8}),
        ("gpt_neox", {"num_key_value_heads": 2, "head_dim": 16}),
        ("llama", {"sliding_window": 64, "num_experts": 8}),
    ],
)
def test_a_field_that_a_family_does_not_have_changes_nothing(
    stray: tuple[str, dict[str, Any]],
) -> None:
    name, fields = stray
    assert weights_of(bare(name) | fields) == weights_of(bare(name))


def test_other_names_of_a_field_are_read() -> None:
    config = bare("mixtral")
    config["num_experts"] = config.pop("num_local_experts")
    assert complete(config)["num_local_experts"] == 4
    assert complete(bare("gpt_neox") | {"rotary_pct": 1.0})["partial_rotary_factor"] == 1.0
    inner = {"rope_parameters": {"partial_rotary_factor": 0.4}, "partial_rotary_factor": 0.9}
    assert complete(bare("phi") | inner)["partial_rotary_factor"] == 0.4


def test_null_is_what_the_class_makes_of_it() -> None:
    assert complete(bare("mistral"))["sliding_window"] == 4096
    assert complete(bare("mistral") | {"sliding_window": None})["sliding_window"] is None
    with pytest.raises(ModelError, match="head_dim is missing"):
        _ = ModelShape(bare("qwen3") | {"head_dim": None}, "here").fields


_NONSENSE: list[Any] = ["abc", [1.5], {"a": 1}, -1, float("nan"), float("inf"), True, [], "", 1e9]


@pytest.mark.parametrize("name", sorted(read_families()))
@pytest.mark.parametrize("field", [*sorted(KINDS), "rope_parameters", "rope_scaling", "rotary_pct"])
def test_no_value_of_any_field_ends_in_a_traceback(name: str, field: str) -> None:
    plan = Plan(name="p", model="m", method="lora", quantisation="none")
    for value in (None, *_NONSENSE, {"partial_rotary_factor": "x"}):
        content = json.dumps(bare(name) | {field: value}).encode()
        try:
            found = predict(plan, parse_config(content, "here"))
        except ModelError as error:
            assert str(error).startswith("here: ")  # noqa: PT017 - one of two good ends
        else:
            assert isinstance(found, Estimate | Unknown)


@pytest.mark.parametrize("kept", [[1], {"quant_method": []}, {"quant_method": {}}, "x", 5, True])
def test_weights_stored_in_what_is_no_name_are_refused(kept: Any) -> None:
    content = json.dumps(bare("llama") | {"quantization_config": kept}).encode()
    with pytest.raises(ModelError, match="stored in"):
        parse_config(content, "here")
