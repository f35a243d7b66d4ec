"""How a device is tied in, and what the kernel's log says of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import RECORDED, FakeNvml

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.facts import gpu_links, kernel_log, nvidia
from cift_probe.sensors import Nvml, read_visible

BUS = Known("00000000:1B:00.0", source="NVML")


def value(item: Evidence) -> Any:
    assert isinstance(item, Known), item
    assert not item.absent, item
    return item.value


def read(machine: str, place: int = 0) -> dict[str, Evidence]:
    nvml = Nvml(FakeNvml(machine))
    uuid = read_visible(nvml)[place]
    return nvidia.read_device(nvml, uuid, place, RECORDED / machine)


@pytest.fixture(autouse=True)
def _no_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    kernel_log.read_log.cache_clear()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000:01:00.0", "0000:01:00.0"),
        ("00010000:01:00.0", "0000:01:00.0"),
        ("1B:00.0", ""),
        ("../../etc", ""),
        ("", ""),
    ],
)
def test_a_bus_id_is_the_name_of_a_folder(text: str, name: str) -> None:
    assert gpu_links.parse_bus_id(text) == name


@pytest.mark.parametrize(
    ("told", "state"),
    [
        (1, "not started"),
        (2, "in progress"),
        (3, "completed"),
        ([3, 999], "completed, with error 999"),
        ([2, 999], "in progress"),
        (0, None),
    ],
)
def test_the_fabrics_state_is_told(told: object, state: str | None) -> None:
    fake = FakeNvml("h200")
    fake.devices[0]["calls"]["nvmlDeviceGetGpuFabricInfoV"] = told
    item = gpu_links.read_fabric(Nvml(fake), fake.devices[0])
    if state is None:
        assert isinstance(item, Known)
        assert item.absent
    else:
        assert value(item) == state


def test_a_switched_machine_tells_fabric_links_and_peers() -> None:
    found = read("hgx-h100-fabric")
    assert value(found["device.fabric.state"]) == "in progress"
    assert value(found["device.nvlink.num_links"]) == 18
    assert value(found["device.nvlink.num_active"]) == 14
    assert value(found["device.peers.refused"]) == []
    other = "GPU-22220000-2f6d-4a53-9a0b-0c3a3d1f5b22"
    assert value(found["device.peers.path"]) == {other: "one host bridge"}


def test_a_peer_that_cannot_be_read_directly_is_named_with_the_reason() -> None:
    found = read("mixed-cards")
    [text] = value(found["device.peers.refused"])
    assert text.startswith("GPU-")
    assert "I/O hubs" in text
    single = read("rtx-4090")
    assert isinstance(single["device.peers.refused"], Known)
    assert single["device.peers.refused"].absent


def test_a_peer_that_is_lost_leaves_it_unknown() -> None:
    fake = FakeNvml("mixed-cards")
    fake.devices[0]["calls"]["nvmlDeviceGetP2PStatus"] = {"error": 15}
    nvml = Nvml(fake)
    found = nvidia.read_device(nvml, read_visible(nvml)[0], 0, RECORDED / "mixed-cards")
    assert isinstance(found["device.peers.refused"], Unknown)


@pytest.mark.parametrize("answer", [{"error": 15}, {"error": 999}, (1 << 32) - 1])
def test_links_that_cannot_be_asked_are_unknown(answer: object) -> None:
    fake = FakeNvml("h200")
    fake.devices[0]["calls"]["nvmlDeviceGetNvLinkState"] = answer
    found = gpu_links.read_nvlink(Nvml(fake), fake.devices[0])
    assert all(isinstance(item, Unknown) for item in found.values())


def folder(root: Path, **files: str) -> None:
    place = root / "sys/bus/pci/devices/0000:1b:00.0"
    (place / "link").mkdir(parents=True)
    for name, text in files.items():
        (place / name.replace("__", "/")).write_text(text)


def links(root: Path, bus_id: Evidence = BUS) -> dict[str, Evidence]:
    fake = FakeNvml("h200")
    return gpu_links.read_links(Nvml(fake), fake.devices[0], bus_id, [], root)


def test_the_kernels_folder_of_a_device_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1, 70})
    folder(
        tmp_path, numa_node="1\n", local_cpulist="64-127\n", link__l1_aspm="1\n", link__clkpm="0\n"
    )
    found = links(tmp_path)
    assert set(found) == set(gpu_links.KEYS)
    assert value(found["device.numa.node"]) == 1
    assert value(found["device.cpus.near"]) is True
    assert "1 of 3" in str(found["device.cpus.near"])
    assert value(found["device.pcie.aspm"]) == ["l1_aspm"]
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    assert value(links(tmp_path)["device.cpus.near"]) is False


def test_a_folder_that_is_hidden_or_says_nonsense_is_unknown(tmp_path: Path) -> None:
    keys = ("device.numa.node", "device.cpus.near", "device.pcie.aspm")
    for bus_id in (BUS, Unknown("lost"), absent("none")):
        assert all(isinstance(links(tmp_path, bus_id)[key], Unknown) for key in keys)
    folder(tmp_path, numa_node="x", local_cpulist="y", link__l1_aspm="z")
    assert all(isinstance(links(tmp_path)[key], Unknown) for key in keys)
    (tmp_path / "sys/bus/pci/devices/0000:1b:00.0/numa_node").write_text("-1\n")
    assert isinstance(links(tmp_path)["device.numa.node"], Known)


# XIDs

LOG = """\
6,1,1,-;usb 1-1: new device
4,2,9,-;NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 12.5] NVRM: Xid (PCI:0000:1B:00): 31, pid=7, Ch 00000008, intr 00000000. MMU Fault
NVRM: Xid (PCI:0000:43:00.0): 13, Graphics SM Warp Exception
NVRM: Xid (PCI:garbage): 48
NVRM: GPU at PCI:0000:1b:00: GPU-5e0d
"""


def test_lines_belong_to_the_device_at_their_address() -> None:
    found = kernel_log.parse_xids(LOG)
    assert {bus: [number for number, _ in rows] for bus, rows in found.items()} == {
        "0000:1b:00": [79, 31],
        "0000:43:00": [13],
    }


def test_the_numbers_and_the_last_line_of_a_device_are_told() -> None:
    found = kernel_log.read_xids(BUS, LOG)
    assert value(found["device.xids"]) == [31, 79]
    assert value(found["device.xids.last"]).startswith("31, pid=7")
    quiet = kernel_log.read_xids(Known("00000000:99:00.0"), LOG)
    assert value(quiet["device.xids"]) == []
    for log, bus_id in ((Unknown("no permission"), BUS), (LOG, Unknown("lost"))):
        assert all(isinstance(i, Unknown) for i in kernel_log.read_xids(bus_id, log).values())


def test_a_log_is_read_where_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = kernel_log.read_log(str(RECORDED / "hgx-h100-fabric/dev/kmsg"))
    assert isinstance(recorded, str)
    assert len(kernel_log.parse_xids(recorded)) == 2
    assert isinstance(kernel_log.read_log(str(tmp_path / "none")), Unknown)

    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / "kmsg").touch()
    monkeypatch.setattr("os.open", refuse)
    told = kernel_log.read_log(str(tmp_path / "kmsg"))
    assert isinstance(told, Unknown)
    assert "not permitted" in told.reason


def test_records_that_are_overwritten_meanwhile_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers: list[Any] = [BrokenPipeError(), b"4,1;NVRM: Xid (PCI:0000:1b:00): 48, DBE", b"other"]
    answers += [b"\xff Xid", BlockingIOError()]

    def read_record(*_: object) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)

    (tmp_path / "kmsg").touch()
    monkeypatch.setattr(os, "read", read_record)
    told = kernel_log.read_log(str(tmp_path / "kmsg"))
    assert isinstance(told, str)
    assert told.count("Xid") == 2
    assert "other" not in told


def test_a_virtual_gpu_a_laptop_and_a_jetson_are_told_as_they_are() -> None:
    vgpu = read("grid-vgpu")
    assert value(vgpu["device.virtualization"]) == "vgpu"
    for key in ("device.ecc.uncorrected", "device.temperature", "device.power.limit"):
        item = vgpu[key]
        assert isinstance(item, Known)
        assert item.absent
    laptop = read("laptop-4070")
    assert value(laptop["device.power.limit"]) == 55.0
    assert value(laptop["device.power.limit.default"]) == 80.0
    assert value(laptop["device.bar1.total"]) == 8 << 30
    jetson = read("jetson-orin")
    assert value(jetson["device.memory.kind"]) == "unified"
    assert value(jetson["device.memory.free"]) == 55000000 * 1024
