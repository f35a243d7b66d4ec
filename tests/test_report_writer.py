"""Reports: written whole or not at all, read back with suspicion."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from fabricated_report import FACTS, FITS, finding, mixed, report

from cift_probe.evidence import Known, Unknown
from cift_probe.report.schema import SCHEMA_FILE, SCHEMA_VERSION, Report, Suite, schema_text
from cift_probe.report.writer import ReportError, canonical_bytes, read_report, write_report
from cift_probe.verdict.finding import Outcome

TOP = "schema_version suite machine software plans evidence findings answers summary digest"
SUITE = (
    "name version run_id started finished selection stack_origin vram_cap_bytes exit_code "
    "complete in_flight instruments num_resumed"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_report(tmp_path, report(*mixed()))
    return tmp_path / "report.json"


def change(path: Path, alter: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    alter(document)
    path.write_text(json.dumps(document))


def refusal(path: Path) -> str:
    with pytest.raises(ReportError) as caught:
        read_report(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def test_what_was_written_is_read_back(path: Path) -> None:
    assert read_report(path) == report(*mixed())
    assert path.read_bytes() == canonical_bytes(read_report(path))
    assert sorted(item.name for item in path.parent.iterdir()) == ["report.json", "report.md"]


def test_bytes_do_not_depend_on_the_order_of_evidence() -> None:
    turned = report(facts=dict(reversed(FACTS.items())))
    assert canonical_bytes(turned) == canonical_bytes(report())


def test_whole_numbers_where_the_schema_wants_fractions_keep_the_digest(tmp_path: Path) -> None:
    made = report(answers=[msgspec.structs.replace(FITS, step_s=1, tokens_per_s=2048)])
    write_report(tmp_path, made)
    assert read_report(tmp_path / "report.json") == made


def test_values_that_json_lacks_are_written_as_text(tmp_path: Path) -> None:
    measured = {
        "loss[gpu0]": Known(float("nan"), "1", note="step 3"),
        "band[gpu0]": Known(5, "1", "bench", band=float("nan")),
        "name[gpu0]": Known("a\udcff"),
    }
    answer = msgspec.structs.replace(FITS, step_s=float("nan"), tokens_per_s=float("inf"))
    broken = finding("CVG001[gpu0]", Outcome.FAIL, found=Known(float("-inf"), "1"))
    made = report(broken, answers=[answer], measured=measured)
    write_report(tmp_path, made)
    json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    back = read_report(tmp_path / "report.json")
    assert back == made
    assert back.evidence["measured"] == {
        "loss[gpu0]": Known("nan", "1", note="step 3"),
        "band[gpu0]": Unknown("5 with an error band of nan", "bench"),
        "name[gpu0]": Known("a\\udcff"),
    }
    assert back.findings[0].found == Known("-inf", "1")
    kept = (back.answers[0].step_s, back.answers[0].tokens_per_s, back.answers[0].band)
    assert kept == (None, None, FITS.band)


def test_a_missing_report_is_named(tmp_path: Path) -> None:
    assert "name a report.json" in refusal(tmp_path / "no.json")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe{}", b'{"schema_version": NaN}', b'{"a": 1e999}', b"[" * 100_000],
)
def test_a_report_that_is_no_json_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert "is no JSON" in refusal(path)


@pytest.mark.parametrize("content", ["[]", "null", "7"])
def test_a_report_that_is_no_object_is_refused(path: Path, content: str) -> None:
    path.write_text(content)
    assert "holds no JSON object" in refusal(path)


@pytest.mark.parametrize("version", ["9.0", "1.1", "2"])
def test_a_report_of_a_newer_schema_asks_for_a_newer_cift(path: Path, version: str) -> None:
    change(path, lambda document: document.update(schema_version=version, something_new=1))
    message = refusal(path)
    assert f"has schema {version}, this is cift 0.1.0, which reads up to 1.0" in message
    assert "upgrade cift-probe" in message


@pytest.mark.parametrize("version", [None, "one", "", [1], "1.-1"])
def test_a_report_without_a_schema_version_is_refused(path: Path, version: object) -> None:
    change(path, lambda document: document.update(schema_version=version))
    assert "has no schema_version" in refusal(path)


def test_a_report_of_another_shape_is_refused_with_the_place(path: Path) -> None:
    change(path, lambda document: document["findings"][0].update(outcome="FINE"))
    message = refusal(path)
    assert "$.findings[0].outcome" in message
    assert "FINE" in message


CHANGES: list[Callable[[dict[str, Any]], object]] = [
    lambda document: document["findings"][0].update(outcome="NOT_APPLICABLE"),
    lambda document: document["answers"][0].update(usable_bytes=1),
    lambda document: document["answers"][0].update(note="a field of nobody"),
    lambda document: document["findings"].pop(),
    lambda document: document["evidence"]["facts"].pop("device.serial[gpu0]"),
    lambda document: document.update(digest="sha256:" + "0" * 64),
    lambda document: document.pop("digest"),
]


@pytest.mark.parametrize("alter", CHANGES)
def test_a_report_that_was_changed_is_refused(
    path: Path, alter: Callable[[dict[str, Any]], object]
) -> None:
    change(path, alter)
    assert "was changed after it was written" in refusal(path)


def test_the_order_of_keys_in_a_file_changes_nothing(path: Path) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(document.items()))))
    assert read_report(path) == report(*mixed())


def test_a_full_disk_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {item.name: item.read_bytes() for item in path.parent.iterdir()}

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(path.parent, report())
    assert {item.name: item.read_bytes() for item in path.parent.iterdir()} == before


def test_the_committed_schema_is_the_one_of_this_code() -> None:
    hint = "run python -m cift_probe.report.schema"
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), hint


def test_the_fields_of_a_report_are_frozen(path: Path) -> None:
    assert list(Report.__struct_fields__) == TOP.split()
    assert set(json.loads(path.read_text())) == set(TOP.split())
    assert list(Suite.__struct_fields__) == SUITE.split()
    assert SCHEMA_VERSION == "1.0"


def errors(document: dict[str, Any]) -> list[jsonschema.ValidationError]:
    schema = json.loads(SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return list(jsonschema.Draft202012Validator(schema).iter_errors(document))


def test_a_written_report_is_valid_by_the_schema(path: Path) -> None:
    assert errors(json.loads(path.read_text())) == []


BREAKS: list[Callable[[dict[str, Any]], object]] = [
    lambda document: document.pop("suite"),
    lambda document: document["findings"][0].pop("outcome"),
    lambda document: document["evidence"]["facts"].update(x={"value": 1}),
]


@pytest.mark.parametrize("alter", BREAKS)
def test_a_report_that_lacks_a_part_is_not_valid(
    path: Path, alter: Callable[[dict[str, Any]], object]
) -> None:
    document = json.loads(path.read_text())
    alter(document)
    assert errors(document)
