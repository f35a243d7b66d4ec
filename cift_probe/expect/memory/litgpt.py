"""litgpt's own layers (litgpt/model.py, lora.py; 2023 to 2024), for rows measured with it.

One product for query, key and value; keys and values copied for every query head; the turned part
of each head is concatenated with the rest; embedding and head are separate tensors.
"""

from __future__ import annotations

from cift_probe.expect.memory.anatomy import Architecture, Projection
from cift_probe.expect.memory.layers import Layer


def as_litgpt(architecture: Architecture, *, quantised: bool) -> Architecture:
    """Return the architecture with litgpt's layers; quantisation takes the head along."""
    dims = dict(architecture.dims)
    for width in ("query", "key"):
        dims.setdefault(f"{width}_rotary", dims[width])
    one = architecture.kinds[0]
    grouped = dims["query"] != dims["key"]
    layer: Layer = one._replace(
        fused_qkv="chunk",
        rotary="partial",
        grouped=False,
        expands_keys=grouped,
        pads_adapters=True,
        activation="silu" if one.activation == "silu" else "gelu",
        feed_forward="gated" if one.feed_forward == "gated_fused" else one.feed_forward,
        kernel="eager" if one.softcap else "flash",
    )
    rest = [p for p in architecture.projections[0] if p.role not in {"q", "k", "v", "qkv"}]
    if one.feed_forward == "gated_fused":
        rest = [p for p in rest if p.role != "gate_up"]
        rest += [Projection(role, role, "intermediate", "hidden") for role in ("gate", "up")]
    fused = Projection("qkv", "qkv", "query_key_value", "hidden")
    named = tuple(p._replace(module=p.role) for p in (fused, *rest))
    return architecture._replace(
        dims=dims,
        kinds=(layer,),
        projections=(named,),
        order=(0,) * len(architecture.order),
        tied=False,
        packed_head=quantised,
        window=0,
    )
