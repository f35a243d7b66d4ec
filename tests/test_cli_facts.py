"""`cift facts`: everything that the sources tell, in two forms."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_nvml import FakeNvml
from suite_runner import run_cift

from cift_probe import facts
from cift_probe.cli import facts as command
from cift_probe.evidence import Evidence, Known, Unknown, absent

UUID = "8a6f0c5e-2f6d-4a53-9a0b-0c3a3d1f5b11"
FOUND: dict[str, Evidence] = {
    "device.memory.total[gpu1]": Known(24 << 30, "B", "NVML"),
    "device.uuid[gpu1]": Known(f"GPU-{UUID}", source="NVML"),
    "device.ecc.mode[gpu1]": absent("not supported", "NVML"),
    "host.memory.limit": Unknown(f"no permission for GPU-{UUID}", "cgroup"),
    "package.torch": Known("2.13.0", "version", "metadata"),
    "weather.today": Known(["fine", "dry"], note="out of the window"),
}


def test_an_entry_is_written_as_in_a_report_and_says_what_is_missing() -> None:
    told = command.entries(FOUND)
    assert list(told) == sorted(FOUND)
    for key, entry in told.items():
        assert msgspec.convert(entry, Evidence) == FOUND[key]
    assert told["device.memory.total[gpu1]"] == {
        "is": "known",
        "value": 24 << 30,
        "unit": "B",
        "source": "NVML",
    }
    assert told["host.memory.limit"]["unknown"] == f"no permission for GPU-{UUID}"
    assert "value" not in told["host.memory.limit"]
    assert told["device.ecc.mode[gpu1]"]["value"] is None
    assert told["weather.today"]["unit"] == ""


def test_the_page_groups_aligns_and_never_breaks_a_line() -> None:
    lines = list(command.page({**FOUND, "host.os": Known("De\nbian" + "x" * 999)}))
    assert [line for line in lines if line and line[0] != " "] == [
        "host",
        "device gpu1",
        "packages",
        "other",
    ]
    assert "  device.memory.total  24.00 GiB" in lines
    assert "  device.ecc.mode      absent: not supported" in lines
    assert any(line.endswith(" …") and "De\\nbian" in line for line in lines)
    assert max(map(len, lines)) < 250


def test_names_are_left_out_everywhere() -> None:
    clean = command.without_names(FOUND)
    assert set(clean) == set(FOUND)
    assert UUID not in json.dumps(command.entries(clean))
    assert clean["package.torch"] == FOUND["package.torch"]


@pytest.mark.parametrize("form", [[], ["--json"], ["--json", "--redact"]])
def test_the_command_tells_this_machine(tmp_path: Path, form: list[str]) -> None:
    session = run_cift(tmp_path, "facts", *form)
    assert session.code == 0, session.text
    if form:
        told = json.loads(session.text)
        assert told["schema"] == "cift-facts/1"
        assert told["evidence"]["torch.version"]["value"]
        assert told["evidence"]["host.memory.total"]["unit"] == "B"
    else:
        assert "\n  host.memory.total" in session.text
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_call_is_refused(tmp_path: Path) -> None:
    assert run_cift(tmp_path, "facts", "--yaml").code == 4


def test_every_source_is_read_for_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("mixed-cards"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    asked: list[tuple[str, str]] = []

    def call(device: str, target: str, _payload: Any, _deadline_s: float) -> Any:
        asked.append((device, target.rpartition(":")[2]))
        return {"available": True, "name": device}

    devices = facts.read_devices()
    found = facts.read_everything(devices, call)
    for label in ("gpu0", "gpu1"):
        assert found[f"torch.device.name[{label}]"] == Known(
            label, source="import torch, in a child process"
        )
        assert f"device.memory.total[{label}]" in found
        assert f"torch.cuda.available[{label}]" in found
        assert (label, "read_torch_device") in asked
    assert {"host.os", "storage.work.free", "package.torch", "driver.version"} <= set(found)


def test_torch_stays_out_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it would raise
    assert isinstance(facts.read_everything([], None)["host.os"], Known)
