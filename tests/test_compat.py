"""Described situations and machines: kinds and outcomes of real reports, and of our own."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from cift_probe import data
from cift_probe.cli import run_command
from cift_probe.compat import judge
from cift_probe.compat.case import Case, parse_capability, parse_version
from cift_probe.compat.machine import Machine, from_evidence, install_line, judge_machine
from cift_probe.data import DataError
from cift_probe.diagnose.kinds import read_kinds
from cift_probe.expect.rows import Fact, Row, read_compat, rulings
from cift_probe.expect.wheels import find_wheel, read_wheels, serving, wheels_for

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"
OUTCOMES = {"pass", "warn", "fail", "unknown", "not_applicable"}
H200 = ROOT / "reports" / "examples" / "h200-torch-2.11-cu130.json"


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


REPORTS, OWN = rows_of("bug_reports.jsonl"), rows_of("own_cases.jsonl")


def said(fields: dict[str, Any]) -> tuple[str, str] | None:
    found = judge(fields)
    return (found[0].kind, found[0].outcome) if found else None


# ---- situations ----


def test_real_reports_are_judged_rightly() -> None:
    """Owed are 95 of 100; a wrong one is named."""
    wrong = [row["id"] for row in REPORTS if said(row["input"]) != (row["kind"], row["outcome"])]
    assert len(REPORTS) == 87
    assert not wrong


@pytest.mark.parametrize("row", OWN, ids=lambda row: f"{row['kind']}-{row['outcome']}")
def test_our_own_wordings_are_judged_rightly(row: dict[str, Any]) -> None:
    assert said(row["input"]) == (row["kind"], row["outcome"])


@pytest.mark.parametrize("row", rows_of("near_misses.jsonl"), ids=lambda row: row["not"])
def test_a_near_miss_is_no_failure_of_the_kind(row: dict[str, Any]) -> None:
    bad = {item.kind for item in judge(row["input"]) if item.outcome in {"fail", "warn"}}
    assert row["not"] not in bad


def test_every_kind_has_two_wordings_of_our_own_and_a_near_miss() -> None:
    bad = Counter(row["kind"] for row in OWN if row["outcome"] not in {"pass", "not_applicable"})
    missed = {row["kind"] for row in OWN if row["outcome"] in {"pass", "not_applicable"}}
    good_by_nature = {"arch_false_alarm", "device_index_mismatch", "device_memory_misread"}
    good_by_nature |= {"nvml_field_unsupported", "p2p_name_rule"}
    # what a text alone tells has its near misses in own_texts.toml
    by_text = {kind for kind, row in read_kinds().items() if row.told}
    for kind in read_kinds():
        assert bad[kind] >= 2 or kind in good_by_nature, kind
        assert kind in missed or kind in by_text, kind


def test_no_unconfirmed_report_is_the_only_ground_of_a_failure() -> None:
    confirmed = {row["kind"] for row in REPORTS if row["confirmed"]}
    failing = {row["kind"] for row in REPORTS if row["outcome"] == "fail"}
    for kind in failing - confirmed:
        assert read_kinds()[kind].source, f"{kind}: name another ground in data/kinds.toml"


def test_fields_that_no_rule_knows_are_not_guessed_about() -> None:
    assert judge({"colour": "green", "rule": "driver_vs_runtime"}) == []
    assert judge({}) == []
    assert judge({"cases": []}) == []


def test_the_expected_answer_is_not_read() -> None:
    for row in REPORTS:
        assert "expect" not in row["input"]
        fields = {**row["input"], "expect": "fail:nonsense", "verdict": "FAIL", "kind": "x"}
        assert judge(fields) == judge(row["input"])


NAMES = sorted({name for row in (*REPORTS, *OWN) for name in row["input"]})
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["[N/A]", "2.6.0+cu124", "sm_90a", "12.4", "Exclusive_Process", "nan"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=7))
def test_no_situation_ends_in_a_traceback(fields: dict[str, Any]) -> None:
    for item in judge(fields):
        assert item.kind in read_kinds()
        assert item.outcome in OUTCOMES
        assert item.reason


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_versions_and_capabilities_are_read_from_any_text(text: str) -> None:
    parse_version(text)
    parse_capability(text)
    Case({"total": text, "torch": text}).size("total")


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"free_gib": 2}, 2 << 30),
        ({"free_mb": 3}, 3_000_000),
        ({"free": "1.5 GiB"}, 3 << 29),
        ({"free_bytes": 12}, 12),
        ({"free_gib": None}, None),
        ({"free_gib": True}, None),
        ({"freedom_gib": 2}, None),
    ],
)
def test_sizes_have_the_unit_of_their_name(fields: dict[str, Any], size: float | None) -> None:
    assert Case(fields).size("free") == size


# ---- wheels ----


@pytest.mark.parametrize(
    ("capability", "names", "served"),
    [
        ((8, 6), ["sm_80"], "sm_80"),
        ((8, 0), ["sm_86"], None),
        ((9, 0), ["sm_80"], None),
        ((9, 0), ["compute_80"], "compute_80"),
        ((9, 0), ["sm_90a"], "sm_90a"),
        ((12, 1), ["sm_120f"], "sm_120f"),
        ((12, 1), ["sm_120a"], None),
        ((12, 1), ["compute_120a"], None),
        ((8, 7), ["sm_80", "sm_86"], None),
        ((8, 9), ["sm_87"], None),
        ((6, 1), ["sm_60", "compute_50"], "sm_60"),
        ((7, 5), ["nonsense", ""], None),
    ],
)
def test_a_binary_serves_its_own_major_from_its_minor_on(
    capability: tuple[int, int], names: list[str], served: str | None
) -> None:
    assert serving(capability, names) == served


def test_wheels_are_found_for_a_card_and_its_driver() -> None:
    old = wheels_for((7, 0), Version("12.2"))
    assert old[0].cuda == "12.6"
    assert all(Version(wheel.cuda).major <= 12 for wheel in old)
    assert wheels_for((12, 0), Version("12.8"))[0].torch == "2.11"
    assert wheels_for((7, 0), Version("13.0"))[0].cuda == "12.6"
    assert wheels_for((3, 0), None) == []
    later = find_wheel(Version("2.8.1"), Version("12.8"))
    assert later is not None
    assert later.torch == "2.8"
    assert find_wheel(Version("2.0"), Version("12.8")) is None
    assert wheels_for((3, 7), None)[0].torch == "2.0"
    for name, wheel in read_wheels().items():
        assert name == f"{wheel.torch}+cu{wheel.cuda.replace('.', '')}"
        assert wheel.source


# ---- rows ----


def around(spec: str) -> Iterator[Version]:
    """Yield versions at, below and above every bound of a specifier."""
    for item in SpecifierSet(spec):
        edge = Version(item.version)
        yield edge
        yield Version(f"{edge.base_version}.dev0")
        yield Version(f"{edge.base_version}.1")
        yield Version(f"{edge.major + 1}.0")
        yield Version(f"{max(edge.major - 1, 0)}.99")
        yield Version(f"{edge.major}.{max((*edge.release, 0)[1] - 1, 0)}.99")


def fact(spec: str, *, within: bool) -> Fact | None:
    """Return a value inside or outside a specifier or list of names; None where there is none."""
    if spec[:1] not in "<>=!~":
        return spec.split("|", maxsplit=1)[0] if within else "something else"
    allowed = SpecifierSet(spec, prereleases=True)
    return next((item for item in around(spec) if (item in allowed) == within), None)


@pytest.mark.parametrize("name", sorted(read_compat()))
def test_every_row_speaks_where_it_should_and_is_silent_elsewhere(name: str) -> None:
    row: Row = read_compat()[name]
    met = {key: value for key, spec in row.when.items() if (value := fact(spec, within=True))}
    assert len(met) == len(row.when)

    def outcome(facts: dict[str, Fact]) -> str | None:
        return next((item.outcome for item in rulings(facts) if item.row == name), None)

    good = {key: value for key, spec in row.needs.items() if (value := fact(spec, within=True))}
    assert outcome(met | good) == "pass"
    for key, spec in row.needs.items():
        wrong = fact(spec, within=False)
        assert wrong is not None
        assert outcome(met | good | {key: wrong}) == row.outcome
    for key, spec in row.when.items():
        other = fact(spec, within=False)
        if other is not None:
            assert outcome(met | good | {key: other}) is None
        assert outcome({k: v for k, v in (met | good).items() if k != key}) is None
    assert row.source
    assert row.kind in read_kinds()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"when": {"torch": "2.0 > 1"}}, "2.0 > 1; write a specifier"),
        ({"needs": {"torch": ">=x"}}, "Invalid specifier"),
        ({"outcome": "pass"}, "outcome"),
        ({"unless": {}}, "unless"),
    ],
)
def test_a_malformed_row_names_table_and_row(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], words: str
) -> None:
    good = {
        "kind": "k",
        "when": {},
        "needs": {},
        "why": "w",
        "fix": "f",
        "source": "s",
        "date": "d",
    }
    monkeypatch.setattr(data, "load_toml", lambda _name: {"a-row": good | changed})
    read_compat.cache_clear()
    with pytest.raises(DataError, match=r"data/compat\.toml: row 'a-row'") as caught:
        read_compat()
    read_compat.cache_clear()
    assert words in str(caught.value)


# ---- machines ----


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run_command(["compat", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def kinds_of(answer: dict[str, Any], outcome: str) -> set[str]:
    return {row["kind"] for row in answer["findings"] if row["outcome"] == outcome}


P100 = ("--gpu", "p100", "--driver", "580.1")
NEW = ("--driver", "580.95", "--torch", "2.13+cu130")
LATE = ("--torch", "2.11+cu130", "--bitsandbytes", "0.46.0", "--driver", "580.1", "--gpu", "l4")


@pytest.mark.parametrize(
    ("arguments", "code", "failing"),
    [
        (
            ("--gpu", "v100", "--driver", "535.104", "--torch", "2.13+cu130"),
            1,
            {"driver_too_old", "arch_missing"},
        ),
        (("--gpu", "v100", "--driver", "580.95", "--torch", "2.13+cu130"), 1, {"arch_missing"}),
        (("--gpu", "v100", "--driver", "535.104", "--torch", "2.12+cu126"), 0, set()),
        (("--gpu", "v100", "--driver", "580.95", "--torch", "2.10+cu128"), 0, set()),
        (("--gpu", "v100", "--driver", "580.95", "--torch", "2.11+cu128"), 1, {"arch_missing"}),
        (
            ("--gpu", "p100", "--driver", "580.1", "--torch", "2.8+cu128"),
            1,
            {"arch_missing"},
        ),
        ((*P100, "--torch", "2.8+cu126"), 0, set()),
        (("--gpu", "rtx-5090", "--driver", "570.1", "--torch", "2.6+cu124"), 1, {"arch_missing"}),
        (("--gpu", "gb10", "--driver", "580.95", "--torch", "2.11+cu130"), 0, set()),
        (("--gpu", "l4", "--driver", "470.2", "--torch", "2.6+cu124"), 1, {"driver_too_old"}),
        (("--gpu", "l4", "--driver", "550.5", "--torch", "2.6+cpu"), 1, {"cpu_only_wheel"}),
        (("--gpu", "l4", "--torch", "2.6+cu124"), 10, set()),
        (("--gpu", "l4", "--driver", "550.5", "--torch", "2.6"), 10, set()),
        (("--gpu", "l4", "--torch", "2.6+rocm6.4", "--driver", "550.5"), 1, {"cpu_only_wheel"}),
        (("--gpu", "l4", "--driver-cuda", "12.4", "--torch", "2.11+cu130"), 1, {"driver_too_old"}),
        (("--gpu", "l4", "--driver-cuda", "13.0", "--torch", "2.11+cu130"), 0, set()),
        (("--gpu", "h200", "--driver", "580.1", "--torch", "1.13.1+cu117"), 1, {"arch_missing"}),
        (("--gpu", "l4,v100", "--driver", "580.95", "--torch", "2.13+cu130"), 1, {"arch_missing"}),
        (
            ("--gpu", "t4", "--driver", "580.95", "--torch", "2.13+cu130", "--flash-attn", "2.8.3"),
            1,
            {"flash_attn_unsupported"},
        ),
        (("--trl", "1.16", "--transformers", "4.51.3"), 1, {"package_version_conflict"}),
        (
            (
                "--torch",
                "2.11+cu130",
                "--bitsandbytes",
                "0.46.0",
                "--driver",
                "580.1",
                "--gpu",
                "l4",
            ),
            1,
            {"bnb_binary_missing"},
        ),
    ],
)
def test_a_described_machine_is_judged(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, failing: set[str]
) -> None:
    found, answer = told(capsys, *arguments)
    assert (found, kinds_of(answer, "fail") & failing) == (code, failing)
    if not failing:
        assert not kinds_of(answer, "fail")


def test_what_fails_comes_with_the_line_that_mends_it(capsys: pytest.CaptureFixture[str]) -> None:
    _, answer = told(capsys, "--gpu", "v100", "--driver", "535.104", "--torch", "2.13+cu130")
    lines = {row["install"] for row in answer["findings"] if row["kind"] == "arch_missing"}
    [line] = lines
    found = re.fullmatch(r'pip install "torch==(\S+)\.\*" --index-url (\S+)', line)
    assert found is not None
    code, _ = told(
        capsys, "--gpu", "v100", "--driver", "535.104", "--torch", f"{found[1]}+{found[2][-5:]}"
    )
    assert code == 0
    _, answer = told(capsys, "--trl", "1.16", "--transformers", "4.51.3")
    [row] = [row for row in answer["findings"] if row["outcome"] == "fail"]
    assert row["install"] == 'pip install "transformers>=4.56.2"'


def test_a_card_that_no_wheel_serves_gets_no_line() -> None:
    machine = Machine(
        capabilities={"k10": (3, 0)}, torch=Version("2.8"), torch_cuda=Version("12.6")
    )
    found = [item for item in judge_machine(machine) if item.kind == "arch_missing"]
    assert found[0].outcome == "fail"
    assert install_line(machine, found[0]) == ""


def test_reports_and_facts_of_a_machine_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, answer = told(capsys, "--facts", str(H200))
    assert code == 0
    assert "arch_missing" in kinds_of(answer, "pass")
    place = tmp_path / "facts.json"
    place.write_text(
        json.dumps(
            {
                "schema": "cift-facts/1",
                "evidence": {
                    "device.capability[gpu0]": {
                        "value": "7.0",
                        "unit": "capability",
                        "source": "x",
                    },
                    "driver.version": {"value": "580.95.05", "source": "x"},
                    "torch.version": {"value": "2.13.0", "source": "x"},
                    "torch.cuda.version": {"value": "13.0", "source": "x"},
                    "host.memory.limit": {"unknown": "no permission", "source": "x"},
                },
            }
        )
    )
    code, answer = told(capsys, "--facts", str(place))
    assert (code, "arch_missing" in kinds_of(answer, "fail")) == (1, True)
    # what is said on the command line replaces what the file says
    code, answer = told(capsys, "--facts", str(place), "--torch", "2.12+cu126")
    assert code == 0


def test_the_real_architecture_list_outranks_the_table() -> None:
    machine = from_evidence(
        {
            "device.capability[gpu0]": "6.1",
            "torch.version": "2.8.0",
            "torch.cuda.version": "12.8",
            "torch.arch.list": ["sm_60", "sm_70"],
            "driver.version": "580.1",
        }
    )
    [found] = [item for item in judge_machine(machine) if item.kind == "arch_missing"]
    assert (found.outcome, "sm_60 serves" in found.reason) == ("pass", True)


def test_a_file_of_situations_is_judged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = tmp_path / "cases.json"
    place.write_text(json.dumps([{"input": {"code": 802}}, {"xid": 13}, {"exit_code": 137}]))
    code = run_command(["compat", "--case", str(place), "--json"])
    answers = json.loads(capsys.readouterr().out)
    assert code == 1
    assert [answer["kind"] for answer in answers] == ["fabric_not_ready", None, "host_oom_killer"]
    place.write_text(json.dumps({"colour": "green"}))
    assert run_command(["compat", "--case", str(place)]) == 10
    assert "nothing is guessed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "describe the machine"),
        (("--gpu", "v1000"), "is no card"),
        (("--gpu", "a"), "is no card"),
        (("--torch", "new"), "--torch 'new' is no version"),
        (("--torch", "2.13+cu13"), "'cu13' is no build"),
        (("--facts", "/dev/zero"), "is no file of at most 64 MiB"),
        (("--flash-attn", "x.y"), "--flash-attn 'x.y' is no version"),
        (("--facts", "nowhere.json"), "nowhere.json: cannot be read"),
        (("--case", "nowhere.json"), "nowhere.json: cannot be read"),
        (("--facts", "TEXT"), "is no JSON"),
        (("--facts", "LIST"), "has no evidence"),
        (("--case", "NUMBER"), "is no object of fields"),
        (("--os", "beos"), "invalid choice"),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    for name, content in (("TEXT", "{"), ("LIST", "[]"), ("NUMBER", "[1]")):
        (tmp_path / name).write_text(content)
    given_ = [str(tmp_path / word) if (tmp_path / word).is_file() else word for word in arguments]
    try:
        code = run_command(["compat", *given_])
    except SystemExit as error:
        code = int(error.code or 0)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert words in err
