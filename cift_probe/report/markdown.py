"""One page that a stranger can read: the answer first, then why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TypeAlias

from cift_probe.evidence import Evidence, Known, Scope
from cift_probe.report.schema import Report
from cift_probe.verdict.answer import Answer
from cift_probe.verdict.display import bytes_text, evidence_text
from cift_probe.verdict.finding import Finding, Outcome, Severity

# title, text with one place per key, keys
_Row: TypeAlias = tuple[str, str, tuple[str, ...]]
_MACHINE_ROWS: tuple[_Row, ...] = (
    ("CPU", "{}, {} usable cores", ("host.cpu.model", "host.cpu.num_usable")),
    (
        "host memory",
        "{} in all, {} available, limit: {}",
        ("host.memory.total", "host.memory.available", "host.memory.limit"),
    ),
    ("system", "{}, kernel {}, container: {}", ("host.os", "host.kernel", "host.container")),
    ("driver", "{}, serves CUDA {}", ("driver.version", "driver.cuda.version")),
    (
        "disk",
        "{} free to work in, {} for the model cache",
        ("storage.work.free", "storage.cache.free"),
    ),
    ("cooling", "{}", ("system.cooling",)),
    ("memory modules", "{}", ("system.host.memory.configuration",)),
)
_DEVICE_ROWS: tuple[_Row, ...] = (
    ("", "{}, capability {}, {}", ("device.name", "device.capability", "device.memory.total")),
    (
        "identity",
        "serial {}, {}, VBIOS {}",
        ("device.serial", "device.uuid", "device.vbios"),
    ),
    (
        "link, power",
        "PCIe {} x{}, limit {} of {}",
        (
            "device.pcie.generation.max",
            "device.pcie.width.max",
            "device.power.limit",
            "device.power.limit.default",
        ),
    ),
)
_WHOLE = 100  # from here on digits behind the point say nothing
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "trl", "datasets", "accelerate")


def render(report: Report) -> str:
    """Return the report as Markdown."""
    parts = (
        _head(report),
        _answers(report),
        _machine(report),
        _failures("Failed", _broken(report, must=True)),
        _undecided(report),
        _failures("Advice", _broken(report, must=False)),
        _not_applicable(report),
        _not_run(report),
        _software(report),
        _method(report),
    )
    return "\n".join(line for part in parts for line in part) + "\n"


def _head(report: Report) -> Iterator[str]:
    suite = report.suite
    yield "# Can I fine-tune on this machine?"
    yield ""
    yield f"Tested: {suite.stack_origin}, {suite.started}, {suite.selection or 'all checks'}."
    if suite.vram_cap_bytes is not None:
        yield f"Device memory was limited to {bytes_text(suite.vram_cap_bytes)} (--vram-cap)."
    if not suite.complete:
        yield ""
        where = suite.in_flight or "between two checks"
        yield f"**This run ended early. In flight: {where}.**"
    yield ""


def _answers(report: Report) -> Iterator[str]:
    yield "## Answer"
    yield ""
    for answer in report.answers:
        yield from _answer(answer)
    yield from _training(report)
    yield f"Conformance: {report.summary.text}."
    yield ""


def _answer(answer: Answer) -> Iterator[str]:
    verdict = answer.verdict.value.replace("_", " ")
    demanded = ", demanded" if answer.demanded else ""
    yield f"- **{answer.plan}** on {answer.device}{demanded}: **{verdict}**. {answer.reason}."
    if answer.required_bytes is not None:
        band = f"± {answer.band:.0%}" if answer.band is not None else ""
        yield (
            f"  - peak allocated {_bytes(answer.peak_allocated_bytes)}, required "
            f"{_bytes(answer.required_bytes)} {band}, usable {_bytes(answer.usable_bytes)}, "
            f"headroom {_bytes(answer.headroom_bytes)} (tier {answer.tier})"
        )
        band = f" ± {answer.step_band:.0%}" if answer.step_band is not None else ""
        speed = f"{_number(answer.step_s, 's')}, {_number(answer.tokens_per_s, 'tokens/s')}"
        yield f"  - step {speed}{band}"
    for limit in answer.limits:
        yield f"  - limit of this answer: {limit}"
    yield ""


def _training(report: Report) -> Iterator[str]:
    """Say where the one real training of this run learned: it needs no card to be an answer."""
    for finding in report.findings:
        if finding.check != "CVG001":
            continue
        word = "learns" if finding.outcome is Outcome.PASS else finding.outcome.value.lower()
        losses = [
            _cell(report.evidence.get("measured", {}).get(f"training.loss.{end}[{finding.case}]"))
            for end in ("first", "last")
        ]
        numbers = f" (loss {losses[0]} to {losses[1]})" if "not asked" not in losses else ""
        yield f"- **embedded model, QLoRA end to end** on {finding.case}: **{word}**{numbers}"
    yield ""


def _machine(report: Report) -> Iterator[str]:
    yield "## Machine"
    yield ""
    yield "| what | value |"
    yield "|---|---|"
    for title, text, keys in _MACHINE_ROWS:
        yield f"| {title} | {text.format(*_cells(report.machine, keys))} |"
    names = (key for key in report.machine if key.startswith("device.name"))
    for label in sorted(key.partition("[")[2].rstrip("]") for key in names):
        for title, text, keys in _DEVICE_ROWS:
            scoped = [Scope(label).key(key) for key in keys]
            row = f"{label} {title}".strip()
            yield f"| {row} | {text.format(*_cells(report.machine, scoped))} |"
    yield ""


def _failures(title: str, findings: list[Finding]) -> Iterator[str]:
    if not findings:
        return
    yield f"## {title}"
    yield ""
    for finding in findings:
        yield f"- **{finding.label}** {finding.requirement} ({finding.domain}, {finding.severity})"
        yield f"  - {finding.reason}"
        for name, side in (("found", finding.found), ("limit", finding.limit)):
            if side is not None and side.source:
                yield f"  - {name} in {side.source}"
        yield f"  - why: {finding.why}"
        yield f"  - fix: {finding.fix}"
    yield ""


def _undecided(report: Report) -> Iterator[str]:
    findings = [item for item in report.findings if item.outcome is Outcome.UNKNOWN]
    if not findings:
        return
    yield "## Undecided"
    yield ""
    for finding in findings:
        if not finding.blocked_by:
            yield f"- **{finding.label}** {finding.requirement} {finding.reason}."
    blocked = sorted((item for item in findings if item.blocked_by), key=lambda f: f.blocked_by)
    for origin, group in groupby(blocked, key=lambda item: item.blocked_by):
        labels = [item.label for item in group]
        yield f"- blocked by {origin}: {len(labels)} checks: {', '.join(labels)}"
    yield ""


def _not_applicable(report: Report) -> Iterator[str]:
    findings = [item for item in report.findings if item.outcome is Outcome.NOT_APPLICABLE]
    if not findings:
        return
    yield "## Not applicable"
    yield ""
    for finding in findings:
        yield f"- {finding.label} {finding.requirement} {finding.reason}."
    yield ""


def _not_run(report: Report) -> Iterator[str]:
    if not report.summary.not_run:
        return
    yield "## Not run"
    yield ""
    by_reason = sorted(report.summary.not_run.items(), key=lambda item: (item[1], item[0]))
    for reason, group in groupby(by_reason, key=lambda item: item[1]):
        yield f"- {reason}: {', '.join(label for label, _ in group)}"
    yield ""


def _software(report: Report) -> Iterator[str]:
    yield "## Software"
    yield ""
    named = [f"{name} {_cell(report.software.get(f'package.{name}'))}" for name in _PACKAGES]
    yield ", ".join(named)
    build = [
        f"{title} {_cell(report.software.get(key))}"
        for title, key in (
            ("CUDA", "torch.cuda.version"),
            ("cuDNN", "torch.cudnn.version"),
            ("NCCL", "torch.nccl.version"),
            ("architectures", "torch.arch.list"),
        )
        if key in report.software
    ]
    if build:
        yield ""
        yield f"torch build: {'; '.join(build)}"
    yield ""


def _method(report: Report) -> Iterator[str]:
    suite = report.suite
    yield "## Method"
    yield ""
    yield (
        f"{suite.name} {suite.version}, schema {report.schema_version}, run {suite.run_id}. Every "
        "limit, its source and all evidence stand in report.json beside this file."
    )
    instruments = ", ".join(f"{name}/{version}" for name, version in suite.instruments.items())
    yield f"Instruments: {instruments}."
    if suite.num_resumed:
        yield f"{suite.num_resumed} findings were taken over from the run that this one resumed."
    yield f"Digest: `{report.digest}`"


def _broken(report: Report, *, must: bool) -> list[Finding]:
    return [
        item
        for item in report.findings
        if item.outcome in (Outcome.FAIL, Outcome.ERROR)
        and (item.severity is Severity.MUST) is must
    ]


def _cells(facts: dict[str, Evidence], keys: Iterable[str]) -> list[str]:
    return [_cell(facts.get(key)) for key in keys]


def _cell(evidence: Evidence | None) -> str:
    if isinstance(evidence, Known) and evidence.absent:
        return evidence.absent
    return evidence_text(evidence).replace("|", "\\|") or "not asked"


def _bytes(value: int | None) -> str:
    return "not measured" if value is None else bytes_text(value)


def _number(value: float | None, unit: str) -> str:
    return (
        f"{unit} not measured"
        if value is None
        else f"{value:.0f} {unit}"
        if value >= _WHOLE
        else f"{value:.3g} {unit}"
    )
