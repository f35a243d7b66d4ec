"""What torch does for compilers at every operation, and a trace of fixed sizes does not need.

A trace of 32 layers is 58 000 operations, and half of its time went into these. Each shortcut
gives the same result; where torch has changed what it replaces, it is left out.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch._subclasses import fake_tensor

_SPARSE = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)
# names differ between releases; what is missing is left as it is
_METADATA = getattr(fake_tensor, "TensorMetadata", None)


def install(*modes: type) -> None:
    """Apply the shortcuts in this process; `modes` are further modes of dispatch."""
    for mode in (fake_tensor.FakeTensorMode, *modes):
        enter_directly(mode)
    if _METADATA is not None and hasattr(_METADATA, "_flatten_into"):
        _METADATA._flatten_into = flatten_whole(_METADATA)  # noqa: SLF001 - torch's own
    if hasattr(fake_tensor, "is_sparse_any"):
        fake_tensor.is_sparse_any = is_sparse


def enter_directly(mode: type) -> None:
    """Take off the switch of torch.compile that torch puts around every mode's dispatch.

    torch/utils/_python_dispatch.py wraps it in `_disable_dynamo`, which sets the interpreter's
    frame evaluation twice per call; nothing is compiled in a trace.
    """
    wrapped = getattr(mode.__dict__.get("__torch_dispatch__"), "__wrapped__", None)
    if wrapped is not None:
        mode.__torch_dispatch__ = wrapped  # type: ignore[attr-defined]


def is_sparse(tensor: Any) -> bool:
    """Tell it from the layout, in place of five questions to the tensor."""
    return isinstance(tensor, torch.Tensor) and tensor.layout in _SPARSE


def flatten_whole(metadata: type) -> Any:
    """Return a method that gives the key of the cache of fake results all fields as one entry.

    torch flattens them one by one to rename symbolic sizes, of which a trace has none.
    """
    names = [item.name for item in dataclasses.fields(metadata)]  # a dataclass
    read = operator.attrgetter(*names)
    plain = metadata._flatten_into  # type: ignore[attr-defined]  # noqa: SLF001 - torch's own

    def flatten(self: Any, result: list[Any], mode: Any, state: Any) -> None:
        if any(isinstance(size, torch.SymInt) for size in self.shape):
            plain(self, result, mode, state)
        else:
            result.append(read(self))

    return flatten
