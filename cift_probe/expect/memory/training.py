"""A training step of a plan: structure, sizes, and what lives between steps."""

from __future__ import annotations

from typing import NamedTuple

from cift_probe.expect.memory.anatomy import Architecture
from cift_probe.expect.memory.experts import EXPERTS
from cift_probe.expect.memory.inventory import Tensor, adapters, packed, parameters, stored
from cift_probe.expect.memory.layers import Regime
from cift_probe.expect.memory.optimizers import optimizer_bytes
from cift_probe.expect.memory.profiles import Profile
from cift_probe.expect.memory.step import EMBEDDING, FORWARD, LOSS, Structure, compile_step
from cift_probe.expect.memory.tape import FP32, HALF, KEPT
from cift_probe.plan import Plan

BETWEEN = "between steps"
CLIPPING = "clipping"
OPTIMIZER = "optimizer"
END = "end of the step"
TILE = 32_768  # trl/trainer/utils.py _CHUNKED_LOGPROB_CHUNK_SIZE
TILE_ROWS = 4096  # trl/kernels/chunked_logprob.py TOKEN_CHUNK_SIZE
CHUNK = 128  # litgpt: lm_head_chunk_size, and the chunk of its cross-entropy
UNSORTED = 3072  # EmbeddingBackwardKernel.cu: up to here no sorted indices, no workspace
# `loss = model(...)` lets go of the last step's graph once the new loss is there
HOLDS_LAST_GRAPH = frozenset({EMBEDDING, FORWARD, LOSS})
ATTENTION_ROLES = frozenset({"q", "k", "v", "o", "qkv"})


class Ledger(NamedTuple):
    """Bytes per instant, and the parts of the highest one."""

    instants: dict[str, int]
    instant: str
    parts: dict[str, int]
    largest: int = 0


class Standing(NamedTuple):
    """What lives between steps, part by part, and what clipping and optimizer see."""

    parts: dict[str, int]
    gradients: int
    temporaries: int


def adapted_roles(architecture: Architecture, targets: str | tuple[str, ...]) -> frozenset[str]:
    """Return the roles that LoRA adapts; empty where no module has such a name."""
    projections = architecture.projections[0]
    if targets == "all-linear":
        experts = frozenset({EXPERTS}) if architecture.extras else frozenset[str]()
        return frozenset(p.role for p in projections) | experts
    if targets == "attention":
        return frozenset(p.role for p in projections) & ATTENTION_ROLES
    names = (targets,) if isinstance(targets, str) else targets
    return frozenset(p.role for p in projections if p.module in names)


def _weight_item(plan: Plan, profile: Profile) -> int:
    """Return the bytes of a weight that is not quantised, before anything is turned to float32."""
    scaled = plan.dtype == "float16" and plan.method == "full"
    return FP32 if plan.dtype == "float32" or (scaled and profile.widens_float16) else HALF


def regime_of(
    plan: Plan, profile: Profile, architecture: Architecture, adapted: frozenset[str]
) -> Regime:
    """Return how the stack holds and computes the weights of this plan."""
    quantised = plan.method == "qlora"
    item = FP32 if plan.dtype == "float32" else HALF
    weights = _weight_item(plan, profile)
    upcast = FP32 if quantised and profile.upcasts else weights
    adapters_item = profile.packed_adapter_item if quantised else profile.adapter_item
    if plan.dtype == "float16" and profile.widens_float16:
        adapters_item = FP32
    return Regime(
        autocast=plan.method in profile.autocast and plan.dtype != "float32",
        trained=plan.method == "full",
        norm_item=upcast,
        weight_item=weights if architecture.quantisable else upcast,
        compute=item,
        float16=plan.dtype == "float16",
        packed=plan.quantisation if quantised and architecture.quantisable else "",
        double=plan.double_quantisation,
        adapter_item=adapters_item,
        adapted=adapted,
        keeps_packed_input=profile.keeps_packed_input,
        adapter_dropout=profile.adapter_dropout,
    )


def structure_of(
    plan: Plan, profile: Profile, architecture: Architecture, regime: Regime
) -> Structure:
    """Return all that decides what lives when."""
    return Structure(
        kinds=architecture.kinds,
        regime=regime,
        hidden_item=_stream_item(architecture, regime),
        loss=profile.loss,
        tied=architecture.tied,
        checkpointing=plan.gradient_checkpointing,
        head_item=regime.norm_item,
        softcap=architecture.softcap,
        logit_scale=architecture.logit_scale,
        embedding_scale=architecture.embedding_scale,
        keep_gradients=plan.gradient_accumulation == 1,
        first=architecture.order[0],
    )


def _stream_item(architecture: Architecture, regime: Regime) -> int:
    """Return the bytes per number of what goes from layer to layer.

    LayerNorm answers in float32 under autocast, and bitsandbytes' layers in the type they were
    given, so that the first sum already is float32.
    """
    wide = architecture.kinds[0].norm == "layer" and regime.autocast and regime.packed
    return FP32 if wide else regime.norm_item


def dimensions(plan: Plan, architecture: Architecture) -> dict[str, int]:
    """Return every dimension by name."""
    dims = dict(architecture.dims)
    sequence, batch = plan.sequence_length, plan.batch_size
    if plan.packing:
        sequence, batch = sequence * batch, 1
    tokens = sequence * batch
    dims |= {
        "tokens": tokens,
        "sequence": sequence,
        "batch": batch,
        "sequence_128": -(-sequence // 128) * 128,
        "rank": plan.rank,
        "tile": TILE,
        "labelled": plan.num_labels,
        "tile_rows": min(plan.num_labels, TILE_ROWS),
        "chunk": batch * min(sequence, CHUNK),
        "sorted_tokens": tokens if tokens > UNSORTED else 0,
        "experts_rank_up": 2 * plan.rank * dims.get("experts", 0),
        "experts_rank_down": plan.rank * dims.get("experts", 0),
        "routed": tokens * dims.get("chosen", 0),
    }
    for projection in architecture.projections[0]:
        elements = dims[projection.rows] * dims[projection.columns]
        dims[f"{projection.role}_blocks"] = elements // 64
    return dims


def standing_of(
    plan: Plan, profile: Profile, architecture: Architecture, regime: Regime
) -> Standing:
    """Return the parts that live between steps."""
    base = parameters(architecture)
    parts: dict[str, int] = {}
    linear = [tensor for tensor in base if tensor.group == "linear"]
    rest = [tensor for tensor in base if tensor.group != "linear"]
    experts = [tensor for tensor in rest if tensor.group == "expert"]
    others = [tensor for tensor in rest if tensor.group != "expert"]
    parts["weights"] = stored(others, regime.norm_item) + stored(experts, regime.norm_item)
    if regime.packed:
        sizes = [packed(tensor, regime.packed, double=regime.double) for tensor in linear]
        parts["weights"] += sum(size for size, _ in sizes)
        parts["quantisation constants"] = sum(constants for _, constants in sizes)
    else:
        parts["weights"] += stored(linear, regime.weight_item)
    trained: list[Tensor] = base
    item = regime.weight_item
    if not regime.trained:
        trained = list(adapters(architecture, regime.adapted, plan.rank))
        item = regime.adapter_item
        parts["adapters"] = stored(trained, item)
    optimizer = optimizer_bytes(
        plan.optimizer, trained, item, wide_embedding=profile.wide_embedding_state
    )
    parts["optimizer state"] = optimizer.state
    return Standing(parts, stored(trained, item), optimizer.temporaries)


def _inputs(
    plan: Plan, architecture: Architecture, regime: Regime, dims: dict[str, int]
) -> dict[str, int]:
    """Return the batch and what the model derives from it for all layers."""
    tokens = plan.sequence_length * plan.batch_size
    rotary = 2 * plan.sequence_length * architecture.dims["head"] * regime.norm_item
    found = {"inputs": 3 * tokens * 8, "rotary positions": rotary}
    found["attention masks"] = _num_masks(plan, architecture) * _mask(architecture, regime, dims)
    return found


def _mask(architecture: Architecture, regime: Regime, dims: dict[str, int]) -> int:
    """Return the bytes of one mask: numbers for eager attention, booleans for sdpa."""
    item = regime.norm_item if architecture.kinds[0].kernel == "eager" else 1
    return dims["batch"] * dims["sequence"] ** 2 * item


def _outside(standing: Standing, kept: int, held: int) -> dict[str, int]:
    """Return the bytes of the instants around forward and backward.

    `kept` bytes the graph holds until it goes, `held` of them also where the loop keeps its loss.
    """
    between = sum(standing.parts.values())
    updated = between + standing.gradients
    return {
        BETWEEN: between + held,
        CLIPPING: updated + kept,
        OPTIMIZER: updated + standing.temporaries + held,
        END: updated + held,
    }


def _making_masks(plan: Plan, masks: int, dims: dict[str, int]) -> int:
    """Return what masking_utils.py holds beside the masks while it makes them, as traced."""
    if not masks:
        return 0
    return dims["sequence"] ** 2 * (1 if plan.padding else 2)


def _num_masks(plan: Plan, architecture: Architecture) -> int:
    """Return how many masks live through the step: masking_utils.py makes one for each pattern."""
    windows = any(architecture.windowed)
    if architecture.kinds[0].kernel == "eager" or plan.padding or plan.packing:
        return 2 if windows and not all(architecture.windowed) else 1
    return 1 if any(layer.masked for layer in architecture.kinds) else 0


def ledger_of(plan: Plan, profile: Profile, architecture: Architecture) -> Ledger:
    """Return the highest bytes of every instant of a step, and the parts of the highest."""
    adapted = frozenset[str]()
    if plan.method != "full":
        adapted = adapted_roles(architecture, plan.targets)
    regime = regime_of(plan, profile, architecture, adapted)
    step = compile_step(structure_of(plan, profile, architecture, regime))
    dims = dimensions(plan, architecture)
    standing = standing_of(plan, profile, architecture, regime)
    fixed = standing.parts | _inputs(plan, architecture, regime, dims)
    if plan.gradient_accumulation > 1:
        fixed["gradients"] = standing.gradients
    walk = step.walk(dims, architecture.order, sum(fixed.values()))
    last_graph = _last_graph(plan, dims, regime) + walk.kept if profile.keeps_graph else 0
    making = _making_masks(plan, fixed["attention masks"], dims)
    walk.peaks[EMBEDDING] += making
    held = walk.kept if profile.keeps_graph else 0
    peaks = walk.peaks | _outside(standing, walk.kept, held)
    peaks = {n: size + (last_graph if n in HOLDS_LAST_GRAPH else 0) for n, size in peaks.items()}
    instant = max(peaks, key=lambda name: peaks[name])
    if instant in walk.peaks:
        parts = fixed | _merge(fixed, walk.parts(instant))
    else:
        gradients = 0 if instant == BETWEEN else standing.gradients
        parts = standing.parts | {"gradients": gradients}
    if instant == EMBEDDING:
        parts["temporaries"] = parts.get("temporaries", 0) + making
    parts["graph of the last step"] = last_graph if instant in HOLDS_LAST_GRAPH else 0
    if instant == OPTIMIZER:
        parts["temporaries"] = standing.temporaries
    if instant not in walk.peaks:
        parts[KEPT] = walk.kept if instant == CLIPPING else held
    found = {name: size for name, size in parts.items() if size}
    return Ledger(peaks, instant, found, walk.largest)


def _last_graph(plan: Plan, dims: dict[str, int], regime: Regime) -> int:
    """Return what the last step's graph still holds of checkpoints while the next one begins."""
    if not plan.gradient_checkpointing or plan.method == "full":
        return 0
    return 2 * dims["tokens"] * dims["hidden"] * regime.norm_item


def _merge(fixed: dict[str, int], found: dict[str, int]) -> dict[str, int]:
    return {name: size + fixed.get(name, 0) for name, size in found.items()}
