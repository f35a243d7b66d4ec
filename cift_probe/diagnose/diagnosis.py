"""From a log of any size to the failures that it tells of, the likeliest cause first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import msgspec

from cift_probe.diagnose import memory
from cift_probe.diagnose.bearing import Bearing
from cift_probe.diagnose.kinds import read_kinds
from cift_probe.diagnose.log import MAX_LINE, WINDOW_LINES, read_lines
from cift_probe.diagnose.signs import ASIDE, LIKELY, NAMES_IT, SIGNS, Sign

_MAX_KNOWN = 20_000  # pairs of lines that are remembered
_SHOWN = 3
_ESCAPE = re.compile(rb"\x1b\[[0-9;?]{0,16}[A-Za-z]")
_SURE = {NAMES_IT: "certain", LIKELY: "likely", ASIDE: "aside"}


class Line(NamedTuple):
    """A line of the log, counted from 1."""

    number: int
    text: str


class Diagnosis(msgspec.Struct, frozen=True):
    """A failure that a log tells of.

    `sure` is "certain" where the text names it, "likely" where it may be another, "aside" where it
    is a consequence or harmless. `lines` are the first that show it, `count` how many do;
    `figures` are bytes that the first of them tells. `machine` is what a report says to it.
    """

    kind: str
    title: str
    fix: str
    sure: str
    lines: tuple[Line, ...]
    count: int
    figures: dict[str, int] = {}
    machine: Bearing | None = None


def diagnose(stream: BinaryIO) -> list[Diagnosis]:
    """Return the failures that a log tells of, the likeliest cause first; empty for none.

    What names its cause comes before what may have several, and the first of a kind before the
    next: later errors are mostly consequences. The stream is read once, block by block.
    """
    seen: dict[str, _Seen] = {}
    known: dict[tuple[bytes, ...], tuple[str, str, dict[str, int]]] = {}
    for number, lines, index in read_lines(stream):
        raw = tuple(lines[index : index + 2])
        if raw not in known:
            if len(known) >= _MAX_KNOWN:
                known.clear()
            text, *rest = [_text(line) for line in lines[index : index + WINDOW_LINES]]
            window = " ".join((text, *rest))
            known[raw] = text, window, dict(_kinds_of(text, window))
        text, window, kinds = known[raw]
        for kind, strength in kinds.items():
            seen.setdefault(kind, _Seen(window)).add(Line(number, text), strength)
    found = [_diagnosis(kind, item) for kind, item in seen.items()]
    rank = list(_SURE.values())
    return sorted(found, key=lambda item: (rank.index(item.sure), item.lines[0].number))


class _Seen:
    """What was seen of one kind."""

    def __init__(self, window: str) -> None:
        self.window = window
        self.strength = 0
        self.lines: list[Line] = []
        self.count = 0

    def add(self, line: Line, strength: int) -> None:
        """Count a line that shows the kind, and keep the first ones."""
        self.count += 1
        self.strength = max(self.strength, strength)
        if len(self.lines) < _SHOWN:
            self.lines.append(line)


def _kinds_of(text: str, window: str) -> Iterator[tuple[str, int]]:
    low = window.lower()
    for sign in SIGNS:
        if not any(word in low for word in sign.triggers):
            continue
        match = _match(sign, text, window)
        if match:
            yield (sign.decide(match) if sign.decide else sign.kind), sign.strength


def _match(sign: Sign, text: str, window: str) -> str:
    """Return the text from where a sign begins in this line, or nothing."""
    scope = window if sign.runs_on else text
    found = sign.pattern.search(scope)
    if found is None or found.start() > len(text):
        return ""
    if sign.unless is not None and sign.unless.search(scope):
        return ""
    return window[found.start() :] or found.group()


def _diagnosis(kind: str, seen: _Seen) -> Diagnosis:
    row = read_kinds()[kind]
    figures = memory.parse_figures(seen.window) if kind in _WITH_FIGURES else memory.Figures()
    told = {k: v for k, v in msgspec.structs.asdict(figures).items() if isinstance(v, int)}
    sure = _SURE[seen.strength]
    return Diagnosis(kind, row.title, row.fix, sure, tuple(seen.lines), seen.count, told)


_WITH_FIGURES = frozenset(
    {
        "gpu_oom",
        "gpu_oom_capped",
        "gpu_oom_despite_free",
        "gpu_oom_fragmentation",
        "gpu_oom_other_process",
        "sysmem_fallback",
    }
)


def _text(line: bytes) -> str:
    """Return a line as people saw it: the last of what a progress bar wrote over itself."""
    shown = _ESCAPE.sub(b"", line[-MAX_LINE:].rstrip(b"\r")).rpartition(b"\r")[2]
    return shown.decode("utf-8", errors="replace").strip()
