"""`cift diagnose`: real and made-up texts of every kind, look-alikes, and logs that are no text."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cift_probe.diagnose import Diagnosis, diagnose
from cift_probe.diagnose.diagnosis import read_kinds
from cift_probe.diagnose.signs import SIGNS

DATA = Path(__file__).parent / "data"
# collected from public reports; each record names its thread
REAL = [json.loads(line) for line in (DATA / "error_texts.jsonl").read_text().splitlines()]
OWN: dict[str, Any] = tomllib.loads((DATA / "own_texts.toml").read_text(encoding="utf-8"))
OWN_TEXTS = [(kind, text) for kind, row in OWN.items() for text in row["texts"]]
MISSES = [(kind, text) for kind, row in OWN.items() for text in row["misses"]]


def of(text: str | bytes) -> list[Diagnosis]:
    content = text.encode() if isinstance(text, str) else text
    return diagnose(io.BytesIO(content))


def first(text: str) -> str:
    found = of(text)
    return found[0].kind if found else ""


@pytest.mark.parametrize("record", REAL, ids=[record["id"] for record in REAL])
def test_a_real_text_is_recognised(record: dict[str, Any]) -> None:
    assert first(record["text"]) == record["kind"]


@pytest.mark.parametrize(("kind", "text"), OWN_TEXTS)
def test_a_text_in_other_words_is_recognised(kind: str, text: str) -> None:
    assert first(text) == kind


@pytest.mark.parametrize(("kind", "text"), MISSES)
def test_a_near_miss_is_not_of_the_kind(kind: str, text: str) -> None:
    assert kind not in [item.kind for item in of(text)]


def test_every_kind_with_a_sign_has_texts_of_our_own_and_a_row() -> None:
    kinds = {sign.kind for sign in SIGNS} | {kind for kind, _ in OWN_TEXTS}
    assert kinds == set(read_kinds())
    assert all(len(row["texts"]) >= 2 for row in OWN.values())
    assert set(OWN) == kinds


def test_every_sign_is_needed_by_a_text() -> None:
    """A trigger that no text of its kind holds would keep the sign from ever being looked at."""
    texts = [text.lower() for _, text in OWN_TEXTS] + [record["text"].lower() for record in REAL]
    for sign in SIGNS:
        found = [t for t in texts if any(word in t for word in sign.triggers)]
        flat = [" ".join(t.splitlines()) for t in found]
        assert any(sign.pattern.search(t) for t in flat), sign.kind
