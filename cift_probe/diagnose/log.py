"""The lines of a log that may begin a message: of any size, in one pass, in little memory."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import BinaryIO

from cift_probe.diagnose.signs import TRIGGERS

WINDOW_LINES = 8  # a message may be broken over so many
MAX_LINE = 4000  # bytes; what is longer is no message
_BLOCK_BYTES = 1 << 20
_MAX_KNOWN = 50_000  # lines that are remembered
_MAX_CONTROL = 0.05  # share of control characters from which on a line is no text
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\x1b\x08") | {127})
# what changes from step to step: decimals, "12/980", "13%", "00:41"; an error's code stays
_PROGRESS = re.compile(rb"\d+(?:\.\d+(?:e-?\d+)?|(?=[/%:]))|(?<=[/:])\d+")
_TRIGGERS = tuple(word.encode() for word in TRIGGERS)


def read_lines(stream: BinaryIO) -> Iterator[tuple[int, list[bytes], int]]:
    """Yield the number of every line that may begin a message, with a block and its place there.

    At least WINDOW_LINES - 1 lines follow it in the block, as far as the log has them.
    """
    chosen = _Chosen()
    for number, lines, num_new in _blocks(stream):
        for index in chosen.of(lines, num_new):
            yield number + index, lines, index


def _blocks(stream: BinaryIO) -> Iterator[tuple[int, list[bytes], int]]:
    """Yield the first line's number, whole lines, and how many of them are to be looked at.

    The last lines of a block come again with the next one, so that no message is cut.
    """
    number, rest = 1, b""
    read = stream.read(_BLOCK_BYTES)
    wide = codecs.getincrementaldecoder("utf-16")("replace")
    is_wide = read[:2] in {codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE}  # as PowerShell redirects
    while True:
        text = wide.decode(read).encode("utf-8", "replace") if is_wide else read
        lines = (rest + text).split(b"\n")
        if not read:
            yield number, lines, len(lines)
            return
        if len(lines[-1]) > _BLOCK_BYTES:
            lines[-1] = lines[-1][-MAX_LINE:]
        num_new = max(0, len(lines) - WINDOW_LINES)
        yield number, lines, num_new
        number += num_new
        rest = b"\n".join(lines[num_new:])
        read = stream.read(_BLOCK_BYTES)


class _Chosen:
    """Chooses lines that hold a trigger; lines like those before are not searched again."""

    def __init__(self) -> None:
        self._hits: set[bytes] = set()
        self._misses: set[bytes] = set()

    def of(self, lines: list[bytes], num_new: int) -> list[int]:
        """Return the places of the lines to look at, among the first `num_new`."""
        found: set[int] = set()
        unknown: list[tuple[int, bytes]] = []
        for index in range(num_new):
            line = lines[index]
            if line in self._hits:
                found.add(index)
                continue
            masked = _PROGRESS.sub(b"0", line[-MAX_LINE:])
            if masked not in self._misses:
                unknown.append((index, masked))
        hits = self._search([lines[index] for index, _ in unknown])
        for place, (index, masked) in enumerate(unknown):
            if place in hits:
                found.add(index)
                self._remember(self._hits, lines[index])
            else:
                self._remember(self._misses, masked)
        # what begins in one line may name itself in the next
        return sorted(found | {index - 1 for index in found if index})

    def _search(self, lines: list[bytes]) -> set[int]:
        """Return the places of lines that hold a trigger and are text."""
        text = [b"" if _is_binary(line) else line for line in lines]
        block = b"\n".join(text).lower()
        positions: set[int] = set()
        for word in _TRIGGERS:
            start = block.find(word)
            while start >= 0:
                positions.add(start)
                end = block.find(b"\n", start)  # one hit in a line is enough
                start = block.find(word, end) if end >= 0 else -1
        places: set[int] = set()
        place, end = -1, -1
        for position in sorted(positions):
            while position > end:
                place += 1
                end += len(text[place]) + 1
            places.add(place)
        return places

    def _remember(self, known: set[bytes], line: bytes) -> None:
        if len(known) >= _MAX_KNOWN:
            known.clear()
        known.add(line)


def _is_binary(line: bytes) -> bool:
    """Tell whether a line holds more control characters than text does."""
    return len(line) - len(line.translate(None, _CONTROL)) > _MAX_CONTROL * len(line)
