"""The stack `trl`: bitsandbytes NF4, PEFT LoRA and TRL's `SFTTrainer` with its own defaults.

Four parts that can be combined anew: a model, a tokenizer, a dataset, a trainer around them.
Nothing here reaches the network, and nothing is written outside the trainer's output folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

Precision: TypeAlias = Literal["bfloat16", "float16", "float32"]

NATIVE_BFLOAT16 = (8, 0)  # Ampere; below it torch emulates bfloat16 and reports it as supported
PACKAGES = ("trl", "peft", "bitsandbytes", "transformers", "torch")
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run asks of the trainer; `options` are further `SFTConfig` fields by name.

    Everything that is not named here keeps TRL's default (8 rows per step, gradient
    checkpointing, gradients clipped to norm 1, a learning rate that falls linearly to 0).
    """

    torch_device: str
    output_dir: str
    max_steps: int
    learning_rate: float
    precision: Precision
    seed: int = 42
    options: Mapping[str, Any] = {}


def keep_offline() -> None:
    """Forbid network, telemetry and progress bars to the libraries of this process.

    Call it first: huggingface_hub reads its environment once, when it is imported.
    """
    os.environ.update(OFFLINE)
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def stack_versions() -> str:
    """Return names and versions of the stack, for the source of a measurement."""
    named = []
    for package in PACKAGES:
        try:
            named.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            named.append(f"{package} (not installed)")
    return ", ".join(named)


def native_precision(torch_device: str) -> Precision:
    """Return the half precision that the device computes without emulation.

    A CPU gets bfloat16, as with TRL's defaults. `torch.cuda.is_bf16_supported()` answers True
    for emulation as well, so the compute capability decides.
    """
    if torch_device == "cpu":
        return "bfloat16"
    import torch

    native = torch.version.hip or torch.cuda.get_device_capability(torch_device) >= NATIVE_BFLOAT16
    return "bfloat16" if native else "float16"


def quantization_config(precision: Precision) -> Any:
    """Return NF4 with double quantisation, computing in `precision`."""
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, precision),
    )


def load_quantised(folder: Path, torch_device: str, precision: Precision) -> Any:
    """Load a causal LM from a folder, its linear layers in NF4, the rest in `precision`.

    Raises OSError when the folder holds no model, ImportError when bitsandbytes is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=quantization_config(precision),
        dtype=getattr(torch, precision),
        device_map={"": torch_device},
        local_files_only=True,
    )


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that lies in a model's folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_rows(file: Path) -> list[dict[str, str]]:
    """Read JSON lines: rows of `prompt` and `completion`, or of `text`."""
    decode = msgspec.json.Decoder(dict[str, str]).decode
    return [decode(line) for line in file.read_bytes().splitlines()]


def build_dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return the rows as a `datasets.Dataset` in memory, without a cache file."""
    from datasets import Dataset

    return Dataset.from_list([dict(row) for row in rows])


def lora_config(
    rank: int = 16,
    alpha: int = 32,
    dropout: float = 0.0,
    targets: str | list[str] = "all-linear",
) -> Any:
    """Return LoRA on the target modules, by default on every linear layer but the head."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def build_trainer(
    model: Any,
    tokenizer: Any,
    dataset: Any,
    *,
    settings: TrainerSettings,
    peft_config: Any = None,
    callbacks: Sequence[Any] = (),
    optimizer: tuple[Any, dict[str, Any]] | None = None,
) -> Any:
    """Return an `SFTTrainer`, ready for `train()`; with `peft_config=None` all weights train.

    `optimizer` is a class and its arguments, for one that transformers has no name for.

    Logs every step and keeps NaN in the log. Saves no checkpoint and reports to no service.
    """
    from transformers import PrinterCallback
    from trl import SFTTrainer

    trainer = SFTTrainer(
        model=model,
        args=_config(settings),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=list(callbacks),
        optimizer_cls_and_kwargs=optimizer,
    )
    trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is the caller's
    if settings.precision == "float16":  # TRL stores adapters of a quantised model in bfloat16
        widen_trained(trainer.model)
    return trainer


def _config(settings: TrainerSettings) -> Any:
    from trl import SFTConfig

    return SFTConfig(
        output_dir=settings.output_dir,
        max_steps=settings.max_steps,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
        bf16=settings.precision == "bfloat16",
        fp16=settings.precision == "float16",
        use_cpu=settings.torch_device == "cpu",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings.options,
    )


def widen_trained(model: Any) -> None:
    """Store what is trained in float32.

    The gradient scaler that float16 needs can unscale neither bfloat16 nor float16 gradients.
    """
    import torch

    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.float32)
