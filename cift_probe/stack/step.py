"""The training step of a plan, on the stack that the plan names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cift_probe.plan import Plan
from cift_probe.stack.instants import Marks

LEARNING_RATE = 2e-4
_MAX_GRADIENT_NORM = 1.0  # the default of transformers and TRL


def prepare_step(
    plan: Plan, model: Any, marks: Marks, *, torch_device: str, folder: Path, num_steps: int
) -> Callable[[], None]:
    """Return what runs `num_steps` optimizer steps of the plan around a loaded model.

    The marks are told the ends of all instants. Nothing is written outside `folder`.
    """
    if plan.method == "inference":
        return _inference(plan, model, marks, torch_device, num_steps)
    if plan.stack == "raw":
        return _raw(plan, model, marks, torch_device, num_steps)
    return _Training(
        prepare_trainer(
            plan, model, marks, torch_device=torch_device, folder=folder, num_steps=num_steps
        )
    )


def prepare_trainer(
    plan: Plan, model: Any, marks: Marks, *, torch_device: str, folder: Path, num_steps: int
) -> Any:
    """Return the trainer of a plan whose stack has one, with its marks set; `let_go` frees it."""
    build = _trl if plan.stack == "trl" else _transformers
    trainer = build(plan, model, torch_device, folder, num_steps)
    trainer.add_callback(marks.callback())
    marks.attach(trainer.model)
    trainer.accelerator.backward = marks.around_backward(trainer.accelerator.backward)
    return trainer


def let_go(trainer: Any) -> None:
    """Cut the way that accelerate keeps to a trainer through the wrapped method."""
    del trainer.accelerator.backward


class _Training:
    """A trainer that is let go of when its training has ended, so that its memory is free."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __call__(self) -> None:
        self._trainer.train()
        let_go(self._trainer)
        self._trainer = None


def _trl(plan: Plan, model: Any, torch_device: str, folder: Path, num_steps: int) -> Any:
    from cift_probe.stack import slices, trl_stack

    settings = trl_stack.TrainerSettings(
        torch_device=torch_device,
        output_dir=str(folder),
        max_steps=num_steps,
        learning_rate=LEARNING_RATE,
        precision=plan.dtype,
        options={
            "max_length": plan.sequence_length,
            "per_device_train_batch_size": plan.batch_size,
            "gradient_accumulation_steps": plan.gradient_accumulation,
            "packing": plan.packing,
            # TRL's default is on; stated only where the plan differs, since its name is changing
            **({} if plan.gradient_checkpointing else {"gradient_checkpointing": False}),
            **_optim(plan),
        },
    )
    rows = slices.random_rows(plan, num_steps)
    adapters = None
    if plan.method != "full":
        targets = slices.targets_of(plan, model)
        adapters = trl_stack.lora_config(plan.rank, plan.lora_alpha, targets=targets)
    return trl_stack.build_trainer(
        model,
        slices.small_tokenizer(),
        trl_stack.build_dataset(rows),
        settings=settings,
        peft_config=adapters,
        optimizer=_loop(plan),
    )


def _transformers(plan: Plan, model: Any, torch_device: str, folder: Path, num_steps: int) -> Any:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from cift_probe.stack import slices, trl_stack

    rows = slices.random_rows(plan, num_steps)
    trainer = Trainer(
        model=_adapted(plan, model, loop=False),
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=num_steps,
            learning_rate=LEARNING_RATE,
            per_device_train_batch_size=plan.batch_size,
            gradient_accumulation_steps=plan.gradient_accumulation,
            gradient_checkpointing=plan.gradient_checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            bf16=plan.dtype == "bfloat16",
            fp16=plan.dtype == "float16",
            use_cpu=torch_device == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **_optim(plan),
        ),
        train_dataset=trl_stack.build_dataset(rows),
        data_collator=_collator(plan),
        optimizer_cls_and_kwargs=_loop(plan),
    )
    trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is the caller's
    if plan.dtype == "float16":
        trl_stack.widen_trained(trainer.model)
    return trainer


def _collator(plan: Plan) -> Any:
    """Return what makes labels of the ids, or pads those that are there."""
    from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq

    from cift_probe.stack import slices

    tokenizer = slices.small_tokenizer()
    if plan.prompt_length:
        return DataCollatorForSeq2Seq(tokenizer)
    return DataCollatorForLanguageModeling(tokenizer, mlm=False)


def _optim(plan: Plan) -> dict[str, str]:
    chosen = {} if plan.optimizer == "adamw_torch_loop" else {"optim": plan.optimizer}
    # rows of two lengths in turn: by lot a batch could hold long ones alone, another none
    return chosen | ({"train_sampling_strategy": "sequential"} if plan.padding else {})


def _loop(plan: Plan) -> tuple[Any, dict[str, Any]] | None:
    """Return AdamW without fusing, which has no name of its own in transformers."""
    if plan.optimizer != "adamw_torch_loop":
        return None
    import torch

    return torch.optim.AdamW, {"lr": LEARNING_RATE, "foreach": False, "fused": False}


def _adapted(plan: Plan, model: Any, *, loop: bool) -> Any:
    """Return a model made ready for training as PEFT's documentation shows it."""
    from cift_probe.stack import slices, trl_stack

    without_reentrance = {"use_reentrant": False}
    if plan.method == "qlora":
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=plan.gradient_checkpointing,
            gradient_checkpointing_kwargs=without_reentrance,
        )
    elif plan.gradient_checkpointing:
        if loop:  # a trainer switches it on by itself
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=without_reentrance)
        if plan.method == "lora":
            model.enable_input_require_grads()
    if plan.method != "full":
        from peft import get_peft_model

        targets = slices.targets_of(plan, model)
        lora = trl_stack.lora_config(plan.rank, plan.lora_alpha, targets=targets)
        model = get_peft_model(model, lora)
    return model


def _raw(
    plan: Plan, model: Any, marks: Marks, torch_device: str, num_steps: int
) -> Callable[[], None]:
    """Return a loop of one's own: autocast around adapters, clipping, an optimizer."""
    import torch

    model.config.use_cache = False
    model = _adapted(plan, model, loop=True)
    model.train()
    marks.attach(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    device = torch_device.partition(":")[0]
    precision = getattr(torch, plan.dtype)
    # full fine-tuning in a loop keeps everything in the weights' own dtype
    mixed = plan.method != "full" and precision != torch.float32
    scaler = torch.amp.GradScaler(device, enabled=mixed and precision == torch.float16)

    def loop() -> None:
        optimizer = _optimizer(plan, trained)
        for inputs in _batches(plan, torch_device, num_steps):
            marks.step_begins()
            for micro in inputs:
                with torch.autocast(device, precision, enabled=mixed):
                    loss = model(**micro).loss / plan.gradient_accumulation
                marks.around_backward(scaler.scale(loss).backward)()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(trained, _MAX_GRADIENT_NORM)
            marks.mark("clipping")
            scaler.step(optimizer)
            marks.mark("optimizer")
            scaler.update()
            optimizer.zero_grad()
            marks.step_ends()

    return loop


def _inference(
    plan: Plan, model: Any, marks: Marks, torch_device: str, num_steps: int
) -> Callable[[], None]:
    """Return a loop that reads a whole prompt and then writes one token, with the KV cache."""
    import torch

    model.eval()
    marks.attach(model)

    def loop() -> None:
        for inputs in _batches(plan, torch_device, num_steps):
            marks.step_begins()
            with torch.no_grad():
                for micro in inputs:
                    micro.pop("labels")
                    read = model(**micro, use_cache=True, logits_to_keep=1)
                    marks.mark("prefill")
                    token = read.logits.argmax(-1)
                    cache = read.past_key_values
                    del read
                    model(input_ids=token, past_key_values=cache, use_cache=True)
                    marks.mark("decode")
                    del cache, token
            marks.step_ends()

    return loop


def _batches(plan: Plan, torch_device: str, num_steps: int) -> Any:
    """Yield the micro-batches of each step: token ids and labels of shape (batch, sequence)."""
    import torch

    from cift_probe.stack import slices

    rows = iter(slices.random_rows(plan, num_steps))
    for _ in range(num_steps):
        step = []
        for _ in range(plan.gradient_accumulation):
            ids = torch.zeros(plan.batch_size, plan.sequence_length, dtype=torch.long)
            mask = torch.zeros_like(ids)
            labels = torch.full_like(ids, slices.NO_LABEL)
            for index, length in enumerate(plan.row_lengths):
                row = next(rows)
                ids[index, :length] = torch.tensor(row["input_ids"])
                labels[index, :length] = torch.tensor(row.get("labels", row["input_ids"]))
                mask[index, :length] = 1
            micro = {"input_ids": ids, "labels": labels}
            if plan.padding:
                micro["attention_mask"] = mask
            step.append({name: tensor.to(torch_device) for name, tensor in micro.items()})
        yield step


def _optimizer(plan: Plan, trained: list[Any]) -> Any:
    import torch

    adam: dict[str, Any] = {"adamw_torch": {}, "adamw_torch_fused": {"fused": True}}
    adam["adamw_torch_loop"] = {"foreach": False, "fused": False}
    if plan.optimizer in adam:
        return torch.optim.AdamW(trained, lr=LEARNING_RATE, **adam[plan.optimizer])
    if plan.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=LEARNING_RATE)
    if plan.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(trained, lr=LEARNING_RATE, scale_parameter=False, relative_step=False)
    import bitsandbytes

    kinds = {
        "adamw_bnb_8bit": bitsandbytes.optim.AdamW8bit,
        "paged_adamw_8bit": bitsandbytes.optim.PagedAdamW8bit,
        "paged_adamw_32bit": bitsandbytes.optim.PagedAdamW32bit,
    }
    return kinds[plan.optimizer](trained, lr=LEARNING_RATE)
