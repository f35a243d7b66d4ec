"""Plans: what somebody wants to fine-tune, and how.

A plan is a TOML file or a built-in row of `data/plans/`. What it does not say keeps the default
of the stack it names, so that a prediction is about the code that people run.
"""

from __future__ import annotations

import difflib
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from cift_probe.data import folder
from cift_probe.models import ModelError, load_model

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B)\s*")
_FACTOR = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
MAX_COUNT = 1_000_000
_MAX_FILE_BYTES = 1 << 20
_MAX_SIZE_BYTES = 1 << 60
_MAX_SECONDS = 1e9
# transformers' names; `adamw_torch` is its default of several tensors per kernel ("foreach"), and
# `adamw_torch_loop` one tensor after the other
OPTIMIZERS = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_loop",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "adafactor",
    "sgd",
)
_QUANTISED = ("nf4", "fp4", "int8")
# One column in twenty of the inputs of bitsandbytes' 8-bit layers: how many hold a value beyond
# the threshold, and are kept in 16 bits to the end of the step, depends on the weights.
OUTLIER_BAND = 0.05
REFERENCE_PLAN = "smollm2-135m-qlora"  # small enough for every device; every session runs it


class PlanError(ValueError):
    """A plan, model or size that cannot be used; one line that says what to change."""


class Budget(msgspec.Struct, frozen=True):
    """What one optimizer step may take: bytes, and seconds. None is not limited.

    `host_ram` is the host memory that loading and training may take at their peak.
    """

    peak_allocated: int | None = None
    required: int | None = None
    step_s: float | None = None
    host_ram: int | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One configuration of fine-tuning, or of inference.

    `sequence_length` is in tokens, `batch_size` in sequences per device and forward pass.
    `lora_alpha` is TRL's and PEFT's scaling numerator, `targets` "all-linear", "attention" or
    names of modules. `quantisation` is how the linear layers are stored, `dtype` what the rest is
    stored and computed in. `attention` and `optimizer` are transformers' names. `padding` says
    that every second row of a batch is half as long, so that an attention mask is needed.
    `prompt_length` are tokens at the head of each row that have no label. The loss is the
    stack's: TRL's never makes full logits, the others' do.
    """

    name: str
    model: str
    method: Literal["qlora", "lora", "full", "inference"] = "qlora"
    rank: int = 16
    lora_alpha: int = 32
    targets: str | tuple[str, ...] = "all-linear"
    quantisation: Literal["nf4", "fp4", "int8", "none"] = "nf4"
    double_quantisation: bool = True
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    sequence_length: int = 2048
    batch_size: int = 1
    gradient_accumulation: int = 1
    gradient_checkpointing: bool = True
    optimizer: str = "adamw_torch_fused"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    packing: bool = False
    padding: bool = False
    prompt_length: int = 0
    stack: Literal["trl", "transformers", "raw"] = "trl"
    budget: Budget | None = None

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Tokens of each row of a batch."""
        full = self.sequence_length
        short = max(1, full // 2) if self.padding else full
        return tuple(short if index % 2 else full for index in range(self.batch_size))

    @property
    def num_labels(self) -> int:
        """Tokens of a batch that the loss is about; the first of a row has no predecessor."""
        unlabelled = max(1, self.prompt_length)
        return sum(max(0, length - unlabelled) for length in self.row_lengths)

    @property
    def outlier_band(self) -> float:
        """Relative error for what depends on trained weights, which random ones do not show."""
        return OUTLIER_BAND if self.quantisation == "int8" else 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequence_length * self.batch_size * self.gradient_accumulation


def parse_quantity(text: str) -> int:
    """Return a number of bytes.

    >>> parse_quantity("24GiB"), parse_quantity("1.5 GB")
    (25769803776, 1500000000)
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        message = f"{text!r} is no size; write a number and a unit, for instance 24GiB"
        raise PlanError(message)
    size = float(match[1]) * _FACTOR[match[2]]
    if not 1 <= size < _MAX_SIZE_BYTES:
        message = f"{text[:40]!r} is outside 1 B to 1 EiB; write a size that memory can have"
        raise PlanError(message)
    return int(size)


def read_plan(text: str) -> Plan:
    """Return a built-in plan by name, or the plan in a TOML file; raises PlanError."""
    builtin = {path.stem: path for path in folder("plans").glob("*.toml")}
    path = builtin.get(text, Path(text))
    try:
        if "/" not in text and not path.exists():
            message = f"--plan {text}: no such file or built-in plan{_nearest(text, [*builtin])}"
            raise PlanError(message)
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_FILE_BYTES:
            message = f"--plan {path}: is no file of at most 1 MiB; name a readable TOML file"
            raise PlanError(message)
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        message = f"--plan {path}: is not text ({error.reason}); name a TOML file"
        raise PlanError(message) from error
    except OSError as error:
        message = f"--plan {path}: cannot be read ({error.strerror}); name a readable TOML file"
        raise PlanError(message) from error
    return parse_plan(content, str(path), path.stem)


def parse_plan(content: str, place: str, default_name: str) -> Plan:
    """Return the plan in a TOML text; raises PlanError naming `place`, key and value."""
    try:
        row = tomllib.loads(content)
    except (ValueError, RecursionError) as error:  # tomllib lets both through for odd texts
        message = f"{place}: is no TOML: {error}"
        raise PlanError(message) from error
    row.setdefault("name", default_name)
    row.setdefault("quantisation", default_quantisation(row.get("method", "qlora")))
    try:
        row["budget"] = _budget(row["budget"]) if "budget" in row else None
        plan = msgspec.convert(row, Plan)
        check_plan(plan)
    except (msgspec.ValidationError, ModelError, PlanError) as error:
        message = f"{place}: {error}"
        raise PlanError(message) from error
    return plan


def default_quantisation(method: object) -> Literal["nf4", "none"]:
    """Return how linear layers are stored where nobody says it."""
    return "nf4" if method == "qlora" else "none"


def default_plan(model: str) -> Plan:
    """Return QLoRA with the defaults of the stack for a model; raises PlanError."""
    try:
        load_model(model)
    except ModelError as error:
        raise PlanError(str(error)) from error
    stem = re.sub(r"[^\w.+-]+", "-", model).strip("-")
    return Plan(name=f"{stem}-qlora", model=model)


def _budget(row: Any) -> Budget:
    if not isinstance(row, dict):
        message = "[budget] is no table; write [budget] and one line per limit"
        raise PlanError(message)
    unknown = sorted(set(row) - set(Budget.__struct_fields__))
    if unknown:
        fields = ", ".join(Budget.__struct_fields__)
        message = f"[budget] has no field {unknown[0]!r}; it has {fields}"
        raise PlanError(message)
    values: dict[str, Any] = {}
    for name, value in row.items():
        if name == "step_s":
            number = not isinstance(value, bool) and isinstance(value, int | float)
            if not number or not 0 < value < _MAX_SECONDS:  # NaN is not between them either
                message = f"[budget] step_s = {str(value)[:40]} is no number of seconds above 0"
                raise PlanError(message)
            values[name] = float(value)
        elif isinstance(value, str):
            values[name] = parse_quantity(value)
        else:
            message = (
                f'[budget] {name} = {repr(value)[:40]} has no unit; write for instance "22 GiB"'
            )
            raise PlanError(message)
    return Budget(**values)


def check_plan(plan: Plan) -> None:
    """Raise PlanError or ModelError, naming field and value, for a plan that nobody can run."""
    counts = ("rank", "lora_alpha", "sequence_length", "batch_size", "gradient_accumulation")
    for name in counts:
        value = getattr(plan, name)
        if not 1 <= value <= MAX_COUNT:
            message = f"{name} = {value} is outside 1 to {MAX_COUNT}"
            raise PlanError(message)
    if not re.fullmatch(r"[\w.+-]+", plan.name):
        message = f"name = {plan.name!r}: write letters, digits, '.', '_', '+' and '-' only"
        raise PlanError(message)
    if plan.optimizer not in OPTIMIZERS:
        message = f"optimizer = {plan.optimizer!r}{_nearest(plan.optimizer, list(OPTIMIZERS))}"
        raise PlanError(message)
    if not 0 <= plan.prompt_length < plan.sequence_length:
        message = f"prompt_length = {plan.prompt_length} is outside 0 to {plan.sequence_length - 1}"
        raise PlanError(message)
    shape = load_model(plan.model)
    longest = shape.max_position_embeddings
    if longest is not None and plan.sequence_length > longest:
        message = f"sequence_length = {plan.sequence_length} is above the model's {longest}"
        raise PlanError(message)
    rank, hidden = plan.rank, shape.count("hidden_size")
    if plan.method in {"lora", "qlora"} and rank > hidden:
        message = f"rank = {rank} is above the model's hidden size {hidden}; write a smaller rank"
        raise PlanError(message)
    _check_pairs(plan)


def _check_pairs(plan: Plan) -> None:
    """Raise PlanError for fields that exclude each other."""
    quantised = plan.quantisation in _QUANTISED
    if plan.method != "inference" and (plan.method == "qlora") != quantised:
        message = (
            f"method {plan.method!r} and quantisation {plan.quantisation!r} exclude each other; "
            "qlora needs nf4, fp4 or int8, lora and full need none"
        )
        raise PlanError(message)
    names = (plan.targets,) if isinstance(plan.targets, str) else plan.targets
    if not names or not all(re.fullmatch(r"[\w.-]+", name) for name in names):
        message = f"targets = {plan.targets!r}: write all-linear, attention or names of modules"
        raise PlanError(message)
    if plan.packing and (plan.padding or plan.stack != "trl"):
        message = "packing is TRL's, and packed rows have no padding; use stack trl, padding false"
        raise PlanError(message)
    if plan.padding and plan.batch_size == 1:
        message = "padding needs at least two rows that differ in length; raise batch_size"
        raise PlanError(message)


def _nearest(name: str, options: list[str]) -> str:
    close = difflib.get_close_matches(name, options, n=3, cutoff=0.4)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(options)}"
