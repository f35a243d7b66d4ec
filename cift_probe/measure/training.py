"""Trains the embedded model as users train theirs, and looks whether anything was learnt.

One run of the stack `trl`: NF4 weights, LoRA of rank 16 on every linear layer, 60 steps of 8 rows.
The rows ask for a skill that the model lacks, so its loss starts high and falls only when
gradients reach the adapters and the optimizer applies them.
"""

from __future__ import annotations

import hashlib
import math
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from cift_probe import data
from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.measure.declare import Task, instrument
from cift_probe.stack import trl_stack

STEPS = 60
LEARNING_RATE = 3e-3
SEED = 42
FIRST_STEPS = 3
LAST_STEPS = 5
WARM_UP_STEPS = 5  # kernels are chosen and Adam's state is allocated in these
FAULT_STEP = 2

PRODUCES = (
    "training.loss.first",
    "training.loss.last",
    "training.loss.ratio",
    "training.loss.series",
    "training.steps",
    "training.seconds",
    "training.step.seconds",
    "training.adapters.changed",
    "training.frozen.changed",
    "training.gradient_norm.max",
    "training.num_nonfinite",
    "training.device",
    "training.dtype",
)
FAULTS = ("frozen_adapters", "shuffled_labels", "corrupted_frozen", "nan_gradient")


class Run(msgspec.Struct, frozen=True):
    """What one training run left behind; digests are by tensor name, times in seconds."""

    losses: list[float]
    gradient_norms: list[float]
    step_times: list[float]
    duration: float
    adapters: tuple[dict[str, str], dict[str, str]]
    frozen: tuple[dict[str, str], dict[str, str]]
    device: str
    precision: str


@instrument(
    "training",
    version=1,
    produces=PRODUCES,
    estimate_s=20.0,
    deadline_s=900.0,
    faults=FAULTS,
)
def measure_training(task: Task) -> dict[str, Evidence]:
    """Train the embedded model for 60 steps on the task's device.

    Losses are nats per completion token, as TRL logs them: `first` is the mean of the first 3
    steps, `last` of the last 5, `ratio` is last over first. `adapters.changed` is the share of
    LoRA tensors (A and B) whose bytes differ after training, `frozen.changed` the number of other
    tensors whose bytes do (packed 4-bit weights and their scales, norms, embeddings, head).
    `num_nonfinite` counts logged losses and gradient norms that are NaN or infinite; what is
    computed from them is NaN too, which no limit lets pass. With float16 it counts losses alone.

    All values are Unknown when a package of the stack is missing.
    """
    try:
        with third_party_warnings_ignored(), tempfile.TemporaryDirectory() as folder:
            run = train(task, Path(folder))
    except ImportError as error:
        reason = f"the training stack cannot be imported: {error}"
        return dict.fromkeys(PRODUCES, Unknown(reason, trl_stack.stack_versions()))
    return evidence_of(run)


@contextmanager
def third_party_warnings_ignored() -> Iterator[None]:
    """Keep deprecations inside the stack from ending a measurement under `-W error`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train(task: Task, folder: Path) -> Run:
    """Train in this process, with digests of all tensors before and after."""
    times: list[float] = []
    if task.torch_device == "cpu":
        # the model is too small to share: threads that wait for one another on a busy machine
        # were seen to take ten times as long as one alone
        import torch

        torch.set_num_threads(1)
    trainer = build(task, folder, times)
    adapters, frozen = digests(trainer.model)
    started = time.perf_counter()
    trainer.train()
    duration = time.perf_counter() - started
    adapters_after, frozen_after = digests(trainer.model)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Run(
        losses=[float(entry["loss"]) for entry in logged],
        gradient_norms=[float(entry["grad_norm"]) for entry in logged],
        step_times=times,
        duration=duration,
        adapters=(adapters, adapters_after),
        frozen=(frozen, frozen_after),
        device=device_name(task.torch_device),
        precision=trl_stack.native_precision(task.torch_device),
    )


def build(task: Task, folder: Path, times: list[float]) -> Any:
    """Return the trainer of a task; it writes to `folder` and its step times into `times`."""
    trl_stack.keep_offline()
    embedded = data.folder("embedded")
    precision = trl_stack.native_precision(task.torch_device)
    rows = trl_stack.load_rows(embedded / "train.jsonl")
    return trl_stack.build_trainer(
        trl_stack.load_quantised(embedded, task.torch_device, precision),
        trl_stack.load_tokenizer(embedded),
        trl_stack.build_dataset(shuffled(rows) if task.fault == "shuffled_labels" else rows),
        settings=trl_stack.TrainerSettings(
            torch_device=task.torch_device,
            output_dir=str(folder),
            max_steps=STEPS,
            learning_rate=0.0 if task.fault == "frozen_adapters" else LEARNING_RATE,
            precision=precision,
            seed=SEED,
        ),
        peft_config=trl_stack.lora_config(),
        callbacks=[step_watch(task, times)],
    )


def step_watch(task: Task, times: list[float]) -> Any:
    """Return a trainer callback that times every step and plants the task's fault."""
    import torch
    from transformers import TrainerCallback

    def now() -> float:
        if task.torch_device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    class StepWatch(TrainerCallback):  # type: ignore[misc]  # exported lazily
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = now()

        def on_step_end(self, _args: Any, state: Any, *_: Any, **parts: Any) -> None:
            times.append(now() - self.started)
            if state.global_step == FAULT_STEP:
                harm(task.fault, parts["model"])

    return StepWatch()


def digests(model: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return SHA-256 by name of the trainable tensors, and of all others.

    The state dict alone is no answer: a 4-bit weight keeps its scales in an attribute.
    """
    trainable: dict[str, str] = {}
    frozen: dict[str, str] = {}
    for name, weight in model.named_parameters():
        (trainable if weight.requires_grad else frozen)[name] = digest(weight)
        quantisation = getattr(weight, "quant_state", None)
        if quantisation is not None:
            for part, scales in quantisation.as_dict(packed=True).items():
                frozen[f"{name}.{part}"] = digest(scales)
    for name, buffer in model.named_buffers():
        frozen[name] = digest(buffer)
    return trainable, frozen


def digest(tensor: Any) -> str:
    """Return the SHA-256 of a tensor's bytes, wherever it lies."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def shuffled(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Planted fault: completions whose words come from anywhere and follow from nothing."""
    words = sorted({word for row in rows for text in row.values() for word in text.split()})
    chance = random.Random(SEED)  # noqa: S311 - a reproducible fault, not a secret
    return [
        {
            "prompt": row["prompt"],
            "completion": " " + " ".join(chance.choice(words) for _ in row["completion"].split()),
        }
        for row in rows
    ]


def harm(fault: str, model: Any) -> None:
    """Plant the faults that strike during training: a flipped bit, or NaN in a gradient."""
    weights = list(model.parameters())
    if fault == "corrupted_frozen":
        packed = next(weight for weight in weights if hasattr(weight, "quant_state"))
        packed.data.reshape(-1)[0] ^= 1
    if fault == "nan_gradient":
        adapter = next(weight for weight in weights if weight.requires_grad)
        adapter.register_hook(lambda gradient: gradient * math.nan)


def device_name(device: str) -> str:
    """Return "cpu" or the GPU's marketing name."""
    import torch

    return "cpu" if device == "cpu" else str(torch.cuda.get_device_name(device))


def evidence_of(run: Run) -> dict[str, Evidence]:
    """Turn what a run left behind into evidence."""
    first = mean(run.losses[:FIRST_STEPS])
    last = mean(run.losses[-LAST_STEPS:])
    norms = run.gradient_norms
    if run.precision == "float16":
        # The loss scaler feels for the largest scale: it overflows on purpose and skips the step.
        norms = [norm for norm in norms if math.isfinite(norm)]
    values: dict[str, tuple[Any, str]] = {
        "training.loss.first": (first, "1"),
        "training.loss.last": (last, "1"),
        "training.loss.ratio": (last / first if first else math.nan, "1"),
        "training.loss.series": (
            [loss if math.isfinite(loss) else None for loss in run.losses],
            "",
        ),
        "training.steps": (len(run.losses), "1"),
        "training.seconds": (run.duration, "s"),
        "training.step.seconds": (median(run.step_times[WARM_UP_STEPS:]), "s"),
        "training.adapters.changed": (share_changed(*run.adapters), "1"),
        "training.frozen.changed": (num_changed(*run.frozen), "1"),
        "training.gradient_norm.max": (largest(norms), "1"),
        "training.num_nonfinite": (num_nonfinite([*run.losses, *norms]), "1"),
        "training.device": (run.device, ""),
        "training.dtype": (run.precision, ""),
    }
    source = trl_stack.stack_versions()
    return {name: Known(value, unit, source) for name, (value, unit) in values.items()}


def mean(values: list[float]) -> float:
    """Return the mean, NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def median(values: list[float]) -> float:
    """Return the median, NaN of nothing."""
    return statistics.median(values) if values else math.nan


def largest(values: list[float]) -> float:
    """Return the largest value, NaN if one of them is NaN or there is none."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=math.nan)


def num_nonfinite(values: list[float]) -> int:
    """Count the values that are NaN or infinite."""
    return sum(not math.isfinite(value) for value in values)


def num_changed(before: dict[str, str], after: dict[str, str]) -> int:
    """Count the tensors whose digest differs, or that are there only before or after."""
    return sum(before.get(name) != after.get(name) for name in before.keys() | after.keys())


def share_changed(before: dict[str, str], after: dict[str, str]) -> float:
    """Return the changed share of the tensors that were there before, NaN of nothing."""
    return num_changed(before, after) / len(before) if before else math.nan
