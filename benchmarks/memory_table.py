"""How far every tier is from what a GPU measured, as a Markdown table.

    python benchmarks/memory_table.py RESULTS.jsonl [--half build|score] [--rows]

RESULTS.jsonl is what `benchmarks/memory_grid.py` wrote (`reports/examples/memory-h200.jsonl` is
one from an H200). Errors are relative to the run at full depth; the formula is worked out here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cift_probe.evidence import Unknown
from cift_probe.expect.memory import predict
from cift_probe.models import load_model
from cift_probe.plan import Plan

MEASURED_WITH = (5, 17)  # transformers of the runs at full depth
PEAK, RESERVED, ROOM = "peak allocated", "reserved", "smallest cap"


class Error(NamedTuple):
    """One comparison: of which plan, tier and quantity, and the relative error."""

    plan: Plan
    tier: str
    quantity: str
    value: float


def main(arguments: list[str]) -> int:
    """Print one line per tier, stack and quantity."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--half", default="")
    parser.add_argument("--rows", action="store_true", help="one line per plan as well")
    options = parser.parse_args(arguments)
    rows = [json.loads(line) for line in options.results.read_text().splitlines()]
    found = list(errors([row for row in rows if options.half in {"", row["half"]}]))
    if options.rows:
        for item in found:
            print(f"{item.plan.name} | {item.tier} | {item.quantity} | {item.value:+.2%}")
        print()
    print("| tier | stack | quantity | plans | median error | worst error |")
    print("|---|---|---|---|---|---|")
    for tier in ("sliced", "traced", "traced-periods", "formula"):
        for stack in ("trl", "raw", "transformers"):
            for quantity in (PEAK, RESERVED, ROOM):
                chosen = [
                    item
                    for item in found
                    if (item.tier, item.plan.stack, item.quantity) == (tier, stack, quantity)
                ]
                if chosen:
                    print(line(tier, stack, quantity, [item.value for item in chosen]))
    return 0


def line(tier: str, stack: str, quantity: str, values: list[float]) -> str:
    """Return one row of the table; the worst error keeps its sign."""
    middle = statistics.median(map(abs, values))
    worst = max(values, key=abs)
    cells = (tier, stack, quantity, str(len(values)), f"{middle:.2%}", f"{worst:+.2%}")
    return f"| {' | '.join(cells)} |"


def errors(rows: list[dict[str, Any]]) -> Iterable[Error]:
    """Yield every comparison that the rows allow."""
    good = [row for row in rows if "fault" not in row]
    measured = {row["plan"]["name"]: row for row in good if row["tier"] == "measured"}
    peaks = {name: row["peak_bytes"] for name, row in measured.items()}
    caps = {row["plan"]["name"]: row for row in good if row["tier"] == "cap"}
    traced = {row["plan"]["name"]: row for row in good if row["tier"] == "traced"}
    for row in good:
        plan = msgspec.convert(row["plan"], Plan)
        answered = row
        if row["tier"] == "measured":
            told = predict(plan, load_model(plan.model), transformers=MEASURED_WITH)
            if isinstance(told, Unknown):
                continue
            answered = {
                "tier": "formula",
                "peak_bytes": told.peak_allocated_bytes,
                "required_bytes": told.required_bytes,
            }
        elif row["tier"] == "cap":
            continue
        if plan.name in peaks:
            yield Error(plan, answered["tier"], PEAK, answered["peak_bytes"] / peaks[plan.name] - 1)
        if plan.name in measured and answered.get("reserved_bytes"):
            truth = measured[plan.name]["reserved_bytes"]
            yield Error(plan, answered["tier"], RESERVED, answered["reserved_bytes"] / truth - 1)
        if plan.name in caps:
            required = answered["required_bytes"]
            if answered["tier"] == "sliced":  # as advise/here.py, with_room
                whole = traced[plan.name]
                beyond = whole["required_bytes"] - whole["peak_bytes"]
                required = answered["peak_bytes"] + beyond
            yield Error(plan, answered["tier"], ROOM, cap_error(required, caps[plan.name]))


def cap_error(required: float, cap: dict[str, Any]) -> float:
    """Return 0 within the bounds that bisection left, else the error against the nearer one."""
    low, high = cap["refused_bytes"], cap["cap_bytes"]
    if low <= required <= high:
        return 0.0
    return float(required / (high if required > high else low) - 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
