"""Which weights quantisation reached: counted on modules that are dense, sparse and packed."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from cift_probe.stack.linear_weights import linear_bytes

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

SIDE = 8


def a_model(*weights: Any) -> Any:
    """Return a model of one decoder layer with these weights, and an embedding beside it."""
    import torch

    layer = torch.nn.Module()
    for number, weight in enumerate(weights):
        parameter = torch.nn.Parameter(weight, requires_grad=False)
        vars(parameter).update(vars(weight))
        layer.register_parameter(f"weight_{number}", parameter)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([layer])
    model.embed_tokens = torch.nn.Embedding(1000, SIDE)
    text = SimpleNamespace(num_hidden_layers=1)
    object.__setattr__(model, "config", SimpleNamespace(get_text_config=lambda: text))
    return model


def tensor(*shape: int, dtype: str = "bfloat16") -> Any:
    import torch

    return torch.zeros(shape, dtype=getattr(torch, dtype))


def packed(num_bytes: int, dtype: str = "uint8") -> Any:
    """Return a weight as bitsandbytes packs it."""
    weight = tensor(num_bytes, 1, dtype=dtype)
    weight.quant_state = "NF4"
    return weight


def test_packed_weights_are_quantised_and_norms_do_not_count() -> None:
    assert linear_bytes(a_model(packed(32), tensor(SIDE))) == (0, 32)
    assert linear_bytes(a_model(packed(32, "bfloat16"))) == (0, 64)


def test_eight_bits_are_quantised_too() -> None:
    assert linear_bytes(a_model(tensor(SIDE, SIDE, dtype="int8"))) == (0, 64)


def test_a_matrix_that_stayed_as_it_was_is_seen() -> None:
    assert linear_bytes(a_model(packed(32), tensor(SIDE, SIDE))) == (128, 160)


def test_fused_experts_are_seen_whatever_their_module() -> None:
    experts = tensor(4, SIDE, SIDE)
    assert linear_bytes(a_model(packed(32), experts)) == (512, 544)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize(
    ("model", "smallest", "largest"),
    [("smollm2-135m", 0.0, 0.0), ("olmoe-1b-7b", 0.9, 1.0)],
)
def test_a_dense_model_is_quantised_and_a_mixture_hardly(
    monkeypatch: pytest.MonkeyPatch, model: str, smallest: float, largest: float
) -> None:
    from cift_probe import models
    from cift_probe.measure.training import third_party_warnings_ignored
    from cift_probe.plan import Plan
    from cift_probe.stack import slices, trl_stack

    row = models.load_model(model)
    narrow = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 1100}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = {**row.config, **narrow, **heads}
    small = models.ModelShape(config, "a narrow one")
    monkeypatch.setattr(slices, "load_model", lambda _name: small)
    trl_stack.keep_offline()
    with third_party_warnings_ignored():
        built = slices.build_slice(Plan(name="p", model=model), 2, "cpu")
    left, total = linear_bytes(built)
    assert smallest <= left / total <= largest
