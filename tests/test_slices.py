"""A slice is what `from_pretrained` loads from a folder, and a step of it passes every instant."""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cift_probe.measure.training import third_party_warnings_ignored
from cift_probe.models import load_model
from cift_probe.plan import Plan
from cift_probe.stack import slices, step, trl_stack
from cift_probe.stack.instants import Marks, decoder_layers
from cift_probe.stack.pattern import config_of

pytestmark = [
    pytest.mark.skipif(find_spec("trl") is None, reason="the extra `train` is not installed"),
    pytest.mark.xdist_group("training"),
]

MODEL = "smollm2-135m"
LAYERS = 2
STEP = [
    "between steps",
    "embedding",
    "forward of the layers",
    "loss",
    "backward of the loss",
    "backward of the last layer",
    "backward of the layers",
    "backward of the embedding",
    "clipping",
    "optimizer",
    "end of the step",
]


def plan(method: str = "qlora", **changed: Any) -> Plan:
    fields: dict[str, Any] = {
        "quantisation": "nf4" if method == "qlora" else "none",
        "sequence_length": 32,
    }
    return Plan(name="small", model=MODEL, method=method, **(fields | changed))  # type: ignore[arg-type]


def build(asked: Plan) -> Any:
    trl_stack.keep_offline()
    with third_party_warnings_ignored():
        return slices.build_slice(asked, LAYERS, "cpu")


@cache
def built(asked: Plan) -> Any:
    """Return a slice that nobody changes."""
    return build(asked)


def load_from_folder(asked: Plan, folder: Path) -> Any:
    """Return the model as users load it: a folder with random weights, then from_pretrained."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = getattr(torch, asked.dtype)
    config = config_of(load_model(asked.model), LAYERS)
    quantisation = None
    if asked.method == "qlora":
        quantisation = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=asked.quantisation,
            bnb_4bit_use_double_quant=asked.double_quantisation,
            bnb_4bit_compute_dtype=dtype,
        )
    with third_party_warnings_ignored():
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantisation, dtype=dtype, device_map={"": "cpu"}
        )


def outline(model: Any) -> dict[str, tuple[Any, ...]]:
    """Return what loading leaves behind, by name: shape, dtype, place, and kind of quantisation."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        state = getattr(weight, "quant_state", None)
        kind = state and (state.quant_type, state.blocksize, state.nested, state.dtype)
        found[name] = (tuple(weight.shape), weight.dtype, weight.device.type, str(kind))
    for name, module in model.named_modules():
        dtype = getattr(module, "compute_dtype", None)
        found[f"{name}()"] = (type(module).__name__, str(dtype), module.training)
    return found


@pytest.mark.parametrize(
    "asked",
    [
        plan(),
        plan(quantisation="fp4", double_quantisation=False, dtype="float16"),
        plan("lora"),
        plan("full"),
    ],
    ids=["qlora", "qlora-fp4-fp16", "lora", "full"],
)
def test_a_slice_is_what_a_folder_gives(asked: Plan, tmp_path: Path) -> None:
    found = built(asked)
    expected = load_from_folder(asked, tmp_path)
    assert outline(found) == outline(expected)
    assert found.config._attn_implementation == expected.config._attn_implementation  # noqa: SLF001 - no public name
    assert getattr(found, "is_loaded_in_4bit", False) is (asked.method == "qlora")


def test_a_quantised_slice_has_every_projection_of_its_layers_in_four_bits() -> None:
    model = built(plan())
    packed = [name for name, item in model.named_parameters() if hasattr(item, "quant_state")]
    assert len(packed) == LAYERS * 7
    assert len(model.model.layers) == LAYERS
    assert {model.get_parameter(name).quant_state.quant_type for name in packed} == {"nf4"}


def test_lora_and_full_slices_are_not_quantised_and_all_in_the_plans_precision() -> None:
    import torch

    model = build(plan("lora", dtype="float16"))
    assert {weight.dtype for weight in model.parameters()} == {torch.float16}
    assert not [name for name, item in model.named_parameters() if hasattr(item, "quant_state")]


def test_the_plans_attention_is_used() -> None:
    assert build(plan("full", attention="eager")).config._attn_implementation == "eager"  # noqa: SLF001 - no public name


def test_weights_are_drawn_with_the_published_spread_and_norms_are_ones() -> None:
    state = built(plan("full")).state_dict()
    projection = state["model.layers.1.mlp.down_proj.weight"].float()
    assert projection.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(projection.mean().item()) < 1e-3
    assert set(state["model.norm.weight"].tolist()) == {1.0}


def test_weights_for_8_bit_layers_send_no_input_beyond_their_threshold() -> None:
    """By hand: 0.5 / sqrt(4096); silu(g) * u of two inputs of that spread stays below 6."""
    wide = plan("qlora", quantisation="int8")
    assert slices.spread_of(wide, 4096) == pytest.approx(0.0078125)
    assert slices.spread_of(wide, 256) == slices.SPREAD
    assert slices.spread_of(plan("qlora"), 4096) == slices.SPREAD


def test_rows_fill_the_sequence_and_last_for_all_steps() -> None:
    rows = slices.random_rows(plan(batch_size=2, gradient_accumulation=3), 4)
    assert len(rows) == 2 * 3 * 4
    assert {len(row["input_ids"]) for row in rows} == {32}
    assert len({tuple(row["input_ids"]) for row in rows}) == len(rows)
    assert all(set(row) == {"input_ids"} for row in rows)


def test_with_padding_every_second_row_is_half_as_long() -> None:
    asked = plan(batch_size=3, padding=True)
    rows = slices.random_rows(asked, 2)
    assert [len(row["input_ids"]) for row in rows] == [32, 16, 32, 32, 16, 32]
    assert asked.num_labels == 31 + 15 + 31


def test_a_prompt_has_no_labels() -> None:
    asked = plan(batch_size=2, padding=True, prompt_length=20)
    full, short = slices.random_rows(asked, 1)
    assert full["labels"] == [slices.NO_LABEL] * 20 + full["input_ids"][20:]
    assert short["labels"] == [slices.NO_LABEL] * 16
    assert asked.num_labels == 12


def train(asked: Plan, folder: Path, num_steps: int = 2) -> tuple[list[str], Any]:
    """Return the marks of real steps on the CPU, and the model that was trained."""
    marks: list[str] = []
    model = build(asked)
    with third_party_warnings_ignored():
        run = step.prepare_step(
            asked,
            model,
            Marks(marks.append),
            torch_device="cpu",
            folder=folder,
            num_steps=num_steps,
        )
        run()
    return marks, model


@pytest.mark.parametrize(
    "asked",
    [
        plan(),
        plan("full"),
        plan(stack="raw"),
        plan("lora", stack="transformers"),
        plan("full", stack="raw", optimizer="adamw_torch_loop", gradient_checkpointing=False),
        plan("lora", prompt_length=20),
        plan("lora", stack="transformers", prompt_length=20),
    ],
    ids=[
        "trl-qlora",
        "trl-full",
        "raw-qlora",
        "transformers-lora",
        "raw-full",
        "trl-prompt",
        "transformers-prompt",
    ],
)
def test_a_real_step_passes_every_instant_once_and_in_order(asked: Plan, tmp_path: Path) -> None:
    marks, _ = train(asked, tmp_path)
    assert marks == STEP * 2


def test_with_accumulation_the_instants_of_a_pass_repeat_and_the_optimizers_do_not(
    tmp_path: Path,
) -> None:
    asked = plan("lora", gradient_accumulation=2, gradient_checkpointing=False)
    marks, _ = train(asked, tmp_path)
    # what enters the first layer is no adapter's, and without checkpointing it has no gradient
    passed, rest = [*STEP[1:6], *STEP[7:8]], STEP[8:]
    assert rest == ["clipping", "optimizer", "end of the step"]
    assert marks == [STEP[0], *passed * 2, *rest] * 2


def test_a_prompt_is_read_and_one_token_written(tmp_path: Path) -> None:
    marks, _ = train(plan("inference", quantisation="none"), tmp_path)
    read = ["embedding", "forward of the layers"]
    assert marks == ["between steps", *read, "prefill", *read, "decode", "end of the step"] * 2


def trainer_of(asked: Plan, folder: Path) -> Any:
    with third_party_warnings_ignored():
        return step._trl(asked, build(asked), "cpu", folder, 2)  # noqa: SLF001 - settings of a part


def test_the_trainer_does_what_the_plan_states(tmp_path: Path) -> None:
    asked = plan(
        "lora", rank=4, lora_alpha=8, targets="attention", batch_size=3, optimizer="adamw_torch"
    )
    trainer = trainer_of(asked, tmp_path)
    adapters = trainer.model.peft_config["default"]
    assert (adapters.r, adapters.lora_alpha) == (4, 8)
    assert adapters.target_modules == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert (trainer.args.max_length, trainer.args.per_device_train_batch_size) == (32, 3)
    assert trainer.args.optim == "adamw_torch"
    assert trainer.args.gradient_checkpointing is True
    trainable = [name for name, item in trainer.model.named_parameters() if item.requires_grad]
    assert len(trainable) == LAYERS * 4 * 2
    assert all("lora_" in name for name in trainable)


def test_a_full_plan_trains_every_weight_and_may_keep_all_activations(tmp_path: Path) -> None:
    trainer = trainer_of(plan("full", gradient_checkpointing=False), tmp_path)
    assert all(weight.requires_grad for weight in trainer.model.parameters())
    assert trainer.args.gradient_checkpointing is False


def test_the_loss_of_random_ids_is_that_of_guessing(tmp_path: Path) -> None:
    trainer = trainer_of(plan(), tmp_path)
    with third_party_warnings_ignored():
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(math.log(49_152), rel=0.05)


def test_a_model_without_decoder_layers_is_refused() -> None:
    import torch

    class Bare(torch.nn.Module):
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=3))

    with pytest.raises(ValueError, match="Bare has no list of 3 decoder layers"):
        decoder_layers(Bare())


def test_layers_that_are_entered_again_in_the_backward_pass_are_marked_once() -> None:
    # the installed stack checkpoints inside its layers; other versions enter the layers again
    import torch
    from torch.utils.checkpoint import checkpoint

    entered: list[int] = []
    marks: list[str] = []

    class Decoder(torch.nn.Module):
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=LAYERS))

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(LAYERS))

        def forward(self, hidden: Any) -> Any:
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            return hidden

    model = Decoder()
    model.layers[0].register_forward_pre_hook(lambda *_: entered.append(1))
    watch = Marks(marks.append)
    watch.attach(model)
    for _ in range(2):
        loss = model(torch.ones(1, 4, requires_grad=True)).sum()
        watch.around_backward(loss.backward)()
    assert len(entered) == 2 * 2
    assert marks == STEP[1:8] * 2
