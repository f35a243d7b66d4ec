"""What torch says of its build and of the device it sees; carried out in a child process.

The child sees one GPU at the most, through CUDA_VISIBLE_DEVICES. None stands for "this build has
none", or "torch does not tell".
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

_CUDNN_9 = 90_000  # cudnn.h: major * 10000 + minor * 100 + patch since 9, major * 1000 + … before


def read_torch_build(_payload: Any) -> dict[str, Any]:
    """Return version, build flags and whether CUDA starts; {"missing": reason} without torch.

    Asks for the number of devices and no more, which makes no CUDA context.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return {"missing": "torch is not installed"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        count = torch.cuda.device_count()
    accelerated = bool(torch.version.cuda or torch.version.hip)
    found = {
        "version": str(torch.__version__),
        "file": torch.__file__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "arch_list": _arch_list(torch) if accelerated else None,
        "cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
        "nccl": _nccl(torch) if accelerated else None,
        **_details(torch),
        "available": available,
        "count": count,
        "error": None if available else _start_error(torch, caught),
    }
    with suppress(RuntimeError):  # torch was built against another cuDNN than the one loaded
        cudnn: Any = torch.backends.cudnn
        number = cudnn.version()
        found["cudnn"] = None if number is None else parse_cudnn(int(number))
    return found


def read_torch_device(_payload: Any) -> dict[str, Any]:
    """Return what torch tells of the one visible device; memory in bytes.

    Makes a CUDA context. Raises RuntimeError or AssertionError when CUDA does not start.
    """
    import torch

    found = torch.cuda.get_device_properties(0)
    free, _ = torch.cuda.mem_get_info(0)
    return {
        "name": found.name,
        "uuid": parse_uuid(getattr(found, "uuid", None), os.environ.get("CUDA_VISIBLE_DEVICES")),
        "capability": f"{found.major}.{found.minor}",
        "total_memory": int(found.total_memory),
        "free_memory": int(free),
        "bf16": bool(torch.cuda.is_bf16_supported(including_emulation=False)),
        "integrated": bool(found.is_integrated),
        "num_multiprocessors": int(found.multi_processor_count),
        "shared_memory": getattr(found, "shared_memory_per_block_optin", None),
        "expandable_segments": _expandable(torch),
    }


def read_operators(_payload: Any) -> dict[str, Any]:
    """Return what xformers says of each operator: "available", or why it is not.

    {"missing": reason} without xformers. Raises what its import raises.
    """
    try:
        info = import_module("xformers.info")
    except ModuleNotFoundError as error:
        if error.name != "xformers":
            raise
        return {"missing": "xformers is not installed"}
    return {"operators": {str(k): str(v) for k, v in info.get_features_status().items()}}


def parse_uuid(told: object, selected: str | None) -> str | None:
    """Return torch's UUID as NVML writes it, or None when it does not name the device.

    torch gives the digits alone, and of a MIG slice they may be those of its board.
    """
    if told is None:
        return None
    digits = str(told).removeprefix("GPU-")
    if selected and selected.startswith("MIG-"):
        return selected if selected.endswith(digits) else None
    return f"GPU-{digits}"


def parse_cudnn(number: int) -> str:
    """Return "9.10.2" from 91002, "8.9.7" from 8907."""
    major, rest = divmod(number, 10_000 if number >= _CUDNN_9 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def parse_rocm(text: str) -> dict[str, str | None]:
    """Return the versions of HIP's runtime and MIOpen from torch's configuration text."""
    rows = [line.strip(" -") for line in text.splitlines()]
    return {
        name: next((row.rsplit(None, 1)[-1] for row in rows if row.startswith(title)), None)
        for name, title in (("hip_runtime", "HIP Runtime"), ("miopen", "MIOpen"))
    }


def _details(torch: Any) -> dict[str, Any]:
    """Return what issue templates ask of a build; a torch that lacks one of them leaves it out."""
    asked: dict[str, Callable[[], Any]] = {
        "debug": lambda: bool(torch.version.debug),
        "git": lambda: torch.version.git_version,
        "xnnpack": lambda: bool(import_module("torch.backends.xnnpack").enabled),
        "xpu": lambda: getattr(torch.version, "xpu", None),
    }
    found = {"accelerator": _accelerator(torch)}
    for name, ask in asked.items():
        with suppress(AttributeError, ImportError, RuntimeError):
            found[name] = ask()
    with suppress(AttributeError, RuntimeError):
        found |= parse_rocm(torch.__config__.show())
    return found


def _accelerator(torch: Any) -> str | None:
    try:
        current = torch.accelerator.current_accelerator()
    except (AttributeError, RuntimeError):  # torch before 2.6, or a driver that does not start
        return None
    return "none" if current is None else str(current.type)


def _expandable(torch: Any) -> bool | None:
    # Not the environment: torch before 2.10 does not read PYTORCH_ALLOC_CONF for CUDA.
    try:
        told = torch.cuda.memory._snapshot()["allocator_settings"]  # noqa: SLF001 - the only way
        return bool(told["expandable_segments"])
    except (AttributeError, KeyError, RuntimeError, TypeError):
        return None


def _arch_list(torch: Any) -> list[str]:
    # Not torch.cuda.get_arch_list(): that is empty where CUDA does not start.
    return str(torch._C._cuda_getArchFlags() or "").split()  # noqa: SLF001 - as above


def _start_error(torch: Any, caught: list[warnings.WarningMessage]) -> str:
    texts = [str(item.message) for item in caught if "CUDA" in str(item.message)]
    if texts:
        return " ".join(texts[0].split())
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "torch sees no CUDA device, yet CUDA starts"


def _nccl(torch: Any) -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return None
