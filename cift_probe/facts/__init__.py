"""What the machine says: one file per source, read when a check first asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cift_probe.evidence import Evidence, Scope
from cift_probe.facts import host, nvidia, packages, storage, torch_build
from cift_probe.facts.torch_build import Call
from cift_probe.sensors import open_nvml, read_visible

DEVICE_PREFIX = "gpu"


def read_devices() -> list[str]:
    """Return the labels of the GPUs that this process may see: gpu0, gpu1, …."""
    with open_nvml() as nvml:
        return [f"{DEVICE_PREFIX}{place}" for place in range(len(read_visible(nvml)))]


def visible_uuid(label: str) -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES that shows one GPU alone, or None without it."""
    with open_nvml() as nvml:
        uuids = read_visible(nvml)
    place = _place(label)
    return uuids[place] if 0 <= place < len(uuids) else None


def produce(name: str, scope: Scope, call: Call) -> Mapping[str, Evidence]:
    """Read the source that `name` comes from; return all it says, by stored key.

    `call` runs a function in a child process that sees the device of the scope: facts that need
    torch are read there.
    """
    for prefix, read in _SOURCES:
        if name.startswith(prefix):
            return read(scope.device, call)
    return {}


def _driver(_device: str, _call: Call) -> Mapping[str, Evidence]:
    with open_nvml() as nvml:
        return nvidia.read_driver(nvml)


def _device(label: str, _call: Call) -> Mapping[str, Evidence]:
    with open_nvml() as nvml:
        uuids = read_visible(nvml)
        place = _place(label)
        if not 0 <= place < len(uuids):
            return nvidia.no_device(label, nvml.problem or f"there is no {label or 'GPU'}")
        return nvidia.scoped(nvidia.read_device(nvml, uuids[place], place), label)


def _place(label: str) -> int:
    return int(label.removeprefix(DEVICE_PREFIX)) if label.startswith(DEVICE_PREFIX) else -1


# The first prefix that fits decides.
_SOURCES: tuple[tuple[str, Callable[[str, Call], Mapping[str, Evidence]]], ...] = (
    ("host.", lambda _device, _call: host.read_host()),
    ("storage.", lambda _device, _call: storage.read_storage()),
    ("package.", lambda _device, _call: packages.read_packages()),
    ("flash_attn.", lambda _device, _call: packages.read_packages()),
    ("driver.", _driver),
    ("device.count", _driver),
    ("device.", _device),
    ("torch.device.", lambda device, call: torch_build.read_torch_device(call, device)),
    ("torch.", lambda _device, call: torch_build.read_torch_build(call)),
)
