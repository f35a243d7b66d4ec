"""Fabricated reports: a good run on an H200, and what tests change in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.report.schema import Report, Suite
from cift_probe.report.writer import build_report
from cift_probe.verdict.answer import Answer, Verdict
from cift_probe.verdict.finding import Domain, Finding, Outcome, Severity

GIB = 1024**3
UUID = "4f1c9a02-77aa-4b1e-9a3c-0123456789ab"
SERIAL = "1650123045678"
SUITE: dict[str, Any] = {
    "name": "can-i-fine-tune",
    "version": "0.1.0",
    "run_id": "20261201T120000Z-7",
    "started": "2026-12-01T12:00:00+00:00",
    "finished": "2026-12-01T12:03:00+00:00",
    "selection": "-m gpu",
    "stack_origin": "environment as it is",
    "instruments": {"bf16-matmul": 1, "sliced-step": 2},
    "exit_code": 0,
    "complete": True,
}
HEADER: dict[str, Any] = {"suite": SUITE, "machine": "0123456789abcdef"}
PLAN: dict[str, Any] = {"name": "llama-3.1-8b-qlora", "model": "llama-3.1-8b", "method": "qlora"}
FITS = Answer(
    plan="llama-3.1-8b-qlora",
    device="gpu0",
    verdict=Verdict.FITS,
    reason="needs at most 7.35 GiB of 138.20 GiB",
    tier="sliced",
    peak_allocated_bytes=6806 * 1024**2,
    required_bytes=7452 * 1024**2,
    usable_bytes=int(138.2 * GIB),
    headroom_bytes=int(130.85 * GIB),
    band=0.01,
    step_s=0.4125,
    tokens_per_s=4964.8,
)
FACTS: dict[str, Evidence] = {
    "host.cpu.model": Known("Intel(R) Xeon(R) Platinum 8480+", source="/proc/cpuinfo"),
    "host.memory.total": Known(128 * GIB, "B", "/proc/meminfo"),
    "host.os": Known("Ubuntu 24.04.2 LTS", source="/etc/os-release"),
    "driver.version": Known("580.95.05", "version", "NVML"),
    "device.count": Known(1, "1", "NVML"),
    "device.name[gpu0]": Known("NVIDIA H200", source="NVML"),
    "device.serial[gpu0]": Known(SERIAL, source="NVML nvmlDeviceGetSerial"),
    "device.uuid[gpu0]": Known(f"GPU-{UUID}", source="NVML nvmlDeviceGetUUID"),
    "torch.device.uuid[gpu0]": Known(f"GPU-{UUID}", source="torch"),
    "package.torch": Known("2.11.0+cu130", "version", "metadata"),
    "package.flash_attn": absent("flash_attn is not installed", "metadata"),
}


def passed(label: str) -> Finding:
    """Return a finding that passed."""
    check, _, case = label.rstrip("]").partition("[")
    return Finding(
        Outcome.PASS,
        "at least",
        Known(5, "1", "found here"),
        Known(3, "1", "limit of a table"),
        "5 is at least 3",
        check=check,
        case=case,
        requirement=f"The machine does what {check} asks.",
        why="a reason",
        fix="a remedy",
        family="device",
        domain=Domain.HARDWARE,
    )


def finding(label: str, outcome: Outcome, **changes: Any) -> Finding:
    """Return a finding with another outcome and other fields."""
    return msgspec.structs.replace(passed(label), outcome=outcome, **changes)


def blocked(label: str, by: str) -> Finding:
    """Return a finding that another one blocks."""
    reason = f"blocked by {by}: no GPU"
    return finding(label, Outcome.UNKNOWN, blocked_by=by, reason=reason, found=None, limit=None)


def report(
    *findings: Finding,
    answers: Sequence[Answer] = (FITS,),
    facts: Mapping[str, Evidence] = FACTS,
    measured: Mapping[str, Evidence] | None = None,
    not_run: Mapping[str, str] | None = None,
    **suite: Any,
) -> Report:
    """Return the report of a good run on an H200, or what differs from it."""
    return build_report(
        suite=Suite(**{**SUITE, **suite}),
        evidence={"facts": dict(facts), "measured": dict(measured or {})},
        findings=list(findings) or [passed(f"HST{number:03}") for number in range(1, 31)],
        answers=list(answers),
        plans=[dict(PLAN)],
        not_run=dict(not_run or {}),
    )


def mixed() -> list[Finding]:
    """Return findings of every outcome and severity."""
    missing = Unknown("no permission; needs root", "NVML")
    return [
        passed("HST001"),
        finding("GPU001[gpu0]", Outcome.FAIL, reason="0 is not at least 1", fix="plug one in"),
        blocked("GPU002[gpu0]", "GPU001[gpu0]"),
        blocked("KRN001[gpu0]", "GPU001[gpu0]"),
        finding("GPU003[gpu0]", Outcome.UNKNOWN, found=missing, reason=missing.reason),
        finding("GPU005[gpu0]", Outcome.FAIL, severity=Severity.SHOULD, reason="12 is not empty"),
        finding("ENV005[gpu0]", Outcome.NOT_APPLICABLE, reason="flash_attn is not installed"),
        finding("ENV006[gpu0]", Outcome.ERROR, reason="ValueError: broke"),
    ]
