"""Plans: what is read, what is refused, and what the refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest

from cift_probe.plan import (
    OPTIMIZERS,
    Plan,
    PlanError,
    default_plan,
    parse_plan,
    parse_quantity,
    read_plan,
)

GIB = 1024**3


def test_the_built_in_plan_is_trl_defaults() -> None:
    plan = read_plan("llama-3.1-8b-qlora")
    assert (plan.model, plan.method, plan.rank) == ("llama-3.1-8b", "qlora", 16)
    assert (plan.sequence_length, plan.batch_size, plan.stack) == (2048, 1, "trl")


def test_a_plan_file_is_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('model = "qwen3-8b"\n[budget]\npeak_allocated = "22 GiB"\nstep_s = 1\n')
    plan = read_plan(str(path))
    assert plan.name == "mine"
    assert plan.budget is not None
    assert plan.budget.peak_allocated == 22 * GIB
    assert plan.budget.step_s == 1.0


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("24GiB", 24 * GIB), (" 24 GB ", 24 * 10**9), ("1.5MiB", 1572864), ("512B", 512)],
)
def test_a_size_is_read_with_its_unit(text: str, num_bytes: int) -> None:
    assert parse_quantity(text) == num_bytes


@pytest.mark.parametrize("text", ["24", "GiB", "-1GiB", "24 Gib", "1e3GiB", "0GiB", "nanGB", ""])
def test_a_size_without_sense_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="write a"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("model = ", "is no TOML"),
        ('model = "llama-3.1-8b"\nmodel = "x"', "is no TOML"),
        ("rank = 16", "model"),
        ('model = "lama-3.1-8b"', "did you mean llama-3.1-8b"),
        ('model = "llama-3.1-8b"\nseq = 4', "seq"),
        ('model = "llama-3.1-8b"\nrank = "16"', "rank"),
        ('model = "llama-3.1-8b"\nrank = 0', "rank = 0"),
        ('model = "llama-3.1-8b"\nsequence_length = 200000', "131072"),
        ('model = "llama-3.1-8b"\nmethod = "full"\nquantisation = "nf4"', "exclude each other"),
        ('model = "llama-3.1-8b"\nquantisation = "none"', "exclude each other"),
        (
            'model = "llama-3.1-8b"\nprompt_length = 2048',
            "prompt_length = 2048 is outside 0 to 2047",
        ),
        ('model = "llama-3.1-8b"\nprompt_length = -1', "prompt_length = -1 is outside"),
        ('model = "llama-3.1-8b"\nrank = 5000', "hidden size 4096"),
        ('model = "llama-3.1-8b"\noptimizer = "adam"', "did you mean"),
        ('model = "llama-3.1-8b"\ntargets = ["a b"]', "names of modules"),
        ('model = "llama-3.1-8b"\ntargets = []', "names of modules"),
        ('model = "llama-3.1-8b"\npacking = true\nstack = "raw"', "packing is TRL's"),
        ('model = "llama-3.1-8b"\npadding = true', "raise batch_size"),
        ('model = "llama-3.1-8b"\n[budget]\nstep_s = nan', "seconds"),
        ('model = "llama-3.1-8b"\nname = "a b"', "name ="),
        ('model = "llama-3.1-8b"\nbudget = 4', "[budget]"),
        ('model = "llama-3.1-8b"\n[budget]\npeak = "1GiB"', "peak_allocated"),
        ('model = "llama-3.1-8b"\n[budget]\nrequired = 4', "has no unit"),
        ('model = "llama-3.1-8b"\n[budget]\nstep_s = "1"', "seconds"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(content)
    with pytest.raises(PlanError) as caught:
        read_plan(str(path))
    text = str(caught.value)
    assert words in text
    assert str(path) in text
    assert "\n" not in text


@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_an_unreadable_plan_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "plan.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError) as caught:
        read_plan(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_built_in_plan_names_the_near_ones() -> None:
    with pytest.raises(PlanError, match=r"did you mean llama-3\.1-8b-qlora"):
        read_plan("llama-3.1-8b-qlra")


def test_a_model_alone_gives_the_default_plan() -> None:
    assert default_plan("qwen3-8b") == Plan(name="qwen3-8b-qlora", model="qwen3-8b")


def test_a_model_that_nobody_knows_gives_no_default_plan() -> None:
    with pytest.raises(PlanError, match=r"did you mean .*qwen3-8b"):
        default_plan("qwen3-8bb")


def test_every_optimizer_can_be_planned(tmp_path: Path) -> None:
    for name in OPTIMIZERS:
        path = tmp_path / f"{name}.toml"
        path.write_text(f'model = "qwen3-8b"\noptimizer = "{name}"\n')
        assert read_plan(str(path)).optimizer == name


@pytest.mark.parametrize(
    ("method", "stored"),
    [("qlora", "nf4"), ("lora", "none"), ("full", "none"), ("inference", "none")],
)
def test_only_qlora_quantises_where_nothing_is_said(method: str, stored: str) -> None:
    text = f'model = "qwen3-8b"\nmethod = "{method}"'
    assert parse_plan(text, "here", "x").quantisation == stored
    assert parse_plan('model = "qwen3-8b"', "here", "x").quantisation == "nf4"
