"""Texts about a GPU that torch has no code for: real, or a false alarm.

A binary serves devices of its own major version and an equal or higher minor one, so that the
literal name missing from a list says nothing (CUDA C++ Programming Guide, Binary Compatibility).
"""

from __future__ import annotations

import re

_DEVICE = re.compile(r"cuda capability (?:sm_)?(\d{1,3}\.\d|\d{2,3})\b", re.IGNORECASE)
_LIST = re.compile(r"\bsm_(\d{2,3})[af]?\b")
_BOUNDS = re.compile(r"is \((\d{1,2}\.\d)\) ?- ?\((\d{1,2}\.\d)\)")


def decide(text: str) -> str:
    """Return "arch_false_alarm" where the text itself names a binary that serves the GPU."""
    found = _DEVICE.search(text)
    if found is None:
        return "arch_missing"
    device = _capability(found[1])
    bounds = _BOUNDS.search(text)
    if bounds is not None:
        lowest, highest = _capability(bounds[1]), _capability(bounds[2])
        served = lowest <= device and device[0] <= highest[0]
        return "arch_false_alarm" if served else "arch_missing"
    offered = [_capability(name) for name in _LIST.findall(text[found.end() :])]
    served = any(major == device[0] and minor <= device[1] for major, minor in offered)
    return "arch_false_alarm" if served else "arch_missing"


def _capability(name: str) -> tuple[int, int]:
    if "." in name:
        major, _, minor = name.partition(".")
        return int(major), int(minor)
    return int(name[:-1]), int(name[-1])
