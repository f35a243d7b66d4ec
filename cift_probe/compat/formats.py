"""Kinds of number formats: bfloat16 that is emulated or refused, float16 that overflows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from cift_probe.compat.case import Case, Judgement

_NATIVE_BF16 = (8, 0)  # CUDA C++ Programming Guide, "Arithmetic Instructions"
_FP16_MAX = 65504.0  # IEEE 754 binary16
_RISK = 0.5  # of the largest value: the next step may pass it
_REFUSALS = ("not_supported", "unsupported", "refused", "error", "fail", "not supported")
_WRONG_FP16 = ("gtx 16", "gtx 1650", "gtx 1660", "gtx 1630")
_MAX_ERROR = 0.05
_FP16 = frozenset({"float16", "fp16", "half", "torch.float16"})
_BF16 = frozenset({"bfloat16", "bf16", "torch.bfloat16"})


def bf16(case: Case) -> Judgement | None:
    """Tell bfloat16 that is refused, or runs by emulation alone."""
    capability = case.capability()
    flags = case.get("flags", "trainer_flags", "arguments") or {}
    asked = isinstance(flags, dict) and bool(flags.get("bf16"))
    asked = asked or str(case.get("dtype", "torch_dtype", "compute_dtype") or "") in _BF16
    asked = asked or bool(case.flag("bf16", "bf16_requested"))
    refused = str(case.get("bf16_gemm", "bf16_matmul", "bf16_result", "bf16_error") or "").lower()
    native = case.flag("native_bf16", "bf16_native", "including_emulation_false")
    if any(word in refused for word in _REFUSALS):
        return Judgement("bf16_unsupported", "fail", f"a bfloat16 product ends in {refused}")
    if asked and (bool(flags) or case.flag("bf16")):
        if capability is None:
            return Judgement(
                "bf16_unsupported", "unknown", "bf16 is asked for on an unknown device"
            )
        reason = f"bf16 is asked for on capability {capability[0]}.{capability[1]}"
        return Judgement(
            "bf16_unsupported", "fail" if capability < _NATIVE_BF16 else "pass", reason
        )
    said = case.has(
        "bare_call",
        "is_bf16_supported",
        "bf16_supported",
        "bf16_gemm",
        "native_bf16",
        "bf16_native",
        "bf16",
        "bf16_requested",
        "emulated",
    )
    if not said and not asked:
        return None
    if native is None and capability is not None:
        native = capability >= _NATIVE_BF16
    if native is None:
        return Judgement(
            "bf16_emulated", "unknown", "neither capability nor the native query is told"
        )
    text = "computed natively" if native else "by emulation alone, whatever the bare call says"
    return Judgement("bf16_emulated", "pass" if native else "warn", f"bfloat16 is {text}")


def overflow(case: Case) -> Judgement | None:
    """Read whether gradients and activations are finite; a finite loss proves nothing."""
    rows = case.get("log", "steps", "history", "log_history")
    norms = list(_values(rows, ("grad_norm", "gradient_norm"))) if isinstance(rows, list) else []
    single = case.get("grad_norm", "gradient_norm", "max_grad_norm_seen")
    norms += [_number(single)] if single is not None else []
    skipped = case.number("skipped_steps", "num_skipped", "overflow_steps")
    steps = case.number("steps_total", "num_steps", "total_steps")
    largest = case.number("max_activation", "activation_max", "abs_max", "max_abs", "max_value")
    dtype = str(case.get("dtype", "compute_dtype", "torch_dtype") or "float16")
    found = [norm for norm in norms if norm is not None]
    if any(not math.isfinite(norm) for norm in found):
        return Judgement("fp16_overflow", "fail", "a gradient norm is NaN or infinite")
    if largest is not None and dtype in _FP16:
        if not math.isfinite(largest) or largest > _FP16_MAX:
            return Judgement("fp16_overflow", "fail", f"{largest:g} is above fp16's {_FP16_MAX:g}")
        risk = largest > _RISK * _FP16_MAX
        return Judgement("fp16_overflow", "warn" if risk else "pass", f"largest value {largest:g}")
    if skipped is not None:
        many = skipped > 1 if steps is None else skipped > max(1.0, 0.05 * steps)
        return Judgement(
            "fp16_overflow",
            "fail" if many else "warn" if skipped else "pass",
            f"{skipped:g} steps were skipped",
        )
    if found:
        return Judgement("fp16_overflow", "pass", "every gradient norm is finite")
    trained, now = str(case.get("trained_dtype", "checkpoint_dtype", "model_dtype") or ""), dtype
    if trained in _BF16 and case.has("dtype", "compute_dtype") and now in _FP16:
        return Judgement("fp16_overflow", "warn", "a model trained in bf16 may exceed fp16's range")
    return None


def _values(rows: list[Any], names: tuple[str, ...]) -> Iterator[float | None]:
    for row in rows:
        if isinstance(row, dict):
            for name in names:
                if name in row:
                    yield _number(row[name])


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def trainable_type(case: Case) -> Judgement | None:
    """Tell trainable parameters in fp16 under fp16 mixed precision."""
    mixed = case.flag("fp16", "fp16_flag", "mixed_fp16")
    if mixed is None and case.get("mixed_precision") is not None:
        mixed = str(case.get("mixed_precision")) in _FP16
    load = str(case.get("load", "load_dtype", "dtype") or "")
    listed = case.get("trainable_dtypes", "dtypes", "param_dtypes")
    saved = case.flag("modules_to_save", "trains_base_modules", "full_finetune")
    if case.has("modules_to_save") and saved is None:
        saved = bool(case.get("modules_to_save"))
    if mixed is None or (listed is None and not load):
        return None
    if isinstance(listed, dict):
        listed = [
            key if isinstance(value, int) else value for key, value in listed.items() if value != 0
        ]
    names = [listed] if isinstance(listed, str) else listed
    half = (
        any(str(item) in _FP16 for item in names) if names is not None else load in _FP16 and saved
    )
    if mixed and half:
        return Judgement(
            "fp16_trainable_params", "fail", "trainable parameters are fp16, and fp16 is on"
        )
    return Judgement(
        "fp16_trainable_params", "pass", "no trainable fp16 under fp16 mixed precision"
    )


def self_test(case: Case) -> Judgement | None:
    """Read a self-test of fp16 against fp32, on devices that offer it and return NaN."""
    broken = case.flag("has_nan", "fp16_nan", "nan", "has_inf")
    error = case.number("fp16_error", "relative_error", "fp16_rel_error", "max_rel_err")
    name = str(case.get("name", "gpu", "gpu_name") or "").lower()
    if broken is None and error is None:
        if any(word in name for word in _WRONG_FP16) and not case.has("arch_list", "torch_cuda"):
            reason = "cards of this name return NaN in fp16, and no self-test was run"
            return Judgement("fp16_numerics_broken", "warn", reason)
        return None
    if broken or (error is not None and not error <= _MAX_ERROR):
        return Judgement("fp16_numerics_broken", "fail", "fp16 differs from fp32")
    return Judgement("fp16_numerics_broken", "pass", "fp16 agrees with fp32")


JUDGES = (self_test, trainable_type, bf16, overflow)
