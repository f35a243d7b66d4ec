"""A redacted report says nothing of who and which, and is judged like the original."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fabricated_report import FACTS, FITS, SERIAL, UUID, finding, report

from cift_probe.evidence import Known, Unknown
from cift_probe.report.markdown import render
from cift_probe.report.redact import Names, redact
from cift_probe.report.schema import Report
from cift_probe.report.writer import canonical_bytes, read_report, write_report
from cift_probe.verdict.finding import Outcome

MIG = "9c0ffee0-1111-2222-3333-44445555aaaa"
SECRETS = (
    *(SERIAL, UUID, UUID.upper(), UUID.replace("-", ""), UUID[:8], MIG),
    *("node17", "cluster.example", "alice", "wonderland", "/bo/"),
)


@pytest.fixture
def leaky() -> Report:
    facts = {
        **FACTS,
        "host.name": Known("node17.cluster.example", source="uname"),
        "host.serial": Known(99, source="board"),
        "device.memory.free[gpu0]": Unknown(f"lost GPU-{UUID.upper()} on node17", f"NVML {SERIAL}"),
        "device.processes.foreign[gpu0]": Known(
            [{"pid": 7, "name": "alice-train", "device": f"MIG-{MIG}", "why": "node17"}]
        ),
        "storage.work.path": Known(
            "/home/alice/runs", note="C:\\Users\\wonderland\\x, /root/x /home/bo/y"
        ),
        "torch.file": Known(f"/mnt/home/alice/lib?{UUID.replace('-', '')}"),
    }
    failed = finding(
        "GPU005[gpu0]",
        Outcome.FAIL,
        found=Known(int(SERIAL), note="alice"),
        reason=f"alice on NODE17 holds MIG-GPU-{MIG}/1/0; CUDA_VISIBLE_DEVICES=GPU-{UUID[:8]}",
        evidence=("facts:device.processes.foreign[gpu0]",),
    )
    answer = msgspec.structs.replace(FITS, limits=(f"only on {UUID}",))
    return report(
        failed,
        facts=facts,
        answers=[answer],
        not_run={"STB001": "node17 is busy"},
        selection="--report-dir=/home/alice/out -k x",
        stack_origin="venv of alice",
        run_id="node17-1",
        in_flight=f"MIG-{MIG}",
    )


def test_every_planted_leak_is_gone(leaky: Report) -> None:
    text = canonical_bytes(redact(leaky, Names())).decode() + render(redact(leaky, Names()))
    assert [secret for secret in SECRETS if secret.lower() in text.lower()] == []
    assert "/root" not in text


@pytest.mark.parametrize("secret", SECRETS)
def test_the_leaks_were_planted(leaky: Report, secret: str) -> None:
    assert secret.lower() in canonical_bytes(leaky).decode().lower()


def test_a_short_identity_is_gone_from_its_own_field(leaky: Report) -> None:
    clean = redact(leaky, Names())
    assert clean.evidence["facts"]["host.serial"] == Known("serial-redacted", source="board")


def test_a_redacted_report_is_valid_and_reads_back(leaky: Report, tmp_path: Path) -> None:
    clean = redact(leaky, Names())
    write_report(tmp_path, clean)
    assert read_report(tmp_path / "report.json") == clean
    assert clean.digest != leaky.digest


def test_what_was_equal_stays_equal_and_what_differed_differs(leaky: Report) -> None:
    facts = redact(leaky, Names()).evidence["facts"]
    told = [facts[key] for key in ("device.uuid[gpu0]", "torch.device.uuid[gpu0]")]
    assert [item.value for item in told if isinstance(item, Known)] == ["GPU-uuid-1-redacted"] * 2
    busy = facts["device.processes.foreign[gpu0]"]
    assert isinstance(busy, Known)
    assert busy.value[0]["device"] not in ("GPU-uuid-1-redacted", "MIG-uuid-1-redacted")


def test_redacting_twice_changes_nothing(leaky: Report) -> None:
    names = Names(("node17",), ("alice",))
    assert redact(redact(leaky, names), names) == redact(leaky, names)


def test_verdicts_keys_and_numbers_stay(leaky: Report) -> None:
    clean = redact(leaky, Names(("gpu0", "torch", "pass"), ("must", "fits")))
    assert set(clean.evidence["facts"]) == set(leaky.evidence["facts"])
    assert [item.evidence for item in clean.findings] == [item.evidence for item in leaky.findings]
    assert [item.label for item in clean.findings] == ["GPU005[gpu0]"]
    assert clean.findings[0].severity == leaky.findings[0].severity
    assert clean.summary.failed == ["GPU005[gpu0]"]
    assert clean.answers[0].required_bytes == FITS.required_bytes
    assert clean.evidence["facts"]["package.torch"] == FACTS["package.torch"]


def test_names_of_this_machine_are_left_out_as_well() -> None:
    told = report(stack_origin="built by bob on buildbox.lan")
    clean = redact(told, Names(("buildbox.lan",), ("bob",)))
    assert clean.suite.stack_origin == "built by user-redacted on host-redacted"


def test_without_names_those_of_this_machine_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "carol")
    monkeypatch.setattr("socket.gethostname", lambda: "darkstar")
    clean = redact(report(stack_origin="carol at darkstar, root at localhost"))
    assert clean.suite.stack_origin == "user-redacted at host-redacted, root at localhost"
