"""Half-precision matrix products against float64, in the mean and in the worst element."""

from __future__ import annotations

from typing import Any

from cift_probe.evidence import Evidence, Known
from cift_probe.measure import compare_tensors
from cift_probe.measure.declare import Task, instrument

# (rows, inner, columns): a projection and a long reduction, where accumulation shows
_SHAPES_GPU = ((1024, 4096, 4096), (512, 14336, 1024))
_SHAPES_CPU = ((128, 1024, 512), (64, 4096, 256))

PRODUCES = ("bf16.matmul.error", "bf16.matmul.worst_element", "fp16.matmul.error")


@instrument(
    "matmul",
    version=1,
    produces=PRODUCES,
    estimate_s=2.0,
    deadline_s=120.0,
    faults=("corrupt_element", "lost_precision"),
)
def measure_matmul(task: Task) -> dict[str, Evidence]:
    """Multiply N(0, 1) matrices in bf16 and fp16 and compare with the product in float64.

    The error is relative (Frobenius), the worst element relative to the root mean square of the
    product; the worst over all shapes counts. Half-precision inputs are exact in float64, so
    what is seen is accumulation and the rounding of the result.
    """
    import torch

    shapes = _SHAPES_CPU if task.device == "cpu" else _SHAPES_GPU
    bf16 = [_errors(shape, torch.bfloat16, task) for shape in shapes]
    fp16 = [_errors(shape, torch.float16, task) for shape in shapes]
    how = f"products of {', '.join('x'.join(map(str, shape)) for shape in shapes)} N(0, 1) values"
    return {
        "bf16.matmul.error": Known(compare_tensors.worst(error for error, _ in bf16), "1", how),
        "bf16.matmul.worst_element": Known(
            compare_tensors.worst(element for _, element in bf16), "1", how
        ),
        "fp16.matmul.error": Known(compare_tensors.worst(error for error, _ in fp16), "1", how),
    }


def _errors(shape: tuple[int, int, int], dtype: Any, task: Task) -> tuple[float, float]:
    import torch

    rows, inner, columns = shape
    left = compare_tensors.random_tensor(
        (rows, inner), device=task.torch_device, dtype=dtype, scale=inner**-0.5
    )
    right = compare_tensors.random_tensor(
        (inner, columns), device=task.torch_device, dtype=dtype, seed=compare_tensors.SEED + 1
    )
    product = left @ right
    if task.fault == "lost_precision":
        product = product.to(torch.float8_e4m3fn).to(dtype)
    if task.fault == "corrupt_element":
        product[rows // 2, columns // 2] += 1.0  # one root mean square
    reference = left.double() @ right.double()
    return (
        compare_tensors.relative_error(product, reference),
        compare_tensors.worst_element(product, reference),
    )
