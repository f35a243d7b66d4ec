"""bitsandbytes' other products: FP4, and LLM.int8() with outlier columns."""

from __future__ import annotations

from typing import Any

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure import compare_tensors
from cift_probe.measure.declare import Task, instrument
from cift_probe.worker import is_sticky

_ROWS, _INPUTS, _OUTPUTS = 64, 1024, 512
_SPREAD = 0.02
_OUTLIERS, _OUTLIER_SIZE = 4, 20.0  # columns beyond the threshold, which stay in 16 bits
_THRESHOLD = 6.0  # LLM.int8(), arXiv 2208.07339

PRODUCES = (
    "fp4.forward.error",
    "fp4.backward.error",
    "int8.forward.error",
    "int8.backward.error",
)


@instrument(
    "quantised",
    version=1,
    produces=PRODUCES,
    estimate_s=4.0,
    deadline_s=180.0,
    faults=("corrupt_block", "turned_row"),
)
def measure_quantised(task: Task) -> dict[str, Evidence]:
    """Put an FP4 and an int8 layer through one product and back.

    Errors are the worst over single outputs and inputs, relative. Those of FP4 are against the
    product on the dequantised weights in float32: the kernel's own. Those of int8 are against
    the product on the original weights: rounding of weights and inputs to 8 bits is part of them.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        missing = Unknown(f"bitsandbytes cannot be imported: {error}")
        return dict.fromkeys(PRODUCES, missing)
    how = f"bitsandbytes {bitsandbytes.__version__}"
    found: dict[str, Evidence] = {}
    for name, measure in (("fp4", _fp4), ("int8", _int8)):
        try:
            forward, backward = measure(bitsandbytes, task)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            if is_sticky(str(error)):
                raise
            text = f"{name} does not run on {task.device}: {str(error).partition(chr(10))[0]}"
            lost = absent(text, how) if task.device == "cpu" else Unknown(text, how)
            found |= {f"{name}.forward.error": lost, f"{name}.backward.error": lost}
            continue
        found[f"{name}.forward.error"] = Known(forward, "1", how)
        found[f"{name}.backward.error"] = Known(backward, "1", how)
    return found


def _original(device: str) -> Any:
    import torch

    return compare_tensors.random_tensor(
        (_OUTPUTS, _INPUTS), device=device, dtype=torch.float16, scale=_SPREAD
    )


def _through(layer: Any, inputs: Any, plain: Any) -> tuple[float, float]:
    """Return the errors of a product and of its input's gradient against float32 weights."""
    flow = compare_tensors.random_tensor(
        (_ROWS, _OUTPUTS),
        device=str(inputs.device),
        dtype=inputs.dtype,
        seed=compare_tensors.SEED + 1,
    )
    inputs.requires_grad_()
    outputs = layer(inputs)
    outputs.backward(flow)
    exact = inputs.detach().float() @ plain.T
    return (
        compare_tensors.worst_column_error(outputs.detach(), exact),
        compare_tensors.worst_column_error(inputs.grad, flow.float() @ plain),
    )


def _fp4(bitsandbytes: Any, task: Task) -> tuple[float, float]:
    import torch

    device = task.torch_device
    layer = bitsandbytes.nn.Linear4bit(
        _INPUTS, _OUTPUTS, bias=False, compute_dtype=torch.bfloat16, quant_type="fp4"
    )
    layer.weight = bitsandbytes.nn.Params4bit(
        _original("cpu").bfloat16(), requires_grad=False, quant_type="fp4", blocksize=64
    )
    layer = layer.to(device)
    weight = layer.weight
    plain = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state).float()
    if task.fault == "corrupt_block":
        weight.data.view(-1)[:32] ^= 0xFF  # 32 bytes hold one block of 64 weights
    inputs = compare_tensors.random_tensor((_ROWS, _INPUTS), device=device, dtype=torch.bfloat16)
    return _through(layer, inputs, plain)


def _int8(bitsandbytes: Any, task: Task) -> tuple[float, float]:
    import torch

    device = task.torch_device
    original = _original(device)
    layer = bitsandbytes.nn.Linear8bitLt(
        _INPUTS, _OUTPUTS, bias=False, has_fp16_weights=False, threshold=_THRESHOLD
    )
    layer.weight = bitsandbytes.nn.Int8Params(
        original.cpu().clone(), requires_grad=False, has_fp16_weights=False
    )
    layer = layer.to(device)
    if task.fault == "turned_row":
        layer.weight.data[0].neg_()
    inputs = compare_tensors.random_tensor((_ROWS, _INPUTS), device=device, dtype=torch.float16)
    inputs[:, :_OUTLIERS] *= _OUTLIER_SIZE
    return _through(layer, inputs, original.float())
