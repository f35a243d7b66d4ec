"""Trace training steps and write `traced_peaks.jsonl`.

    python tests/data/trace_peaks.py FOLDER_OF_THE_TRACER raw|trl OUTPUT.jsonl

The tracer runs the installed stack's real step on fake CUDA tensors (`raw.run`, `trlrun.run`). One
stack per process: its trainers patch torch. Rows of the stack "transformers" were made in the same
way with `transformers.Trainer(bf16=True)` in the place of `SFTTrainer`.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

OPTIMIZERS = {
    "adamw": "adamw_torch",
    "fused": "adamw_torch_fused",
    "adam8": "adamw_bnb_8bit",
    "paged8": "paged_adamw_8bit",
}
ATTENTION = {
    "phi3": ["qkv_proj", "o_proj"],
    "phi": ["q_proj", "k_proj", "v_proj", "dense"],
    "gpt_neox": ["query_key_value", "dense"],
    "falcon": ["query_key_value", "dense"],
}
SEEDS = {"raw": 7, "trl": 8}


def configurations(table: Path) -> dict[str, dict[str, Any]]:
    """Return every distinct model of the stored rows, by name."""
    rows = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
    return {row["model"]: row["config"] for row in rows}


def points(models: dict[str, dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return a shuffled grid over models, methods, lengths, batches and checkpointing."""
    dice = random.Random(seed)  # noqa: S311 - a reproducible grid, not a secret
    found = []
    for name, config in models.items():
        for method in ("full", "lora", "qlora"):
            longest = config.get("max_position_embeddings", 4096)
            found.append(
                {
                    "model": name,
                    "method": method,
                    "sequence_length": min(dice.choice([512, 1024, 2048, 4096]), longest),
                    "batch_size": dice.choice([1, 2, 4]),
                    "gradient_checkpointing": dice.random() < 0.6,
                    "optimizer": dice.choice(["adamw", "fused", "adam8"]),
                    "rank": dice.choice([8, 16, 32, 64]),
                    "targets": dice.choice(["all-linear", "attention"]),
                }
            )
    dice.shuffle(found)
    return found


def trace(tracer: Any, stack: str, point: dict[str, Any], config: dict[str, Any]) -> int:
    """Return the peak of one configuration in bytes."""
    targets = point["targets"]
    if targets == "attention":
        default = ["q_proj", "k_proj", "v_proj", "o_proj"]
        targets = ATTENTION.get(config["model_type"], default)
    sizes = point["sequence_length"], point["batch_size"]
    if stack == "raw":
        done = tracer.run(
            point["model"],
            point["method"],
            *sizes,
            point["gradient_checkpointing"],
            "sdpa",
            point["optimizer"],
            point["rank"],
            targets=targets,
        )
    else:
        settings = {
            "gradient_checkpointing": point["gradient_checkpointing"],
            "optim": OPTIMIZERS[point["optimizer"]],
        }
        done = tracer.run(
            point["model"], point["method"], *sizes, targets, point["rank"], cfg=settings
        )
    return int(done["peak"])


def main() -> None:
    """Trace the grid of one stack and append its rows to the output."""
    folder, stack, output = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    sys.path.insert(0, str(folder))
    tracer = importlib.import_module("raw" if stack == "raw" else "trlrun")
    models = configurations(Path(__file__).with_name("traced_peaks.jsonl"))
    for name, config in models.items():
        rest = {key: value for key, value in config.items() if key != "model_type"}
        tracer.A[name] = config["model_type"], rest
    with output.open("a", encoding="utf-8") as file:
        for index, point in enumerate(points(models, SEEDS[stack])):
            config = models[point["model"]]
            row = {"stack": stack, **point, "held_out": index % 2 == 1}
            row |= {"optimizer": OPTIMIZERS[point["optimizer"]], "config": config}
            row["peak_bytes"] = trace(tracer, stack, point, config)
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
