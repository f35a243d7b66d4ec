"""A model in a folder, as users have it: written with random weights, loaded as the plan asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cift_probe.plan import Plan
from cift_probe.stack import slices


class Checkpoint(msgspec.Struct, frozen=True):
    """A folder with weights, and what its weights and the largest of them take, in bytes."""

    folder: Path
    num_bytes: int
    largest_bytes: int


def write_checkpoint(plan: Plan, num_layers: int, folder: Path) -> Checkpoint:
    """Write the plan's model with random weights, in the plan's dtype and not quantised."""
    plain = msgspec.structs.replace(plan, method="full", quantisation="none")
    model = slices.build_slice(plain, num_layers, "cpu")
    for weight in model.parameters():
        weight.data = weight.data.clone()  # layers share their random weights; a file has each
    sizes = [weight.numel() * weight.element_size() for weight in model.parameters()]
    model.save_pretrained(folder)
    return Checkpoint(folder, sum(sizes), max(sizes))


def load_checkpoint(plan: Plan, checkpoint: Checkpoint, torch_device: str) -> Any:
    """Load a model from its folder straight to the device, quantised as the plan asks."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        checkpoint.folder,
        quantization_config=slices.quantization_of(plan),
        dtype=getattr(torch, plan.dtype),
        attn_implementation=None if plan.attention == "sdpa" else plan.attention,
        device_map={"": torch_device},
        local_files_only=True,
    )
