"""Published measurements as plans: which rows can be compared, under which stack, and why not.

A row is compared where its source states model, method, lengths and loop, and the ledger knows
all of them. Sizes in "GB" are 1e9 bytes where the source divides by that (litgpt), else GiB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cift_probe.evidence import Unknown
from cift_probe.expect.memory import Estimate, predict_profile
from cift_probe.expect.memory.architectures import describe
from cift_probe.expect.memory.litgpt import as_litgpt
from cift_probe.expect.memory.profiles import PROFILES
from cift_probe.models import ModelShape
from cift_probe.plan import Plan

FILE = Path(__file__).parent / "data" / "published_measurements.jsonl"
GIB = 1 << 30
GB = 10**9
# bytes that the driver leaves to a process, less about 0.5 GiB of context
USABLE = {
    "A10G": 22_300 * 2**20,
    "A100-SXM4-40GB": 39_200 * 2**20,
    "A100-SXM4-80GB": 79_000 * 2**20,
    "A100 80GB": 79_000 * 2**20,
    "4080": 15_300 * 2**20,
    "4090": 23_400 * 2**20,
    "A6000": 47_400 * 2**20,
}
CONTEXT = GIB // 2
CAPABILITY = {"A10G": (8, 6), "A100": (8, 0), "4080": (8, 9), "4090": (8, 9), "A6000": (8, 6)}


class Row(NamedTuple):
    """A comparable row: what it would need, and what was measured.

    `kind` is "allocated", "reserved" or "device"; `measured` is in bytes, None for a row that
    ran out of memory.
    """

    identity: str
    source: str
    plan: Plan
    shape: ModelShape
    profile: str
    capability: tuple[int, int]
    usable: int
    kind: str
    measured: int | None


class NotComparable(NamedTuple):
    """A row that is not compared, and the reason."""

    identity: str
    source: str
    reason: str


def _shape(model_type: str, *sizes: int, **more: Any) -> ModelShape:
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    config = {"model_type": model_type, **dict(zip(names, sizes, strict=True)), **more}
    return ModelShape(config, "config.json of the model")


# Gemma and Qwen 1 are described by the family that has the same tensors
MODELS = {
    "tiiuae/falcon-7b": _shape("falcon", 4544, 18176, 32, 71, 1, 65024),
    "google/gemma-2b": _shape("llama", 2048, 16384, 18, 8, 1, 256000, head_dim=256),
    "google/gemma-7b": _shape("llama", 3072, 24576, 28, 16, 16, 256000, head_dim=256),
    "google/gemma-2-2b": _shape("gemma2", 2304, 9216, 26, 8, 4, 256000, head_dim=256),
    "google/gemma-2-9b": _shape("gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256),
    "meta-llama/Llama-2-7b-hf": _shape("llama", 4096, 11008, 32, 32, 32, 32000),
    "meta-llama/Llama-2-13b-hf": _shape("llama", 5120, 13824, 40, 40, 40, 32000),
    "meta-llama/Meta-Llama-3-8B": _shape("llama", 4096, 14336, 32, 32, 8, 128256),
    "meta-llama/Llama-3.2-1B": _shape("llama", 2048, 8192, 16, 32, 8, 128256),
    "meta-llama/Llama-3.2-3B": _shape("llama", 3072, 8192, 28, 24, 8, 128256, head_dim=128),
    "mistralai/Mistral-7B-v0.1": _shape("mistral", 4096, 14336, 32, 32, 8, 32000),
    "microsoft/phi-2": _shape("phi", 2560, 10240, 32, 32, 32, 51200, partial_rotary_factor=0.4),
    "microsoft/phi-1_5": _shape("phi", 2048, 8192, 24, 32, 32, 51200, partial_rotary_factor=0.5),
    "microsoft/Phi-3-mini-4k-instruct": _shape("phi3", 3072, 8192, 32, 32, 32, 32064),
    "stabilityai/stablelm-base-alpha-3b": _shape("gpt_neox", 4096, 16384, 16, 32, 32, 50688),
    # parallel attention with two norms and 8 key heads: the layers of GPT-NeoX, grouped
    "tiiuae/falcon-40b": _shape("gpt_neox", 8192, 32768, 60, 128, 8, 65024, rotary_pct=1.0),
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": _shape(
        "llama", 2048, 5632, 22, 32, 4, 32000
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": _shape(
        "qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": _shape(
        "qwen2", 1536, 8960, 28, 12, 2, 151936, tie_word_embeddings=True
    ),
    "Qwen/Qwen2.5-3B-Instruct": _shape(
        "qwen2", 2048, 11008, 36, 16, 2, 151936, tie_word_embeddings=True
    ),
    "Qwen/Qwen2.5-7B-Instruct": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "Qwen/Qwen-1_8B": _shape("llama", 2048, 5504, 24, 16, 16, 151936),
    "Qwen/Qwen-7B": _shape("llama", 4096, 11008, 32, 32, 32, 151936),
    "Qwen/Qwen-14B": _shape("llama", 5120, 13696, 40, 40, 40, 151936),
}
for _name, _of in (
    ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3-8B"),
    ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3-8B"),
    ("meta-llama/Llama-3.2-3B-Instruct", "meta-llama/Llama-3.2-3B"),
    ("unsloth/Mistral-7B-v0.2", "mistralai/Mistral-7B-v0.1"),
):
    MODELS[_name] = MODELS[_of]


def read_rows() -> Iterator[Row | NotComparable]:
    """Yield every published row, mapped or refused."""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        yield map_row(json.loads(line))


def source_of(row: dict[str, Any]) -> str:
    """Return the repository a row comes from."""
    return str(row["source"]).split(":", maxsplit=1)[0].split("@", maxsplit=1)[0]


def map_row(row: dict[str, Any]) -> Row | NotComparable:
    """Return the plan of a row, or why there is none."""
    source = source_of(row)
    reason = _why_not(row, source)
    if reason:
        return NotComparable(row["id"], source, reason)
    make = {
        "DaoyuanLi2816/can-i-finetune-this": _daoyuan,
        "Lightning-AI/litgpt": _litgpt,
        "QwenLM/Qwen": _qwen,
        "pytorch/torchtune": _torchtune,
    }[source]
    plan, profile, kind, unit = make(row)
    measured = None if row["outcome"] == "oom" else int(_measured(row) * unit)
    card = next(name for name in USABLE if name in row["gpu"])
    capability = next(value for name, value in CAPABILITY.items() if name in row["gpu"])
    return Row(
        row["id"],
        source,
        plan,
        MODELS[row["model"]],
        profile,
        capability,
        USABLE[card],
        kind,
        measured,
    )


def _measured(row: dict[str, Any]) -> float:
    return float(
        row["peak_alloc_gib"] if row["peak_alloc_gib"] and "cift-" in row["id"] else row["peak_mem"]
    )


def _why_not(row: dict[str, Any], source: str) -> str:
    special = {"QwenLM/Qwen": _why_not_qwen, "pytorch/torchtune": _why_not_torchtune}
    if row["n_gpus"] != 1 or "FSDP" in (row["parallelism"] or ""):
        reason = "several GPUs, or a configuration for several"
    elif (row["parallelism"] or "none") != "none":
        reason = "offload or DeepSpeed"
    elif row["complete"] in {"suspect", "vague"}:
        reason = f"the source leaves facts out ({row['complete']})"
    elif row["method"] not in {"lora", "qlora", "full"}:
        reason = f"the method {row['method']} is not modelled"
    elif source == "huggingface/peft":
        reason = "the peak includes generating with 50 rows, and lengths vary"
    elif source in special:
        reason = special[source](row)
    else:
        known = row["model"] in MODELS
        reason = "" if known else f"no layers written down for {row['model']}"
    return reason


def _why_not_qwen(row: dict[str, Any]) -> str:
    if row["quant"]:
        return "GPTQ is not modelled"
    if "+emb" in row["id"]:
        return "embedding and head trained beside LoRA are not modelled"
    if row["method"] == "full":
        return "the script shards with DeepSpeed, whose optimizer is not modelled"
    return ""


def _why_not_torchtune(row: dict[str, Any]) -> str:
    optimizer = row["optimizer"] or ""
    if "fused into backward" in optimizer or "offload" in str(row["gradient_checkpointing"]):
        return "an optimizer inside the backward, or activation offload, is not modelled"
    if row["complete"] != "full" or row["quant"]:
        return "facts are missing, or torchao's NF4, which is not modelled"
    if "compiled" in row["loss_impl"] and row["gradient_checkpointing"] is False:
        return "torch.compile decides what is saved; not modelled without checkpointing"
    return ""


def _plan(row: dict[str, Any], **facts: Any) -> Plan:
    quantised = row["method"] == "qlora"
    values: dict[str, Any] = {
        "name": "row",
        "model": row["model"],
        "method": row["method"],
        "rank": row["lora_rank"] or 1,
        "quantisation": "nf4" if quantised else "none",
        "sequence_length": row["seq_len"],
        "batch_size": row["batch_size"],
        "gradient_checkpointing": bool(row["gradient_checkpointing"]),
        "stack": "raw",
        **facts,
    }
    return Plan(**values)


def _daoyuan(row: dict[str, Any]) -> tuple[Plan, str, str, int]:
    targets = tuple(row["lora_targets"])
    plan = _plan(row, targets=targets, optimizer="paged_adamw_8bit")
    return plan, "raw without autocast", "allocated", GIB


def _litgpt(row: dict[str, Any]) -> tuple[Plan, str, str, int]:
    """Litgpt accumulates micro-batches (global_batch_size 8 and more), and divides by 1e9."""
    wanted = set[str]()
    roles = {"q": {"qkv"}, "k": {"qkv"}, "v": {"qkv"}, "proj": {"o"}, "mlp": {"gate", "up", "down"}}
    for name in row["lora_targets"] or ():
        wanted |= roles.get(name, set())
    layers = as_litgpt(describe(MODELS[row["model"]], "flash"), quantised=False)
    modules = {p.module for p in layers.projections[0]}
    torch_adamw = "torch" in row["optimizer"]
    plan = _plan(
        row,
        targets=tuple(sorted(wanted & modules)) or "all-linear",
        double_quantisation="dq" in (row["quant"] or ""),
        optimizer="adamw_torch" if torch_adamw else "paged_adamw_32bit",
        gradient_accumulation=2,
    )
    newer = row["method"] == "qlora" and "hub" in row["id"]
    return plan, "litgpt quantised" if newer else "litgpt", "allocated", GB


def _qwen(row: dict[str, Any]) -> tuple[Plan, str, str, int]:
    """Read the unit, which is not stated, as 1e9 bytes.

    So read, what stays beyond the tensors at 256 tokens is 0.65 to 0.85 GiB for all three sizes;
    read as GiB it would grow from 1.3 to 3 with the size of the model.
    """
    plan = _plan(row, optimizer="adamw_torch", gradient_accumulation=8, gradient_checkpointing=True)
    return plan, "qwen 2023", "device", GB


def _torchtune(row: dict[str, Any]) -> tuple[Plan, str, str, int]:
    names = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    targets = tuple(names.get(name, name) for name in row["lora_targets"] or ())
    plan = _plan(row, targets=targets or "all-linear", optimizer="adamw_torch_fused")
    chunked = "chunked" in row["loss_impl"]
    return plan, "torchtune chunked" if chunked else "torchtune", "allocated", GIB


def expect(row: Row) -> Estimate:
    """Return the prediction of a row; raises where the ledger refuses it."""
    shape = row.shape
    if row.source == "pytorch/torchtune" and shape.count("hidden_size") == 3072:
        shape = ModelShape({**shape.config, "tie_word_embeddings": True}, shape.source)
    found = predict_profile(row.plan, shape, PROFILES[row.profile], row.capability)
    if isinstance(found, Unknown):
        message = f"{row.identity}: {found.reason}"
        raise TypeError(message)
    return found


def predicted_bytes(row: Row, estimate: Estimate) -> int:
    """Return the prediction in the kind of memory that the row reports."""
    if row.kind == "allocated":
        return estimate.peak_allocated_bytes
    return estimate.required_bytes + (CONTEXT if row.kind == "device" else 0)


def verdict(row: Row, estimate: Estimate) -> str:
    """Return "fits", "does_not_fit" or "undecided" against the usable memory of the card."""
    room = row.usable
    if estimate.required_bytes * (1 + estimate.required_band) <= room:
        return "fits"
    if estimate.peak_allocated_bytes * (1 - estimate.band) > room:
        return "does_not_fit"
    return "undecided"
