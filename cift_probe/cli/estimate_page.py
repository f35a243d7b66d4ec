"""How the answers of `cift estimate` look: one page, a table, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from cift_probe.advise import fit as advise_fit
from cift_probe.advise import levers
from cift_probe.advise.fit import Fit
from cift_probe.advise.largest import MEMORY
from cift_probe.devices import Device
from cift_probe.expect.estimate import Estimate
from cift_probe.verdict.answer import Verdict
from cift_probe.verdict.display import bytes_text

_WIDTH = 34


def as_json(found: Sequence[Fit], *, explain: bool) -> str:
    """Return one object, or a list of several; with `explain` the tensors at the peak as well."""
    plain = [_plain(item, explain=explain) for item in found]
    return json.dumps(plain[0] if len(plain) == 1 else plain, indent=2)


def _plain(found: Fit, *, explain: bool) -> dict[str, Any]:
    """Return an answer as plain data; a number that nobody has is None."""
    estimate = found.estimate
    told = {} if estimate is None else msgspec.to_builtins(estimate)
    holds = (
        {} if estimate is None or not explain else {"holds": [h._asdict() for h in estimate.holds]}
    )
    names = ("peak_allocated_bytes", "required_bytes", "tier", "band", "required_band", "instant")
    return {
        "model": found.plan.model,
        "card": found.card,
        "verdict": found.verdict.value,
        "reason": found.reason,
        **{name: told.get(name) for name in names},
        "usable_bytes": found.usable.value,
        "usable_band": found.usable.band,
        "expandable_bytes": told.get("expandable_bytes"),
        "tight": found.tight,
        "components": told.get("components", {}),
        "instants": told.get("instants", {}),
        "stack": told.get("stack", found.plan.stack),
        "note": told.get("note", ""),
        "remarks": list(found.remarks),
        "limited_by": found.limited_by or None,
        **holds,
        "plan": msgspec.to_builtins(found.plan),
    }


def page(found: Fit, device: Device, *, explain: bool) -> str:
    """Return one answer for a reader: verdict, numbers, what holds them, what would change them."""
    plan = found.plan
    what = f"{plan.model}, {plan.method}, {_size(found)}"
    lines = [f"{what} on {device.name}: {_word(found)} ({found.reason})", ""]
    if found.limited_by:
        lines.insert(1, f"the largest that fits; limited by {found.limited_by}")
    estimate = found.estimate
    if estimate is None:
        hint = "hint: try --tier traced, which runs the installed stack itself"
        return "\n".join([*lines, *_remark_lines(found), hint])
    lines += _numbers(found, estimate)
    lines += ["", f"held at the peak, in the instant {estimate.instant!r}:"]
    lines += [_line(name, bytes_text(size)) for name, size in estimate.components.items() if size]
    if explain:
        lines += ["", "largest tensors at the peak:"]
        lines += [
            f"  {bytes_text(item.num_bytes):>12}  {item.operation}  {list(item.shape)}  "
            f"{item.dtype}  {item.module}".rstrip()
            for item in estimate.holds
        ] or ["  none are known: another tier answered"]
    lines += _lever_lines(found, device)
    return "\n".join(lines)


def _numbers(found: Fit, estimate: Estimate) -> list[str]:
    peak = f"{bytes_text(estimate.peak_allocated_bytes)} ± {estimate.band:.1%}"
    needed = f"{bytes_text(estimate.required_bytes)} ± {estimate.required_band:.1%}"
    usable = f"{bytes_text(found.usable.value)} ± {found.usable.band:.1%}"
    lines = [
        _line("peak allocated", peak),
        _line("required (smallest room)", needed),
        _line("usable", f"{usable}, {found.usable.source}"),
        _line("tier", f"{estimate.tier}, {estimate.stack}"),
    ]
    if estimate.expandable_bytes is not None:
        text = bytes_text(estimate.expandable_bytes)
        lines.insert(2, _line("with expandable segments", text))
    if estimate.note:
        lines.append(_line("note", estimate.note))
    return lines + _remark_lines(found)


def _remark_lines(found: Fit) -> list[str]:
    return [_line("note", remark) for remark in found.remarks]


def _lever_lines(found: Fit, device: Device) -> list[str]:
    if found.verdict is Verdict.FITS and not found.tight:
        return []
    estimate = advise_fit.formula(found.plan, device)
    base = advise_fit.answer(found.plan, found.card, device, estimate)
    lines = [
        f"  {item.change}: {_word(item.fit)}, {bytes_text(item.saved_bytes)} less; {item.price}"
        for item in levers.find_levers(base, device)
    ]
    return ["", "levers (tier formula):", *lines] if lines else []


def _word(found: Fit) -> str:
    return "fits, tight" if found.tight else found.verdict.value.replace("_", " ")


def _line(name: str, text: str) -> str:
    return f"  {name:<{_WIDTH}}{text}"


def table(found: Sequence[Fit]) -> str:
    """Return models by cards: what is required and the verdict, and below it what needs saying."""
    rows = list(dict.fromkeys(item.plan.model for item in found))
    columns = list(dict.fromkeys(item.card for item in found))
    sizes = {_size(item) for item in found}
    own = len(sizes) > 1  # then one size for all would be said of plans that have another
    cells = {(item.plan.model, item.card): _cell(item, own_size=own) for item in found}
    head = ["model", *columns]
    body = [[row, *(cells[row, column] for column in columns)] for row in rows]
    widths = [max(len(line[index]) for line in [head, *body]) for index in range(len(head))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *body]
    ]
    first = found[0].plan
    size = "tokens x rows in each cell" if own else sizes.pop()
    tiers = sorted({item.estimate.tier for item in found if item.estimate is not None})
    named = f", tier {' and '.join(tiers)}" if tiers else ""
    what = f"required memory: {first.method}, {size}, stack {first.stack}{named}"
    told = list(_told(found))
    return "\n".join([f"{what}; tight is above 90 % of usable", "", *lines, *told])


def _told(found: Sequence[Fit]) -> Iterator[str]:
    """Yield what a cell has no room for, each text once with the answers that it is about."""
    texts: dict[str, list[str]] = {}
    for item in found:
        reasons = list(item.remarks)
        if item.estimate is None:
            reasons.append(f"undecided: {item.reason}")
        elif item.estimate.note:
            reasons.append(item.estimate.note)
        if item.limited_by not in {"", MEMORY}:
            reasons.append(f"limited by {item.limited_by}, not by memory")
        for reason in reasons:
            texts.setdefault(reason, []).append(f"{item.plan.model} on {item.card}")
    if texts:
        yield ""
    for reason, answers in texts.items():
        about = ", ".join(answers) if len(answers) < len(found) else "all"
        yield f"note: {about}: {reason}"


def _cell(found: Fit, *, own_size: bool) -> str:
    size = f"{_size(found)}, " if own_size else ""
    if found.estimate is None:
        return f"{size}undecided"
    return f"{size}{bytes_text(found.estimate.required_bytes)} {_word(found)}"


def _size(found: Fit) -> str:
    return f"{found.plan.sequence_length} x {found.plan.batch_size}"
