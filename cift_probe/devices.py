"""Cards by name: what their makers publish, and what of their memory a training step can have."""

from __future__ import annotations

import difflib
import re
from functools import cache

import msgspec

from cift_probe.data import DataError, read_rows
from cift_probe.evidence import Known
from cift_probe.plan import PlanError, parse_quantity

DEVICES = "devices.toml"
_GIB = 1 << 30
_CAPABILITY = re.compile(r"\d{1,2}\.\d")
# What stands between the memory that a driver shows and what torch can allocate. The driver's
# reserve: 0.43 % of an H200 (NVML total against torch's); 2 % on cards of 24 GiB leaves room for
# what nobody measured here. The context: 141 MiB on a T4, 783 MiB on an H200 (reports/examples).
_RESERVE_SHARE = (0.004, 0.02)
_CONTEXT_BYTES = (141 << 20, 800 << 20)
_VISIBLE_SHARE = 0.995  # where nobody looked: an RTX 5090 of 32 GiB shows 99.5 %, most cards more


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One card; bytes, bytes per second, FLOP/s and watts. None where no source was found.

    `memory_bytes` is the capacity as sold, `visible_bytes` what the driver shows.
    Rates are dense, with fp32 accumulation; `bf16_flops` is None without bf16 tensor cores.
    """

    name: str
    capability: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    power_w: float
    source: str
    date: str
    architecture: str = ""
    visible_bytes: int | None = None
    bf16_flops: float | None = None
    fp16_flops: float | None = None
    fp32_flops: float | None = None
    unified: bool = False
    note: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        major, _, minor = self.capability.partition(".")
        return int(major), int(minor)

    def usable(self) -> Known:
        """Return the bytes that torch can allocate on an otherwise idle card, with their band."""
        return usable_of(self.visible_bytes or int(self.memory_bytes * _VISIBLE_SHARE), self.name)


def usable_of(visible_bytes: int, name: str) -> Known:
    """Return usable bytes of a card whose driver shows `visible_bytes`; the band is symmetric."""
    low = visible_bytes * (1 - _RESERVE_SHARE[1]) - _CONTEXT_BYTES[1]
    high = visible_bytes * (1 - _RESERVE_SHARE[0]) - _CONTEXT_BYTES[0]
    middle = max(0.0, (low + high) / 2)
    return Known(
        int(middle),
        "B",
        f"{name}, less driver reserve and CUDA context",
        band=(high - low) / 2 / middle if middle else 1.0,
        note="nothing else runs on the card",
    )


def find_device(text: str) -> tuple[str, Device]:
    """Return row name and card for a row, alias or full name; raises PlanError for no such card."""
    rows = read_devices()
    wanted = _letters(text)
    for row, device in rows.items():
        if wanted in map(_letters, (row, *device.aliases)):
            return row, device
    exact = [row for row, item in rows.items() if _letters(item.name) == wanted]
    if len(exact) == 1:
        return exact[0], rows[exact[0]]
    if exact:
        message = f"{text!r} is sold with several memory sizes; write {' or '.join(exact)}"
        raise PlanError(message)
    family = [row for row in sorted(rows) if wanted and _letters(row).startswith(wanted)]
    close = family or difflib.get_close_matches(text.strip().lower(), sorted(rows), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else "give its memory with --vram SIZE"
    message = f"{text[:60]!r} is no card of data/{DEVICES}; {hint}"
    raise PlanError(message)


def find_family(text: str) -> dict[str, Device]:
    """Return the cards that a name may mean: one, or all of a family; raises PlanError for none.

    What only the capability decides can be said of "v100" without its memory.
    """
    try:
        row, device = find_device(text)
    except PlanError:
        wanted = _letters(text)
        family = {
            name: item for name, item in read_devices().items() if _letters(name).startswith(wanted)
        }
        if not wanted or len({item.capability for item in family.values()}) != 1:
            raise
        return family
    return {row: device}


def _letters(name: str) -> str:
    """Return a name without what people write differently: case, blanks, hyphens."""
    return re.sub(r"[\s_-]+", "", name.lower())


def described(vram: str) -> Device:
    """Return a card of which only the memory is known; raises PlanError for what is no size."""
    size = parse_quantity(vram)
    return Device(
        name=f"a card with {vram.strip()}",
        capability="9.0",  # the largest workspaces: rather too much than too little
        memory_bytes=size,
        visible_bytes=size,
        bandwidth_bytes_per_s=0.0,
        power_w=0.0,
        source="--vram",
        date="",
    )


@cache
def read_devices() -> dict[str, Device]:
    """Return all cards by row; raises DataError for a malformed row or an alias given twice."""
    rows = read_rows(DEVICES, Device)
    seen: dict[str, str] = {}
    for row, device in rows.items():
        if not _CAPABILITY.fullmatch(device.capability):
            message = f"data/{DEVICES}: row {row!r}: capability is not written as 8.9"
            raise DataError(message)
        for name in (row, *device.aliases):
            if seen.setdefault(name, row) != row:
                message = f"data/{DEVICES}: {name!r} names both {seen[name]!r} and {row!r}"
                raise DataError(message)
    return rows
