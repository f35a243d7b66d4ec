"""`cift estimate`: what a plan needs on a card, without the card, and what would change that."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import msgspec

from cift_probe.advise import fit as advise_fit
from cift_probe.advise import largest
from cift_probe.advise.fit import Fit
from cift_probe.cli import estimate_page as render
from cift_probe.devices import Device, described, find_device
from cift_probe.evidence import Unknown
from cift_probe.expect.estimate import STACK_REFUSES, Estimate
from cift_probe.expect.memory import wrong_targets
from cift_probe.models import ModelError, load_model
from cift_probe.plan import OPTIMIZERS, Plan, PlanError, check_plan, default_quantisation
from cift_probe.verdict.answer import Verdict
from cift_probe.verdict.display import one_line

EXIT_USAGE = 4
EXIT_CODES = {
    Verdict.FITS: 0,
    Verdict.FITS_WITH_LEVERS: 0,
    Verdict.DOES_NOT_FIT: 1,
    Verdict.UNDECIDED: 10,
}
_DEFAULT_LENGTH = 2048  # tokens
_Tracer = Callable[[Plan, tuple[int, int]], Estimate | Unknown]
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
    add("--seq", type=int, help="tokens of a row (default 2048, or all that the model takes)")
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
        help="the largest that fits, by the formula; sequences in steps of 64",
    )
    add("--explain", action="store_true", help="list the tensors at the peak; needs tier traced")
    add("--json", action="store_true", help="one JSON object, or a list of several")
    return made


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    try:
        cards = _cards(options)
        plans = [_plan(options, model) for model in dict.fromkeys(options.models)]
        _check_ways(options, len(plans) * len(cards))
        tracer = cache(_traced)  # once for all cards of one capability
        found = [_answer(options, plan, *card, tracer) for plan in plans for card in cards.items()]
    except (PlanError, ModelError) as error:
        print(f"cift estimate: {one_line(str(error))}", file=sys.stderr)  # noqa: T201 - a tool prints
        return EXIT_USAGE
    if options.json:
        text = render.as_json(found, explain=options.explain)
    elif len(found) == 1:
        text = render.page(found[0], cards[found[0].card], explain=options.explain)
    else:
        text = render.table(found)
    print(text)  # noqa: T201 - a command-line tool prints
    return max((EXIT_CODES[item.verdict] for item in found), key=(0, 10, 1).index)


def _check_ways(options: argparse.Namespace, num_answers: int) -> None:
    """Raise PlanError for options that would otherwise be dropped without a word."""
    if options.largest and options.tier != "formula":
        message = "--max tries many plans; use it with --tier formula"
        raise PlanError(message)
    if options.explain and options.tier != "traced":
        message = "--explain lists tensors, which --tier traced alone knows"
        raise PlanError(message)
    if options.explain and num_answers > 1 and not options.json:
        message = (
            "--explain lists the tensors of one answer; name one model and one card, or --json"
        )
        raise PlanError(message)


def _cards(options: argparse.Namespace) -> dict[str, Device]:
    names = [name for text in options.gpu for name in text.split(",") if name.strip()]
    sizes = [size for text in options.vram for size in text.split(",") if size.strip()]
    cards = dict(find_device(name) for name in names)
    cards |= {size.strip(): described(size) for size in sizes}
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
        sequence_length=_length(options, model),
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


def _length(options: argparse.Namespace, model: str) -> int:
    """Return the tokens of a row; without a word of the user's what the model surely takes."""
    if options.seq is not None:
        return int(options.seq)
    longest = load_model(model).max_position_embeddings
    return min(_DEFAULT_LENGTH, longest or _DEFAULT_LENGTH)


def _answer(
    options: argparse.Namespace, plan: Plan, card: str, device: Device, tracer: _Tracer
) -> Fit:
    if options.largest:
        found = largest.find_largest(plan, card, device, options.largest)
        if found is not None:
            return found
        estimate = advise_fit.formula(plan, device)
    elif options.tier == "formula":
        estimate = advise_fit.formula(plan, device)
    else:
        estimate = _slower(options.tier, plan, device, tracer)
    return advise_fit.answer(plan, card, device, estimate)


def _slower(
    tier: Literal["traced", "sliced", "measured"],
    plan: Plan,
    device: Device,
    tracer: _Tracer,
) -> Estimate | Unknown:
    """Return what a tier says that runs the stack; falls back to the formula with the reason."""
    if tier == "traced":
        found = tracer(plan, device.compute_capability)
        if isinstance(found, Unknown) and found.source == STACK_REFUSES:
            return found  # the formula would answer for a model that nobody can build
    else:
        from cift_probe.advise.here import measure_here

        found = measure_here(plan, tier, on_progress=_say)
    if isinstance(found, Estimate):
        return found
    fallback = advise_fit.formula(plan, device)
    if isinstance(fallback, Unknown):
        return found
    return msgspec.structs.replace(fallback, note=f"in place of tier {tier}: {found.reason}")


def _traced(plan: Plan, capability: tuple[int, int]) -> Estimate | Unknown:
    from cift_probe.expect.traced import trace

    return trace(plan, capability=capability, on_progress=_say)


def _say(text: str) -> None:
    print(f"cift estimate: {text} …", file=sys.stderr)  # noqa: T201 - long work shows progress
