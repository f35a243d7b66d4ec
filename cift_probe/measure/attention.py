"""Attention back ends: which one runs a training step, and whether each that runs is right."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.measure import compare_tensors
from cift_probe.measure.declare import Task, instrument
from cift_probe.worker import is_sticky

_BACK_ENDS = (
    ("flash", "FLASH_ATTENTION"),
    ("efficient", "EFFICIENT_ATTENTION"),
    ("cudnn", "CUDNN_ATTENTION"),
    ("math", "MATH"),
)
# names of operators in a profile, most special first: every call also shows the plain name
_OPERATORS = (
    ("cudnn", "_scaled_dot_product_cudnn_attention"),
    ("efficient", "_scaled_dot_product_efficient_attention"),
    ("flash", "_scaled_dot_product_flash_attention"),
    ("math", "_scaled_dot_product_attention_math"),
)
_HEADS, _KV_HEADS = 8, 2
_LENGTH_GPU, _LENGTH_CPU = 512, 96


class _Call(NamedTuple):
    """One way of calling attention; `grouped` leaves fewer key heads to the back end."""

    name: str
    head_size: int
    grouped: bool = False
    masked: bool = False


# what a causal language model asks for; a back end that lacks one of the first two is not offered
_CALLS = (
    _Call("head size 64", 64),
    _Call("head size 128", 128),
    _Call("head size 256", 256),
    _Call("grouped queries", 128, grouped=True),
    _Call("boolean mask", 128, masked=True),
)
_NEEDED = 2

PRODUCES = (
    "attention.kernel",
    "attention.available",
    "attention.error.forward",
    "attention.error.backward",
    "attention.errors",
    "attention.serves",
)


@instrument(
    "attention",
    version=3,
    produces=PRODUCES,
    estimate_s=4.0,
    deadline_s=180.0,
    faults=("wrong_mask", "scaled_output"),
)
def measure_attention(task: Task) -> dict[str, Evidence]:
    """Run causal attention, forward and backward, on every back end and in every way of calling.

    Errors are relative (Frobenius) against the plain formula in float32, the worst over the back
    ends and what each serves: head sizes 64, 128 and 256 with keys repeated for every query head,
    grouped queries left to the back end, and a boolean mask. The backward one is over the
    gradients of queries, keys and values. `attention.kernel` is read from a profile of the
    default call.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = _native_dtype(task.torch_device)
    errors: dict[str, dict[str, float]] = {}
    serves: dict[str, list[str]] = {}
    for name, member in _BACK_ENDS:
        found: dict[str, tuple[float, float]] = {}
        for call in _CALLS:
            try:
                with sdpa_kernel(getattr(SDPBackend, member)):
                    found[call.name] = _errors(call, dtype, task)
            except (RuntimeError, AttributeError) as error:
                if is_sticky(str(error)):
                    raise  # this process computes nothing more; its worker replaces it
        if all(call.name in found for call in _CALLS[:_NEEDED]):
            serves[name] = list(found)
            errors[name] = {
                "forward": compare_tensors.worst(forward for forward, _ in found.values()),
                "backward": compare_tensors.worst(backward for _, backward in found.values()),
            }
    if task.device != "cpu":
        torch.cuda.synchronize()
    how = f"{dtype} causal, {_HEADS} query and {_KV_HEADS} key heads"
    if not errors:
        return dict.fromkeys(PRODUCES, Unknown("no attention back end ran", how))
    return {
        "attention.kernel": _default_kernel(dtype, task),
        "attention.available": Known(list(errors), "", how),
        "attention.error.forward": Known(_worst(errors, "forward"), "1", how),
        "attention.error.backward": Known(_worst(errors, "backward"), "1", how),
        "attention.errors": Known(errors, "1", how),
        "attention.serves": Known(serves, "", how),
    }


def _worst(errors: dict[str, dict[str, float]], way: str) -> float:
    return compare_tensors.worst(item[way] for item in errors.values())


def _native_dtype(torch_device: str) -> Any:
    import torch

    from cift_probe.stack.trl_stack import native_precision

    return getattr(torch, native_precision(torch_device))


def _inputs(head_size: int, dtype: Any, task: Task) -> list[Any]:
    length = _LENGTH_CPU if task.device == "cpu" else _LENGTH_GPU
    return [
        compare_tensors.random_tensor(
            (1, heads, length, head_size),
            device=task.torch_device,
            dtype=dtype,
            seed=compare_tensors.SEED + number,
        ).requires_grad_()
        for number, heads in enumerate((_HEADS, _KV_HEADS, _KV_HEADS))
    ]


def _attend(inputs: list[Any], call: _Call) -> Any:
    import torch

    queries, keys, values = inputs
    if not call.grouped:  # expanded, since not every back end takes grouped queries
        repeats = _HEADS // _KV_HEADS
        keys, values = (item.repeat_interleave(repeats, dim=1) for item in (keys, values))
    mask = ~_later(queries) if call.masked else None
    return torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=call.grouped
    )


def _later(queries: Any) -> Any:
    """Return which keys come after each query, as (length, length)."""
    import torch

    length = queries.shape[-2]
    return torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)


def _reference(inputs: list[Any]) -> Any:
    queries, keys, values = inputs
    repeats = _HEADS // _KV_HEADS
    keys, values = (item.repeat_interleave(repeats, dim=1) for item in (keys, values))
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
    return scores.masked_fill(_later(queries), -math.inf).softmax(-1) @ values


def _errors(call: _Call, dtype: Any, task: Task) -> tuple[float, float]:
    inputs = _inputs(call.head_size, dtype, task)
    exact = [item.detach().float().requires_grad_() for item in inputs]
    found, reference = _attend(inputs, call), _reference(exact)
    if task.fault == "scaled_output":
        found = found * 1.05
    if task.fault == "wrong_mask":
        found = found + 0.1 * inputs[2].repeat_interleave(_HEADS // _KV_HEADS, dim=1).roll(-1, 2)
    flow = compare_tensors.random_tensor(
        tuple(found.shape), device=task.torch_device, dtype=dtype, seed=compare_tensors.SEED + 9
    )
    found.backward(flow)
    reference.backward(flow.float())
    backward = compare_tensors.worst(
        compare_tensors.relative_error(mine.grad, theirs.grad)
        for mine, theirs in zip(inputs, exact, strict=True)
    )
    return compare_tensors.relative_error(found, reference), backward


def _default_kernel(dtype: Any, task: Task) -> Evidence:
    import torch
    from torch.profiler import ProfilerActivity, profile

    inputs = _inputs(_CALLS[1].head_size, dtype, task)
    queries, keys, values = inputs
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        # grouped queries as transformers hands them over, which not every fused kernel takes
        torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
    seen = {event.key for event in trace.key_averages()}
    for name, operator in _OPERATORS:
        if any(operator in key for key in seen):
            return Known(name, "", f"profile of the default call: {operator}")
    return Unknown("the profile names no attention operator", "torch.profiler")
