"""Stacks: what the training loop of a library does to types, logits and gradients.

Versions are those whose code was read; an older or newer one is another profile.
"""

from __future__ import annotations

from typing import NamedTuple

from cift_probe.expect.memory.tape import FP32, HALF


class Profile(NamedTuple):
    """A stack's choices.

    `autocast` names the methods computed under bf16 autocast. `upcasts` says that
    `peft.prepare_model_for_kbit_training` (peft/utils/other.py) turns what is not quantised to
    float32. `adapter_item` and `packed_adapter_item` are bytes per number of adapters on plain
    and on quantised layers. `loss` names a head of `head.py`. `keeps_graph` says that the loss of
    the last step still holds the first layer's input when the next one begins.
    `wide_embedding_state`: transformers/trainer.py registers 32-bit state for embeddings with
    bitsandbytes' 8-bit optimizers. `widens_float16`: what float16
    trains is stored in float32, since the gradient scaler unscales nothing else
    (stack/trl_stack.py). `layers` names a module that writes other layers than
    transformers: "litgpt". `keeps_packed_input`: bitsandbytes' MatMul4Bit held its input for the
    backward (autograd/_functions.py, `ctx.tensors = (A, B)`) before it held None.
    """

    name: str
    versions: str
    autocast: frozenset[str]
    upcasts: bool
    adapter_item: int
    packed_adapter_item: int
    loss: str
    keeps_graph: bool = False
    wide_embedding_state: bool = False
    layers: str = ""
    keeps_packed_input: bool = False
    adapter_dropout: bool = False
    widens_float16: bool = False


_ALL = frozenset({"full", "lora", "qlora"})
_VERSIONS = "torch 2.13, transformers 5.24, peft 0.21, bitsandbytes 0.50"

PROFILES = {
    # trl/trainer/sft_trainer.py 1.16: bf16 in the arguments, adapters of a quantised model cast to
    # bfloat16 (line 911), no upcast of the rest, chunked loss by default
    "trl": Profile(
        "trl",
        f"{_VERSIONS}, trl 1.16",
        _ALL,
        upcasts=False,
        adapter_item=FP32,
        packed_adapter_item=HALF,
        loss="fused",
        wide_embedding_state=True,
        widens_float16=True,
    ),
    # transformers/trainer.py with bf16=True and peft.prepare_model_for_kbit_training, as its
    # documentation of quantised training has it; accelerate turns the model's outputs to float32
    "transformers": Profile(
        "transformers",
        f"{_VERSIONS}, accelerate 1.15",
        _ALL,
        upcasts=True,
        adapter_item=FP32,
        packed_adapter_item=FP32,
        loss="fp32 logits",
        wide_embedding_state=True,
        widens_float16=True,
    ),
    # github.com/DaoyuanLi2816/can-i-finetune-this, benchmarks: no autocast, `outputs` kept while
    # loss.backward() runs, adapters float32
    "raw without autocast": Profile(
        "raw without autocast",
        "torch 2.6, transformers 5.8, peft 0.19, bitsandbytes 0.49",
        frozenset(),
        upcasts=True,
        adapter_item=FP32,
        packed_adapter_item=FP32,
        loss="kept logits",
    ),
    # litgpt 2024 (finetune/lora.py, full.py), bf16-true: no autocast, adapters bfloat16, chunked
    # head; embedding and head are two tensors, and quantisation includes the head
    "litgpt": Profile(
        "litgpt",
        "litgpt 2023-10 to 2024-09, torch 2.1 to 2.4",
        frozenset(),
        upcasts=False,
        adapter_item=HALF,
        packed_adapter_item=HALF,
        loss="chunked",
        layers="litgpt",
        keeps_packed_input=True,
        adapter_dropout=True,  # config_hub and finetune/lora.py: lora_dropout 0.05
    ),
    # the same with bitsandbytes in 2024: finetune/lora.py sets `precision = None` beside its
    # plugin, so what is no linear layer, adapters included, is taken to stay float32. Rows at
    # batch 4 and more are over-predicted by 20 % and more: the least certain of these profiles
    "litgpt quantised": Profile(
        "litgpt quantised",
        "litgpt 2024-03 to 2024-09, bitsandbytes 0.42",
        frozenset(),
        upcasts=True,
        adapter_item=FP32,
        packed_adapter_item=FP32,
        loss="chunked",
        layers="litgpt",
        adapter_dropout=True,
    ),
    # github.com/QwenLM/Qwen finetune.py of 2023: Trainer with bf16, lora dropout 0.05; accelerate
    # turns the logits to float32. That adapters are float32 is assumed, not read in peft 0.5
    "qwen 2023": Profile(
        "qwen 2023",
        "torch 2.0, transformers 4.32, peft 0.5",
        _ALL,
        upcasts=False,
        adapter_item=FP32,
        packed_adapter_item=FP32,
        loss="fp32 logits",
        adapter_dropout=True,
    ),
    # torchtune 0.4 recipes/full_finetune_single_device.py, lora_finetune_single_device.py, dtype
    # bf16: no autocast, output in float32 unless CEWithChunkedOutputLoss takes bf16 chunks
    "torchtune": Profile(
        "torchtune",
        "torchtune 0.4, torch 2.5",
        frozenset(),
        upcasts=False,
        adapter_item=HALF,
        packed_adapter_item=HALF,
        loss="kept logits",
    ),
    "torchtune chunked": Profile(
        "torchtune chunked",
        "torchtune 0.4, torch 2.5",
        frozenset(),
        upcasts=False,
        adapter_item=HALF,
        packed_adapter_item=HALF,
        loss="compiled chunks",
    ),
    # a plain loop: forward under autocast where there are adapters, loss.backward(), step()
    "raw": Profile(
        "raw",
        _VERSIONS,
        frozenset({"lora", "qlora"}),
        upcasts=True,
        adapter_item=FP32,
        packed_adapter_item=FP32,
        loss="logits",
        keeps_graph=True,
    ),
}
