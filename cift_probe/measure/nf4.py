"""bitsandbytes: the native library it really loaded, and its 4-bit products."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure import compare_tensors
from cift_probe.measure.declare import Task, instrument

_ROWS, _INPUTS, _OUTPUTS = 64, 1024, 512
_SPREAD = 0.02

PRODUCES = (
    "nf4.library",
    "nf4.library.cuda",
    "nf4.forward.error",
    "nf4.backward.error",
    "nf4.quantisation.error",
)


@instrument(
    "nf4",
    version=2,
    produces=PRODUCES,
    estimate_s=9.0,
    deadline_s=180.0,
    faults=("corrupt_block", "library_missing"),
)
def measure_nf4(task: Task) -> dict[str, Evidence]:
    """Put a 4-bit layer (NF4, double quantisation) through one product and back.

    Forward and backward errors are against the same product on the dequantised weights in
    float32, the worst over single outputs and single inputs: one damaged block of 64 weights
    reaches one output only. The quantisation error is that of the dequantised weights against
    the original N(0, 0.02) ones, relative (Frobenius).
    """
    try:
        import bitsandbytes
    except ImportError as error:
        missing = Unknown(f"bitsandbytes cannot be imported: {error}")
        return dict.fromkeys(PRODUCES, missing)
    library = None if task.fault == "library_missing" else _loaded_library(bitsandbytes)
    if library is None:
        reason = _load_error(bitsandbytes)
        numbers = dict.fromkeys(PRODUCES, Unknown(reason))
        return {**numbers, "nf4.library": absent(f"bitsandbytes loaded no library: {reason}")}
    how = f"bitsandbytes {bitsandbytes.__version__}, {library}"
    if task.device != "cpu" and "cpu" in library:
        reason = f"bitsandbytes loaded {library} on a machine with a GPU"
        return {**dict.fromkeys(PRODUCES, Unknown(reason, how)), "nf4.library": absent(reason, how)}
    forward, backward, quantisation = _errors(bitsandbytes, task)
    return {
        "nf4.library": Known(library, "", how),
        "nf4.library.cuda": _cuda_release(library, how),
        "nf4.forward.error": Known(forward, "1", how),
        "nf4.backward.error": Known(backward, "1", how),
        "nf4.quantisation.error": Known(quantisation, "1", how),
    }


def _loaded_library(bitsandbytes: Any) -> str | None:
    # a library that failed to load is replaced by a stand-in that raises when it is called
    native = getattr(bitsandbytes.cextension.lib, "__dict__", {}).get("_lib")
    name = getattr(native, "_name", None)
    return Path(name).name if name else None


def _load_error(bitsandbytes: Any) -> str:
    error = bitsandbytes.cextension.lib.__dict__.get("error_msg", "no reason was given")
    return str(error).partition("\n")[0]


def _cuda_release(library: str, how: str) -> Evidence:
    match = re.search(r"cuda(\d{2})(\d)", library)
    if match is None:
        return absent(f"{library} is not built for CUDA", how)
    return Known(f"{match[1]}.{match[2]}", "version", how)


def _errors(bitsandbytes: Any, task: Task) -> tuple[float, float, float]:
    import torch

    device = task.torch_device
    original = compare_tensors.random_tensor(
        (_OUTPUTS, _INPUTS), device="cpu", dtype=torch.bfloat16, scale=_SPREAD
    )
    layer = bitsandbytes.nn.Linear4bit(
        _INPUTS,
        _OUTPUTS,
        bias=False,
        compute_dtype=torch.bfloat16,
        quant_type="nf4",
        compress_statistics=True,
    )
    layer.weight = bitsandbytes.nn.Params4bit(
        original.clone(), requires_grad=False, quant_type="nf4", compress_statistics=True
    )
    layer = layer.to(device)
    weight = layer.weight
    plain = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state).float()
    quantisation = compare_tensors.relative_error(plain.cpu(), original)
    if task.fault == "corrupt_block":
        weight.data.view(-1)[:32] ^= 0xFF  # 32 bytes hold one block of 64 weights
    inputs = compare_tensors.random_tensor((_ROWS, _INPUTS), device=device, dtype=torch.bfloat16)
    flow = compare_tensors.random_tensor(
        (_ROWS, _OUTPUTS), device=device, dtype=torch.bfloat16, seed=compare_tensors.SEED + 1
    )
    inputs.requires_grad_()
    outputs = layer(inputs)
    outputs.backward(flow)
    forward = compare_tensors.worst_column_error(
        outputs.detach(), inputs.detach().float() @ plain.T
    )
    backward = compare_tensors.worst_column_error(inputs.grad, flow.float() @ plain)
    return forward, backward, quantisation
