import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_nvml import FakeNvml

from cift_probe import sensors
from cift_probe.evidence import Known, Unknown
from cift_probe.sensors import Board, Nvml, Slice, parse_selection, select
from cift_probe.stack import cuda_order

A, B, C = "GPU-aaaa0000-1", "GPU-bbbb0000-2", "GPU-bbbb1111-3"
CARDS = [Board(A), Board(B), Board(C)]
SLICES = (Slice("MIG-11", "MIG-GPU-aaaa0000-1/7/0"), Slice("MIG-22", "MIG-GPU-aaaa0000-1/8/0"))
CUT = [Board(A, partitioned=True, slices=SLICES), Board(B)]


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("0,1", ["0", "1"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,-1,3", ["2"]),
        (" 1 , 0 ", ["1", "0"]),
        ("1gpu,0", ["1", "0"]),
        ("00", ["0"]),
        ("0,0", []),
        ("GPU-8932f9", ["GPU-8932f9"]),
        ("MIG-00000000-0000-0000-0000-000000000000", ["MIG-00000000-0000-0000-0000-000000000000"]),
        ("MIG-GPU-00000000/1/2", ["MIG-GPU-00000000/1/2"]),
        ("0,MIG-11,nonsense,1", ["0", "MIG-11"]),
    ],
)
def test_every_form_of_the_variable_is_split_as_cuda_does(text: str, entries: list[str]) -> None:
    assert parse_selection(text) == entries


@pytest.mark.parametrize(
    ("entries", "boards", "uuids"),
    [
        (["2", "0"], CARDS, [C, A]),
        (["0", "7", "1"], CARDS, [A]),
        ([B], CARDS, [B]),
        (["GPU-aaaa"], CARDS, [A]),
        (["GPU-bbbb"], CARDS, []),  # two cards begin so
        (["GPU-aaaa", "0"], CARDS, []),  # one card twice
        (["0", "1"], [Board("", problem="lost"), Board(B)], []),
        (["1"], [Board("", problem="lost"), Board(B)], [B]),
        (["0", "1"], CUT, ["MIG-11"]),
        (["1"], CUT, [B]),
        (["MIG-22", "MIG-11"], CUT, ["MIG-22", "MIG-11"]),
        (["MIG-GPU-aaaa0000-1/8/0"], CUT, ["MIG-22"]),
        (["MIG-33"], CUT, []),
        (["0"], [Board(A, partitioned=True)], []),
    ],
)
def test_entries_name_devices_by_place_prefix_and_slice(
    entries: list[str], boards: list[Board], uuids: list[str]
) -> None:
    assert select(entries, boards) == uuids


def test_an_integer_counts_in_cudas_order_where_that_is_known() -> None:
    assert select(["0"], CARDS, [C, A, B]) == [C]


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return Nvml(FakeNvml("mixed-cards"))


def test_cuda_is_asked_for_its_order_only_where_integers_meet_different_cards(
    mixed: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = (board.uuid for board in sensors.read_boards(mixed))
    told = json.dumps([fast, slow]).encode()
    asked: list[dict[str, str]] = []

    def run(_command: list[str], *, env: dict[str, str], **_rest: object) -> SimpleNamespace:
        asked.append(env)
        return SimpleNamespace(stdout=told)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr("subprocess.run", run)
    assert sensors.read_visible(mixed) == [slow]
    assert "CUDA_VISIBLE_DEVICES" not in asked.pop()  # else the list would be cut already
    assert sensors.read_visible(mixed, slow) == [slow]
    assert sensors.read_visible(Nvml(FakeNvml("h200")), "0") != []
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert sensors.read_visible(mixed) == [fast]
    assert not asked


def test_without_cudas_answer_integers_count_in_bus_order(
    mixed: Nvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "order.py"
    monkeypatch.setattr(sensors, "_ORDER_PROGRAM", program)
    slow, fast = (board.uuid for board in sensors.read_boards(mixed))
    program.write_text("raise SystemExit(3)")
    assert sensors.read_visible(mixed, "0") == [slow]
    program.write_text("print('no json')")
    assert sensors.read_visible(mixed, "0") == [slow]
    program.write_text(f"print({json.dumps(json.dumps([fast, slow]))})")
    assert sensors.read_visible(mixed, "0") == [fast]


def test_the_order_program_prints_uuids_as_nvml_writes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = bytes(range(16))

    def uuid(buffer: SimpleNamespace, _device: object) -> int:
        buffer.target[:] = raw
        return 0

    def count(number: SimpleNamespace) -> int:
        number.target.value = 1
        return 0

    fake = SimpleNamespace(
        cuInit=lambda flags: flags,
        cuDeviceGetCount=count,
        cuDeviceGet=lambda _device, _index: 0,
        cuDeviceGetUuid_v2=uuid,
    )
    monkeypatch.setattr("ctypes.CDLL", lambda _name: fake)
    monkeypatch.setattr("ctypes.byref", lambda thing: SimpleNamespace(target=thing))
    assert cuda_order.read_order() == ["GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"]
    fake.cuInit = lambda _flags: 802
    with pytest.raises(OSError, match="802"):
        cuda_order.read_order()


def test_no_selection_shows_every_card_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sensors.read_visible(Nvml(FakeNvml("gpu-lost"))) == [
        "GPU-5e0d3b1c-8f5a-4c36-9d2b-7a1e6f40c201"
    ]


def test_a_cut_card_stands_for_its_first_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = Nvml(FakeNvml("a100-mig"))
    first, second = "MIG-11111111-2222-5333-8444-555555555501", "MIG-99999999"
    assert sensors.read_visible(nvml) == [first]
    assert sensors.read_visible(nvml, second) == ["MIG-99999999-2222-5333-8444-555555555502"]
    old = "MIG-GPU-a1000000-aaaa-4bbb-8ccc-ddddeeee0001/7/0"
    assert sensors.read_visible(nvml, old) == [first]


def test_a_card_whose_cutting_is_only_pending_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeNvml("h200")
    fake.devices[0]["calls"]["nvmlDeviceGetMigMode"] = [0, 1]
    assert sensors.read_visible(Nvml(fake)) == ["GPU-5e0d3b1c-8f5a-4c36-9d2b-7a1e6f40c201"]


def test_a_card_that_refuses_its_mode_is_cut_when_it_lists_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeNvml("a100-mig")
    fake.devices[0]["calls"]["nvmlDeviceGetMigMode"] = {"error": 4}
    assert sensors.read_visible(Nvml(fake)) == ["MIG-11111111-2222-5333-8444-555555555501"]


@pytest.mark.parametrize("answer", ["", "  ", b" ", None, 5])
def test_an_answer_without_letters_is_no_text(answer: object) -> None:
    with pytest.raises(ValueError, match="is no text"):
        sensors.parse_text(answer)


@pytest.mark.parametrize("answer", [-1, True, "5", None, (1 << 32) - 1, (1 << 64) - 1])
def test_nvmls_mark_for_no_value_is_no_number(answer: object) -> None:
    with pytest.raises(ValueError, match="stands for no value"):
        sensors.parse_number(answer)


def test_without_a_driver_nothing_is_visible() -> None:
    assert sensors.read_visible(Nvml(FakeNvml("driver-not-loaded")), "0") == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (1, "not initialised"),
        (4, "no permission"),
        (6, "does not know this device"),
        (9, "driver is not loaded"),
        (12, "library"),
        (13, "lacks the function"),
        (15, "fallen off the bus"),
        (16, "needs a reset"),
        (17, "device cgroup"),
        (18, "different versions"),
        (77, "77"),
        (999, "unknown error"),
    ],
)
def test_a_refusal_is_unknown_with_its_reason(code: int, reason: str) -> None:
    fake = FakeNvml("h200")
    fake.devices[0]["calls"]["nvmlDeviceGetSerial"] = {"error": code}
    told = Nvml(fake).evidence("nvmlDeviceGetSerial", fake.devices[0])
    assert isinstance(told, Unknown)
    assert reason in told.reason


@pytest.mark.parametrize("code", [3, 22])
def test_not_supported_is_known_to_be_absent(code: int) -> None:
    fake = FakeNvml("h200")
    fake.devices[0]["calls"]["nvmlDeviceGetEccMode"] = {"error": code}
    told = Nvml(fake).evidence("nvmlDeviceGetEccMode", fake.devices[0])
    assert isinstance(told, Known)
    assert told.absent
    assert told.value is None


def test_a_missing_package_is_a_problem_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with sensors.open_nvml() as nvml:
        told = nvml.evidence("nvmlSystemGetDriverVersion")
    assert isinstance(told, Unknown)
    assert "nvidia-ml-py" in told.reason


def test_a_session_is_ended_once_even_when_the_block_raises() -> None:
    fake = FakeNvml("h200")
    with pytest.raises(KeyError), sensors.open_nvml(fake):
        raise KeyError
    assert fake.shut == 1


def test_a_sample_has_what_fuses_watch() -> None:
    nvml = Nvml(FakeNvml("h200"))
    sample = sensors.read_sample(nvml, sensors.read_visible(nvml, "0")[0])
    told = {key: (item.value, item.unit) for key, item in sample.items() if isinstance(item, Known)}
    assert told == {
        "device.temperature": (29, "degC"),
        "device.power.draw": (76.412, "W"),
        "device.clock.sm": (1_980_000_000, "Hz"),
        "device.throttle.reasons": ([], ""),
        "device.memory.used": (641 << 20, "B"),
    }


def test_a_sample_of_a_slice_has_the_slices_memory_and_the_boards_heat() -> None:
    nvml = Nvml(FakeNvml("a100-mig"))
    sample = sensors.read_sample(nvml, "MIG-11111111-2222-5333-8444-555555555501")
    heat, memory = sample["device.temperature"], sample["device.memory.used"]
    assert isinstance(heat, Known)
    assert isinstance(memory, Known)
    assert (heat.value, memory.value) == (47, 4 << 20)
    assert isinstance(sample["device.power.draw"], Unknown)


def test_a_sample_of_a_lost_device_is_unknown_throughout() -> None:
    sample = sensors.read_sample(
        Nvml(FakeNvml("gpu-lost")), "GPU-dead0000-0000-4000-8000-000000000000"
    )
    assert len(sample) == 5
    assert all(isinstance(item, Unknown) and "lost" in item.reason for item in sample.values())
