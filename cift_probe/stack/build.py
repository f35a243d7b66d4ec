"""What torch says of its build and of the device it sees; carried out in a child process.

The child sees one GPU at the most, through CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

from typing import Any


def read_torch_build(_payload: None) -> dict[str, Any]:
    """Return version, build flags and whether CUDA initialises; None is "this build has none"."""
    import torch

    cuda = torch.version.cuda
    found: dict[str, Any] = {
        "version": str(torch.__version__),
        "file": torch.__file__,
        "cuda": cuda,
        "hip": torch.version.hip,
        "arch_list": torch.cuda.get_arch_list() if cuda else None,
        "cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
        "cudnn": _cudnn(torch) if cuda else None,
        "nccl": _nccl(torch) if cuda else None,
        "available": torch.cuda.is_available(),
        "count": torch.cuda.device_count(),
        "error": None,
    }
    if cuda and not found["available"]:
        found["error"] = _initialisation_error(torch)
    if cuda and not found["arch_list"]:
        # get_arch_list() is empty when CUDA is not available; the flags are compiled in
        found["arch_list"] = str(torch._C._cuda_getArchFlags() or "").split()  # noqa: SLF001
    return found


def read_torch_device(_payload: None) -> dict[str, Any]:
    """Return name, UUID, capability and memory of the one visible device, as CUDA tells them."""
    import torch

    found = torch.cuda.get_device_properties(0)
    uuid = getattr(found, "uuid", None)
    return {
        "name": found.name,
        "uuid": None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}",
        "capability": f"{found.major}.{found.minor}",
        "total_memory": found.total_memory,
    }


def _initialisation_error(torch: Any) -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "torch.cuda.is_available() is false, yet CUDA initialises"


def _cudnn(torch: Any) -> str | None:
    number = torch.backends.cudnn.version()
    if number is None:
        return None
    # cudnn.h: major * 10000 + minor * 100 + patch since 9.0, major * 1000 + … before
    thousand = 10_000 if number >= 90_000 else 1_000  # noqa: PLR2004 - the two schemes above
    return f"{number // thousand}.{number % thousand // 100}.{number % 100}"


def _nccl(torch: Any) -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return None
