"""torch.compile on one decoder block: what it costs at first, and whether it is right."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure import compare_tensors
from cift_probe.measure.declare import Task, instrument
from cift_probe.worker import is_sticky

_HIDDEN, _HEADS, _LENGTH = 512, 8, 256
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

PRODUCES = (
    "compile.first.seconds",
    "compile.warm.seconds",
    "compile.forward.error",
    "compile.backward.error",
)


@instrument(
    "compile",
    version=1,
    produces=PRODUCES,
    estimate_s=25.0,
    deadline_s=240.0,
    faults=("scaled_output",),
)
def measure_compile(task: Task) -> dict[str, Evidence]:
    """Compile one block of a Llama of width 512, forward and backward, with an empty cache.

    `first` is the first step, compilation included, `warm` the third. Errors are relative
    (Frobenius) against the same block uncompiled, both in bfloat16; the backward one is of the
    inputs' gradient.
    """
    if task.device == "cpu":
        reason = "on the CPU training is not compiled here: it asks for a C++ compiler"
        return dict.fromkeys(PRODUCES, absent(reason))
    import torch

    with tempfile.TemporaryDirectory() as cache, _caches(cache):
        try:
            return _steps(torch.compile, task)
        except Exception as error:
            if is_sticky(str(error)):
                raise  # the device's fault, not the compiler's
            text = str(error).strip().partition("\n")[0]
            return dict.fromkeys(PRODUCES, Unknown(f"{type(error).__name__}: {text}"))


def _caches(folder: str) -> Any:
    """Return a context in which what is compiled goes to a folder of our own."""
    from unittest.mock import patch

    return patch.dict("os.environ", dict.fromkeys(_CACHES, folder))


def _steps(compiler: Callable[[Any], Any], task: Task) -> dict[str, Evidence]:
    import torch

    block, inputs, rotary = _block(task)
    flow = compare_tensors.random_tensor(
        tuple(inputs.shape), device=task.torch_device, dtype=inputs.dtype, seed=1
    )

    def step(module: Any) -> tuple[Any, Any, float]:
        x = inputs.detach().clone().requires_grad_()
        started = time.perf_counter()
        found = module(x, position_embeddings=rotary)
        found = found[0] if isinstance(found, tuple) else found
        if task.fault == "scaled_output" and module is not block:
            found = found * 1.05
        found.backward(flow)
        if task.device != "cpu":
            torch.cuda.synchronize()
        return found.detach(), x.grad, time.perf_counter() - started

    plain, plain_gradient, _ = step(block)
    compiled = compiler(block)
    _, _, first = step(compiled)
    step(compiled)
    found, gradient, warm = step(compiled)
    how = f"torch {torch.__version__}, a Llama block of width {_HIDDEN}, {_LENGTH} tokens"
    return {
        "compile.first.seconds": Known(first, "s", how),
        "compile.warm.seconds": Known(warm, "s", how),
        "compile.forward.error": Known(compare_tensors.relative_error(found, plain), "1", how),
        "compile.backward.error": Known(
            compare_tensors.relative_error(gradient, plain_gradient), "1", how
        ),
    }


def _block(task: Task) -> tuple[Any, Any, tuple[Any, Any]]:
    """Return a decoder block, its inputs (1, 256, 512), and cosines and sines of positions."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=_HIDDEN,
        intermediate_size=4 * _HIDDEN,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    torch.manual_seed(compare_tensors.SEED)
    block = LlamaDecoderLayer(config, 0).to(task.torch_device, torch.bfloat16)
    inputs = compare_tensors.random_tensor(
        (1, _LENGTH, _HIDDEN), device=task.torch_device, dtype=torch.bfloat16
    )
    positions = torch.arange(_LENGTH, device=task.torch_device)[None]
    rotary = LlamaRotaryEmbedding(config).to(task.torch_device)(inputs, positions)
    return block, inputs, rotary
