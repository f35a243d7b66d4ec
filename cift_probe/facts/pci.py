"""Whether the machine has an NVIDIA GPU at all, asked without the driver."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cift_probe.evidence import Evidence, Known, Unknown

_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")  # PCI class: VGA and 3D controller
_TREE = "sys/bus/pci/devices"
_NODE = re.compile(r"nvidia\d+")


def read_hardware(root: Path = Path("/")) -> Evidence:
    """Return how many NVIDIA GPUs the PCI bus and the device nodes show.

    Unknown where a GPU could be without either: WSL, Tegra, another system than Linux. Where the
    bus is hidden, as in some sandboxes, the missing node decides: without it no process reaches
    a GPU.
    """
    if (root / "dev/dxg").exists():
        return Unknown("WSL shows no PCI devices of the host", "/dev/dxg")
    if "nvidia,tegra" in _text(root / "proc/device-tree/compatible"):
        return Unknown("the GPU of a Tegra module is not on the PCI bus", "/proc/device-tree")
    nodes = _names(root / "dev")
    num_nodes = sum(bool(_NODE.fullmatch(name)) for name in nodes or ())
    folders = _names(root / _TREE)
    if folders is None and sys.platform != "linux":
        return Unknown(f"{sys.platform} shows no PCI bus", _TREE)
    on_bus = sum(_is_gpu(root / _TREE / name) for name in folders or ())
    note = "the PCI bus is hidden here; counted /dev/nvidia*" if folders is None else ""
    return Known(max(on_bus, num_nodes), "1", f"/{_TREE} and /dev/nvidia*", note=note)


def _is_gpu(folder: Path) -> bool:
    is_nvidia = _text(folder / "vendor").strip() == _NVIDIA
    return is_nvidia and _text(folder / "class").startswith(_DISPLAY)


def _names(folder: Path) -> list[str] | None:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
