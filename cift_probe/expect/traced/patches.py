"""Where Python code of the stack looks at a device, a type or a value that fake tensors lack.

Each patch lets the code go the way that it goes on a real device with the plan's data: no
padding unless the plan says so, all labels valid. Applied once, in a child process.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from cift_probe.expect.traced import sdpa
from cift_probe.expect.traced.stand_ins import Facts

_LIBRARY: list[Any] = []


def install() -> None:
    """Patch torch, bitsandbytes and TRL in this process, once."""
    _patch_torch()
    _patch_bitsandbytes()
    _patch_trl()


def state(facts: Facts, capability: tuple[int, int], *, packed: bool) -> None:
    """State the plan's data and card, and make what the fake tensors' mode must own."""
    sdpa.use_capability(capability)
    _patch_masks(facts, packed=packed)
    with suppress(ImportError):
        import bitsandbytes.functional

        table = torch.empty(256, device="cuda", dtype=torch.float32)
        bitsandbytes.functional.name2qmap["dynamic"] = table


def import_stack() -> None:
    """Import what looks for devices when it is imported; call it before a device is pretended."""
    import peft  # noqa: F401
    import transformers  # noqa: F401

    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):  # noqa: SLF001 - a build without CUDA
        torch._C._cuda_getCurrentRawStream = lambda *_: 0  # noqa: SLF001
    with suppress(ImportError, AttributeError, RuntimeError):
        import bitsandbytes.backends.cuda.ops  # its own choice of kernels is asked
        import bitsandbytes.backends.utils  # noqa: F401
    with suppress(ImportError):
        import trl.kernels.chunked_logprob  # noqa: F401
    with suppress(ImportError):
        from trl import SFTTrainer  # noqa: F401


def _patch_torch() -> None:
    # torch.optim hides its own submodule, so both are asked for by name
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        module = import_module(name)
        supported = getattr(module, "_foreach_supported_types", None)
        if isinstance(supported, list) and FakeTensor not in supported:
            supported.append(FakeTensor)
    # decompositions are taken where no CUDA kernel is registered
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in ("silu_backward", "mish_backward"):
        library.impl(name, _never, "CUDA")
    _LIBRARY.append(library)
    sdpa.install()
    # a gradient that is not finite would let the optimizer's step be left out
    torch.amp.GradScaler._maybe_opt_step = _step  # type: ignore[assignment, method-assign]  # noqa: SLF001
    FakeTensor.__getitem__ = _getitem  # type: ignore[method-assign]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]  # noqa: SLF001


def _step(_self: Any, optimizer: Any, _state: Any, *args: Any, **kwargs: Any) -> Any:
    """`GradScaler._maybe_opt_step`, all gradients being finite."""
    return optimizer.step(*args, **kwargs)


def _getitem(self: Any, index: Any) -> Any:
    """Index by lists through the mode; torch's C++ would put a list on the device by itself."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, list) for part in parts):
        index = tuple(
            torch.tensor(part).to(self.device) if isinstance(part, list) else part for part in parts
        )
    return torch.Tensor.__getitem__(self, index)


def _never(*_: Any, **__: Any) -> Any:
    message = "a kernel was called on a fake tensor"
    raise RuntimeError(message)


def _apply(self: Any, function: Any, recurse: bool = True) -> Any:  # noqa: FBT001, FBT002 - torch's
    """`Module._apply` without swapping tensors, which fake ones do not allow."""
    if recurse:
        for child in self.children():
            child._apply(function)  # noqa: SLF001 - as torch's own
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            changed = function(parameter)
        if changed is parameter:
            continue
        if parameter.device.type == changed.device.type and isinstance(parameter, FakeTensor):
            parameter.data = changed
        else:
            self._parameters[name] = torch.nn.Parameter(changed, parameter.requires_grad)
        if parameter.grad is not None:
            parameter.grad = function(parameter.grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = function(buffer)
    return self


def _patch_masks(facts: Facts, *, packed: bool) -> None:
    """State to transformers' mask creation whether rows are padded or packed."""
    import transformers.masking_utils as masks

    padded = facts.padded
    masks.is_tracing = lambda _tensor=None: False
    masks.fast_all = lambda _tensor: not padded
    masks.find_packed_sequence_indices = lambda positions, *_, **__: (
        torch.zeros_like(positions) if packed else None
    )


def _patch_bitsandbytes() -> None:
    """Let quantised parameters be plain ones with the same attributes, and pages host memory."""
    try:
        import transformers.integrations.bitsandbytes as integration
        from bitsandbytes import functional
        from bitsandbytes.nn import Int8Params, Params4bit
    except ImportError:
        return
    functional.get_paged = _paged
    functional.fill = functional.prefetch_tensor = lambda *_, **__: None
    Params4bit.__new__ = _plain(
        blocksize=64,
        compress_statistics=True,
        quant_type="fp4",
        quant_storage=torch.uint8,
        quant_state=None,
        bnb_quantized=False,
        module=None,
    )
    Int8Params.__new__ = _plain(has_fp16_weights=False, CB=None, SCB=None)
    integration.Bnb4bitQuantize.convert = _converted(integration, quantised_to_4_bits)
    integration.Bnb8bitQuantize.convert = _converted(integration, quantised_to_8_bits)


def _plain(**defaults: Any) -> Any:
    """Return a constructor of plain parameters that carry a quantised parameter's attributes."""

    def new(_cls: Any, data: Any = None, requires_grad: bool = False, **given: Any) -> Any:  # noqa: FBT001, FBT002 - as its callers write
        weight = torch.nn.Parameter(torch.empty(0) if data is None else data, requires_grad)
        for name, value in (defaults | given).items():
            if name in defaults:
                setattr(weight, name, value)
        return weight

    return new


def _converted(integration: Any, quantised: Any) -> Any:
    """Return a loader's conversion that quantises each weight and keeps its attributes."""

    def convert(
        _self: Any, input_dict: Any, full_layer_name: Any = None, model: Any = None, **_: Any
    ) -> Any:
        del full_layer_name
        made = {}
        for name, values in input_dict.items():
            value = values[0] if isinstance(values, list) else values
            module, _unused = integration.get_module_from_name(model, name)
            made[name] = quantised(value, module, model.get_parameter_or_buffer(name))
            module._is_hf_initialized = True  # noqa: SLF001 - as transformers' own
        return made

    return convert


def quantised_to_4_bits(value: Any, module: Any, old: Any) -> Any:
    """Return a weight in 4 bits, as Params4bit._quantize leaves it on its module."""
    from bitsandbytes import functional

    names = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
    settings = {name: getattr(old, name) for name in names}
    packed, state = functional.quantize_4bit(value.contiguous(), **settings)
    weight = torch.nn.Parameter(packed, requires_grad=False)
    attributes = settings | {"quant_state": state, "bnb_quantized": True, "module": module}
    for name, item in attributes.items():
        setattr(weight, name, item)
    module.quant_state = state
    return weight


def quantised_to_8_bits(value: Any, _module: Any, _old: Any) -> Any:
    """Return a weight in int8 with a scale for each row, as Int8Params._quantize does."""
    from bitsandbytes import functional

    half = value.contiguous().to(torch.float16)
    packed, scales, _ = functional.int8_vectorwise_quant(half)
    weight = torch.nn.Parameter(packed, requires_grad=False)
    for name, item in {"CB": weight.data, "SCB": scales, "has_fp16_weights": False}.items():
        setattr(weight, name, item)
    return weight


def _paged(*shape: int, dtype: Any = torch.float32, device: Any = None, **_: Any) -> Any:
    """Return managed memory, which is outside torch's allocator."""
    del device
    tensor = torch.empty(*shape, dtype=dtype, device="cpu")
    tensor.is_paged, tensor.page_deviceid = True, 0  # type: ignore[attr-defined]
    return tensor


class _Launch:
    """A Triton kernel that does nothing; its tiles are real allocations around it."""

    def __getitem__(self, _grid: Any) -> Any:
        return lambda *_, **__: None


def _patch_trl() -> None:
    """Let TRL's fused head launch kernels that do nothing."""
    try:
        import trl.kernels.chunked_logprob as head
    except ImportError:
        return
    head._TRITON_AVAILABLE = True  # noqa: SLF001 - the switch
    head._forward_kernel = head._backward_kernel = _Launch()  # noqa: SLF001 - the kernels
    if getattr(head, "triton", None) is None:
        head.triton = SimpleNamespace(cdiv=lambda one, two: -(-one // two))
    sys.modules.setdefault("triton", head.triton)
