"""What other people measured, against the formula tier."""

from __future__ import annotations

import statistics
from functools import cache

import pytest
from published_rows import NotComparable, Row, expect, predicted_bytes, read_rows, verdict

MEDIAN = 0.05
SHARE = 0.1
SOURCES = (
    "DaoyuanLi2816/can-i-finetune-this",
    "Lightning-AI/litgpt",
    "QwenLM/Qwen",
    "pytorch/torchtune",
)


@cache
def comparable() -> list[Row]:
    return [row for row in read_rows() if isinstance(row, Row)]


@pytest.mark.parametrize("source", SOURCES)
def test_the_median_error_of_every_source_is_small(source: str) -> None:
    found = [
        abs(predicted_bytes(row, expect(row)) / row.measured - 1)
        for row in comparable()
        if row.source == source and row.measured is not None
    ]
    assert found
    assert statistics.median(found) <= MEDIAN


def test_no_row_that_ran_out_of_memory_fits() -> None:
    failed = [row for row in comparable() if row.measured is None]
    assert len(failed) >= 10
    assert [row.identity for row in failed if verdict(row, expect(row)) == "fits"] == []


@pytest.mark.parametrize("wrong", ["does_not_fit", "undecided"])
def test_few_rows_that_ran_are_refused_or_undecided(wrong: str) -> None:
    ran = [row for row in comparable() if row.measured is not None]
    found = [row.identity for row in ran if verdict(row, expect(row)) == wrong]
    assert len(found) <= SHARE * len(ran), found


def test_every_row_is_compared_or_has_a_reason() -> None:
    rows = list(read_rows())
    assert len(rows) == 228
    refused = [row for row in rows if isinstance(row, NotComparable)]
    assert all(row.reason for row in refused)
    assert len(rows) - len(refused) >= 95
