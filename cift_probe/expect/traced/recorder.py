"""Every allocation and release of a step on fake CUDA tensors, as one stream of events."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch._dynamo.eval_frame
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cift_probe.expect.traced.allocator import Event

# frames between an operation and its caller: this module, and torch's wrapper of dispatch modes
_BETWEEN = (__file__, torch._compile.__file__, torch._dynamo.eval_frame.__file__)  # noqa: SLF001
_DEVICE = torch.ops.prim.device.default
_ENGINE = "_engine_run_backward"  # torch.autograd.graph: the only Python frame of a backward pass


class Origin(NamedTuple):
    """Where an allocation came from: operation, shape, dtype and the module that ran."""

    operation: str
    shape: tuple[int, ...]
    dtype: str
    module: str


class UnknownOperationError(RuntimeError):
    """An operation whose result depends on data, and for which no stand-in says what it is."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records `events` for the allocator, and `origins` by id.

    `stand_ins` give results of operations that fake tensors cannot; `temporaries` give bytes that
    a kernel allocates and releases inside one operation. Both are keyed by the operation.
    """

    def __init__(
        self,
        stand_ins: dict[Any, Callable[..., Any]],
        temporaries: dict[Any, Callable[..., int]],
        workspaces: tuple[frozenset[Any], int] = (frozenset(), 0),
    ) -> None:
        """Record nothing yet; `workspaces` are operations and the bytes kept for their thread."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.origins: dict[int, Origin] = {}
        self.module = ""
        self._stand_ins = stand_ins
        self._temporaries = temporaries
        self._ids: dict[int, int] = {}
        self._next = 0
        self._with_workspace, self._workspace_bytes = workspaces
        self._persistent: set[str] = set()

    def mark(self, instant: str) -> None:
        """End an instant."""
        self.events.append(("m", instant))

    def loaded(self) -> None:
        """End loading: the cache is emptied, and peaks count from here."""
        self.events.append(("r",))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and record what it allocates."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # as FakeTensor does, for more than half of all calls
        kwargs = kwargs or {}
        if accumulates(func, args, kwargs):
            return args[0]
        if func in self._with_workspace and args[0].device.type == "cuda":
            where = "backward" if in_backward() else "forward"
            self.persistent(self._workspace_bytes, f"cuBLAS workspace of the {where} pass")
        stand_in = self._stand_ins.get(func)
        result = NotImplemented if stand_in is None else stand_in(self, func, args, kwargs)
        if result is NotImplemented:
            try:
                result = func(*args, **kwargs)
            except (
                torch._subclasses.fake_tensor.DataDependentOutputException,  # noqa: SLF001
                torch._subclasses.fake_tensor.DynamicOutputShapeException,  # noqa: SLF001
            ) as error:
                message = f"{func} depends on data, and no stand-in says what it gives"
                raise UnknownOperationError(message) from error
        self._keep(func, result)
        temporary = self._temporaries.get(func)
        if temporary is not None:
            self.passing(temporary(args, kwargs, result), f"{func} (inside)")
        return result

    def passing(self, num_bytes: int, operation: str) -> None:
        """Record bytes that are allocated and released at once."""
        if num_bytes > 0:
            self._allocate(num_bytes, Origin(operation, (), "", self.module))
            self.events.append(("f", self._next))

    def persistent(self, num_bytes: int, operation: str) -> None:
        """Record bytes that a library allocates once and keeps."""
        if operation not in self._persistent and num_bytes > 0:
            self._persistent.add(operation)
            self._allocate(num_bytes, Origin(operation, (), "", ""))

    def name_modules(self, model: Any) -> None:
        """Give weights their names, and what is allocated from here the module that ran last.

        In the backward pass that is the last one of the layer that was computed again.
        """
        for name, weight in model.named_parameters():
            found = self._ids.get(weight.untyped_storage()._cdata)  # noqa: SLF001 - its identity
            if found is not None:
                self.origins[found] = self.origins[found]._replace(module=name)
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                module.register_forward_pre_hook(self._enters(name))

    def _enters(self, name: str) -> Callable[[Any, Any], None]:
        def enter(_module: Any, _args: Any) -> None:
            self.module = name

        return enter

    def _keep(self, func: Any, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._add(func, result)
        elif isinstance(result, list | tuple):
            for item in result:
                self._keep(func, item)

    def _add(self, func: Any, tensor: Any) -> None:
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        identity = storage._cdata  # noqa: SLF001 - as above
        if identity in self._ids or not storage.nbytes():
            return
        origin = Origin(str(func), tuple(tensor.shape), str(tensor.dtype), self.module)
        self._ids[identity] = self._allocate(storage.nbytes(), origin)
        weakref.finalize(storage, self._release, identity).atexit = False

    def _allocate(self, num_bytes: int, origin: Origin) -> int:
        self._next += 1
        self.events.append(("a", self._next, num_bytes))
        self.origins[self._next] = origin
        return self._next

    def _release(self, identity: int) -> None:
        name = self._ids.pop(identity, None)
        if name is not None:
            self.events.append(("f", name))


def in_backward() -> bool:
    """Tell whether the autograd engine runs, which does so in a thread of its own on a device."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001 - -1 is "no backward runs"


def accumulates(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether the autograd engine adds two gradients, which it really does in place.

    torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace(), says no where a dispatch
    mode is active or the tensor is a subclass; without either it says yes for a contiguous
    tensor that nothing else refers to.
    """
    if func is not torch.ops.aten.add.Tensor or kwargs or not isinstance(args[1], torch.Tensor):
        return False
    old, new = args
    alike = old.shape == new.shape and old.dtype == new.dtype and type(old) is FakeTensor
    return alike and old.is_contiguous() and _sole(old) and _called_by_engine()


def _sole(tensor: Any) -> bool:
    # the engine's own reference, this call's argument list and its two Python names make 4; the
    # storage is held by the fake tensor and its wrapper
    storage = tensor.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001
    return bool(tensor._use_count() <= 4 and uses <= 2)  # noqa: SLF001, PLR2004 - as above


def _called_by_engine() -> bool:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - no other way to see the caller
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == _ENGINE
