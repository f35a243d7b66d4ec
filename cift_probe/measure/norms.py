"""RMS norm in bfloat16, torch's own and the one that models carry, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.measure import compare_tensors
from cift_probe.measure.declare import Task, instrument

_ROWS, _WIDTH = 512, 4096
_EPSILON = 1e-5

PRODUCES = ("rms_norm.forward.error", "rms_norm.backward.error", "rms_norm.errors")


@instrument(
    "rms_norm",
    version=1,
    produces=PRODUCES,
    estimate_s=2.0,
    deadline_s=120.0,
    faults=("scaled_row", "wrong_mean"),
)
def measure_rms_norm(task: Task) -> dict[str, Evidence]:
    """Normalise 512 rows of 4096 values, forward and backward.

    Errors are those of the worst row, relative, against float64; the backward one is of the
    inputs' gradient. `rms_norm.errors` has them by implementation.
    """
    import torch

    names: dict[str, Callable[[Any, Any], Any]] = {
        "torch": lambda x, w: torch.nn.functional.rms_norm(x, (_WIDTH,), w, _EPSILON)
    }
    model = _of_models()
    if model is not None:
        names["transformers"] = model
    errors = {name: _errors(function, task) for name, function in names.items()}
    how = f"torch {torch.__version__}: {' and '.join(names)}, bfloat16, rows of {_WIDTH}"
    if not errors:
        return dict.fromkeys(PRODUCES, Unknown("no implementation ran", how))
    return {
        "rms_norm.forward.error": Known(
            compare_tensors.worst(forward for forward, _ in errors.values()), "1", how
        ),
        "rms_norm.backward.error": Known(
            compare_tensors.worst(backward for _, backward in errors.values()), "1", how
        ),
        "rms_norm.errors": Known({name: list(pair) for name, pair in errors.items()}, "1", how),
    }


def _of_models() -> Callable[[Any, Any], Any] | None:
    """Return the norm of transformers' Llama; None where transformers is not installed."""
    try:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
    except ImportError:
        return None

    def norm(x: Any, weight: Any) -> Any:
        layer = LlamaRMSNorm(_WIDTH, _EPSILON)
        layer.weight = weight
        return layer(x)

    return norm


def _errors(function: Callable[[Any, Any], Any], task: Task) -> tuple[float, float]:
    import torch

    def drawn(shape: tuple[int, ...], seed: int) -> Any:
        return compare_tensors.random_tensor(
            shape, device=task.torch_device, dtype=torch.bfloat16, seed=seed
        )

    inputs = drawn((_ROWS, _WIDTH), compare_tensors.SEED).requires_grad_()
    weight = torch.nn.Parameter(drawn((_WIDTH,), compare_tensors.SEED + 1))
    flow = drawn((_ROWS, _WIDTH), compare_tensors.SEED + 2)
    exact = inputs.detach().double().requires_grad_()
    mean = exact.square().mean(-1, keepdim=True)
    if task.fault == "wrong_mean":
        mean = mean * 1.05
    reference = exact * (mean + _EPSILON).rsqrt() * weight.detach().double()
    reference.backward(flow.double())
    found = function(inputs, weight)
    if task.fault == "scaled_row":
        scale = torch.ones(_ROWS, 1, device=found.device, dtype=found.dtype)
        scale[0] = 1.1
        found = found * scale
    found.backward(flow)
    # of rows, as the norm is: a transposed matrix has rows as columns
    return (
        compare_tensors.worst_column_error(found.detach().T, reference.detach().T),
        compare_tensors.worst_column_error(inputs.grad.T, exact.grad.T),
    )
