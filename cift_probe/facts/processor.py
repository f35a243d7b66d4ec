"""What lscpu would print: the processor's features, clocks, caches, and what guards against what.

Sources: /proc/cpuinfo and /sys/devices/system/cpu (the kernel's admin guide, cputopology and
"Hardware vulnerabilities"), with cpufreq for clocks and governor.
"""

from __future__ import annotations

import re
from pathlib import Path

from cift_probe.evidence import Evidence, Known, Unknown, absent

_ROOT = Path("/")
_TREE = "sys/devices/system/cpu"
_MOST = 64  # entries of a folder that are read; there are about fifteen


def parse_features(text: str) -> dict[str, list[str] | str | int]:
    """Return "flags", "vendor" and "num_sockets" from /proc/cpuinfo; each may lack.

    Arm writes Features for flags, and no vendor.
    """
    found: dict[str, list[str] | str | int] = {}
    flags = re.search(r"^(?:flags|Features)[ \t]*:[ \t]*(.*)$", text, re.MULTILINE)
    if flags is not None and flags[1].split():
        found["flags"] = flags[1].split()
    vendor = re.search(r"^vendor_id[ \t]*:[ \t]*(\S+)", text, re.MULTILINE)
    if vendor is not None:
        found["vendor"] = vendor[1]
    sockets = set(re.findall(r"^physical id[ \t]*:[ \t]*(\d{1,6})[ \t]*$", text, re.MULTILINE))
    if sockets:
        found["num_sockets"] = len(sockets)
    return found


def parse_cache_size(text: str) -> int:
    """Return bytes of "512K" or "32M"; raises ValueError for another form."""
    match = re.fullmatch(r"(\d{1,9})([KMG]?)", text.strip())
    if match is None:
        message = f"{text[:20]!r} is no size of a cache"
        raise ValueError(message)
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def read_processor(root: Path = _ROOT) -> dict[str, Evidence]:
    """Return features, highest clock (Hz), governor, caches (bytes) and vulnerabilities."""
    told = parse_features(_text(root / "proc/cpuinfo"))
    source, missing = "/proc/cpuinfo", Unknown("the system does not tell", "/proc/cpuinfo")
    found: dict[str, Evidence] = {
        f"host.cpu.{name}": Known(told[name], unit, source) if name in told else missing
        for name, unit in (("flags", ""), ("vendor", ""), ("num_sockets", "1"))
    }
    frequency = root / _TREE / "cpu0/cpufreq"
    governor = _text(frequency / "scaling_governor").strip()
    most = _text(frequency / "cpuinfo_max_freq").strip()
    unset = absent("the system does not let clocks be chosen here, as in most guests", "cpufreq")
    return {
        **found,
        "host.cpu.governor": Known(governor, source="cpufreq") if governor else unset,
        "host.cpu.clock.max": (
            Known(int(most) * 1000, "Hz", "cpufreq") if most.isdecimal() else unset
        ),
        "host.cpu.caches": _caches(root),
        "host.cpu.vulnerabilities": _vulnerabilities(root),
    }


def _caches(root: Path) -> Evidence:
    found: dict[str, int] = {}
    for folder in _entries(root / _TREE / "cpu0/cache"):
        level, kind = (_text(folder / name).strip() for name in ("level", "type"))
        try:
            size = parse_cache_size(_text(folder / "size"))
        except ValueError:
            continue  # index folders without a size, and files beside them
        found[f"L{level}{kind[:1].lower() if kind in ('Data', 'Instruction') else ''}"] = size
    source = f"/{_TREE}/cpu0/cache"
    if found:
        return Known(found, "B", source)
    return Unknown("the kernel does not show caches here", source)


def _vulnerabilities(root: Path) -> Evidence:
    source = f"/{_TREE}/vulnerabilities"
    found = {path.name: _text(path).strip() for path in _entries(root / source.lstrip("/"))}
    if found:
        return Known(found, source=source)
    return Unknown("the kernel does not show them here", source)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())[:_MOST]
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
