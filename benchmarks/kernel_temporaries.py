"""Whether the temporaries that tier traced assumes are what the kernels take on this GPU.

    python benchmarks/kernel_temporaries.py

Runs every operation that `expect/traced/stand_ins.py` has a row for, at several shapes, and
prints assumed and measured bytes: the peak during the operation, less inputs and results. Exits
with 1 where one is off by more than 5 % and 2 MiB.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from cift_probe.expect.traced.stand_ins import TEMPORARIES, cublas_workspace, operation

aten = torch.ops.aten
MIB = 1 << 20
SLACK_SHARE, SLACK_BYTES = 0.05, 2 * MIB


def main() -> int:
    """Print one line per operation and shape."""
    torch.manual_seed(20)
    bad = 0
    print("operation | shape | assumed MiB | measured MiB")
    for name, shape, func, args, kwargs in cases():
        assumed, measured = compare(func, args, kwargs)
        off = abs(assumed - measured) > max(SLACK_BYTES, SLACK_SHARE * measured)
        bad += off
        mark = "  <-- off" if off else ""
        print(f"{name} | {shape} | {assumed / MIB:.1f} | {measured / MIB:.1f}{mark}")
    before = torch.cuda.memory_allocated()
    one = torch.ones(64, 64, device="cuda", requires_grad=True)
    (one @ one).sum().backward()  # type: ignore[no-untyped-call]
    del one
    kept = torch.cuda.memory_allocated() - before
    capability = torch.cuda.get_device_capability()
    print(
        f"cuBLAS workspaces | {capability} | {2 * cublas_workspace(capability) / MIB:.1f} | ",
        end="",
    )
    print(f"{kept / MIB:.1f} more than before (0 where a case above made them)")
    return 1 if bad else 0


def compare(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return assumed and measured bytes of one operation's temporaries."""
    assumed = 0
    measured = 0
    for _ in range(2):  # the first run may load kernels and make workspaces
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = func(*args, **kwargs)
        torch.cuda.synchronize()
        left = torch.cuda.memory_allocated() - before
        measured = torch.cuda.max_memory_allocated() - before - left
        assumed = TEMPORARIES[func](args, kwargs, result)
        del result
    return assumed, measured


def cases() -> Iterator[tuple[str, str, Any, tuple[Any, ...], dict[str, Any]]]:
    """Yield name, shape in words, operation and its arguments."""
    for batch, heads, key_heads, length, head in (
        (1, 32, 8, 2048, 128),
        (2, 12, 2, 2048, 128),
        (1, 16, 16, 1000, 64),
        (1, 8, 4, 1024, 256),
    ):
        yield flash(batch, heads, key_heads, length, head)
    for tokens, hidden, words in ((2048, 4096, 128256), (4096, 2048, 128256), (8192, 1536, 151936)):
        grad = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        ids = torch.randint(0, 1000, (tokens,), device="cuda")
        args: tuple[Any, ...] = (grad, ids, words, -1, False)
        yield (
            "embedding backward",
            f"{args[0].shape}",
            aten.embedding_dense_backward.default,
            args,
            {},
        )
    for shape in ((1, 32, 1024, 1024), (2, 8, 2048, 2048)):
        for dtype in (torch.float32, torch.bfloat16):
            output = torch.rand(shape, device="cuda", dtype=dtype)
            args = (output.clone(), output, -1, dtype)
            func = aten._softmax_backward_data.default  # noqa: SLF001 - the operation's name
            yield "softmax backward", f"{shape} {dtype}", func, args, {}
    for dtype in (torch.float16, torch.float32):
        for heads, length, head in ((32, 2048, 128), (16, 1000, 64), (8, 1024, 256)):
            yield efficient(heads, length, head, dtype)
    scores = torch.randn(2, 16, 2048, 2048, device="cuda")
    args = (scores, -1)
    yield "safe softmax", f"{scores.shape}", aten._safe_softmax.default, args, {}  # noqa: SLF001
    yield from four_bit()
    yield from eight_bit()


def efficient(heads: int, length: int, head: int, dtype: Any) -> Any:
    """Return a case of the memory-efficient kernel's backward pass."""
    shape = (1, heads, length, head)
    query, key, value = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    forward = aten._scaled_dot_product_efficient_attention.default  # noqa: SLF001 - as above
    out, sums, seed, offset = forward(query, key, value, None, True, 0.0, True)  # noqa: FBT003
    grad = torch.randn_like(out)
    args = (grad, query, key, value, None, out, sums, seed, offset, 0.0, [True] * 3 + [False], True)
    func = aten._scaled_dot_product_efficient_attention_backward.default  # noqa: SLF001 - as above
    return "memory-efficient attention backward", f"{shape} {dtype}", func, args, {}


def flash(batch: int, heads: int, key_heads: int, length: int, head: int) -> Any:
    """Return a case of flash attention's backward pass."""

    def made(count: int) -> Any:
        # as models make it: the heads are taken apart after the projection
        flat = torch.randn(batch, length, count, head, device="cuda", dtype=torch.bfloat16)
        return flat.transpose(1, 2)

    query, key, value = made(heads), made(key_heads), made(key_heads)
    forward = aten._scaled_dot_product_flash_attention.default  # noqa: SLF001 - as above
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward(
        query, key, value, dropout_p=0.0, is_causal=True, return_debug_mask=False
    )
    grad = torch.randn_like(out)
    args = (grad, query, key, value, out, lse, cum_q, cum_k, max_q, max_k)
    func = aten._scaled_dot_product_flash_attention_backward.default  # noqa: SLF001 - as above
    shape = f"{(batch, heads, length, head)} on {key_heads} key heads"
    return "flash attention backward", shape, func, (*args, 0.0, True, seed, offset), {}


def four_bit() -> Iterator[Any]:
    """Yield 4-bit products as the installed bitsandbytes calls them."""
    func = operation("bitsandbytes", "gemm_4bit")
    if func is None:
        return
    from bitsandbytes import functional
    from bitsandbytes.nn import Linear4bit

    del functional
    for rows, inner, outer in ((2048, 4096, 14336), (512, 4096, 4096)):
        layer = Linear4bit(inner, outer, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        layer = layer.to("cuda")
        inputs = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        seen: list[Any] = []
        with Catch(func, seen), torch.no_grad():
            layer(inputs)
        for args, kwargs in seen:
            yield "4-bit product", f"{(rows, inner)} x {(inner, outer)}", func, args, kwargs


def eight_bit() -> Iterator[Any]:
    """Yield what an 8-bit product does with inputs that have no outliers."""
    names = ("int8_vectorwise_quant", "int8_mixed_scaled_mm")
    functions = [operation("bitsandbytes", name) for name in names]
    if None in functions:
        return
    from bitsandbytes.nn import Linear8bitLt

    for rows, inner, outer in ((2048, 4096, 14336), (4096, 2048, 2048)):
        layer = Linear8bitLt(inner, outer, bias=False, has_fp16_weights=False, threshold=6.0)
        layer = layer.to("cuda")
        inputs = torch.rand(rows, inner, device="cuda", dtype=torch.bfloat16)
        for func in functions:
            seen: list[Any] = []
            with Catch(func, seen), torch.no_grad():
                layer(inputs)
            for args, kwargs in seen:
                shape = f"{(rows, inner)} x {(inner, outer)}"
                yield f"8-bit {func.name().partition('::')[2]}", shape, func, args, kwargs


class Catch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]  # noqa: SLF001
    """Keeps the arguments with which an operation is called."""

    def __init__(self, func: Any, seen: list[Any]) -> None:
        """Keep calls of `func` in `seen`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._func, self._seen = func, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass the call on."""
        if func is self._func:
            self._seen.append((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    raise SystemExit(main())
