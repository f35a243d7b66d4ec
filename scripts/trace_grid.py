"""Trace a grid of plans with the installed stack: what the formula tier is held against.

    python scripts/trace_grid.py [tests/data/traced_steps.jsonl] [--part 0/1]
        [--num NUMBER] [--num-others NUMBER]

Appends one line per plan and skips plans that are there. Remake the file when the stack moves:
delete it and run this again (some 10 s a plan). The draw is reproducible; every second plan is
held out: `half` is "build" for those that the formula may be looked at with while it is written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cift_probe.expect import traced
from cift_probe.models import ModelError, read_models
from cift_probe.plan import Plan, PlanError, check_plan
from cift_probe.worker import Worker, WorkerFaultError

SEED = 20261201
OTHER_MODELS = (
    "llama-3.2-1b",
    "pythia-1.4b",
    "qwen3-0.6b",
    "falcon-7b",
    "gemma-3-1b",
    "phi-2",
    "olmoe-1b-7b",
    "starcoder2-3b",
    "phi-3-mini",
    "granite-3.1-2b",
    "olmo-2-7b",
)
SMALL_MODELS = ("smollm2-135m", "qwen3-0.6b", "pythia-1.4b", "gemma-3-1b", "llama-3.2-1b")
TYPES = ("bfloat16", "float16", "float32")
CARDS = ((7, 5), (8, 6), (9, 0))
LAYERS = (2, 4, 6, 8, 12)  # of the pattern's whole periods where a model has one
ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 600.0


class Case(NamedTuple):
    """A plan, how many layers of its model, and the card's compute capability."""

    plan: Plan
    layers: int
    capability: tuple[int, int] = (9, 0)


def draw(count: int) -> Iterator[Case]:
    """Yield plans and numbers of layers: every model, method and stack in turn, the rest by lot."""
    chance = random.Random(SEED)  # noqa: S311 - a reproducible grid, not a secret
    models = [name for name in sorted(read_models()) if "distill" not in name]
    chance.shuffle(models)
    made = 0
    while made < count:
        model = models[made % len(models)]
        method = ("qlora", "lora", "full")[made % 3]
        stack = ("trl", "raw", "trl", "transformers", "raw")[made % 5]
        plan = Plan(
            name=f"grid-{made}",
            model=model,
            method=method,  # type: ignore[arg-type]  # one of the three above
            stack=stack,  # type: ignore[arg-type]  # as above
            quantisation="nf4" if method == "qlora" else "none",
            sequence_length=chance.choice((512, 1024, 2048, 4096)),
            batch_size=chance.choice((1, 1, 2, 4)),
            rank=chance.choice((8, 16, 64)),
            targets=chance.choice(("all-linear", "all-linear", "attention")),
            optimizer=chance.choice(("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "sgd")),
            gradient_checkpointing=chance.random() < 0.7,  # noqa: PLR2004 - most people's choice
            gradient_accumulation=chance.choice((1, 1, 2)),
        )
        layers = min(chance.choice(LAYERS), read_models()[model].num_hidden_layers)
        try:
            check_plan(plan)
        except (PlanError, ModelError):
            plan = msgspec.structs.replace(plan, sequence_length=512)
        yield Case(plan, layers)
        made += 1


def draw_others(count: int) -> Iterator[Case]:
    """Yield plans in other types, on other cards, with masks, in 8 bits and of other optimizers.

    Every way to choose an attention kernel is among them.
    """
    chance = random.Random(SEED + 1)  # noqa: S311 - as above
    for number in range(count):
        method = ("qlora", "lora", "full")[number % 3]
        stored = chance.choice(("nf4", "int8", "fp4")) if method == "qlora" else "none"
        batch_size = chance.choice((1, 2))
        masked = chance.choice(("", "", "padding", "packing"))
        stack = ("trl", "raw", "transformers", "trl")[number % 4]
        if masked == "packing" and stack != "trl":
            masked = "padding"
        plan = Plan(
            name=f"other-{number}",
            model=OTHER_MODELS[number % len(OTHER_MODELS)],
            method=method,  # type: ignore[arg-type]  # one of the three above
            stack=stack,  # type: ignore[arg-type]  # as above
            quantisation=stored,  # type: ignore[arg-type]  # as above
            double_quantisation=chance.random() < 0.5,  # noqa: PLR2004 - both ways alike
            dtype=TYPES[number // 2 % 3],  # type: ignore[arg-type]  # as above
            sequence_length=chance.choice((512, 1024)),
            batch_size=2 if masked == "padding" else batch_size,
            padding=masked == "padding",
            packing=masked == "packing",
            attention="eager" if chance.random() < 0.15 else "sdpa",  # noqa: PLR2004 - now and then
            optimizer=chance.choice(("adamw_torch_loop", "adafactor", "paged_adamw_8bit")),
            gradient_checkpointing=chance.random() < 0.7,  # noqa: PLR2004 - as above
        )
        check_plan(plan)
        yield Case(plan, 4, CARDS[number % 3 - number // 3 % 3])


def draw_pairs() -> Iterator[Case]:
    """Yield every method in every type on every stack, and inference from every storage."""
    chance = random.Random(SEED + 2)  # noqa: S311 - as above
    cases = itertools.product(("qlora", "lora", "full"), TYPES, ("trl", "raw", "transformers"))
    for number, (method, dtype, stack) in enumerate(cases):
        stored = ("nf4", "int8", "fp4")[number % 3] if method == "qlora" else "none"
        plan = Plan(
            name=f"other-pair-{number}",
            model=SMALL_MODELS[number % len(SMALL_MODELS)],
            method=method,  # type: ignore[arg-type]  # one of the three above
            stack=stack,  # type: ignore[arg-type]  # as above
            quantisation=stored,  # type: ignore[arg-type]  # as above
            dtype=dtype,  # type: ignore[arg-type]  # as above
            sequence_length=chance.choice((512, 1024)),
            batch_size=chance.choice((1, 2)),
            gradient_accumulation=chance.choice((1, 2)),
            prompt_length=chance.choice((0, 200)),
            optimizer=chance.choice(("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit")),
            gradient_checkpointing=chance.random() < 0.7,  # noqa: PLR2004 - as above
        )
        yield Case(plan, 4, CARDS[number // 3 % 3])
    for number, (stored, dtype) in enumerate(itertools.product(("none", "nf4", "int8"), TYPES)):
        plan = Plan(
            name=f"other-inference-{number}",
            model=SMALL_MODELS[number % len(SMALL_MODELS)],
            method="inference",
            quantisation=stored,  # type: ignore[arg-type]  # as above
            dtype=dtype,  # type: ignore[arg-type]  # as above
            sequence_length=1024,
            batch_size=2,
        )
        yield Case(plan, 4, CARDS[number % 3])


def draw_masks() -> Iterator[Case]:
    """Yield long sequences with every kind of mask, which then weighs something."""
    facts: tuple[tuple[str, dict[str, Any], int], ...] = (
        ("smollm2-135m", {"packing": True, "sequence_length": 4096, "batch_size": 4}, 4),
        ("smollm2-135m", {"padding": True, "sequence_length": 4096, "batch_size": 4}, 4),
        ("smollm2-135m", {"padding": True, "stack": "raw", "batch_size": 4}, 4),
        ("smollm2-135m", {"padding": True, "attention": "eager", "batch_size": 2}, 4),
        ("gemma-3-1b", {"sequence_length": 8192}, 6),
        ("gemma-3-1b", {"padding": True, "sequence_length": 4096, "batch_size": 2}, 6),
    )
    for number, (model, given, layers) in enumerate(facts):
        plan = Plan(
            name=f"other-mask-{number}", model=model, method="lora", quantisation="none", **given
        )
        yield Case(plan, layers)


def main(arguments: list[str]) -> int:
    """Fill in the lines that are not there yet."""
    parser = argparse.ArgumentParser()
    default = ROOT / "tests" / "data" / "traced_steps.jsonl"
    parser.add_argument("file", type=Path, nargs="?", default=default)
    parser.add_argument("--num", type=int, default=120)
    parser.add_argument("--num-others", type=int, default=72)
    parser.add_argument("--part", default="0/1", help="of several processes side by side: 0/2")
    options = parser.parse_args(arguments)
    part, num_parts = map(int, options.part.split("/"))
    lines = options.file.read_text().splitlines() if options.file.exists() else []
    done = {json.loads(line)["plan"]["name"] for line in lines}
    with Worker(traced.ENVIRONMENT) as worker:
        cases = (
            *draw(options.num),
            *draw_others(options.num_others),
            *draw_pairs(),
            *draw_masks(),
        )
        for index, case in enumerate(cases):
            plan = case.plan
            if plan.name in done or index % num_parts != part:
                continue
            row = {
                "half": "build" if index % 2 == 0 else "score",
                "num_layers": case.layers,
                "capability": case.capability,
                "plan": msgspec.to_builtins(plan),
            }
            row |= trace(worker, case)
            with options.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(plan.name, plan.model, plan.method, plan.stack, row.get("fault", "traced"))
            worker.retire("every plan is traced in a process of its own")
    return 0


def trace(worker: Worker, case: Case) -> dict[str, Any]:
    """Return instants, reserved bytes and smallest caps of one plan, or the fault."""
    request = {
        "plan": msgspec.to_builtins(case.plan),
        "num_layers": case.layers,
        "capability": case.capability,
    }
    try:
        seen = worker.call("cift_probe.expect.traced.child:run", request, DEADLINE_S)
    except WorkerFaultError as fault:
        return {"fault": fault.detail[:400]}
    names = ("instants", "instant", "reserved", "required", "expandable", "num_events")
    largest = max(item[-1] for item in seen["holds"])
    return {name: seen[name] for name in names} | {
        "largest": largest,
        "stack": traced.stack_versions(),
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
