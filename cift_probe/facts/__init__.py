"""What the machine says: one file per source, read when a check first asks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

from cift_probe.evidence import Evidence, Scope, Unknown, absent
from cift_probe.facts import (
    cuda_start,
    driver_files,
    host,
    loaded,
    nvidia,
    packages,
    processor,
    requirements,
    settings,
    storage,
    system,
    toolchain,
    torch_build,
    wheels,
)
from cift_probe.sensors import open_nvml, read_visible

DEVICE_PREFIX = "gpu"

DeviceCall: TypeAlias = Callable[[str, str, Any, float], Any]
_Call = Callable[[str, Any, float], Any] | None
_Reader = Callable[[str, Scope, _Call], Mapping[str, Evidence]]


def read_devices() -> list[str]:
    """Return the labels of the GPUs that this process may see: gpu0, gpu1, ….

    The number is the place in CUDA_VISIBLE_DEVICES, or in PCI bus order without that variable.
    """
    with open_nvml() as nvml:
        return [f"{DEVICE_PREFIX}{place}" for place in range(len(read_visible(nvml)))]


def visible_uuid(label: str) -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES that shows one GPU alone, or None without it."""
    with open_nvml() as nvml:
        return _uuid(read_visible(nvml), label)


def read_everything(devices: list[str], call: DeviceCall | None) -> dict[str, Evidence]:
    """Return all that every source says of the machine and of `devices`, by stored key.

    `call(device, function, payload, deadline_s)` runs a function in the child of one device.
    Children start at the same time, and what needs none is read meanwhile: to import torch takes
    longer than all the rest.
    """

    def read(device: str, keys: tuple[str, ...]) -> dict[str, Evidence]:
        found: dict[str, Evidence] = {}
        inner = None if call is None else partial(call, device or "cpu")
        for key in keys:
            found.update(produce(key, Scope(device), inner))
        return found

    first, *others = devices or [""]
    tasks = [(first, _OF_MACHINE), (first, _OF_TORCH + (_OF_DEVICE if devices else ()))]
    tasks += [(device, _OF_DEVICE) for device in others]
    found: dict[str, Evidence] = {}
    with ThreadPoolExecutor(max_workers=len(tasks)) as pool:
        for told in pool.map(lambda task: read(*task), tasks):
            found.update(told)
    return found


def produce(key: str, scope: Scope, call: _Call) -> Mapping[str, Evidence]:
    """Read the source that `key` comes from; return all it says, by stored key.

    `call` runs a function in a child process that sees the device of the scope: facts that need
    torch are read there, and are Unknown without it.
    """
    for prefix, read in _SOURCES:
        if key.startswith(prefix):
            return read(key, scope, call)
    return {}


def _read_host(_key: str, _scope: Scope, _call: _Call) -> Mapping[str, Evidence]:
    return host.read_host() | system.read_system() | processor.read_processor()


def _read_packages(key: str, _scope: Scope, _call: _Call) -> Mapping[str, Evidence]:
    found = packages.read_packages()
    name = key.removeprefix("package.")
    if key in found or name == key:
        return found
    return found | {key: packages.read_version(name)}


def _read_wheels(_key: str, _scope: Scope, _call: _Call) -> Mapping[str, Evidence]:
    return wheels.read_wheels(packages.read_installed()) | requirements.read_conflicts()


def _read_driver(_key: str, _scope: Scope, _call: _Call) -> Mapping[str, Evidence]:
    with open_nvml() as nvml:
        return nvidia.read_driver(nvml) | driver_files.read_driver_files(nvml)


def _read_start(_key: str, scope: Scope, _call: _Call) -> Mapping[str, Evidence]:
    label = scope.device
    found = cuda_start.read_machine()
    if not label.startswith(DEVICE_PREFIX):
        return found
    return found | cuda_start.read_device(visible_uuid(label) or "", label)


def _read_settings(_key: str, _scope: Scope, _call: _Call) -> Mapping[str, Evidence]:
    with open_nvml() as nvml:
        return settings.read_settings(nvml)


def _read_device(_key: str, scope: Scope, _call: _Call) -> Mapping[str, Evidence]:
    label = scope.device
    if label == "cpu":
        return nvidia.no_device(label, absent("the CPU is no NVIDIA device"))
    with open_nvml() as nvml:
        uuids = read_visible(nvml)
        uuid = _uuid(uuids, label)
        if uuid is None:
            why = nvml.problem or f"this process sees {len(uuids)} GPU(s)"
            return nvidia.no_device(label, Unknown(f"there is no {label or 'GPU named'}: {why}"))
        found = nvidia.read_device(nvml, uuid, _place(label), visible=uuids)
        return nvidia.scoped(found, label)


def _uuid(uuids: list[str], label: str) -> str | None:
    place = _place(label)
    return uuids[place] if 0 <= place < len(uuids) else None


def _place(label: str) -> int:
    match = re.fullmatch(rf"{DEVICE_PREFIX}(\d+)", label)
    return int(match[1]) if match else -1


# The first prefix that fits decides.
_SOURCES: tuple[tuple[str, _Reader], ...] = (
    ("host.", _read_host),
    ("storage.", lambda _key, _scope, _call: storage.read_storage()),
    ("package.nvidia.doubled", _read_wheels),
    ("package.related", _read_wheels),
    ("package.conda", _read_wheels),
    ("package.conflicts", _read_wheels),
    ("package.glibc.", _read_wheels),
    ("bitsandbytes.native", lambda _key, _scope, call: loaded.read_native(call)),
    ("bitsandbytes.", _read_wheels),
    ("xformers.operators", lambda _key, _scope, call: torch_build.read_operators(call)),
    ("xformers.", _read_wheels),
    ("package.", _read_packages),
    ("flash_attn.", _read_packages),
    ("environment.", _read_settings),
    ("toolchain.", lambda _key, _scope, _call: toolchain.read_toolchain()),
    ("library.", lambda _key, _scope, call: loaded.read_loaded(call)),
    ("driver.start.", _read_start),
    ("driver.library.cuda.", _read_start),
    *((key, _read_start) for key in cuda_start.DEVICE_KEYS),
    ("driver.", _read_driver),
    ("device.count", _read_driver),
    ("device.lost", _read_driver),
    ("device.", _read_device),
    ("torch.device.", lambda _key, scope, call: torch_build.read_torch_device(call, scope.device)),
    ("torch.", lambda _key, scope, call: torch_build.read_torch_build(call, scope.device)),
)
# one key of each source above, by what the source is about
_OF_MACHINE = (
    *("host.os", "storage.work.free", "package.torch", "package.related", "environment.variables"),
    *("toolchain.compiler", "driver.version", "driver.start.code"),
)
_OF_TORCH = ("torch.version", "library.loaded", "bitsandbytes.native", "xformers.operators")
_OF_DEVICE = ("device.name", "device.managed", "torch.device.name", "torch.cuda.available")
