"""`cift diagnose`: real and made-up texts of every kind, look-alikes, and logs that are no text."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cift_probe.cli import machine_file, run_command
from cift_probe.diagnose import architecture, log, memory
from cift_probe.diagnose.diagnosis import Diagnosis, diagnose
from cift_probe.diagnose.kinds import read_kinds
from cift_probe.diagnose.signs import SIGNS
from cift_probe.verdict import catalogue

# the same examples in every run, and nothing kept in the folder
settings.register_profile("cift", derandomize=True, database=None, deadline=None)
settings.load_profile("cift")

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"
# collected from public reports; each record names its thread
REAL = [json.loads(line) for line in (DATA / "error_texts.jsonl").read_text().splitlines()]
OWN: dict[str, Any] = tomllib.loads((DATA / "own_texts.toml").read_text(encoding="utf-8"))
OWN_TEXTS = [(kind, text) for kind, row in OWN.items() for text in row["texts"]]
MISSES = [(kind, text) for kind, row in OWN.items() for text in row["misses"]]


def of(text: str | bytes) -> list[Diagnosis]:
    content = text.encode() if isinstance(text, str) else text
    return diagnose(io.BytesIO(content))


def first(text: str) -> str:
    found = of(text)
    return found[0].kind if found else ""


@pytest.mark.parametrize("record", REAL, ids=[record["id"] for record in REAL])
def test_a_real_text_is_recognised(record: dict[str, Any]) -> None:
    assert first(record["text"]) == record["kind"]


@pytest.mark.parametrize(("kind", "text"), OWN_TEXTS)
def test_a_text_in_other_words_is_recognised(kind: str, text: str) -> None:
    assert first(text) == kind


@pytest.mark.parametrize(("kind", "text"), MISSES)
def test_a_near_miss_is_not_of_the_kind(kind: str, text: str) -> None:
    assert kind not in [item.kind for item in of(text)]


def test_every_kind_with_a_sign_has_texts_of_our_own_and_a_row() -> None:
    kinds = {sign.kind for sign in SIGNS} | {kind for kind, _ in OWN_TEXTS}
    assert kinds == {kind for kind, row in read_kinds().items() if row.told}
    assert all(len(row["texts"]) >= 2 for row in OWN.values())
    assert set(OWN) == kinds


def test_every_sign_is_needed_by_a_text() -> None:
    """A trigger that no text of its kind holds would keep the sign from ever being looked at."""
    texts = [text.lower() for _, text in OWN_TEXTS] + [record["text"].lower() for record in REAL]
    for sign in SIGNS:
        found = [t for t in texts if any(word in t for word in sign.triggers)]
        flat = [" ".join(t.splitlines()) for t in found]
        assert any(sign.pattern.search(t) for t in flat), sign.kind


def test_the_first_failure_that_names_itself_comes_before_its_consequences() -> None:
    log = (
        "step 1\n\x1b[31mtorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
        "GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free.\x1b[0m\n"
        "ncclSystemError: System call failed\n[launch.py:1] exits with return code = -9\n"
    )
    found = of(log)
    assert [item.kind for item in found] == ["gpu_oom", "host_oom_killer", "nccl_system_error"]
    assert [item.sure for item in found] == ["certain", "likely", "aside"]
    assert found[0].lines[0].number == 2
    assert "\x1b" not in found[0].lines[0].text
    assert found[0].figures == {"request": 2 << 30, "total": 8 << 30, "free": 1 << 30}


def test_what_is_said_again_and_again_is_counted_and_shown_three_times() -> None:
    found = of("RuntimeError: CUDA error: uncorrectable ECC error encountered\nx\n" * 500)
    assert (found[0].count, len(found[0].lines)) == (500, 3)


def test_a_message_is_found_across_the_borders_of_what_is_read_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "a line\n" * 40 + "NVIDIA X with CUDA capability sm_120 is not compatible with the\n"
    text += "current PyTorch installation. It supports sm_80 sm_90.\n" + "more\n" * 40
    for size in (7, 64, 301, 1000):
        monkeypatch.setattr(log, "_BLOCK_BYTES", size)
        found = of(text)
        assert [item.kind for item in found] == ["arch_missing"], size
        assert found[0].lines[0].number == 41


def test_a_code_that_changes_is_not_taken_for_progress() -> None:
    assert first("Error 801: x\nError 801: x\nError 802: system\n") == "fabric_not_ready"
    xids = "".join(f"NVRM: Xid (PCI:0000:81:00): {code}, pid=1\n" for code in (13, 31, 79))
    assert first(xids) == "gpu_fell_off_bus"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1"])
def test_a_log_is_read_in_the_encodings_that_shells_write(encoding: str) -> None:
    text = "étape 1\r\nRuntimeError: CUDA error: invalid device ordinal\r\n"
    assert [item.kind for item in of(text.encode(encoding))] == ["device_index_mismatch"]


@given(st.binary(max_size=3000))
def test_no_bytes_break_it(content: bytes) -> None:
    for item in of(content):
        assert item.kind in read_kinds()


@given(st.data())
def test_a_text_that_is_cut_or_interleaved_breaks_nothing(data: st.DataObject) -> None:
    """What is left of a message names its kind or none, and other lines do not hide it."""
    text = data.draw(st.sampled_from([text for _, text in OWN_TEXTS]))
    other = data.draw(st.sampled_from([text for _, text in MISSES]))
    cut = data.draw(st.integers(0, len(text)))
    assert all(item.kind in read_kinds() for item in of(f"{other}\n{text[:cut]}"))
    lines = f"{other}\n{text}\n{other}"
    assert {item.kind for item in of(text)} <= {item.kind for item in of(lines)}


@given(st.text(alphabet="Tried to allocate 0123456789.GMKiB()[] free capacity", max_size=400))
def test_no_figures_break_the_decision(text: str) -> None:
    assert memory.decide(memory.parse_figures(text)) in read_kinds()


@given(st.text(alphabet="cuda capability sm_0123456789.()- is", max_size=200))
def test_no_list_breaks_the_architectures(text: str) -> None:
    assert architecture.decide(text) in {"arch_missing", "arch_false_alarm"}


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        ("RuntimeError: CUDA error: out of memory\n", 0, "change first: see who holds the GPU"),
        ("all went well\n", 10, "nothing is guessed"),
    ],
)
def test_the_command_says_what_it_is_and_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, code: int, words: str
) -> None:
    file = tmp_path / "train.log"
    file.write_text(content)
    assert run_command(["diagnose", str(file)]) == code
    assert words in capsys.readouterr().out
    assert run_command(["diagnose", str(file), "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"] is None) == (code == 10)


@pytest.mark.parametrize("name", ["/dev/zero", "/no/such/file", "/dev"])
def test_what_is_no_log_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run_command(["diagnose", name]) == 4
    told = capsys.readouterr()
    assert told.out == ""
    [line] = told.err.splitlines()
    assert line.startswith(f"cift diagnose: {name}: ")


# ---- with a report of the machine ----

LOG = (
    b"RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. "
    b"It is possible that dataloader's workers are out of shared memory.\n"
)
REPORT: dict[str, Any] = {
    "evidence": {"facts": {"host.shm.size": {"is": "known", "value": 67108864, "unit": "B"}}},
    "findings": [
        {"check": "HST001", "outcome": "FAIL", "reason": "64.00 MiB is not at least 1.00 GiB"},
        {"check": "ENV001", "outcome": "PASS", "reason": "fine"},
    ],
}


def with_report(tmp_path: Path, report: Any, *arguments: str) -> int:
    (tmp_path / "log").write_bytes(LOG)
    (tmp_path / "report.json").write_text(json.dumps(report))
    return run_command(["diagnose", str(tmp_path / "log"), "--report", str(tmp_path), *arguments])


def test_a_report_confirms_what_a_log_tells(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert with_report(tmp_path, REPORT) == 0
    out = capsys.readouterr().out
    assert "the report: confirmed" in out
    assert "HST001 FAIL: 64.00 MiB is not at least 1.00 GiB" in out
    assert "host.shm.size: 64.00 MiB" in out
    assert "ENV001" not in out
    sound = REPORT | {"findings": [{"check": "HST001", "outcome": "PASS", "reason": "enough"}]}
    assert with_report(tmp_path, sound, "--json") == 0
    told = json.loads(capsys.readouterr().out)["diagnoses"][0]["machine"]
    assert told["stands"] == "not confirmed"


def test_facts_of_a_machine_are_shown_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    facts = {"evidence": {"host.shm.size": {"value": 67108864, "unit": "B", "source": "statvfs"}}}
    assert with_report(tmp_path, facts) == 0
    assert "host.shm.size: 64.00 MiB" in capsys.readouterr().out


def test_a_report_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert with_report(tmp_path, []) == 4
    assert "has no evidence" in capsys.readouterr().err


def test_checks_and_facts_of_every_kind_exist() -> None:
    known = catalogue.load(ROOT / "suites")
    examples = ROOT / "reports" / "examples"
    keys: set[str] = set()
    for name in ("h200-torch-2.11-cu130.json", "facts/h200.json"):
        keys |= {
            key.partition("[")[0] for key in machine_file.read_machine(str(examples / name))[1]
        }
    for kind, row in read_kinds().items():
        assert set(row.checks) <= set(known), kind
        assert set(row.facts) <= keys, kind
