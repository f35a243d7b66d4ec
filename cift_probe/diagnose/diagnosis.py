"""From a log of any size to the failures that it tells of, the likeliest cause first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import BinaryIO, NamedTuple

import msgspec

from cift_probe.data import read_rows
from cift_probe.diagnose import memory
from cift_probe.diagnose.signs import ASIDE, NAMES_IT, SIGNS, TRIGGERS, Sign

_BLOCK_BYTES = 1 << 20
_MAX_LINE = 4000  # bytes; what is longer is no message
_WINDOW_LINES = 8  # a message may be broken over so many
_MAX_HITS = 200  # of a trigger in a block: a log that repeats itself says nothing new
_MAX_MATCHES = 50  # of a kind: from then on its windows are not read
_SHOWN = 3
_ESCAPE = re.compile(rb"\x1b\[[0-9;?]{0,16}[A-Za-z]")
_SURE = {NAMES_IT: "certain", 2: "likely", ASIDE: "aside"}


class KindRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `data/kinds.toml`: what a failure is, and what to change first."""

    title: str
    fix: str


class Line(NamedTuple):
    """A line of the log, counted from 1."""

    number: int
    text: str


class Diagnosis(msgspec.Struct, frozen=True):
    """A failure that a log tells of.

    `sure` is "certain" where the text names it, "likely" where it may be another, "aside" where it
    is a consequence or harmless. `lines` are the first that show it, `count` how many do;
    `figures` are bytes that the first of them tells.
    """

    kind: str
    title: str
    fix: str
    sure: str
    lines: tuple[Line, ...]
    count: int
    figures: dict[str, int] = {}


@cache
def read_kinds() -> dict[str, KindRow]:
    """Return every kind by name; raises DataError for a malformed row."""
    return read_rows("kinds.toml", KindRow)


def diagnose(stream: BinaryIO) -> list[Diagnosis]:
    """Return the failures that a log tells of, the likeliest cause first; empty for none.

    What names its cause comes before what may have several, and the first of a kind before the
    next: later errors are mostly consequences. The stream is read once, block by block.
    """
    seen: dict[str, list[tuple[int, Line, str]]] = {}
    for line, window in _windows(stream):
        for kind, strength in _kinds_of(line.text, window, seen):
            seen.setdefault(kind, []).append((strength, line, window))
    found = [_diagnosis(kind, matches) for kind, matches in seen.items()]
    rank = list(_SURE.values())
    return sorted(found, key=lambda item: (rank.index(item.sure), item.lines[0].number))


def _kinds_of(
    text: str, window: str, seen: dict[str, list[tuple[int, Line, str]]]
) -> Iterator[tuple[str, int]]:
    low = window.lower()
    for sign in SIGNS:
        if len(seen.get(sign.kind, ())) >= _MAX_MATCHES:
            continue
        if not any(word in low for word in sign.triggers):
            continue
        match = _match(sign, text, window)
        if match:
            yield (sign.decide(match) if sign.decide else sign.kind), sign.strength


def _match(sign: Sign, text: str, window: str) -> str:
    """Return the text from where a sign begins in this line, or nothing."""
    found = sign.pattern.search(text if sign.one_line else window)
    if found is None or found.start() > len(text):
        return ""
    if sign.unless is not None and sign.unless.search(window):
        return ""
    return window[found.start() :] or found.group()


def _diagnosis(kind: str, matches: list[tuple[int, Line, str]]) -> Diagnosis:
    row = read_kinds()[kind]
    strength = max(strength for strength, _, _ in matches)
    lines = [line for _, line, _ in matches]
    figures = memory.parse_figures(matches[0][2]) if kind in _WITH_FIGURES else memory.Figures()
    told = {k: v for k, v in msgspec.structs.asdict(figures).items() if isinstance(v, int)}
    return Diagnosis(
        kind, row.title, row.fix, _SURE[strength], tuple(lines[:_SHOWN]), len(lines), told
    )


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


def _windows(stream: BinaryIO) -> Iterator[tuple[Line, str]]:
    """Yield every line that may begin a message, with the lines after it as one text."""
    for number, lines, num_new in _blocks(stream):
        for index in _interesting(lines, num_new):
            text = _text(lines[index])
            following = (_text(line) for line in lines[index + 1 : index + _WINDOW_LINES])
            yield Line(number + index, text), " ".join((text, *following))


def _blocks(stream: BinaryIO) -> Iterator[tuple[int, list[bytes], int]]:
    """Yield the first line's number, whole lines, and how many of them are to be looked at.

    The last lines of a block come again with the next one, so that no window is cut.
    """
    number, rest = 1, b""
    while True:
        read = stream.read(_BLOCK_BYTES)
        lines = (rest + read).split(b"\n")
        if not read:
            yield number, lines, len(lines)
            return
        if len(lines[-1]) > _BLOCK_BYTES:
            lines[-1] = lines[-1][-_MAX_LINE:]  # no message is that long
        kept = min(len(lines), _WINDOW_LINES)
        num_new = len(lines) - kept
        yield number, lines, num_new
        number += num_new
        rest = b"\n".join(lines[num_new:])


def _interesting(lines: list[bytes], num_new: int) -> list[int]:
    """Return the lines that hold a trigger; a block without one costs a search for each word."""
    block = b"\n".join(lines[:num_new]).lower()
    hits: set[int] = set()
    for word in _TRIGGERS:
        start = block.find(word)
        for _ in range(_MAX_HITS):
            if start < 0:
                break
            hits.add(start)
            start = block.find(word, start + len(word))
    line, end = -1, -1
    found: set[int] = set()
    for position in sorted(hits):
        while position > end:
            line += 1
            end += len(lines[line]) + 1
        found |= {max(line - 1, 0), line}  # what begins in one line may name itself in the next
    return sorted(found)


_TRIGGERS = tuple(word.encode() for word in TRIGGERS)


def _text(line: bytes) -> str:
    """Return a line as people saw it: the last of what a progress bar wrote over itself."""
    shown = _ESCAPE.sub(b"", line[-_MAX_LINE:].rstrip(b"\r")).rpartition(b"\r")[2]
    return shown.decode("utf-8", errors="replace").strip()
