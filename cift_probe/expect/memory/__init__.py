"""Tier `formula`: the peak of a training step or of inference, without torch.

A ledger of tensors per instant, written down from the code of the stack; the peak is the highest
instant. What the ledger was not checked for is refused with the reason.
"""

from __future__ import annotations

from cift_probe.evidence import Unknown
from cift_probe.expect.estimate import Estimate, about_outliers
from cift_probe.expect.memory.anatomy import UnknownArchitectureError
from cift_probe.expect.memory.architectures import describe
from cift_probe.expect.memory.inference import ledger_of_inference
from cift_probe.expect.memory.inventory import unquantised_share
from cift_probe.expect.memory.kernels import choose_kernels
from cift_probe.expect.memory.litgpt import as_litgpt
from cift_probe.expect.memory.profiles import PROFILES, Profile
from cift_probe.expect.memory.refusals import refuse, wrong_targets
from cift_probe.expect.memory.room import Room, required_room
from cift_probe.expect.memory.training import ledger_of
from cift_probe.expect.memory.versions import EAGER_SINCE, READ, Version, parse_version
from cift_probe.models import ModelError, ModelShape
from cift_probe.plan import Plan

__all__ = [
    "EAGER_SINCE",
    "READ",
    "Estimate",
    "Room",
    "left_unquantised",
    "parse_version",
    "predict",
    "predict_profile",
    "wrong_targets",
]

SOURCE = "cift_probe.expect.memory"
BAND = 0.05
MIB = 1 << 20
# What cuBLAS and cuBLASLt keep inside the allocator: aten/src/ATen/cuda/CublasHandlePool.cpp,
# getChosenWorkspaceSize: 32 MiB on compute capability 9.0, else 8 MiB + 128 KiB, once for each of
# the two libraries (64 MiB seen on an H200 with torch 2.11).
_WORKSPACE = {9: 32 * MIB, 10: 32 * MIB, 12: 32 * MIB}
_SMALL_WORKSPACE = 8 * MIB + 128 * 1024


def predict(
    plan: Plan,
    shape: ModelShape,
    capability: tuple[int, int] = (9, 0),
    transformers: Version = READ,
) -> Estimate | Unknown:
    """Return the predicted memory of one step of a plan, or why there is no prediction.

    `capability` is the card's, `transformers` the version that will run the step.
    """
    profile = PROFILES[plan.stack]
    if transformers != READ:
        named = ".".join(map(str, transformers))
        told = profile.versions.replace(
            f"transformers {READ[0]}.{READ[1]}", f"transformers {named}"
        )
        profile = profile._replace(versions=told)
    return predict_profile(plan, shape, profile, capability, transformers)


def predict_profile(
    plan: Plan,
    shape: ModelShape,
    profile: Profile,
    capability: tuple[int, int] = (9, 0),
    transformers: Version = READ,
) -> Estimate | Unknown:
    """Return the prediction under a named profile, which may be of an older stack."""
    try:
        described = describe(shape, "flash")
        architecture = choose_kernels(plan, profile, shape, described, capability, transformers)
        if profile.layers == "litgpt":
            architecture = as_litgpt(architecture, quantised=plan.method == "qlora")
    except (UnknownArchitectureError, ModelError) as error:
        return Unknown(str(error), SOURCE)
    reason = refuse(plan, shape, architecture)
    if reason:
        return Unknown(reason, SOURCE)
    if plan.method == "inference":
        ledger = ledger_of_inference(plan, architecture)
    else:
        ledger = ledger_of(plan, profile, architecture)
    num_passes = 1 if plan.method == "inference" else 2
    workspace = num_passes * _WORKSPACE.get(capability[0], _SMALL_WORKSPACE)
    peak = ledger.instants[ledger.instant] + workspace
    full_logits = profile.loss not in {"fused", "chunked"}
    room = required_room(peak, ledger.largest, plan.method, full_logits=full_logits)
    estimate = Estimate(
        tier="formula",
        peak_allocated_bytes=peak,
        required_bytes=room.size,
        band=BAND,
        required_band=room.band,
        instant=ledger.instant,
        components=ledger.parts | {"cuBLAS workspace": workspace},
        instants={name: size + workspace for name, size in ledger.instants.items()},
        stack=f"{profile.name} ({profile.versions})",
    )
    return about_outliers(estimate, plan)


def left_unquantised(plan: Plan, shape: ModelShape) -> float:
    """Return the share of the layers' matrices that a quantised plan loads as they are; 0 to 1.

    0 as well for a plan that quantises nothing, and a model whose layers are not known here.
    """
    if plan.quantisation == "none":
        return 0.0
    try:
        return unquantised_share(describe(shape, "flash"))
    except (UnknownArchitectureError, ModelError):
        return 0.0
