"""A CUDA device that is not there: what torch must be told so that fake tensors live on one.

Fake tensors with the device "cuda" run forward on any build of torch. The backward pass asks two
more things: a device guard, which torch installs by itself when the registry has a place for it,
and CUDA's hooks, whose answers `isBuilt`, `isAvailable` and `hasPrimaryContext` are set here.
Everything happens in the process that calls `install`, which must be a child of its own: a slot
that another version of torch has moved would end in a crash.

Source: c10/core/impl/DeviceGuardImplInterface.h and ATen/detail/AcceleratorHooksInterface.h. The
slots are read from the headers that the installed wheel ships.
"""

from __future__ import annotations

import ctypes
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

_CUDA = 1  # c10::DeviceType::CUDA
_DESTRUCTOR_SLOTS = 2  # the Itanium C++ ABI gives a virtual destructor two
_AMPERE = (8, 0)  # bfloat16 in hardware
_VTABLE_PREFIX = 2  # offset to the top, and the type's information, stand before the functions
_KEPT: list[Any] = []  # what C++ holds pointers to


class FakeDeviceError(RuntimeError):
    """Fake CUDA tensors cannot be used with this torch; the message says why."""


class FakeGpu(msgspec.Struct, frozen=True):
    """The card that the code believes to see."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    total_bytes: int = 150_754_820_096
    num_multiprocessors: int = 132


def install(gpu: FakeGpu) -> None:
    """Make fake CUDA tensors work in this process, and prove it by a backward pass.

    Raises FakeDeviceError when this torch cannot be told.
    """
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        message = "CUDA is in use in this process; fake tensors need one of their own"
        raise FakeDeviceError(message)
    try:
        _install_guard(torch)
        _answer_hooks(torch)
    except (AttributeError, OSError, ValueError) as error:
        message = f"torch {torch.__version__} has no place for a fake device: {error}"
        raise FakeDeviceError(message) from error
    _describe(torch, gpu)
    _prove(torch)


def _install_guard(torch: Any) -> None:
    """Let torch put its own guard without a device into the registry.

    It does so where a guard is registered that counts no devices: a CPU build has none, so one
    that answers 0 to everything stands there for a moment.
    """
    library = ctypes.CDLL(str(_library(torch, "libc10.so")))
    registry = ctypes.c_void_p.in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    slots = ctypes.cast(ctypes.addressof(registry), ctypes.POINTER(ctypes.c_void_p))
    if not slots[_CUDA]:
        zero = ctypes.CFUNCTYPE(ctypes.c_long)(lambda: 0)
        functions = (ctypes.c_void_p * 64)(*[ctypes.cast(zero, ctypes.c_void_p).value] * 64)
        guard = (ctypes.c_void_p * 2)(ctypes.addressof(functions), 0)
        _KEPT.extend((zero, functions, guard))
        slots[_CUDA] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()  # noqa: SLF001 - what FakeTensorMode itself calls


def _answer_hooks(torch: Any) -> None:
    """Replace the table of virtual functions of CUDA's hooks by one with other answers."""
    headers = Path(torch.__file__).parent / "include" / "ATen" / "detail"
    base = (headers / "AcceleratorHooksInterface.h").read_text(encoding="utf-8")
    derived = (headers / "CUDAHooksInterface.h").read_text(encoding="utf-8")
    slots = read_slots(base)
    library = ctypes.CDLL(str(_library(torch, "libtorch_cpu.so")))
    get_hooks = library._ZN2at6detail12getCUDAHooksEv  # noqa: SLF001 - a mangled C++ name
    get_hooks.restype, get_hooks.argtypes = ctypes.c_void_p, []
    pointer = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    length = _VTABLE_PREFIX + _DESTRUCTOR_SLOTS + len(slots) + derived.count("virtual ")
    old = pointer[0] - _VTABLE_PREFIX * ctypes.sizeof(ctypes.c_void_p)
    source = ctypes.cast(old, ctypes.POINTER(ctypes.c_void_p))
    table = (ctypes.c_void_p * length)(*[source[index] for index in range(length)])
    answer = ctypes.CFUNCTYPE(ctypes.c_int)
    answers = {"isBuilt": answer(lambda: 1), "hasPrimaryContext": answer(lambda: 0)}
    for name, function in answers.items():
        where = _VTABLE_PREFIX + slots[name]
        table[where] = ctypes.cast(function, ctypes.c_void_p).value
    _KEPT.extend((table, *answers.values()))
    pointer[0] = ctypes.addressof(table) + _VTABLE_PREFIX * ctypes.sizeof(ctypes.c_void_p)


def read_slots(header: str) -> dict[str, int]:
    """Return {virtual function: slot} of a C++ class whose first virtual is its destructor.

    Raises ValueError for a header in which it is not, or that lacks what is needed.
    """
    names = re.findall(r"^\s*virtual\s+[^;{(]*?([~\w]+)\s*\(", header, re.MULTILINE)
    if not names or not names[0].startswith("~"):
        message = "AcceleratorHooksInterface.h does not begin with its destructor"
        raise ValueError(message)
    slots = {name: index + _DESTRUCTOR_SLOTS for index, name in enumerate(names[1:])}
    missing = {"isBuilt", "hasPrimaryContext"} - set(slots)
    if missing:
        message = f"AcceleratorHooksInterface.h has no {', '.join(sorted(missing))}"
        raise ValueError(message)
    return slots


def _library(torch: Any, name: str) -> Path:
    place = Path(torch.__file__).parent / "lib" / name
    if not place.is_file():
        message = f"{name} is missing"
        raise OSError(message)
    return place


class _NoGuard:
    """`torch.cuda.device(…)` where there is none to switch to."""

    def __init__(self, *_: Any) -> None:
        """Take any device."""

    def __enter__(self) -> None:
        """Switch nowhere."""

    def __exit__(self, *_: object) -> None:
        """Switch back from nowhere."""


def _properties(gpu: FakeGpu) -> SimpleNamespace:
    major, minor = gpu.capability
    return SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.total_bytes,
        multi_processor_count=gpu.num_multiprocessors,
        is_integrated=0,
        gcnArchName="",
    )


def _describe(torch: Any, gpu: FakeGpu) -> None:
    """Let `torch.cuda` speak of the card as if it were there."""
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "get_device_properties": _properties(gpu),
        "get_device_capability": gpu.capability,
        "get_device_name": gpu.name,
        "is_initialized": False,
        "is_current_stream_capturing": False,
        "mem_get_info": (gpu.total_bytes, gpu.total_bytes),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "synchronize": None,
        "empty_cache": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "_lazy_init": None,
        "reset_peak_memory_stats": None,
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
    native = gpu.capability >= _AMPERE

    def is_bf16_supported(including_emulation: bool = True) -> bool:  # noqa: FBT001, FBT002 - torch's
        return native or including_emulation

    torch.cuda.is_bf16_supported = is_bf16_supported
    torch.cuda.device = _NoGuard
    # a build with CUDA would start it before the first fake tensor
    module: Any = import_module("torch._subclasses.fake_tensor")
    module.init_gpu_context = lambda _device: None
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False


def _prove(torch: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        one = torch.ones(2, 2, device="cuda", requires_grad=True)
        (one @ one).sum().backward()
        if one.grad is None or one.grad.device.type != "cuda":
            message = "a backward pass on fake tensors gives no gradient"
            raise FakeDeviceError(message)
