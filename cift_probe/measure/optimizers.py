"""AdamW as it is really run: fused, in 8 bits, paged; each against the formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.measure import compare_tensors
from cift_probe.measure.declare import Task, instrument
from cift_probe.worker import is_sticky

_SHAPE = (256, 1024)  # above bitsandbytes' least for 8 bits (4096) and for paging (1e5)
_NUM_STEPS = 5
_RATE, _DECAY, _EPSILON = 1e-2, 0.01, 1e-8
_BETAS = (0.9, 0.999)
_ARGUMENTS = {"lr": _RATE, "betas": _BETAS, "eps": _EPSILON, "weight_decay": _DECAY}

PRODUCES = (
    "optimizer.fused.error",
    "optimizer.8bit.error",
    "optimizer.paged_32bit.error",
    "optimizer.paged_8bit.error",
)
_OF_BITSANDBYTES = {
    "optimizer.8bit.error": "AdamW8bit",
    "optimizer.paged_32bit.error": "PagedAdamW32bit",
    "optimizer.paged_8bit.error": "PagedAdamW8bit",
}


@instrument(
    "optimizers",
    version=1,
    produces=PRODUCES,
    estimate_s=3.0,
    deadline_s=120.0,
    faults=("stale_gradient", "no_decay"),
)
def measure_optimizers(task: Task) -> dict[str, Evidence]:
    """Take five steps on a weight of 256 x 1024 with random gradients, with each optimizer.

    The error is that of the whole change of the weight, relative (Frobenius), against AdamW's
    formula (arXiv 1711.05101) in float64. Weights are float32, so that the optimizer's own
    rounding shows and not that of the weight.
    """
    import torch

    gradients = [
        compare_tensors.random_tensor(
            _SHAPE, device="cpu", dtype=torch.float32, seed=compare_tensors.SEED + step
        )
        for step in range(_NUM_STEPS)
    ]
    start = compare_tensors.random_tensor(_SHAPE, device="cpu", dtype=torch.float32, seed=1)
    exact = reference(start, gradients)

    def error_of(make: Callable[[list[Any]], Any], how: str) -> Evidence:
        try:
            moved = _moved(make, start, gradients, task)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            if is_sticky(str(error)):
                raise
            text = str(error).partition("\n")[0]
            return absent(text, how) if task.device == "cpu" else Unknown(text, how)
        return Known(compare_tensors.relative_error(moved, exact - start.double()), "1", how)

    fused: dict[str, Any] = {**_ARGUMENTS, "fused": True}
    found = {
        PRODUCES[0]: error_of(
            lambda weights: torch.optim.AdamW(weights, **fused), f"torch {torch.__version__}"
        )
    }
    return found | _of_bitsandbytes(task, error_of)


def _of_bitsandbytes(
    task: Task, error_of: Callable[[Callable[[list[Any]], Any], str], Evidence]
) -> dict[str, Evidence]:
    if task.device == "cpu":
        reason = "bitsandbytes' optimizers are run on a GPU alone"
        return dict.fromkeys(_OF_BITSANDBYTES, absent(reason))
    try:
        import bitsandbytes
    except ImportError as error:
        missing = Unknown(f"bitsandbytes cannot be imported: {error}")
        return dict.fromkeys(_OF_BITSANDBYTES, missing)
    found = {}
    for key, name in _OF_BITSANDBYTES.items():
        kind = getattr(bitsandbytes.optim, name)
        how = f"bitsandbytes {bitsandbytes.__version__}, {name}"
        found[key] = error_of(lambda weights, kind=kind: kind(weights, **_ARGUMENTS), how)  # type: ignore[misc]  # bound to its turn
    return found


def reference(start: Any, gradients: list[Any]) -> Any:
    """Return the weight after AdamW's steps, in float64."""
    weight = start.double().clone()
    first, second = weight * 0, weight * 0
    for step, gradient in enumerate(gradients, start=1):
        exact = gradient.double()
        weight = weight * (1 - _RATE * _DECAY)
        first = _BETAS[0] * first + (1 - _BETAS[0]) * exact
        second = _BETAS[1] * second + (1 - _BETAS[1]) * exact.square()
        mean = first / (1 - _BETAS[0] ** step)
        spread = (second / (1 - _BETAS[1] ** step)).sqrt() + _EPSILON
        weight = weight - _RATE * mean / spread
    return weight


def _moved(make: Callable[[list[Any]], Any], start: Any, gradients: list[Any], task: Task) -> Any:
    """Return by how much the weight has changed, on the CPU."""
    import torch

    weight = torch.nn.Parameter(start.to(task.torch_device, copy=True))
    optimizer = make([weight])
    if task.fault == "no_decay":
        for group in optimizer.param_groups:
            group["weight_decay"] = 1.0
    for step, gradient in enumerate(gradients):
        stale = task.fault == "stale_gradient" and step
        weight.grad = (gradients[0] if stale else gradient).to(task.torch_device, copy=True)
        optimizer.step()
    return weight.detach().cpu().double() - start.double()
