"""What the environment of this process asks for: variables that training stacks read.

Only names of the list below are kept: an environment is full of other people's secrets.
Sources: CUDA C++ programming guide, "CUDA environment variables"; torch's notes on CUDA and on
environment variables; collect_env; bitsandbytes, accelerate, Triton and NCCL documentation.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.sensors import (
    Nvml,
    RefusedError,
    parse_selection,
    read_boards,
    read_cuda_order,
    select,
)

NAMES = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH"),
    *("CUDA_MPS_PIPE_DIRECTORY", "CUDA_DISABLE_PTX_JIT", "NVIDIA_TF32_OVERRIDE"),
    *("CUBLAS_WORKSPACE_CONFIG", "LD_LIBRARY_PATH", "LD_PRELOAD", "CONDA_PREFIX", "VIRTUAL_ENV"),
    *("PYTHONPATH", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCH_CUDA_ARCH_LIST"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION"),
    *("BNB_CUDA_VERSION", "BNB_ROCM_VERSION", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "CC", "CXX"),
    *("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME"),
    *("NCCL_DEBUG", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    *("MALLOC_ARENA_MAX", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_HUB_ENABLE_HF_TRANSFER"),
    *("TMPDIR", "WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_ID", "ACCELERATE_MIXED_PRECISION"),
)
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_HIDES_ALL = ("", "-1", "nodevfiles")
_CONFIG = "accelerate/default_config.yaml"
_ROW = re.compile(r"(?P<indent> {0,8})(?P<name>[A-Za-z_]\w{0,60}):[ \t]{0,8}(?P<value>.{0,200})")
_ADDRESSES = ("main_process_ip", "main_process_port", "same_network", "machine_rank")
_MAX_CONFIG_BYTES = 1 << 16


def parse_allocator(text: str) -> dict[str, str]:
    """Return the settings of an allocator variable by name, as torch splits it.

    >>> parse_allocator("expandable_segments:True, roundup_power2_divisions:[256:1,512:2]")
    {'expandable_segments': 'True', 'roundup_power2_divisions': '[256:1,512:2]'}
    """
    found, depth, part = {}, 0, ""
    for char in f"{text},":
        depth += {"[": 1, "]": -1}.get(char, 0)
        if char == "," and depth <= 0:
            name, colon, value = part.partition(":")
            if colon and name.strip():
                found[name.strip()] = value.strip()
            part = ""
        else:
            part += char
    return found


def parse_accelerate(text: str) -> dict[str, str]:
    """Return the settings of accelerate's default configuration; what lies deeper gets a dot.

    Addresses of machines are left out. A line that is no `name: value` is skipped.
    """
    found: dict[str, str] = {}
    parent = ""
    for line in text.splitlines():
        match = _ROW.fullmatch(line.rstrip())
        if match is None:
            continue
        name, value = match["name"], match["value"].strip("'\" ")
        if not match["indent"]:
            parent = "" if value else name
        elif parent:
            name = f"{parent}.{name}"
        if value and name not in _ADDRESSES:
            found[name] = value
    return found


def read_settings(
    nvml: Nvml, variables: Mapping[str, str] | None = None, home: Path | None = None
) -> dict[str, Evidence]:
    """Return variables, what of them names no device, and accelerate's default configuration."""
    told = os.environ if variables is None else variables
    source = "environment of this process"
    kept = {name: told[name] for name in NAMES if name in told}
    command = shutil.which("accelerate")
    return {
        "environment.variables": Known(kept, source=source),
        "environment.selection.unmatched": read_unmatched(nvml, told.get("CUDA_VISIBLE_DEVICES")),
        "environment.allocator.expandable": _expandable(told),
        "environment.accelerate.config": _read_accelerate(told, home),
        "environment.accelerate.command": (
            Known(command, source="PATH") if command else absent("no accelerate on the PATH")
        ),
    }


def read_unmatched(
    nvml: Nvml,
    selection: str | None,
    read_order: Callable[[], list[str] | None] = read_cuda_order,
) -> Evidence:
    """Return the entries of CUDA_VISIBLE_DEVICES that name no device of this machine.

    CUDA drops the first such entry and all behind it, and says nothing.
    """
    source = "CUDA_VISIBLE_DEVICES against NVML"
    if selection is None:
        return absent("CUDA_VISIBLE_DEVICES is not set", source)
    if selection.strip().lower() in _HIDES_ALL:
        return Known([], source=source, note="hides every device, as is meant by it")
    try:
        boards = read_boards(nvml)
    except (RefusedError, ValueError) as error:
        return Unknown(str(error), source)
    order = read_order() if len({board.name for board in boards}) > 1 else None
    lost = [
        part.strip()
        for part in selection.split(",")
        if not _names_one(part, lambda entries: select(entries, boards, order))
    ]
    return Known(lost, source=source)


def _names_one(part: str, find: Callable[[list[str]], list[str]]) -> bool:
    entries = parse_selection(part)
    return bool(entries and find(entries))


def _expandable(told: Mapping[str, str]) -> Evidence:
    source = " or ".join(_ALLOCATOR)
    for name in _ALLOCATOR:  # torch's order: an older name, where it is set, wins
        value = parse_allocator(told.get(name, "")).get("expandable_segments")
        if value is not None:
            return Known(value.lower() == "true", source=name)
    return absent("no variable asks for expandable segments", source)


def _read_accelerate(told: Mapping[str, str], home: Path | None) -> Evidence:
    cache = told.get("HF_HOME") or told.get("XDG_CACHE_HOME", "")
    if told.get("HF_HOME"):
        path = Path(cache) / _CONFIG
    elif cache:
        path = Path(cache) / "huggingface" / _CONFIG
    else:
        try:
            path = (home or Path.home()) / ".cache" / "huggingface" / _CONFIG
        except RuntimeError:  # a user id without an account, as in containers
            return absent("there is no home folder", _CONFIG)
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES).decode(errors="replace")
    except OSError:
        return absent("accelerate has no default configuration here", str(path))
    return Known(parse_accelerate(text), source=str(path))
