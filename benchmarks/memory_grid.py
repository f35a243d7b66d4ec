"""What every tier says of a grid of plans, and what an H200 (or another GPU) really takes.

    python benchmarks/memory_grid.py RESULTS.jsonl [--half build|score] [--only NAME,NAME]
        [--tiers measured,cap,sliced,traced,traced-periods]

Appends one JSON line per plan and tier to RESULTS.jsonl and skips lines that are there, so that
an interrupted run goes on. `benchmarks/memory_table.py RESULTS.jsonl` prints the comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cift_probe.plan import Plan
from cift_probe.worker import Worker, WorkerFaultError

ARCHITECTURES = (  # model, sequence length and batch size of its rows
    ("llama-3.2-1b", 2048, 2),
    ("qwen2.5-1.5b", 2048, 2),
    ("qwen3-1.7b", 1024, 4),
    ("gemma-2-2b", 1024, 1),
    ("gemma-3-1b", 2048, 1),
    ("smollm3-3b", 2048, 1),
    ("phi-3-mini", 1024, 2),
    ("olmoe-1b-7b", 1024, 1),
    ("mistral-7b-v0.3", 2048, 1),
    ("llama-3.1-8b", 2048, 1),
)
METHODS = ("qlora", "lora", "full")
STACKS = ("trl", "raw")
VARIANTS: tuple[dict[str, Any], ...] = (
    {"model": "llama-3.2-1b", "method": "full", "gradient_checkpointing": False},
    {"model": "llama-3.2-1b", "method": "full", "optimizer": "adamw_torch"},
    {"model": "llama-3.2-1b", "method": "full", "optimizer": "adamw_bnb_8bit", "stack": "raw"},
    {"model": "llama-3.2-1b", "method": "lora", "padding": True, "batch_size": 4},
    {"model": "llama-3.2-1b", "method": "lora", "attention": "eager", "sequence_length": 1024},
    {"model": "qwen2.5-1.5b", "method": "lora", "packing": True, "batch_size": 2},
    {"model": "qwen2.5-1.5b", "method": "qlora", "optimizer": "paged_adamw_8bit"},
    {"model": "qwen2.5-1.5b", "method": "qlora", "gradient_checkpointing": False},
    {"model": "qwen2.5-1.5b", "method": "lora", "stack": "transformers", "batch_size": 2},
    {"model": "qwen2.5-1.5b", "method": "qlora", "stack": "transformers", "batch_size": 2},
    {"model": "qwen3-1.7b", "method": "lora", "targets": "attention", "rank": 64},
    {"model": "qwen3-1.7b", "method": "qlora", "gradient_accumulation": 4},
    {"model": "llama-3.2-1b", "method": "full", "stack": "transformers"},
    {"model": "llama-3.2-1b", "method": "full", "optimizer": "sgd"},
    {"model": "llama-3.2-1b", "method": "full", "optimizer": "adafactor", "stack": "raw"},
    {"model": "llama-3.2-1b", "method": "full", "dtype": "float32"},
    {"model": "llama-3.2-1b", "method": "full", "dtype": "float16"},
    {"model": "llama-3.2-1b", "method": "lora", "dtype": "float16"},
    {"model": "llama-3.2-1b", "method": "lora", "dtype": "float16", "stack": "raw"},
    {"model": "llama-3.2-1b", "method": "lora", "dtype": "float32", "stack": "raw"},
    {"model": "llama-3.2-1b", "method": "qlora", "dtype": "float16", "batch_size": 4},
    {"model": "qwen2.5-1.5b", "method": "qlora", "stack": "raw", "padding": True, "batch_size": 4},
    {"model": "qwen2.5-1.5b", "method": "qlora", "quantisation": "int8", "batch_size": 2},
    {"model": "qwen2.5-1.5b", "method": "qlora", "quantisation": "int8", "stack": "raw"},
    {"model": "qwen2.5-1.5b", "method": "qlora", "quantisation": "fp4", "stack": "raw"},
    {"model": "qwen3-1.7b", "method": "lora", "gradient_checkpointing": False, "stack": "raw"},
    {"model": "pythia-1.4b", "method": "full", "stack": "raw"},
    {"model": "pythia-1.4b", "method": "lora", "batch_size": 2},
    {"model": "granite-3.1-2b", "method": "qlora"},
    {"model": "granite-3.1-2b", "method": "full"},
    {"model": "gemma-3-4b", "method": "qlora"},
    {"model": "gemma-3-4b", "method": "lora", "stack": "raw"},
    {"model": "qwen3-4b", "method": "qlora", "sequence_length": 4096},
    {"model": "qwen2.5-7b", "method": "lora", "sequence_length": 1024, "batch_size": 4},
    {"model": "phi-2", "method": "qlora", "stack": "raw"},
    {"model": "starcoder2-3b", "method": "lora"},
    {"model": "falcon-7b", "method": "qlora"},
    {"model": "olmo-2-7b", "method": "qlora", "stack": "raw"},
    {"model": "glm-4-9b", "method": "qlora"},
    {"model": "mistral-nemo-12b", "method": "qlora", "stack": "raw"},
    {"model": "qwen2.5-32b", "method": "qlora"},
    {"model": "llama-3.1-8b", "method": "qlora", "stack": "transformers"},
    {"model": "llama-3.1-8b", "method": "qlora", "quantisation": "int8"},
    {"model": "llama-3.1-8b", "method": "inference", "quantisation": "none"},
    {"model": "llama-3.1-8b", "method": "inference", "quantisation": "nf4"},
)
DEADLINE_S = 300.0


def plans() -> Iterator[Plan]:
    """Yield the grid: architectures x methods x stacks, then one thing changed at a time."""
    for model, sequence_length, batch_size in ARCHITECTURES:
        for method in METHODS:
            if method == "full" and model in {"mistral-7b-v0.3", "olmoe-1b-7b"}:
                continue  # 70 GB and more of state: minutes of rented time for no new case
            for stack in STACKS:
                yield _plan(
                    model=model,
                    method=method,
                    stack=stack,
                    sequence_length=sequence_length,
                    batch_size=batch_size,
                )
    for variant in VARIANTS:
        yield _plan(**variant)


def _plan(**fields: Any) -> Plan:
    stored = "nf4" if fields["method"] == "qlora" else "none"
    words = [str(value) for value in fields.values()]
    name = "-".join(words).replace("True", "on").replace("False", "off")
    return Plan(name=name, **({"quantisation": stored} | fields))


def half_of(plan: Plan) -> str:
    """Return which half of the rows a plan is in, by its name alone."""
    return ("build", "score")[zlib.crc32(plan.name.encode()) % 2]


def main(arguments: list[str]) -> int:
    """Fill in the lines that the results do not have yet."""
    options = _options(arguments)
    done = set()
    if options.results.exists():
        rows = map(json.loads, options.results.read_text().splitlines())
        done = {(row["plan"]["name"], row["tier"]) for row in rows}
    deadline = time.monotonic() + options.seconds
    with Worker({"CUDA_VISIBLE_DEVICES": "0"}) as worker:
        for plan in _chosen(options):
            for tier in options.tiers.split(","):
                if (plan.name, tier) in done or time.monotonic() > deadline:
                    continue
                row = run_one(worker, plan, tier)
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                told = row.get("fault") or {k: v for k, v in row.items() if k.endswith("_bytes")}
                print(plan.name, tier, row["wall_s"], told, flush=True)
    return 0


def _chosen(options: argparse.Namespace) -> Iterator[Plan]:
    """Yield the plans of this part; all of a model are in one, so that the largest do not meet."""
    only = set(filter(None, options.only.split(",")))
    part, num_parts = map(int, options.part.split("/"))
    wanted = [
        plan
        for plan in plans()
        if (not only or plan.name in only) and options.half in {"", half_of(plan)}
    ]
    models = list(dict.fromkeys(plan.model for plan in wanted))
    for plan in wanted:
        if models.index(plan.model) % num_parts == part:
            yield plan


def run_one(worker: Worker, plan: Plan, tier: str) -> dict[str, Any]:
    """Return the row of one plan and tier; what fails is told in it."""
    started = time.monotonic()
    row = {"plan": msgspec.to_builtins(plan), "half": half_of(plan), "tier": tier}
    try:
        row |= worker.call("memory_grid:answer", {"plan": row["plan"], "tier": tier}, DEADLINE_S)
    except WorkerFaultError as fault:
        row["fault"] = f"{fault.detail} {fault.stderr_tail[-1500:]}"
    row["wall_s"] = round(time.monotonic() - started, 2)
    if "fault" in row or row.get("left_bytes"):
        worker.retire("memory is measured in a process at the base line")
    return row


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--tiers", default="measured")
    parser.add_argument("--half", default="")
    parser.add_argument("--part", default="0/1", help="of several processes side by side: 0/4")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=1e9)
    return parser.parse_args(arguments)


def answer(payload: Any) -> Any:
    """Run in the worker: one tier's numbers for one plan, bytes and seconds."""
    import warnings

    warnings.simplefilter("ignore")
    plan = msgspec.convert(payload["plan"], Plan)
    tiers = {"measured": _measured, "cap": _cap, "sliced": _sliced}
    if payload["tier"].startswith("traced"):
        return _traced(plan, "periods" if payload["tier"].endswith("periods") else "full")
    from cift_probe.measure.inside import allocated_after_cleaning

    return tiers[payload["tier"]](plan) | {"left_bytes": allocated_after_cleaning()}


def _measured(plan: Plan) -> dict[str, Any]:
    from cift_probe.measure.declare import Task
    from cift_probe.measure.sliced import measure_slice
    from cift_probe.models import load_model

    seen = measure_slice(plan, load_model(plan.model).num_hidden_layers, Task("gpu0"), 4)
    return {
        "peak_bytes": max(seen.instants.values()),
        "reserved_bytes": seen.reserved,
        "weights_bytes": seen.weights,
        "instants": seen.instants,
        "step_s": seen.step_s,
    }


def _cap(plan: Plan) -> dict[str, Any]:
    from cift_probe.measure.full_depth import runs_capped, smallest_cap
    from cift_probe.models import load_model

    depth = load_model(plan.model).num_hidden_layers
    before = _measured(plan)
    low, high = smallest_cap(
        lambda cap: runs_capped(plan, depth, cap),
        int(before["peak_bytes"]),
        int(before["reserved_bytes"]),
    )
    return before | {"refused_bytes": low, "cap_bytes": high}


def _sliced(plan: Plan) -> dict[str, Any]:
    from cift_probe.evidence import Known
    from cift_probe.measure.declare import Task
    from cift_probe.measure.sliced import measure_sliced

    started = time.monotonic()
    found = measure_sliced(Task("gpu0", plan=msgspec.to_builtins(plan)))
    seconds = time.monotonic() - started
    peak, needed, instants = (
        found[key] for key in ("step.peak", "step.required", "step.peak.instants")
    )
    if not isinstance(peak, Known) or not isinstance(needed, Known):
        raise TypeError(peak, needed)
    assert isinstance(instants, Known)  # noqa: S101 - as above
    return {
        "peak_bytes": peak.value,
        "required_bytes": needed.value,
        "instants": instants.value,
        "band": peak.band,
        "slices_s": seconds,
        "slices": getattr(found["step.slices"], "value", None),
    }


def _traced(plan: Plan, depth: Any) -> dict[str, Any]:
    from cift_probe.evidence import Unknown
    from cift_probe.expect.traced import trace

    found = trace(plan, depth=depth)
    if isinstance(found, Unknown):
        raise TypeError(found.reason)
    told: dict[str, Any] = msgspec.to_builtins(found)
    del told["holds"]
    return told | {"peak_bytes": found.peak_allocated_bytes}


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        traceback.print_exc(limit=0)
        raise SystemExit(2) from None
