"""A slice of a model: its real layers, but few of them, with random weights, as users load it.

The weights go through `from_pretrained` itself, so that quantisation, dtypes and everything that
loading leaves behind are the installed stack's own. No weight file is needed: the state dict is
made here, one tensor per shape, shared by all layers, so that a 70B slice takes little host memory.
"""

from __future__ import annotations

from typing import Any

from cift_probe.plan import ModelShape, Plan, load_model
from cift_probe.stack import trl_stack

_SPREAD = 0.02  # initializer_range of the published configurations
_TILE = 1 << 20
_SEED = 20
_NUM_WORDS = 1000  # token ids that the random rows use; every vocabulary is larger


def config_of(shape: ModelShape, num_layers: int) -> Any:
    """Return the model's configuration with `num_layers` decoder layers."""
    from transformers import AutoConfig

    left_out = ("model_type", "num_parameters", "source", "date", "num_hidden_layers")
    fields = {key: getattr(shape, key) for key in shape.__struct_fields__ if key not in left_out}
    return AutoConfig.for_model(shape.model_type, num_hidden_layers=num_layers, **fields)


def build_slice(plan: Plan, num_layers: int, torch_device: str) -> Any:
    """Return a causal LM of the plan with `num_layers` layers, loaded as the plan asks.

    Raises torch.OutOfMemoryError when not even the slice fits.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(load_model(plan.model), num_layers)
    config._attn_implementation = plan.attention  # noqa: SLF001 - what the public argument sets
    dtype = getattr(torch, plan.dtype)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, dtype=dtype)
    quantisation = trl_stack.quantization_config(plan.dtype) if plan.method == "qlora" else None
    if quantisation is not None:
        quantisation.bnb_4bit_quant_type = plan.quantisation
        quantisation.bnb_4bit_use_double_quant = plan.double_quantisation
    return type(outline).from_pretrained(
        None,
        config=config,
        state_dict=random_state(outline, dtype),
        quantization_config=quantisation,
        dtype=dtype,
        device_map={"": torch_device},
    )


def random_state(outline: Any, dtype: Any) -> dict[str, Any]:
    """Return weights for every parameter of a model on the meta device, drawn from N(0, 0.02).

    Norm weights are 1, as at initialisation. Parameters of one shape share one tensor.
    """
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    tile = torch.randn(_TILE, generator=generator).mul_(_SPREAD).to(dtype)
    made: dict[tuple[int, ...], Any] = {}
    state = {}
    for name, weight in outline.state_dict().items():
        shape = tuple(weight.shape)
        if len(shape) < 2:  # noqa: PLR2004 - a norm's scale or a bias
            state[name] = (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=dtype)
            continue
        if shape not in made:
            num_tiles = -(-weight.numel() // _TILE)
            made[shape] = tile.repeat(num_tiles)[: weight.numel()].view(shape)
        state[name] = made[shape]
    return state


def random_rows(plan: Plan, num_steps: int) -> Any:
    """Return rows of random token ids, each exactly one sequence long, enough for the steps."""
    import random

    chance = random.Random(_SEED)  # noqa: S311 - reproducible data, not a secret
    count = num_steps * plan.batch_size * plan.gradient_accumulation
    return trl_stack.build_dataset(
        [
            {"input_ids": [chance.randrange(_NUM_WORDS) for _ in range(plan.sequence_length)]}
            for _ in range(count)
        ]
    )


def small_tokenizer() -> Any:
    """Return a tokenizer with the special tokens that a trainer asks for; the rows are ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(_NUM_WORDS)}
    special = {"<unk>": _NUM_WORDS, "<pad>": _NUM_WORDS + 1, "</s>": _NUM_WORDS + 2}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words | special, unk_token="<unk>")),  # noqa: S106 - a token
        unk_token="<unk>",  # noqa: S106 - a token
        pad_token="<pad>",  # noqa: S106 - a token
        eos_token="</s>",  # noqa: S106 - a token
    )


def slice_trainer(
    plan: Plan,
    model: Any,
    *,
    torch_device: str,
    output_dir: str,
    num_steps: int,
    callbacks: list[Any],
) -> Any:
    """Return the plan's trainer around a slice: TRL's defaults, and what the plan states."""
    settings = trl_stack.TrainerSettings(
        torch_device=torch_device,
        output_dir=output_dir,
        max_steps=num_steps,
        learning_rate=2e-4,
        precision=plan.dtype,
        options={
            "max_length": plan.sequence_length,
            "per_device_train_batch_size": plan.batch_size,
            "gradient_accumulation_steps": plan.gradient_accumulation,
            "optim": plan.optimizer,
            "packing": plan.packing,
            # TRL's default is on; stated only where the plan differs, since its name is changing
            **({} if plan.gradient_checkpointing else {"gradient_checkpointing": False}),
        },
    )
    adapters = None
    if plan.method != "full":
        adapters = trl_stack.lora_config(plan.rank, plan.lora_alpha, targets=targets_of(plan))
    return trl_stack.build_trainer(
        model,
        small_tokenizer(),
        random_rows(plan, num_steps),
        settings=settings,
        peft_config=adapters,
        callbacks=callbacks,
    )


def targets_of(plan: Plan) -> str | list[str]:
    """Return PEFT's target modules for a plan."""
    if plan.targets == "all-linear":
        return "all-linear"
    return ["q_proj", "k_proj", "v_proj", "o_proj"]
