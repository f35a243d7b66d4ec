import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from fake_nvml import RECORDED, FakeNvml

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.facts import gpu_memory, gpu_processes, nvidia, pci
from cift_probe.sensors import Nvml, read_visible

MIB = 1 << 20
NOTHING = RECORDED / "library-missing"  # a tree without /sys, /proc and /dev


@pytest.fixture(autouse=True)
def _no_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


def read(machine: str, selection: str | None = None) -> dict[str, Evidence]:
    nvml = Nvml(FakeNvml(machine))
    return nvidia.read_device(nvml, read_visible(nvml, selection)[0], 0, RECORDED / machine)


def known(item: Evidence) -> Known:
    assert isinstance(item, Known), item
    assert not item.absent, item
    return item


# told by the kernel's files, which recordings of NVML lack; tests/test_facts_links.py has them
OF_THE_KERNEL = {
    *("device.numa.node", "device.cpus.near", "device.pcie.aspm"),
    *("device.xids", "device.xids.last"),
}


def absences(found: dict[str, Evidence]) -> set[str]:
    return {key for key, item in found.items() if isinstance(item, Known) and item.absent}


def unknowns(found: dict[str, Evidence]) -> set[str]:
    return {key for key, item in found.items() if isinstance(item, Unknown)} - OF_THE_KERNEL


def test_a_data_centre_card_tells_everything() -> None:
    found = read("h200")
    assert set(found) == set(nvidia.DEVICE_KEYS)
    assert unknowns(found) == set()
    assert absences(found) == {
        "device.retired.pending",
        "device.mig.parent",
        "device.driver_model",
        "device.peers.refused",
        "device.peers.path",
    }
    told = {key: (known(found[key]).value, known(found[key]).unit) for key in EXPECTED_H200}
    assert told == EXPECTED_H200


EXPECTED_H200 = {
    "device.name": ("NVIDIA H200", ""),
    "device.pci.id": ("10de:2335", ""),
    "device.pci.bus_id": ("00000000:1B:00.0", ""),
    "device.capability": ("9.0", "capability"),
    "device.memory.total": (143771 * MIB, "B"),
    "device.memory.free": (143130 * MIB, "B"),
    "device.memory.used": (4 * MIB, "B"),
    "device.memory.reserved": (637 * MIB, "B"),
    "device.memory.kind": ("dedicated", ""),
    "device.ecc.mode": ("on", ""),
    "device.ecc.uncorrected": (0, "1"),
    "device.ecc.uncorrected.aggregate": (2, "1"),
    "device.ecc.corrected": (5, "1"),
    "device.remap.correctable": (1, "1"),
    "device.remap.uncorrectable": (2, "1"),
    "device.remap.pending": (False, ""),
    "device.remap.failed": (False, ""),
    "device.pcie.generation.current": (5, "1"),
    "device.pcie.width.max": (16, "1"),
    "device.throttle.reasons": ([], ""),
    "device.pcie.generation.own": (5, "1"),
    "device.pcie.replays": (0, "1"),
    "device.bar1.total": (262144 * MIB, "B"),
    "device.virtualization": ("none", ""),
    "device.fabric.state": ("completed", ""),
    "device.nvlink.num_links": (18, "1"),
    "device.nvlink.num_active": (18, "1"),
    "device.power.limit": (700.0, "W"),
    "device.power.draw": (76.412, "W"),
    "device.clock.sm.max": (1_980_000_000, "Hz"),
    "device.clock.memory": (3_201_000_000, "Hz"),
    "device.temperature": (29, "degC"),
    "device.temperature.slowdown": (89, "degC"),
    "device.temperature.shutdown": (92, "degC"),
    "device.persistence": (True, ""),
    "device.compute_mode": ("default", ""),
    "device.mig.mode": ("off", ""),
    "device.processes.compute": ([], ""),
    "device.index": (0, "1"),
}


@pytest.mark.parametrize(
    ("rows", "pending", "failed"), [([0, 1, 1, 0], 1, 0), ([0, 1, 0, 1], 0, 1)]
)
def test_a_pending_and_a_failed_remap_are_told_apart(
    rows: list[int], pending: int, failed: int
) -> None:
    fake = FakeNvml("h200")
    fake.devices[0]["calls"]["nvmlDeviceGetRemappedRows"] = rows
    nvml = Nvml(fake)
    found = nvidia.read_device(nvml, read_visible(nvml)[0], 0)
    told = [known(found[f"device.remap.{name}"]).value for name in ("pending", "failed")]
    assert told == [bool(pending), bool(failed)]


@pytest.mark.parametrize(
    ("number", "text"), [(13000, "13.0"), (12080, "12.8"), (11040, "11.4"), (12100, "12.10")]
)
def test_cuda_versions_are_read_from_one_number(number: int, text: str) -> None:
    assert nvidia.parse_cuda_version(number) == text


def test_what_a_geforce_does_not_have_is_absent_and_never_zero() -> None:
    found = read("rtx-4090")
    assert unknowns(found) == set()
    assert {key for key in absences(found) if key.startswith(("device.ecc", "device.remap"))} == {
        "device.ecc.mode",
        "device.ecc.uncorrected",
        "device.ecc.uncorrected.aggregate",
        "device.ecc.corrected",
        "device.remap.correctable",
        "device.remap.uncorrectable",
        "device.remap.pending",
        "device.remap.failed",
    }
    assert {"device.serial", "device.mig.mode"} < absences(found)
    assert known(found["device.processes.graphics"]).value[0]["memory"] == 396 * MIB
    assert known(found["device.throttle.reasons"]).value == ["gpu idle"]


def test_an_old_driver_is_asked_in_its_own_words() -> None:
    found = read("gtx-1660")
    assert known(found["device.throttle.reasons"]).value == [
        "software power cap",
        "hardware thermal slowdown",
    ]
    assert known(found["device.memory.total"]).value == 6144 * MIB
    used = known(found["device.memory.used"])
    assert (used.value, used.note) == (
        505 * MIB,
        "what the driver reserves is counted as used",
    )
    assert unknowns(found) == {"device.memory.reserved"}


def test_unified_memory_is_the_hosts_with_page_cache_counted_as_free() -> None:
    found = read("gb10")
    assert known(found["device.memory.kind"]).value == "unified"
    assert known(found["device.memory.total"]).value == 127600748 * 1024
    free = known(found["device.memory.free"])
    assert free.value == 62914560 * 1024
    assert free.unit == "B"
    assert "host" in free.note
    assert known(found["device.memory.used"]).value == (127600748 - 62914560) * 1024
    assert "device.memory.reserved" in absences(found)


@pytest.mark.parametrize(
    "told",
    [
        SimpleNamespace(total=0, free=0, used=0, reserved=0),
        SimpleNamespace(total=127 << 30, free=1 << 30, used=126 << 30, reserved=0),
    ],
)
def test_figures_of_nvml_are_not_believed_on_unified_memory(
    told: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeNvml("gb10")
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetMemoryInfo", lambda *_: told)
    nvml = Nvml(fake)
    found = nvidia.read_device(nvml, read_visible(nvml)[0], 0, RECORDED / "gb10")
    assert known(found["device.memory.free"]).value == 62914560 * 1024


@pytest.mark.parametrize("text", ["", "MemTotal: 100 kB\n", "MemAvailable: 100 kB\n"])
def test_unified_memory_without_meminfo_is_unknown(text: str, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(text)
    nvml = Nvml(FakeNvml("gb10"))
    found = nvidia.read_device(nvml, read_visible(nvml)[0], 0, tmp_path)
    assert isinstance(found["device.memory.free"], Unknown)
    assert known(found["device.memory.kind"]).value == "unified"


@pytest.mark.parametrize(
    "changes",
    [
        {"nvmlDeviceGetName": "NVIDIA X1"},
        {"nvmlDeviceGetCudaComputeCapability": {"error": 3}},
    ],
)
def test_name_or_capability_alone_tell_an_integrated_device(changes: dict[str, object]) -> None:
    fake = FakeNvml("gb10")
    fake.devices[0]["calls"] |= changes
    nvml = Nvml(fake)
    found = nvidia.read_device(nvml, read_visible(nvml)[0], 0, RECORDED / "gb10")
    assert known(found["device.memory.kind"]).value == "unified"


@pytest.mark.parametrize(
    ("free", "used", "kind"),
    [
        (10_000, 0, Known),
        (10_001, 0, Unknown),
        (5_000, 5_100, Known),  # the parts are rounded, each for itself
        (5_000, 5_101, Unknown),
        (0, 0, Known),
    ],
)
def test_figures_that_exceed_their_total_are_not_believed(
    free: int, used: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = SimpleNamespace(total=10_000, free=free, used=used, reserved=0)
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetMemoryInfo", lambda *_: told)
    nvml = Nvml(FakeNvml("h200"))
    found = nvidia.read_device(nvml, read_visible(nvml)[0], 0)
    assert isinstance(found["device.memory.free"], kind)


def test_the_hosts_memory_is_never_offered_for_a_card_that_is_not_listed_as_integrated() -> None:
    fake = FakeNvml("gb10")
    fake.devices[0]["calls"] |= {
        "nvmlDeviceGetName": "NVIDIA X1",
        "nvmlDeviceGetCudaComputeCapability": [13, 0],
    }
    nvml = Nvml(fake)
    found = nvidia.read_device(nvml, read_visible(nvml)[0], 0, RECORDED / "gb10")
    for key in gpu_memory.KEYS:
        item = found[key]
        assert isinstance(item, Unknown)
        assert "13.0" in item.reason


def test_a_coherent_but_discrete_device_keeps_its_own_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeNvml("h200")
    fake.devices[0]["calls"]["nvmlDeviceGetName"] = "NVIDIA GH200 480GB"
    told = SimpleNamespace(total=97871 * MIB, free=97000 * MIB, used=271 * MIB, reserved=600 * MIB)
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetMemoryInfo", lambda *_: told)
    nvml = Nvml(fake)
    found = nvidia.read_device(nvml, read_visible(nvml)[0], 0, RECORDED / "gb10")
    assert known(found["device.memory.total"]).value == 97871 * MIB
    assert known(found["device.memory.kind"]).value == "dedicated"


def test_a_slice_has_its_own_memory_and_unknown_what_the_board_refuses() -> None:
    found = read("a100-mig")
    assert known(found["device.uuid"]).value.startswith("MIG-1111")
    assert known(found["device.name"]).value.endswith("MIG 1g.5gb")
    assert known(found["device.memory.total"]).value == 4864 * MIB
    assert known(found["device.mig.parent"]).value.startswith("GPU-a1000000")
    assert known(found["device.mig.mode"]).value == "on"
    assert known(found["device.temperature"]).value == 47
    assert unknowns(found) == {
        "device.ecc.uncorrected",
        "device.ecc.uncorrected.aggregate",
        "device.ecc.corrected",
        "device.remap.correctable",
        "device.remap.uncorrectable",
        "device.remap.pending",
        "device.remap.failed",
        "device.power.draw",
        "device.bar1.total",
        "device.pcie.replays",
        "device.nvlink.num_links",
        "device.nvlink.num_active",
    }
    refused = found["device.ecc.uncorrected"]
    assert isinstance(refused, Unknown)
    assert "permission" in refused.reason


def test_a_board_that_refuses_its_memory_leaves_it_unknown_and_dedicated() -> None:
    nvml = Nvml(FakeNvml("a100-mig"))
    board = "GPU-a1000000-aaaa-4bbb-8ccc-ddddeeee0001"
    found = nvidia.read_device(nvml, board, 0, RECORDED / "gb10")
    assert isinstance(found["device.memory.total"], Unknown)
    assert known(found["device.memory.kind"]).value == "dedicated"


def test_under_wsl_the_processes_are_absent_and_the_driver_model_is_told() -> None:
    found = read("wsl-4090")
    assert set(gpu_processes.KEYS) < absences(found)
    assert known(found["device.driver_model"]).value == "WDDM"


def test_nonsense_is_unknown_field_by_field() -> None:
    found = read("broken-answers")
    assert unknowns(found) == {
        "device.name",
        "device.serial",
        "device.vbios",
        "device.pci.bus_id",
        "device.pci.id",
        "device.capability",
        "device.ecc.mode",
        "device.ecc.uncorrected",
        "device.ecc.uncorrected.aggregate",
        "device.ecc.corrected",
        "device.remap.uncorrectable",
        "device.remap.pending",
        "device.remap.failed",
        "device.power.draw",
        "device.clock.sm",
        "device.clock.memory",
        "device.temperature",
        "device.persistence",
        "device.memory.total",
        "device.memory.free",
        "device.memory.used",
        "device.memory.reserved",
        "device.memory.kind",
        "device.processes.compute",
        "device.processes.foreign",
        "device.processes.graphics",
        "device.bar1.total",
        "device.pcie.generation.own",
        "device.pcie.replays",
        "device.fabric.state",
        "device.nvlink.num_links",
        "device.nvlink.num_active",
    }
    assert known(found["device.gsp.version"]).value == "580.95"
    assert known(found["device.compute_mode"]).value == "unnamed mode 17"
    assert known(found["device.throttle.reasons"]).value == [
        "hardware slowdown",
        "unnamed reason 0x1000",
    ]
    driver = nvidia.read_driver(Nvml(FakeNvml("broken-answers")), NOTHING)
    assert unknowns(driver) == {"driver.cuda.version", "driver.nvml.version"}


@pytest.mark.parametrize(
    ("function", "answer", "key", "text"),
    [
        ("nvmlDeviceGetComputeMode", 0, "device.compute_mode", "default"),
        ("nvmlDeviceGetComputeMode", 1, "device.compute_mode", "exclusive thread"),
        ("nvmlDeviceGetComputeMode", 2, "device.compute_mode", "prohibited"),
        ("nvmlDeviceGetComputeMode", 3, "device.compute_mode", "exclusive process"),
        ("nvmlDeviceGetDriverModel", [0, 1], "device.driver_model", "WDDM"),
        ("nvmlDeviceGetDriverModel", [1, 0], "device.driver_model", "TCC"),
        ("nvmlDeviceGetDriverModel", [2, 0], "device.driver_model", "MCDM"),
        ("nvmlDeviceGetDriverModel", [3, 0], "device.driver_model", "unnamed model 3"),
        ("nvmlDeviceGetEccMode", [0, 1], "device.ecc.mode", "off"),
        ("nvmlDeviceGetEccMode", [1, 0], "device.ecc.mode", "on"),
        ("nvmlDeviceGetMigMode", [0, 1], "device.mig.mode", "off"),
    ],
)
def test_modes_are_told_in_words_and_as_they_are_now(
    function: str, answer: object, key: str, text: str
) -> None:
    fake = FakeNvml("h200")
    fake.devices[0]["calls"][function] = answer
    nvml = Nvml(fake)
    found = nvidia.read_device(nvml, read_visible(nvml)[0], 0)
    assert known(found[key]).value == text


def test_driver_versions_are_read_as_versions() -> None:
    found = nvidia.read_driver(Nvml(FakeNvml("wsl-4090")), RECORDED / "wsl-4090")
    told = {key: (known(item).value, known(item).unit) for key, item in found.items()}
    assert told == {
        "driver.version": ("576.80", "version"),
        "driver.nvml.version": ("12.575.64", "version"),
        "driver.cuda.version": ("12.9", "version"),
        "device.count": (1, "1"),
        "device.lost": ([], ""),
    }


def test_a_lost_device_makes_all_its_fields_unknown_and_is_not_counted() -> None:
    nvml = Nvml(FakeNvml("gpu-lost"))
    found = nvidia.read_device(nvml, "GPU-dead0000-0000-4000-8000-000000000000", 0)
    assert unknowns(found) | OF_THE_KERNEL == set(nvidia.DEVICE_KEYS)
    counted = known(nvidia.read_count(nvml))
    assert counted.value == 1
    assert "lost" in counted.note


def test_when_every_device_is_lost_their_number_is_unknown() -> None:
    fake = FakeNvml("gpu-lost")
    fake.devices.pop()
    counted = nvidia.read_count(Nvml(fake))
    assert isinstance(counted, Unknown)
    assert "lost" in counted.reason
    lost = known(nvidia.read_driver(Nvml(fake))["device.lost"])
    assert len(lost.value) == 1
    assert "lost" in lost.value[0]


@pytest.mark.parametrize(
    ("selection", "count"), [("", 0), ("-1", 0), ("0", 1), ("5", 0), ("GPU-5e0d", 1)]
)
def test_the_count_is_of_what_the_selection_leaves(
    selection: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selection)
    counted = known(nvidia.read_count(Nvml(FakeNvml("h200"))))
    assert counted.value == count
    assert ("NVML lists 1" in counted.note) is (count == 0)


def plant(root: Path, vendor: str, kind: str) -> None:
    folder = root / "sys/bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


@pytest.mark.parametrize("machine", ["driver-not-loaded", "library-missing"])
@pytest.mark.parametrize(
    ("vendor", "kind"),
    [("0x1002", "0x030000"), ("0x10de", "0x040300"), ("0x10de", "0x068000")],
)
def test_without_driver_and_without_a_card_there_are_no_devices(
    machine: str, vendor: str, kind: str, tmp_path: Path
) -> None:
    plant(tmp_path, vendor, kind)
    found = nvidia.read_driver(Nvml(FakeNvml(machine)), tmp_path)
    assert known(found["device.count"]).value == 0
    assert absences(found) == {"driver.version", "driver.nvml.version", "driver.cuda.version"}
    assert known(found["device.lost"]).value == []


@pytest.mark.parametrize("machine", ["driver-not-loaded", "library-missing"])
@pytest.mark.parametrize("kind", ["0x030000", "0x030200"])
def test_a_card_on_the_bus_without_its_driver_is_unknown(
    machine: str, kind: str, tmp_path: Path
) -> None:
    plant(tmp_path, "0x10de", kind)
    found = nvidia.read_driver(Nvml(FakeNvml(machine)), tmp_path)
    counted = found["device.count"]
    assert isinstance(counted, Unknown)
    assert "an NVIDIA device is on the PCI bus, but" in counted.reason
    assert isinstance(found["driver.version"], Unknown)
    assert isinstance(found["device.lost"], Unknown)


def test_a_device_node_is_a_sign_of_a_card_where_the_bus_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    assert known(pci.read_hardware(tmp_path)).value == 0
    (tmp_path / "dev/nvidiactl").touch()
    assert known(pci.read_hardware(tmp_path)).value == 0
    (tmp_path / "dev/nvidia3").touch()
    counted = known(pci.read_hardware(tmp_path))
    assert counted.value == 1
    assert "hidden" in counted.note


@pytest.mark.parametrize(
    ("path", "text"),
    [("dev/dxg", ""), ("proc/device-tree/compatible", "nvidia,p3737\0nvidia,tegra234\0")],
)
def test_nothing_follows_from_the_bus_under_wsl_and_on_tegra(
    path: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    library = tmp_path / "usr/lib/wsl/lib/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    counted = nvidia.read_count(Nvml(FakeNvml("library-missing")), tmp_path)
    assert isinstance(counted, Unknown)
    assert "hint: add /usr/lib/wsl/lib" in counted.reason


def test_the_hint_about_the_linkers_path_is_given_only_where_it_helps(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    plain = nvidia.read_count(Nvml(FakeNvml("library-missing")), tmp_path)
    library = tmp_path / "usr/lib/wsl/lib/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    loaded = nvidia.read_count(Nvml(FakeNvml("driver-not-loaded")), tmp_path)
    for counted in (plain, loaded):
        assert isinstance(counted, Unknown)
        assert "hint" not in counted.reason


def test_without_the_package_that_reads_nvml_the_bus_still_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    counted = known(nvidia.read_count(Nvml(), tmp_path))
    assert counted.value == 0
    assert "nvidia-ml-py" in counted.note
    plant(tmp_path, "0x10de", "0x030200")
    assert isinstance(nvidia.read_count(Nvml(), tmp_path), Unknown)


@pytest.mark.parametrize("code", [17, 18, 999])
def test_a_driver_that_fails_otherwise_is_never_no_devices(code: int) -> None:
    fake = FakeNvml("library-missing")
    fake.recording["init"] = code
    assert isinstance(nvidia.read_count(Nvml(fake), NOTHING), Unknown)


def foreign(*pids: int) -> Evidence:
    fake = FakeNvml("h200")
    fake.devices[0]["calls"]["nvmlDeviceGetComputeRunningProcesses"] = {
        "structs": [{"pid": pid, "usedGpuMemory": 1 << 30} for pid in pids]
    }
    found = gpu_processes.read(Nvml(fake), fake.devices[0])
    assert [item["pid"] for item in known(found["device.processes.compute"]).value] == list(pids)
    return found["device.processes.foreign"]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    # we are 100 and have the child 101; our parent 90 has the child 91 besides
    children = {90: (91, 100, 101), 100: (101,)}

    class Process:
        def __init__(self, pid: int = 100) -> None:
            if pid not in (90, 91, 100, 101, 500):
                raise psutil.NoSuchProcess(pid)
            self.pid = pid

        def parent(self) -> "Process":
            return Process(90)

        def children(self, *, recursive: bool) -> list["Process"]:
            assert recursive
            return [Process(pid) for pid in children.get(self.pid, ())]

        def name(self) -> str:
            return f"name{self.pid}"

    monkeypatch.setattr("psutil.Process", Process)
    monkeypatch.setattr("psutil.pid_exists", lambda pid: pid != 7777)
    monkeypatch.setattr("os.getpid", lambda: 100)


@pytest.mark.usefixtures("processes")
def test_own_processes_are_not_foreign_and_others_are() -> None:
    assert known(foreign(100, 101)).value == []
    assert known(foreign(100, 500)).value == [{"pid": 500, "name": "name500", "memory": 1 << 30}]
    assert [item["pid"] for item in known(foreign(91)).value] == [91]


@pytest.mark.usefixtures("processes")
def test_under_xdist_the_other_workers_are_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert known(foreign(91, 101)).value == []


@pytest.mark.usefixtures("processes")
def test_a_process_of_another_namespace_may_be_our_own() -> None:
    hidden = foreign(7777)
    assert isinstance(hidden, Unknown)
    assert hidden.reason.startswith("1 process(es) outside of this PID namespace")
    seen = known(foreign(7777, 500))
    assert [item["pid"] for item in seen.value] == [500]
    assert "namespace" in seen.note
