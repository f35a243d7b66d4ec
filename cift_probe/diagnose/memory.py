"""Out-of-memory texts of PyTorch's caching allocator: their figures, and what these decide.

c10/cuda/CUDACachingAllocator.cpp wrote them in four forms: "cached" beside "already allocated"
(to 1.3), "reserved in total" including it (1.4 to 2.0), and since 2.1 "allocated by PyTorch" and
"reserved by PyTorch but unallocated", with the memory of this process and of others.
"""

from __future__ import annotations

import re

import msgspec

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?(bytes|[KMGT]iB)"
_FIELDS = {
    "request": rf"Tried to allocate {_SIZE}",
    "total": rf"{_SIZE} total capacity|total capaci?ty of {_SIZE}",
    "free": rf"{_SIZE} (?:is )?free",
    "allocated": rf"{_SIZE} already allocated|{_SIZE} is allocated by PyTorch",
    "cached": rf"{_SIZE} cached",
    "reserved": rf"{_SIZE} reserved in total",
    "unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "process": rf"this process has {_SIZE} memory in use",
    "allowed": rf"{_SIZE} allowed",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _FIELDS.items()}
_PROCESS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_GIB = 1 << 30
_SLACK_SHARE = 0.05  # of what is allocated: less slack than that is no fragmentation
# A context and what libraries take outside torch: up to 1 GiB was seen, and more with NCCL.
_CONTEXT_SHARE, _LEAST_CONTEXT, _MOST_CONTEXT = 1 / 8, 3 * _GIB // 4, 2 * _GIB


class Figures(msgspec.Struct, frozen=True):
    """Bytes that an out-of-memory text tells; None for what it does not.

    `slack` is what the allocator holds beyond what it handed out, `process` what this process
    uses in all, `others` what each process named by number uses.
    """

    request: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    slack: int | None = None
    process: int | None = None
    allowed: int | None = None
    others: tuple[int, ...] = ()


def parse_figures(text: str) -> Figures:
    """Return the figures of a text in one line.

    >>> parse_figures("Tried to allocate 2.00 MiB (GPU 0; 8.00 GiB total capacity)").request
    2097152
    """
    told = {name: _first(pattern, text) for name, pattern in _PATTERNS.items()}
    allocated, slack = told["allocated"], told["unallocated"]
    if slack is None and allocated is not None and told["reserved"] is not None:
        slack = max(0, told["reserved"] - allocated)
    if slack is None:
        slack = told["cached"]
    others = tuple(_bytes(match[1], match[2]) for match in _PROCESS.finditer(text))
    return Figures(
        told["request"],
        told["total"],
        told["free"],
        allocated,
        slack,
        told["process"],
        told["allowed"],
        others,
    )


def decide(figures: Figures) -> str:
    """Return the kind of an out-of-memory text by its figures; the order is part of the answer."""
    request, total, free = figures.request, figures.total, figures.free
    allocated, slack = figures.allocated, figures.slack
    if allocated is not None and total is not None and allocated > total:
        return "sysmem_fallback"
    if figures.allowed is not None and (total is None or figures.allowed < total):
        return "gpu_oom_capped"
    if request is not None and free is not None and free >= request:
        return "gpu_oom_despite_free"
    if _held_by_others(figures):
        return "gpu_oom_other_process"
    known = request is not None and free is not None and slack is not None
    if known and allocated is not None and slack >= _SLACK_SHARE * allocated > 0:  # type: ignore[operator] # `known`
        return "gpu_oom_fragmentation" if request <= free + slack else "gpu_oom"  # type: ignore[operator] # `known`
    return "gpu_oom"


def _held_by_others(figures: Figures) -> bool:
    """Tell whether more is gone than this process and a context account for."""
    if figures.total is None or figures.free is None:
        return False
    if figures.allocated is None and figures.process is None and not figures.others:
        return False  # what this process holds is not told
    own = (figures.allocated or 0) + (figures.slack or 0)
    context = min(_MOST_CONTEXT, max(_LEAST_CONTEXT, figures.total * _CONTEXT_SHARE))
    # "Process N" may be this process, seen from another PID namespace
    strangers = [size for size in figures.others if not own <= size <= own + context]
    if figures.process is not None or strangers:
        return sum(strangers) > context
    return figures.total - figures.free - own > context


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    if match is None:
        return None
    number, unit = [group for group in match.groups() if group is not None]
    return _bytes(number, unit)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
