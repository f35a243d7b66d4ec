"""XIDs: what the driver wrote of a device into the kernel's log, where this user may read that.

Sources: NVIDIA's "XID Errors" (the form of the line); /dev/kmsg (kernel's dev-kmsg ABI), which
root alone may read where kernel.dmesg_restrict is 1. Nothing is consumed by reading.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.facts.gpu_links import parse_bus_id

KEYS = ("device.xids", "device.xids.last")
_LINE = re.compile(
    r"NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?:\.\d)?\): "
    r"(?P<number>\d{1,4})(?P<rest>[^\n]{0,200})"
)
_RECORD_BYTES = 8192  # one record of /dev/kmsg
_MAX_RECORDS = 200_000
_SOURCE = "/dev/kmsg"


def parse_xids(text: str) -> dict[str, list[tuple[int, str]]]:
    """Return (number, line) of every XID by PCI address without function, "0000:1b:00".

    >>> parse_xids("[1.0] NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.")
    {'0000:06:00': [(79, '79, GPU has fallen off the bus.')]}
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for match in _LINE.finditer(text):
        line = f"{match['number']}{match['rest']}".strip()
        found.setdefault(match["bus"].lower(), []).append((int(match["number"]), line))
    return found


def read_xids(bus_id: Evidence, log: str | Unknown) -> dict[str, Evidence]:
    """Return the numbers of the XIDs of one device since the log began, and the last line."""
    if isinstance(log, Unknown):
        return dict.fromkeys(KEYS, log)
    name = parse_bus_id(str(bus_id.value)) if isinstance(bus_id, Known) else ""
    if not name:
        return dict.fromkeys(KEYS, Unknown("the device's PCI address is not known", _SOURCE))
    rows = parse_xids(log).get(name.rpartition(".")[0], [])
    numbers = sorted({number for number, _ in rows})
    last = rows[-1][1] if rows else "none since the log began"
    return {
        "device.xids": Known(numbers, source=_SOURCE, note=f"{len(rows)} lines" if rows else ""),
        "device.xids.last": Known(last, source=_SOURCE),
    }


@cache
def read_log(place: str) -> str | Unknown:
    """Return what the kernel's log holds now, read once per process."""
    if not Path(place).exists():
        return Unknown("this system shows no kernel log, as in most containers", _SOURCE)
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        hint = "; hint: sudo dmesg | cift diagnose -"
        return Unknown(f"the kernel log cannot be read: {error.strerror}{hint}", _SOURCE)
    try:
        return "\n".join(_records(descriptor))
    finally:
        os.close(descriptor)


def _records(descriptor: int) -> list[str]:
    found: list[str] = []
    while len(found) < _MAX_RECORDS:
        try:
            record = os.read(descriptor, _RECORD_BYTES)
        except BlockingIOError:
            break  # the end, so far
        except BrokenPipeError:
            continue  # a record was overwritten meanwhile; the next read goes on behind it
        except OSError:
            break
        if not record:
            break
        text = record.decode(errors="replace")
        if "Xid" in text:
            found.append(text)
    return found
