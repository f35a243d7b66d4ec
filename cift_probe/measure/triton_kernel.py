"""One Triton kernel; a module of its own, since Triton reads a kernel's source from its file."""

from __future__ import annotations

from typing import Any

_BLOCK = 1024


def add_one(values: Any, result: Any) -> None:
    """Write `values + 1` into `result`; raises whatever Triton's compiler raises."""
    import triton
    import triton.language as tl

    # Triton looks names up in the globals of the kernel's module, and a module that imports
    # triton at its head could not be read on a machine without it.
    globals().update(tl=tl)

    def kernel(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        offsets = tl.program_id(0) * block + tl.arange(0, block)
        inside = offsets < count
        loaded = tl.load(source + offsets, mask=inside)
        tl.store(target + offsets, loaded + 1, mask=inside)

    compiled = triton.jit(kernel)
    count = values.numel()
    compiled[(triton.cdiv(count, _BLOCK),)](values, result, count, block=_BLOCK)
