"""What fake tensors cannot answer, and what kernels take inside: each with its source.

A stand-in gives the result of an operation whose shape or value depends on data, from the facts
of the plan. A temporary gives the bytes that a CUDA kernel allocates and releases inside one
operation, which no dispatch sees. Versions: torch 2.11 to 2.13, bitsandbytes 0.50.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import torch

with suppress(ImportError):  # without it no plan is quantised
    import bitsandbytes  # noqa: F401 - registers its operations

aten = torch.ops.aten

StandIn = Callable[..., Any]
STAND_INS: dict[Any, StandIn] = {}
TEMPORARIES: dict[Any, Callable[..., int]] = {}
_BLOCK = 512
_NESTED_SCALES = 7  # position of absmax_8bit in gemm_4bit
_REGISTERS = 128  # widest head of kOutputInRF
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD
_LARGE_WORKSPACE = (9, 10)  # major compute capability: Hopper, and Blackwell of data centres


class Facts(msgspec.Struct, frozen=True):
    """What the data of the plan is: rows of a batch by their lengths in tokens."""

    lengths: tuple[int, ...]
    num_labels: int  # tokens that the loss is about

    @property
    def padded(self) -> bool:
        """Whether rows differ in length."""
        return min(self.lengths) < max(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(self.lengths)


def stand_in(*operations: Any) -> Callable[[StandIn], StandIn]:
    """Register the decorated function as the result of operations; NotImplemented passes on."""

    def register(function: StandIn) -> StandIn:
        STAND_INS.update(dict.fromkeys(operations, function))
        return function

    return register


def temporary(*operations: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register the decorated function as the bytes that operations take inside."""

    def register(function: Callable[..., int]) -> Callable[..., int]:
        TEMPORARIES.update(dict.fromkeys(operations, function))
        return function

    return register


def operation(space: str, name: str, overload: str = "default") -> Any:
    """Return an operation, or None where the installed versions have none of that name."""
    return getattr(getattr(getattr(torch.ops, space), name, None), overload, None)


def rounded(num_bytes: int) -> int:
    """Round up to the allocator's smallest block."""
    return -(-num_bytes // _BLOCK) * _BLOCK


def use_facts(facts: Facts) -> None:
    """State the facts of the plan to the stand-ins of this process."""
    _FACTS["data"] = facts


_FACTS: dict[str, Facts] = {}
_TRUE: set[int] = set()


def _facts() -> Facts:
    return _FACTS["data"]


def _count(num_elements: int) -> int:
    """Return how many of a mask's elements are set: labels that count, or all."""
    return min(num_elements, _facts().num_labels)


@stand_in(aten._local_scalar_dense.default)  # noqa: SLF001 - the operation's name
def read_scalar(_recorder: Any, _func: Any, args: Any, _kwargs: Any) -> Any:
    """`.item()`: what `all()` gave is true, other conditions are false, numbers are 1."""
    tensor = args[0]
    if tensor.dtype == torch.bool:
        return tensor.untyped_storage()._cdata in _TRUE  # noqa: SLF001 - the storage's identity
    return 1.0 if tensor.dtype.is_floating_point else 1


@stand_in(aten.all.default, aten.all.dim)
def all_true(_recorder: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """`all()`: no padding, all labels valid, so that the answer is yes."""
    result = func(*args, **kwargs)
    identity = result.untyped_storage()._cdata  # noqa: SLF001 - as above
    _TRUE.add(identity)
    return result


@stand_in(aten.nonzero.default)
def nonzero(_recorder: Any, _func: Any, args: Any, _kwargs: Any) -> Any:
    """Return indices of the labels that count: (number, dimensions), int64."""
    shape = (_count(args[0].numel()), args[0].dim())
    return torch.empty(shape, dtype=torch.int64, device=args[0].device)


@stand_in(aten.index.Tensor)
def index_by_mask(recorder: Any, _func: Any, args: Any, _kwargs: Any) -> Any:
    """`tensor[mask]`: the rows of the labels that count; inside, CUDA makes int64 indices."""
    tensor, indices = args
    masks = [item for item in indices if item is not None and item.dtype == torch.bool]
    if not masks:
        return NotImplemented
    if len(indices) != 1:
        message = f"an index of {len(indices)} parts with a mask among them"
        raise NotImplementedError(message)
    count = _count(masks[0].numel())
    shape = (count, *tensor.shape[masks[0].dim() :])
    recorder.passing(rounded(count * 8) * masks[0].dim(), "nonzero of a mask")
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


@stand_in(aten.repeat_interleave.Tensor)
def repeat_interleave(_recorder: Any, _func: Any, args: Any, _kwargs: Any) -> Any:
    """Row numbers of packed tokens: as many as there are tokens."""
    return torch.empty((_facts().num_tokens,), dtype=torch.int64, device=args[0].device)


@stand_in(aten.equal.default)
def equal(_recorder: Any, _func: Any, _args: Any, _kwargs: Any) -> bool:
    """Shared weights are what they were."""
    return True


@stand_in(aten._pin_memory.default)  # noqa: SLF001 - the operation's name
def pin_memory(_recorder: Any, _func: Any, args: Any, _kwargs: Any) -> Any:
    """Pinned host memory: where the tensor lies on the host is of no account."""
    return args[0]


@stand_in(operation("aten", "addmm", "dtype"), operation("aten", "addmm", "dtype_out"))
def addmm_to_fp32(_recorder: Any, _func: Any, args: Any, kwargs: Any) -> Any:
    """`torch.addmm(…, out_dtype=float32, out=acc)` of TRL's chunked head: in place."""
    out = kwargs.get("out")
    return args[0] if out is None else out


@stand_in(aten._grouped_mm.default)  # noqa: SLF001 - the operation's name
def grouped_mm(_recorder: Any, _func: Any, args: Any, kwargs: Any) -> Any:
    """Give the shape of a mixture of experts' grouped matrix product, in every type.

    (m, k) x (g, k, n) -> (m, n); (m, k) x (k, n) by offsets -> (g, m, n).
    """
    one, two = args[:2]
    if one.dtype == torch.bfloat16:
        return NotImplemented
    if one.dim() == 2 and two.dim() == 3:  # noqa: PLR2004 - dimensions
        shape: tuple[int, ...] = (one.shape[0], two.shape[2])
    elif one.dim() == 2 and two.dim() == 2:  # noqa: PLR2004 - dimensions
        offsets = args[2] if len(args) > 2 else kwargs["offs"]  # noqa: PLR2004 - third argument
        shape = (offsets.shape[0], one.shape[0], two.shape[1])
    else:
        shape = (one.shape[1], two.shape[-1])
    return torch.empty(shape, dtype=one.dtype, device=one.device)


@stand_in(operation("bitsandbytes", "int8_vectorwise_quant"))
def quantised_rows(_recorder: Any, _func: Any, args: Any, kwargs: Any) -> Any:
    """Rows in int8 with a scale each; no column holds a value beyond the threshold.

    How many do depends on the weights. Random ones have none, or one in a layer; trained ones up
    to some in a hundred, and each adds its inputs in 16 bits, to the end of the step.
    """
    inputs = args[0]
    rows = torch.empty(inputs.shape, dtype=torch.int8, device=inputs.device)
    scales = torch.empty(inputs.numel() // inputs.shape[-1], device=inputs.device)
    none = torch.empty(0, dtype=torch.int64, device=inputs.device)
    return rows, scales, none if _threshold(args, kwargs) else None


@stand_in(operation("bitsandbytes", "int8_mixed_scaled_mm"))
def mixed_product(_recorder: Any, _func: Any, args: Any, _kwargs: Any) -> Any:
    """(rows, k) x (n, k) in int8 -> (rows, n) in the inputs' type, and no outliers' inputs."""
    inputs, weight = args[0], args[2]
    shape = (*inputs.shape[:-1], weight.shape[0])
    none = torch.empty(0, dtype=inputs.dtype, device=inputs.device)
    return torch.empty(shape, dtype=inputs.dtype, device=inputs.device), none


def _threshold(args: Any, kwargs: Any) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("threshold", 0.0))


MATRIX_PRODUCTS = frozenset(
    item
    for item in (
        aten.mm.default,
        aten.mm.out,
        aten.addmm.default,
        aten.addmm.out,
        aten.bmm.default,
        aten.baddbmm.default,
        operation("aten", "addmm", "dtype"),
        operation("aten", "addmm", "dtype_out"),
        operation("bitsandbytes", "gemm_4bit"),
    )
    if item is not None
)


def cublas_workspace(capability: tuple[int, int]) -> int:
    """Return the bytes that cuBLAS keeps for each thread that multiplies matrices.

    aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: 32 MiB on Hopper, else
    ":4096:2:16:8". The forward and the backward pass run in a thread each.
    """
    return 32 << 20 if capability[0] in _LARGE_WORKSPACE else (4096 * 2 + 16 * 8) << 10


@temporary(operation("bitsandbytes", "gemm_4bit"))
def dequantised_weight(args: Any, kwargs: Any, _result: Any) -> int:
    """Return bytes of a 4-bit product's weight in the inputs' dtype, and its scales in fp32.

    bitsandbytes/backends/cuda/ops.py, gemm_4bit: unless few rows let a fused kernel do it, the
    nested scales are reconstructed, then once more with their offset, then the weight.
    """
    inputs, shape = args[0], args[2]
    if _is_fused(inputs, shape, args[4]):
        return 0
    size = rounded(shape[0] * inputs.shape[-1] * inputs.element_size())
    scales = kwargs.get("absmax_8bit")
    if scales is None and len(args) > _NESTED_SCALES:
        scales = args[_NESTED_SCALES]
    return size + (2 * rounded(scales.numel() * 4) if scales is not None else 0)


def _is_fused(inputs: Any, shape: Any, blocksize: int) -> bool:
    """Ask bitsandbytes itself which of its kernels takes a product on this card."""
    try:
        from bitsandbytes.backends.cuda import ops
    except (ImportError, AttributeError, RuntimeError):
        return False  # it cannot be asked: rather too much than too little
    rows, inner = inputs.numel() // inputs.shape[-1], inputs.shape[-1]
    if rows > ops._gemm_4bit_custom_max_m or inner % blocksize:  # noqa: SLF001 - its own dispatch
        return False
    return bool(ops._gemm_4bit_use_custom_fn(0, inputs.dtype, rows, shape[0], inner))  # noqa: SLF001


@temporary(operation("bitsandbytes", "int8_vectorwise_quant"))
def outlier_search(args: Any, kwargs: Any, _result: Any) -> int:
    """`A.abs() >= threshold`: bitsandbytes/backends/cuda/ops.py, int8_vectorwise_quant."""
    inputs = args[0]
    if not _threshold(args, kwargs):
        return 0
    return rounded(inputs.numel() * inputs.element_size()) + rounded(inputs.numel())


@temporary(
    operation("bitsandbytes", "int8_mixed_scaled_mm"), operation("bitsandbytes", "int8_scaled_mm")
)
def int32_product(_args: Any, _kwargs: Any, result: Any) -> int:
    """Count the sums in int32, then in float16, before the type that was asked for.

    bitsandbytes/backends/default/ops.py, int8_scaled_mm; backends/cuda/ops.py, int8_mm_dequant.
    """
    output = result[0] if isinstance(result, tuple) else result
    narrow = 0 if output.dtype == torch.float16 else rounded(output.numel() * 2)
    return rounded(output.numel() * 4) + narrow


@temporary(aten._scaled_dot_product_flash_attention_backward.default)  # noqa: SLF001 - as above
def flash_backward(args: Any, _kwargs: Any, _result: Any) -> int:
    """Accumulators of flash attention's backward pass.

    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: dq_accum in fp32
    and softmax_d over sequences padded to 128 and heads to 32; with grouped queries the
    gradients of keys and values for all heads.
    """
    _grad, query, key, _value = args[:4]
    batch, heads, length, head = query.shape
    padded_length, padded_head = -(-length // 128) * 128, -(-head // 32) * 32
    size = rounded(batch * heads * padded_length * padded_head * 4)
    size += rounded(batch * heads * padded_length * 4)
    if key.shape[1] != heads:
        size += 2 * rounded(batch * key.shape[2] * heads * padded_head * 2)
    # _flash_attention_backward: both are made contiguous with the sequence before the heads
    for tensor in (args[0], args[4]):
        if not tensor.transpose(1, 2).is_contiguous():
            size += rounded(tensor.numel() * tensor.element_size())
    return size


@temporary(aten._scaled_dot_product_efficient_attention_backward.default)  # noqa: SLF001 - as above
def efficient_backward(args: Any, _kwargs: Any, _result: Any) -> int:
    """Accumulators of the memory-efficient kernel's backward pass.

    aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h, workspace_size:
    in 16 bits the queries' gradient in float32, and those of keys and values where a head is too
    wide for registers; attention_backward.cu: in float32 the product of output and gradient; the
    sums of either by row.
    """
    query = args[1]
    batch, heads, length, head = query.shape
    gradients = 3 if query.element_size() == 2 and head > _REGISTERS else 1  # noqa: PLR2004 - bytes
    size = rounded(batch * heads * length * head * 4)
    return gradients * size + rounded(batch * heads * length * 4)


@temporary(operation("aten", "_safe_softmax"))
def safe_softmax(args: Any, _kwargs: Any, _result: Any) -> int:
    """Count which scores are -inf (SoftMax.cpp, _safe_softmax; seen with torch 2.11)."""
    return rounded(args[0].numel())


@temporary(aten.embedding_dense_backward.default)
def embedding_backward(args: Any, _kwargs: Any, result: Any) -> int:
    """Sorted indices and partial sums, of which the kernel makes as many as there could be.

    aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu: up to 3072 indices one kernel does
    without; above, sorting takes int64 arrays, and each run of 10 equal indices, of which there
    are at most one more per word, an fp32 row.
    """
    num_indices = args[1].numel()
    if num_indices <= 3072:  # noqa: PLR2004 - the kernel's own limit
        return 0
    words, hidden = result.shape
    num_sums = num_indices // _ROWS_PER_THREAD + min(num_indices, words)
    return rounded(num_sums * hidden * 4) + 6 * rounded(num_indices * 8)


@temporary(aten._softmax_backward_data.default)  # noqa: SLF001 - the operation's name
def softmax_backward(args: Any, _kwargs: Any, _result: Any) -> int:
    """Grad * output, which aten/src/ATen/native/cuda/SoftMax.cu makes before the kernel."""
    return rounded(args[0].numel() * args[0].element_size())
