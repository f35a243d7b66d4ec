"""A slice of a model: its real layers, but few of them, with random weights, as users load it.

The weights go through `from_pretrained` itself, so that quantisation, dtypes and everything that
loading leaves behind are the installed stack's own. No weight file is needed: the state dict is
made here, one tensor per kind of weight for all layers, so that a 70B slice takes little host
memory.
"""

from __future__ import annotations

import re
from typing import Any

from cift_probe.models import load_model
from cift_probe.plan import Plan
from cift_probe.stack.instants import decoder_layers
from cift_probe.stack.pattern import config_of

SPREAD = 0.02  # initializer_range of the published configurations
_SMALL_INPUTS = 0.5  # standard deviation of what a layer makes of inputs of variance 1
_TILE = (1 << 20) - 3  # odd: no rows of a weight are alike
_SEED = 20
_SHIFT = 104_729  # a prime: no two weights begin at the same place of a tile
NO_LABEL = -100  # torch.nn.CrossEntropyLoss leaves it out
NUM_WORDS = 1000  # token ids that the random rows use; every vocabulary is larger


def build_slice(plan: Plan, num_layers: int, torch_device: str) -> Any:
    """Return a causal LM of the plan with `num_layers` layers, loaded as the plan asks.

    Raises torch.OutOfMemoryError when not even the slice fits.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(load_model(plan.model), num_layers)
    dtype = getattr(torch, plan.dtype)
    # "sdpa" is transformers' default, which falls back to "eager" for architectures without it
    asked = None if plan.attention == "sdpa" else plan.attention
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=asked)
    return type(outline).from_pretrained(
        None,
        config=config,
        state_dict=random_state(outline, dtype, spread_of(plan, config.hidden_size)),
        quantization_config=quantization_of(plan),
        dtype=dtype,
        attn_implementation=asked,
        device_map={"": torch_device},
    )


def quantization_of(plan: Plan) -> Any:
    """Return the plan's BitsAndBytesConfig, computing in the plan's dtype; None without one."""
    if plan.quantisation == "none":
        return None
    import torch
    from transformers import BitsAndBytesConfig

    if plan.quantisation == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=plan.quantisation,
        bnb_4bit_use_double_quant=plan.double_quantisation,
        bnb_4bit_compute_dtype=getattr(torch, plan.dtype),
    )


def spread_of(plan: Plan, hidden_size: int) -> float:
    """Return the standard deviation of the random weights of a plan.

    bitsandbytes' 8-bit layers keep columns of their inputs that go beyond a threshold of 6. Weights
    at initialisation would let nearly all of a wide feed-forward do so, trained ones hardly any.
    """
    if plan.quantisation != "int8":
        return SPREAD
    return float(min(SPREAD, _SMALL_INPUTS / hidden_size**0.5))


def random_state(outline: Any, dtype: Any, spread: float = SPREAD) -> dict[str, Any]:
    """Return weights for every parameter of a model on the meta device, drawn from N(0, spread).

    Norm weights are 1, as at initialisation. The same weight of all layers is one tensor, but no
    two weights of a layer are: gate and up alike would square their inputs. Of weights that the
    model ties only the first has a name here, as in the files that people load.
    """
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    tile = torch.randn(_TILE, generator=generator).mul_(spread).to(dtype)
    made: dict[tuple[str, tuple[int, ...]], Any] = {}
    state = {}
    outline.tie_weights()
    once = {name for name, _ in outline.named_parameters()}
    tied = {name for name, _ in outline.named_parameters(remove_duplicate=False)} - once
    for name, weight in outline.state_dict().items():
        if name in tied:
            continue
        shape = tuple(weight.shape)
        if len(shape) < 2:  # noqa: PLR2004 - a norm's scale or a bias
            state[name] = (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=dtype)
            continue
        kind = re.sub(r"\.\d+\.", ".", name, count=1), shape  # without the layer's number
        if kind not in made:
            num_tiles = -(-weight.numel() // _TILE)
            start = _SHIFT * len(made) % _TILE
            turned = torch.cat((tile[start:], tile[:start]))
            made[kind] = turned.repeat(num_tiles)[: weight.numel()].view(shape)
        state[name] = made[kind]
    return state


def random_rows(plan: Plan, num_steps: int) -> list[dict[str, list[int]]]:
    """Return rows of random token ids, enough for the steps, as long as the plan says.

    Where the plan has a prompt, `labels` repeat the ids but for -100 in its place.
    """
    import random

    chance = random.Random(_SEED)  # noqa: S311 - reproducible data, not a secret
    rows = []
    for _ in range(num_steps * plan.gradient_accumulation):
        for length in plan.row_lengths:
            row = {"input_ids": [chance.randrange(NUM_WORDS) for _ in range(length)]}
            if plan.prompt_length:
                prompt = min(plan.prompt_length, length)
                row["labels"] = [NO_LABEL] * prompt + row["input_ids"][prompt:]
            rows.append(row)
    return rows


def small_tokenizer() -> Any:
    """Return a tokenizer with the special tokens that a trainer asks for; the rows are ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(NUM_WORDS)}
    special = {"<unk>": NUM_WORDS, "<pad>": NUM_WORDS + 1, "</s>": NUM_WORDS + 2}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words | special, unk_token="<unk>")),  # noqa: S106 - a token
        unk_token="<unk>",  # noqa: S106 - a token
        pad_token="<pad>",  # noqa: S106 - a token
        eos_token="</s>",  # noqa: S106 - a token
    )


def targets_of(plan: Plan, model: Any) -> str | list[str]:
    """Return PEFT's target modules for a plan.

    "attention" stands for the linear layers inside the modules that architectures call
    attention or attn, whatever their own names are.
    """
    if plan.targets == "all-linear":
        return "all-linear"
    if plan.targets != "attention":
        return [plan.targets] if isinstance(plan.targets, str) else list(plan.targets)
    import torch

    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in decoder_layers(model)[0].named_modules()
            if isinstance(module, torch.nn.Linear) and "att" in name.rpartition(".")[0]
        }
    )
