"""The package flash-attn: whether it imports, and whether it is right."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure import compare_tensors
from cift_probe.measure.declare import Task, instrument
from cift_probe.worker import is_sticky

_LENGTH, _HEADS, _HEAD_SIZE = 256, 4, 128

PRODUCES = ("flash_attn.imports", "flash_attn.error")


@instrument(
    "flash_attn",
    version=1,
    produces=PRODUCES,
    estimate_s=3.0,
    deadline_s=180.0,
    faults=("undefined_symbol",),
)
def measure_flash_attention(task: Task) -> dict[str, Evidence]:
    """Import flash-attn and compare its causal attention with float32, forward and backward.

    The error is relative (Frobenius), the worse of output and query gradient.
    """
    if find_spec("flash_attn") is None and task.fault != "undefined_symbol":
        return dict.fromkeys(PRODUCES, absent("flash-attn is not installed"))
    try:
        attend = _import(task)
    except (ImportError, OSError) as error:
        reason = str(error).partition("\n")[0]
        return {
            "flash_attn.imports": Known(value=False, note=reason),
            "flash_attn.error": Unknown(f"flash-attn does not import: {reason}"),
        }
    found: dict[str, Evidence] = {"flash_attn.imports": Known(value=True)}
    if task.device == "cpu":
        return {**found, "flash_attn.error": absent("flash-attn has no CPU kernel")}
    return {**found, "flash_attn.error": _error(attend, task)}


def _import(task: Task) -> Any:
    if task.fault == "undefined_symbol":
        message = "flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE"
        raise ImportError(message)
    from flash_attn import flash_attn_func

    return flash_attn_func


def _error(attend: Any, task: Task) -> Evidence:
    import torch

    inputs = [
        compare_tensors.random_tensor(
            (1, _LENGTH, _HEADS, _HEAD_SIZE),
            device=task.torch_device,
            dtype=torch.bfloat16,
            seed=compare_tensors.SEED + number,
        ).requires_grad_()
        for number in range(3)
    ]
    exact = [item.detach().float().requires_grad_() for item in inputs]
    try:
        found = attend(*inputs, causal=True)
        found.sum().backward()
    except RuntimeError as error:
        if is_sticky(str(error)):
            raise
        return Unknown(str(error).partition("\n")[0], "flash_attn_func")
    queries, keys, values = (item.transpose(1, 2) for item in exact)
    reference: Any = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True
    ).transpose(1, 2)
    reference.sum().backward()
    errors = (
        compare_tensors.relative_error(found, reference),
        compare_tensors.relative_error(inputs[0].grad, exact[0].grad),
    )
    return Known(compare_tensors.worst(errors), "1", "flash_attn_func, bf16, causal, head size 128")
