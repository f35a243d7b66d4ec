"""What is expected of a machine's parts: rules over its facts, and tables with their sources."""

from __future__ import annotations

from functools import cache
from typing import Literal

import msgspec

from cift_probe.data import read_rows
from cift_probe.evidence import Evidence, Known, Reading, Unknown, absent
from cift_probe.expect.compat import rule

XIDS = "xids.toml"
_LEAST_CLOCK = 0.5
_PROCESSORS = 2
HARDWARE = "device.xids.hardware"


class XidRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of `data/xids.toml`; its name is the number."""

    kind: Literal["hardware", "application", "event"] = msgspec.field(name="class")
    meaning: str
    source: str
    date: str


@cache
def read_xids() -> dict[str, XidRow]:
    """Return the rows by number; raises DataError for a malformed one."""
    return read_rows(XIDS, XidRow)


def expect_hardware_xids() -> Evidence:
    """Return the numbers that ask for the device or its node to be looked after."""
    numbers = [int(number) for number, row in read_xids().items() if row.kind == "hardware"]
    return Known(sorted(numbers), source=f"data/{XIDS}: NVIDIA's XID documentation, Azure")


@rule("device.memory.capacity")
def expect_capacity(facts: Reading) -> Evidence:
    """Return what torch should call the device's memory: the driver's total, within 5 %.

    What the driver keeps for itself is in NVML's total and not in CUDA's: 0.4 to 4 % of a card.
    """
    total, kind = facts["device.memory.total"], facts["device.memory.kind"]
    for side in (total, kind):
        if isinstance(side, Unknown) or side.absent:
            return side
    if isinstance(kind, Known) and kind.value == "unified":
        return absent("host and device share one memory, which each side counts in its own way")
    value = total.value if isinstance(total, Known) else 0
    return Known(value, "B", f"{total.source}, within 5 %", band=0.05)


@rule("load.clock.sm.min")
def expect_clock(facts: Reading) -> Evidence:
    """Return the SM clock that a device keeps under load: half of its highest, in Hz.

    A data-centre card at its power limit runs matrix products at 0.6 to 0.9 of it; half is what
    a device shows that is held down.
    """
    most = facts["device.clock.sm.max"]
    if isinstance(most, Unknown) or most.absent:
        return most
    return Known(int(_LEAST_CLOCK * most.value), "Hz", f"half of {most.source}")


@rule("host.cpu.num_usable.min")
def expect_processors(facts: Reading) -> Evidence:
    """Return how many processors this process should be able to use: two for each device."""
    count = facts["device.count"]
    if isinstance(count, Unknown) or count.absent:
        return count
    source = "vast-cli check_requirements: 2 processors for each GPU"
    return Known(_PROCESSORS * count.value, "1", source, note=f"{count.value} devices")
