"""The packages flash-attn and xformers: whether they import, and whether they are right."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure import compare_tensors
from cift_probe.measure.declare import Task, instrument
from cift_probe.worker import is_sticky

_LENGTH, _HEADS = 256, 4
_SHORT = 96  # tokens of the first of two rows of variable length
_UNDEFINED = "_ZN3c105ErrorC2ENS_14SourceLocationE"


class _Call(NamedTuple):
    """One way of calling: head size, key heads, and where packed rows end."""

    head_size: int
    key_heads: int = _HEADS
    ends: tuple[int, ...] = (_LENGTH,)


_CALLS = (_Call(64), _Call(128), _Call(256), _Call(128, 2), _Call(128, 2, (_SHORT, _LENGTH)))
Attend = Callable[[list[Any], _Call], Any]


@instrument(
    "flash_attn",
    version=2,
    produces=("flash_attn.imports", "flash_attn.error"),
    estimate_s=3.0,
    deadline_s=180.0,
    faults=("undefined_symbol",),
)
def measure_flash_attention(task: Task) -> dict[str, Evidence]:
    """Import flash-attn and compare its causal attention with float32, forward and backward.

    Head sizes 64, 128 and 256, grouped queries, and packed rows of variable length. The error is
    relative (Frobenius), the worst over the ways of calling, of output and gradients.
    """
    return _measured("flash_attn", "flash-attn", _flash, task)


@instrument(
    "xformers",
    version=1,
    produces=("xformers.imports", "xformers.error"),
    estimate_s=3.0,
    deadline_s=180.0,
    faults=("undefined_symbol",),
)
def measure_xformers(task: Task) -> dict[str, Evidence]:
    """Import xformers and compare its memory-efficient attention with float32, as above."""
    return _measured("xformers", "xformers", _xformers, task)


def _measured(name: str, title: str, load: Callable[[], Attend], task: Task) -> dict[str, Evidence]:
    imports, error = f"{name}.imports", f"{name}.error"
    if find_spec(name) is None and task.fault != "undefined_symbol":
        return dict.fromkeys((imports, error), absent(f"{title} is not installed"))
    try:
        attend = _lacking(name) if task.fault == "undefined_symbol" else load()
    except (ImportError, OSError) as fault:
        reason = str(fault).partition("\n")[0]
        return {
            imports: Known(value=False, note=reason),
            error: Unknown(f"{title} does not import: {reason}"),
        }
    found: dict[str, Evidence] = {imports: Known(value=True)}
    if task.device == "cpu":
        return {**found, error: absent(f"{title} has no CPU kernel")}
    return {**found, error: _error(attend, task, title)}


def _lacking(name: str) -> Attend:
    """Fail as a library does that was built for another torch."""
    message = f"{name}.so: undefined symbol: {_UNDEFINED}"
    raise ImportError(message)


def _flash() -> Attend:
    package = import_module("flash_attn")
    whole, packed = package.flash_attn_func, package.flash_attn_varlen_func

    def attend(inputs: list[Any], call: _Call) -> Any:
        if len(call.ends) == 1:
            return whole(*inputs, causal=True)
        bounds = _bounds(call, inputs[0].device)
        rows = [item[0] for item in inputs]
        return packed(*rows, bounds, bounds, _LENGTH, _LENGTH, causal=True)[None]

    return attend


def _xformers() -> Attend:
    ops = import_module("xformers.ops")
    masks = import_module("xformers.ops.fmha.attn_bias")

    def attend(inputs: list[Any], call: _Call) -> Any:
        queries, keys, values = inputs
        repeats = _HEADS // call.key_heads
        keys, values = (item.repeat_interleave(repeats, dim=2) for item in (keys, values))
        mask = masks.LowerTriangularMask()
        if len(call.ends) > 1:
            lengths = [b - a for a, b in zip((0, *call.ends), call.ends, strict=False)]
            mask = masks.BlockDiagonalCausalMask.from_seqlens(lengths)
        return ops.memory_efficient_attention(queries, keys, values, attn_bias=mask)

    return attend


def _bounds(call: _Call, device: Any) -> Any:
    """Return where rows begin and end, as the packed kernels take it: int32 (rows + 1)."""
    import torch

    return torch.tensor((0, *call.ends), dtype=torch.int32, device=device)


def _error(attend: Attend, task: Task, title: str) -> Evidence:
    errors = []
    for call in _CALLS:
        try:
            errors.append(_error_of(attend, call, task))
        except RuntimeError as error:
            if is_sticky(str(error)):
                raise
            text = str(error).partition("\n")[0]
            return Unknown(f"head size {call.head_size}: {text}", title)
    how = f"{title}, bf16, causal, head sizes 64 to 256, grouped, variable length"
    return Known(compare_tensors.worst(errors), "1", how)


def _error_of(attend: Attend, call: _Call, task: Task) -> float:
    """Return the worst relative error of output and gradients.

    Tensors are (1, 256, heads, head size).
    """
    import torch

    inputs = [
        compare_tensors.random_tensor(
            (1, _LENGTH, heads, call.head_size),
            device=task.torch_device,
            dtype=torch.bfloat16,
            seed=compare_tensors.SEED + number,
        ).requires_grad_()
        for number, heads in enumerate((_HEADS, call.key_heads, call.key_heads))
    ]
    exact = [item.detach().float().requires_grad_() for item in inputs]
    found = attend(inputs, call)
    flow = compare_tensors.random_tensor(
        tuple(found.shape), device=task.torch_device, dtype=torch.bfloat16, seed=1
    )
    found.backward(flow)
    reference = _reference(exact, call)
    reference.backward(flow.float())
    pairs = zip((item.grad for item in inputs), (item.grad for item in exact), strict=True)
    backward = [compare_tensors.relative_error(mine, theirs) for mine, theirs in pairs]
    return compare_tensors.worst([compare_tensors.relative_error(found, reference), *backward])


def _reference(exact: list[Any], call: _Call) -> Any:
    """Return attention in float32, row by row of what is packed."""
    import torch

    queries, keys, values = (item.transpose(1, 2) for item in exact)
    repeats = _HEADS // call.key_heads
    keys, values = (item.repeat_interleave(repeats, dim=1) for item in (keys, values))
    rows = [
        torch.nn.functional.scaled_dot_product_attention(
            queries[:, :, start:end],
            keys[:, :, start:end],
            values[:, :, start:end],
            is_causal=True,
        )
        for start, end in zip((0, *call.ends), call.ends, strict=False)
    ]
    return torch.cat(rows, dim=2).transpose(1, 2)
