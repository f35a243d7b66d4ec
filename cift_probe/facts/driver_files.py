"""The driver as the kernel shows it: module, device nodes, NVSwitch, fabric manager.

Sources: /proc/driver/nvidia/version (NVIDIA driver README, "The /proc interface"), /proc/modules,
/dev/nvidia*, and the path of libnvidia-ml that this process has mapped.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.facts import pci
from cift_probe.facts.cuda_start import parse_library_version
from cift_probe.facts.loaded import parse_library, parse_maps
from cift_probe.sensors import Nvml, parse_text

_ROOT = Path("/")
_PROC = "proc/driver/nvidia/version"
_MODULE = re.compile(
    r"NVRM version:[ \t]{0,8}NVIDIA UNIX (?P<kind>Open )?[^\n]{0,80}?Kernel Module[^\n]{0,40}?"
    r"[ \t](?P<version>\d{3,4}\.\d{1,4}(?:\.\d{1,4})?)"
)
_MANAGER = "nv-fabricmanager"
_MANAGER_VERSION = re.compile(r"(\d{3,4}\.\d{1,4}(?:\.\d{1,4})?)")
_DEADLINE_S = 10.0


def parse_module(text: str) -> tuple[str, str]:
    """Return version and kind ("open" or "proprietary") from /proc/driver/nvidia/version.

    Both are empty where the text has another form.
    """
    match = _MODULE.search(text)
    if match is None:
        return "", ""
    return match["version"], "open" if match["kind"] else "proprietary"


def parse_modules(text: str) -> list[str]:
    """Return NVIDIA's modules from /proc/modules."""
    names = [line.split(" ", 1)[0] for line in text.splitlines()]
    return sorted(
        {name for name in names if re.fullmatch(r"nvidia\w{0,40}|gdrdrv|nv_peer_mem", name)}
    )


def parse_manager_version(text: str) -> str:
    """Return the version that nv-fabricmanager prints; empty where it prints none."""
    match = _MANAGER_VERSION.search(text)
    return match[1] if match else ""


def read_driver_files(
    nvml: Nvml, root: Path = _ROOT, ask: Callable[[str], str] | None = None
) -> dict[str, Evidence]:
    """Return what kernel, device nodes and services say of the driver, without a scope."""
    module, kind = _read_module(nvml, root)
    return {
        "driver.module.version": module,
        "driver.module.kind": kind,
        "driver.modules": _read_modules(root),
        "driver.nodes": _read_nodes(root),
        "driver.library.ml.version": _read_ml_version(nvml, root),
        "driver.nvswitch.count": _read_switches(root),
        **_read_manager(root, ask or _ask),
    }


def _read_module(nvml: Nvml, root: Path) -> tuple[Evidence, Evidence]:
    source = f"/{_PROC}"
    text = _text(root / _PROC)
    version, kind = parse_module(text or "")
    if version:
        return Known(version, "version", source), Known(kind, source=source)
    hidden = Unknown("the kernel does not show its NVIDIA module here", source)
    if nvml.problem:
        nothing = _no_driver(nvml, root)
        missing = hidden if nothing is None else nothing
        return missing, missing
    # nvmlInit refuses a module of another version (code 18): what works, fits
    told = nvml.evidence("nvmlSystemGetDriverVersion", unit="version", read=parse_text)
    return told, hidden


def _read_modules(root: Path) -> Evidence:
    text = _text(root / "proc/modules")
    if text is None:
        return Unknown("the kernel does not show its modules here", "/proc/modules")
    return Known(parse_modules(text), source="/proc/modules")


def _read_nodes(root: Path) -> Evidence:
    try:
        names = sorted(entry.name for entry in (root / "dev").iterdir())
    except OSError as error:
        return Unknown(f"/dev: {error.strerror}", "/dev")
    return Known([name for name in names if re.match(r"nvidia|nvhost|dxg$", name)], source="/dev")


def _no_driver(nvml: Nvml, root: Path) -> Known | None:
    """Return that there is no driver, on a machine without an NVIDIA GPU that would need one."""
    there = pci.read_hardware(root)
    if isinstance(there, Unknown) or there.value:
        return None
    return absent(f"no driver: {nvml.problem}; no NVIDIA device on the PCI bus", there.source)


def _read_ml_version(nvml: Nvml, root: Path) -> Evidence:
    source = "/proc/self/maps, once NVML was asked"
    paths = parse_maps(_text(root / "proc/self/maps") or "")
    path = next((path for path in paths if parse_library(path) == "libnvidia-ml"), "")
    if not path:
        hidden = Unknown("this process has not loaded libnvidia-ml", source)
        nothing = _no_driver(nvml, root) if nvml.problem else None
        return hidden if nothing is None else nothing
    version = parse_library_version(str((root / path.lstrip("/")).resolve()))
    if version:
        return Known(version, "version", path)
    return absent("the library's name has no version, as under WSL", path)


def _read_switches(root: Path) -> Evidence:
    pattern = re.compile(r"nvidia-nvswitch\d+")
    try:
        names = [entry.name for entry in (root / "dev").iterdir()]
    except OSError as error:
        return Unknown(f"/dev: {error.strerror}", "/dev")
    note = "those given to this container or machine; a host may keep its switches to itself"
    return Known(
        sum(bool(pattern.fullmatch(n)) for n in names), "1", "/dev/nvidia-nvswitch*", note=note
    )


def _read_manager(root: Path, ask: Callable[[str], str]) -> dict[str, Evidence]:
    """Return whether the fabric manager runs in sight of this process, and its version."""
    source = "processes in sight"
    place = shutil.which(_MANAGER, path=str(root / "usr/bin"))
    running = any(_name(process) == _MANAGER for process in psutil.process_iter())
    if place is None:
        nothing = absent("no nv-fabricmanager here; in a container it is the host's", "/usr/bin")
        return {
            "driver.fabric_manager.running": Known(value=True, source=source)
            if running
            else nothing,
            "driver.fabric_manager.version": nothing,
        }
    try:
        version = parse_manager_version(ask(place))
    except (OSError, subprocess.SubprocessError):
        version = ""
    silent = Unknown("it prints no version", place)
    return {
        "driver.fabric_manager.running": Known(running, source=source),
        "driver.fabric_manager.version": Known(version, "version", place) if version else silent,
    }


def _name(process: psutil.Process) -> str:
    try:
        # the kernel cuts names at 15 characters; psutil mends that from the command line
        return str(process.name())
    except psutil.Error:
        return ""


def _ask(place: str) -> str:
    done = subprocess.run(  # noqa: S603 - a tool of the driver, asked for its version
        [place, "--version"], capture_output=True, timeout=_DEADLINE_S, check=False
    )
    return done.stdout.decode(errors="replace")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
