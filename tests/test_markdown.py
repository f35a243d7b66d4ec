"""The page that a stranger reads."""

from __future__ import annotations

import msgspec
from fabricated_report import FITS, mixed, report

from cift_probe.evidence import Known
from cift_probe.report.markdown import render
from cift_probe.verdict.answer import Answer, Verdict

ONE_PAGE = 90


def test_a_good_run_fits_one_page_and_answers_first() -> None:
    lines = render(report()).splitlines()
    assert len(lines) <= ONE_PAGE
    answer = next(place for place, line in enumerate(lines) if "**fits**" in line)
    assert answer < next(place for place, line in enumerate(lines) if line == "## Machine")


def test_what_was_not_measured_is_said_and_is_no_zero() -> None:
    missing = Answer("plan-a", "gpu0", Verdict.UNDECIDED, "no GPU", demanded=True)
    text = render(report(answers=[missing]))
    assert "**plan-a** on gpu0, demanded: **undecided**. no GPU." in text
    assert "0 B" not in text
    slow = msgspec.structs.replace(FITS, step_s=None, tokens_per_s=None)
    assert "tokens/s not measured" in render(report(answers=[slow]))


def test_every_outcome_has_its_place() -> None:
    text = render(report(*mixed()))
    failed, undecided = text.index("## Failed"), text.index("## Undecided")
    advice, absent = text.index("## Advice"), text.index("## Not applicable")
    assert failed < text.index("GPU001[gpu0]", failed) < undecided
    assert failed < text.index("ENV006[gpu0]", failed) < undecided
    assert undecided < text.index("no permission; needs root") < advice
    assert "- blocked by GPU001[gpu0]: 2 checks: GPU002[gpu0], KRN001[gpu0]" in text
    assert advice < text.index("GPU005[gpu0]", advice) < absent
    assert "flash_attn is not installed" in text[absent:]
    assert "fix: plug one in" in text


def test_an_early_end_is_said_at_the_top() -> None:
    text = render(report(complete=False, in_flight="KRN003[gpu0]"))
    assert text.index("ended early. In flight: KRN003[gpu0]") < text.index("## Answer")


def test_a_cap_and_the_tested_environment_are_said() -> None:
    text = render(report(vram_cap_bytes=24 * 1024**3, stack_origin="built by make report"))
    assert "Tested: built by make report" in text
    assert "limited to 24.00 GiB (--vram-cap)" in text


def test_what_was_not_run_is_grouped_by_its_reason() -> None:
    text = render(report(not_run={"B": "left out by --quick", "A": "left out by --quick"}))
    assert "- left out by --quick: A, B" in text


def test_the_real_training_is_part_of_the_answer() -> None:
    [check] = [item for item in mixed() if item.check == "HST001"]
    learned = msgspec.structs.replace(check, check="CVG001", case="cpu")
    losses = {
        "training.loss.first[cpu]": Known(8.31, "1"),
        "training.loss.last[cpu]": Known(0.33, "1"),
    }
    text = render(report(learned, measured=losses))
    assert "on cpu: **learns** (loss 8.31 to 0.33)" in text


def test_a_pipe_in_a_value_does_not_break_the_table() -> None:
    text = render(report(facts={"host.os": Known("a|b")}))
    assert "a\\|b" in text
