"""`cift estimate`: what a plan needs on a card, without the card, and what would change that."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from cift_probe.advise import fit as advise_fit
from cift_probe.advise import largest, levers
from cift_probe.advise.fit import Fit
from cift_probe.devices import Device, described, find_device
from cift_probe.evidence import Unknown
from cift_probe.expect.estimate import Estimate
from cift_probe.expect.memory import wrong_targets
from cift_probe.models import ModelError, load_model
from cift_probe.plan import OPTIMIZERS, Plan, PlanError, check_plan, default_quantisation
from cift_probe.verdict.answer import Verdict
from cift_probe.verdict.display import bytes_text, one_line

EXIT_USAGE = 4
EXIT_CODES = {
    Verdict.FITS: 0,
    Verdict.FITS_WITH_LEVERS: 0,
    Verdict.DOES_NOT_FIT: 1,
    Verdict.UNDECIDED: 10,
}
_WIDTH = 34
_DESCRIPTION = """\
Says whether a plan fits on a card, from arithmetic alone: no GPU and no torch are needed.

  cift estimate llama-3.1-8b --gpu rtx-4090
  cift estimate llama-3.1-8b --method lora --rank 64 --seq 4096 --vram 24GiB
  cift estimate ./my-model/config.json --method full --gpu h100-sxm --tier traced
  cift estimate qwen3-8b --gpu l4 --max seq
  cift estimate llama-3.1-8b qwen3-14b --gpu rtx-4090,a100-sxm-80gb,h200

exit codes: 0 fits, 1 does not, 10 undecided, 4 wrong call; of several answers the worst
"""


def parser(kind: type[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Return the command's options in a parser of `kind`."""
    made = kind(
        prog="cift estimate",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("models", nargs="+", metavar="MODEL", help="a model's name, config.json, folder or Hub id")
    add("--method", choices=("full", "lora", "qlora", "inference"), default="qlora")
    add("--rank", type=int, default=16, help="of LoRA (default 16)")
    add("--targets", default="all-linear", help="all-linear, attention, or module names by comma")
    add("--quantisation", choices=("nf4", "fp4", "int8", "none"), help="default nf4 for qlora")
    add("--no-double-quantisation", action="store_true", help="scales of blocks stay in fp32")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--seq", type=int, default=2048, help="tokens of a row (default 2048)")
    add("--batch", type=int, default=1, help="rows per device and forward pass (default 1)")
    add("--accumulation", type=int, default=1, help="forward passes per optimizer step")
    add("--optimizer", default="adamw_torch_fused", help=", ".join(OPTIMIZERS))
    add("--attention", choices=("sdpa", "eager", "flash_attention_2"), default="sdpa")
    add("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    add("--packing", action="store_true", help="TRL's packing of rows")
    add("--padding", action="store_true", help="every second row of a batch is half as long")
    add("--prompt", type=int, default=0, help="tokens at the head of a row without a label")
    add("--stack", choices=("trl", "transformers", "raw"), default="trl")
    add("--gpu", action="append", default=[], metavar="NAME", help="a card; several by comma")
    add("--vram", action="append", default=[], metavar="SIZE", help="or its memory, as 24GiB")
    tiers = ("formula", "traced", "sliced", "measured")
    add("--tier", choices=tiers, default="formula", help="how the numbers are obtained")
    add(
        "--max",
        choices=("seq", "batch"),
        dest="largest",
        help="the largest that fits; sequences by 64",
    )
    add("--explain", action="store_true", help="list the tensors at the peak (tier traced)")
    add("--json", action="store_true", help="one JSON object, or a list of several")
    return made


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    try:
        cards = _cards(options)
        plans = [_plan(options, model) for model in options.models]
        found = [_answer(options, plan, *card) for plan in plans for card in cards]
    except (PlanError, ModelError) as error:
        print(f"cift estimate: {one_line(str(error))}", file=sys.stderr)  # noqa: T201 - a tool prints
        return EXIT_USAGE
    _show(options, found, dict(cards))
    return max((EXIT_CODES[item.verdict] for item in found), key=(0, 10, 1).index)


def _cards(options: argparse.Namespace) -> list[tuple[str, Device]]:
    if options.largest and options.tier != "formula":
        message = "--max tries many plans; use it with --tier formula"
        raise PlanError(message)
    names = [name for text in options.gpu for name in text.split(",") if name.strip()]
    sizes = [size for text in options.vram for size in text.split(",") if size.strip()]
    cards = [find_device(name) for name in names]
    cards.extend((size.strip(), described(size)) for size in sizes)
    if not cards:
        message = "name the card: --gpu rtx-4090, or --vram 24GiB"
        raise PlanError(message)
    return cards


def _plan(options: argparse.Namespace, model: str) -> Plan:
    stored: Any = options.quantisation or default_quantisation(options.method)
    targets: str | tuple[str, ...] = options.targets
    if "," in options.targets:
        targets = tuple(name.strip() for name in options.targets.split(","))
    stem = re.sub(r"[^\w.+-]+", "-", model).strip("-.") or "model"
    plan = Plan(
        name=f"{stem}-{options.method}",
        model=model,
        method=options.method,
        rank=options.rank,
        targets=targets,
        quantisation=stored,
        double_quantisation=not options.no_double_quantisation,
        dtype=options.dtype,
        sequence_length=options.seq,
        batch_size=options.batch,
        gradient_accumulation=options.accumulation,
        gradient_checkpointing=options.checkpointing,
        optimizer=options.optimizer,
        attention=options.attention,
        packing=options.packing,
        padding=options.padding,
        prompt_length=options.prompt,
        stack=options.stack,
    )
    check_plan(plan)
    wrong = wrong_targets(plan, load_model(plan.model))
    if wrong:
        message = f"--targets: {wrong}"
        raise PlanError(message)
    return plan


def _answer(options: argparse.Namespace, plan: Plan, card: str, device: Device) -> Fit:
    if options.largest:
        found = largest.find_largest(plan, card, device, options.largest)
        if found is not None:
            return found
        estimate = advise_fit.formula(plan, device)
    elif options.tier == "formula":
        estimate = advise_fit.formula(plan, device)
    else:
        estimate = _slower(options.tier, plan, device)
    return advise_fit.answer(plan, card, device, estimate)


def _slower(
    tier: Literal["traced", "sliced", "measured"], plan: Plan, device: Device
) -> Estimate | Unknown:
    """Return what a tier says that runs the stack; falls back to the formula with the reason."""

    def say(text: str) -> None:
        print(f"cift estimate: {text} …", file=sys.stderr)  # noqa: T201 - long work shows progress

    if tier == "traced":
        from cift_probe.expect.traced import trace

        found = trace(plan, capability=device.compute_capability, on_progress=say)
    else:
        from cift_probe.advise.here import measure_here

        found = measure_here(plan, tier, on_progress=say)
    if isinstance(found, Estimate):
        return found
    fallback = advise_fit.formula(plan, device)
    if isinstance(fallback, Unknown):
        return found
    return msgspec.structs.replace(fallback, note=f"in place of tier {tier}: {found.reason}")


def _show(options: argparse.Namespace, found: list[Fit], cards: dict[str, Device]) -> None:
    if options.json:
        plain = [_plain(item) for item in found]
        text = json.dumps(plain[0] if len(plain) == 1 else plain, indent=2)
    elif len(found) == 1:
        text = _page(options, found[0], cards[found[0].card])
    else:
        text = _table(found)
    print(text)  # noqa: T201 - a command-line tool prints


def _plain(found: Fit) -> dict[str, Any]:
    """Return an answer as plain data; a number that nobody has is None."""
    estimate = found.estimate
    told = {} if estimate is None else msgspec.to_builtins(estimate)
    told.pop("holds", None)
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
        "plan": msgspec.to_builtins(found.plan),
    }


def _page(options: argparse.Namespace, found: Fit, device: Device) -> str:
    plan = found.plan
    what = f"{plan.model}, {plan.method}, {plan.sequence_length} x {plan.batch_size}"
    lines = [f"{what} on {device.name}: {_word(found)} ({found.reason})", ""]
    estimate = found.estimate
    if estimate is None:
        return "\n".join([*lines, "hint: try --tier traced, which runs the installed stack itself"])
    lines += _numbers(found, estimate)
    lines += ["", f"held at the peak, in the instant {estimate.instant!r}:"]
    lines += [_line(name, bytes_text(size)) for name, size in estimate.components.items() if size]
    if options.explain:
        lines += ["", "largest tensors at the peak:"]
        lines += [
            f"  {bytes_text(item.num_bytes):>12}  {item.operation}  {list(item.shape)}  "
            f"{item.dtype}  {item.module}".rstrip()
            for item in estimate.holds
        ] or ["  tier traced knows them"]
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
    return lines


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


def _table(found: Sequence[Fit]) -> str:
    """Return models by cards: what is required and the verdict."""
    rows = list(dict.fromkeys(item.plan.model for item in found))
    columns = list(dict.fromkeys(item.card for item in found))
    cells = {(item.plan.model, item.card): _cell(item) for item in found}
    head = ["model", *columns]
    body = [[row, *(cells[row, column] for column in columns)] for row in rows]
    widths = [max(len(line[index]) for line in [head, *body]) for index in range(len(head))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *body]
    ]
    first = found[0].plan
    what = f"{first.method}, {first.sequence_length} x {first.batch_size}, stack {first.stack}"
    return "\n".join([f"required memory: {what}; tight is above 90 % of usable", "", *lines])


def _cell(found: Fit) -> str:
    if found.estimate is None:
        return "undecided"
    return f"{bytes_text(found.estimate.required_bytes)} {_word(found)}"
