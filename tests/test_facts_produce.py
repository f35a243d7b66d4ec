import sys

import pytest
from fake_nvml import RECORDED, FakeNvml

from cift_probe import facts
from cift_probe.evidence import Known, Scope, Unknown
from cift_probe.facts import nvidia


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml("gpu-lost")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.mark.parametrize(
    ("key", "stored"),
    [
        ("host.memory.available", "host.memory.available"),
        ("storage.work.free", "storage.work.free"),
        ("package.torch", "package.torch"),
        ("package.msgspec", "package.msgspec"),
        ("package.duplicates", "package.duplicates"),
        ("flash_attn.built.cuda", "flash_attn.built.cuda"),
        ("driver.version", "driver.version"),
        ("device.count", "device.count"),
        ("device.memory.free", "device.memory.free[gpu0]"),
        ("torch.version", "torch.version"),
        ("torch.cuda.available", "torch.cuda.available[gpu0]"),
        ("torch.device.uuid", "torch.device.uuid[gpu0]"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_every_fact_is_stored_under_the_key_that_a_reader_looks_up(key: str, stored: str) -> None:
    assert stored in facts.produce(key, Scope("gpu0"), None)
    assert stored in Scope("gpu0").candidates(key)


def test_a_key_of_no_source_produces_nothing() -> None:
    assert facts.produce("weather.today", Scope(), None) == {}


def test_a_package_by_any_name_is_looked_up() -> None:
    found = facts.produce("package.msgspec", Scope(), None)["package.msgspec"]
    assert isinstance(found, Known)
    assert found.value


def test_devices_are_labelled_by_place_and_found_by_label(machine: FakeNvml) -> None:
    assert facts.read_devices() == ["gpu0"]  # the lost one has no label
    uuid = "GPU-5e0d3b1c-8f5a-4c36-9d2b-7a1e6f40c201"
    assert facts.visible_uuid("gpu0") == uuid
    assert [facts.visible_uuid(label) for label in ("gpu1", "gpu", "gpu-1", "cpu", "")] == [
        None
    ] * 5
    found = facts.produce("device.uuid", Scope("gpu0"), None)["device.uuid[gpu0]"]
    assert isinstance(found, Known)
    assert found.value == uuid
    assert machine.shut == 8  # every session that was opened is ended


@pytest.mark.usefixtures("machine")
def test_a_device_that_is_not_there_is_unknown_in_every_field() -> None:
    for label in ("gpu7", ""):
        found = facts.produce("device.name", Scope(label), None)
        assert set(found) == {Scope(label).key(key) for key in nvidia.DEVICE_KEYS}
        for item in found.values():
            assert isinstance(item, Unknown)
            assert item.reason == f"there is no {label or 'GPU named'}: this process sees 1 GPU(s)"


def test_the_reason_of_a_missing_device_is_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("driver-not-loaded"))
    found = facts.produce("device.name", Scope("gpu0"), None)["device.name[gpu0]"]
    assert isinstance(found, Unknown)
    assert "driver is not loaded" in found.reason
    assert facts.read_devices() == []


def test_the_cpu_has_no_gpu_fields() -> None:
    found = facts.produce("device.memory.free", Scope("cpu"), None)["device.memory.free[cpu]"]
    assert isinstance(found, Known)
    assert found.absent


def test_heavy_packages_stay_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "transformers", "rich"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it would raise
    for key in ("host.os", "storage.work.free", "package.torch", "driver.version", "torch.version"):
        assert facts.produce(key, Scope("gpu0"), None)


def test_every_recorded_machine_says_that_it_is_fabricated_or_captured() -> None:
    folders = sorted(path for path in RECORDED.iterdir() if path.is_dir())
    assert len(folders) > 15
    for folder in folders:
        text = (folder / "README.md").read_text()
        assert "Fabricated" in text or "Captured" in text, folder
