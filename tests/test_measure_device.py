"""Instruments of the device under load, with a torch that only waits and a recorded NVML."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import FakeNvml

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.expect.limits import read_limits
from cift_probe.measure import expandable, load, pcie, pinned, sampling
from cift_probe.measure.declare import Task
from cift_probe.measure.pcie import read_link
from cift_probe.sensors import Nvml, read_sample, read_visible

GIB = 1 << 30


def value(item: Evidence) -> Any:
    assert isinstance(item, Known), item
    assert not item.absent, item
    return item.value


class Piece:
    """A tensor of so many bytes at a place."""

    def __init__(self, torch: Torch, num_bytes: int) -> None:
        """Lie at the end of what was handed out."""
        self.torch, self.num_bytes = torch, num_bytes

    def copy_(self, _of: Piece, *, non_blocking: bool) -> None:
        assert non_blocking
        self.torch.pending_s += self.torch.copy_s

    def __matmul__(self, _right: Piece) -> Piece:
        """Be the product: its values are nobody's matter here."""
        return self

    def data_ptr(self) -> int:
        return 1000


class Torch:
    """What the instruments call of torch; work on the device is a wait in `synchronize`."""

    uint8, bfloat16, float16 = "uint8", "bfloat16", "float16"

    def __init__(self) -> None:
        """Be a sound device."""
        self.copy_s, self.product_s = 0.004, 0.002
        self.pending_s = 0.0
        self.integrated = False
        self.capability = (9, 0)
        self.dtypes: list[str] = []
        self.pin_limit = 1 << 40
        self.pinned: list[int] = []
        self.emptied = 0
        self.settings: list[str] = []
        self.grows: bool | None = None  # None: as it was set
        self.refuses = ""
        self._C = SimpleNamespace(
            _host_emptyCache=self._empty, _accelerator_setAllocatorSettings=self.set
        )

    @property
    def cuda(self) -> Torch:
        return self

    def _empty(self) -> None:
        self.emptied += 1

    def set(self, text: str) -> None:
        self.settings.append(text)
        if self.refuses and "True" in text:
            raise RuntimeError(self.refuses)

    def get_device_properties(self, _index: int) -> Any:
        return SimpleNamespace(is_integrated=self.integrated)

    def get_device_capability(self, _index: int) -> tuple[int, int]:
        return self.capability

    def empty(
        self, num_bytes: int, *, dtype: str, pin_memory: bool = False, device: str = ""
    ) -> Piece:
        assert dtype == "uint8"
        assert pin_memory or device == "cuda"
        if pin_memory:
            if num_bytes > self.pin_limit:
                message = "CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"
                raise RuntimeError(message)
            self.pinned.append(num_bytes)
        return Piece(self, num_bytes)

    def ones(self, num_bytes: int, **_: Any) -> Piece:
        return Piece(self, num_bytes)

    def randn(self, *shape: int, device: str, dtype: str) -> Piece:
        assert device == "cuda"
        self.dtypes.append(dtype)
        return Piece(self, 2 * shape[0] * shape[1])

    def matmul(self, left: Piece, right: Piece, *, out: Piece) -> None:
        assert left
        assert right
        assert out
        self.pending_s += self.product_s

    def synchronize(self) -> None:
        wait, self.pending_s = self.pending_s, 0.0
        time.sleep(wait)

    def empty_cache(self) -> None:
        """Give nothing back: nothing was taken."""

    def memory_snapshot(self) -> list[dict[str, Any]]:
        on = bool(self.settings) and self.settings[-1] == "expandable_segments:True"
        grows = on if self.grows is None else self.grows
        other = {"address": 0, "total_size": 1000, "is_expandable": not grows}
        return [other, {"address": 1000, "total_size": 64 << 20, "is_expandable": grows}]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setattr(pcie, "_LASTS_S", 0.05)
    monkeypatch.setattr(load, "_LASTS_S", 0.4)
    monkeypatch.setattr(load, "_PAUSE_S", 0.01)
    return made


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeNvml("h200")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


# the sampler


def test_a_sampler_looks_again_and_again_and_ends_its_session(nvml: FakeNvml) -> None:
    with sampling.Sampler(read_link, 0.005) as sampler:
        time.sleep(0.1)
    assert len(sampler.samples) > 3
    assert nvml.shut == 1
    assert len(sampler.later(0.5)) < len(sampler.samples)
    assert value(sampler.middle("device.pcie.width.current", "1")) == 16


@pytest.mark.usefixtures("nvml")
def test_a_block_that_ends_at_once_has_one_reading() -> None:
    with sampling.Sampler(read_link, 60.0) as sampler:
        pass
    assert len(sampler.samples) == 1


def test_without_nvml_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("driver-not-loaded"))
    with sampling.Sampler(read_link, 0.01) as sampler:
        pass
    item = sampler.middle("device.pcie.width.current", "1")
    assert isinstance(item, Unknown)
    assert "driver is not loaded" in item.reason
    assert sampler.later() == []


def filled(*readings: Mapping[str, Evidence]) -> sampling.Sampler:
    sampler = sampling.Sampler(read_link, 1.0)
    sampler.samples = [(float(place), reading) for place, reading in enumerate(readings)]
    return sampler


def test_what_was_before_it_settled_does_not_count() -> None:
    key = "device.clock.sm"
    readings = [{key: Known(number, "Hz", "NVML")} for number in (1, 1, 1, 7, 7, 9)]
    item = filled(*readings).middle(key, "Hz")
    assert value(item) == 7
    assert "3 readings" in str(item)


def test_missing_readings_are_passed_over_and_all_missing_is_told() -> None:
    key = "device.clock.sm"
    some = filled({key: Known(5, "Hz")}, {key: Unknown("once")}, {key: Known(5, "Hz")})
    assert value(some.middle(key, "Hz")) == 5
    for item in (Unknown("no permission"), absent("not supported")):
        assert filled({key: item}, {key: item}).middle(key, "Hz") == item
    assert isinstance(filled({}, {}).middle(key, "Hz"), Unknown)


def test_a_link_is_read_from_the_board() -> None:
    told = read_link(Nvml(FakeNvml("laptop-4070")), "GPU-44440000-2f6d-4a53-9a0b-0c3a3d1f5b44")
    assert [value(item) for item in told.values()] == [1, 8]
    lost = read_link(Nvml(FakeNvml("h200")), "GPU-gone")
    assert all(isinstance(item, Unknown) for item in lost.values())


# the link


def measured(instrument: Callable[[Task], Any], produces: tuple[str, ...], fault: str = "") -> Any:
    found = instrument(Task("gpu0", fault=fault))
    assert set(found) == set(produces)
    return found


@pytest.mark.usefixtures("nvml")
def test_the_link_is_read_during_the_copies(torch: Torch) -> None:
    found = measured(pcie.measure_pcie, pcie.PRODUCES)
    assert value(found["pcie.generation"]) == 5
    assert value(found["pcie.width"]) == 16
    rate = (256 << 20) / torch.copy_s
    assert 0.5 * rate < value(found["pcie.to_device"]) <= rate
    share = value(found["pcie.share"])
    assert share == min(value(found[f"pcie.{way}"]) for way in ("to_device", "to_host")) / (
        16 * 3.938e9
    )
    assert found["pcie.to_host"].unit == "B/s"
    assert torch.emptied == 1  # the pinned memory is given back


@pytest.mark.usefixtures("nvml", "torch")
def test_a_slow_copy_and_a_slow_link_are_seen() -> None:
    sound = measured(pcie.measure_pcie, pcie.PRODUCES)
    slow = measured(pcie.measure_pcie, pcie.PRODUCES, "slow_copy")
    assert value(slow["pcie.share"]) < 0.6 * value(sound["pcie.share"])
    first = measured(pcie.measure_pcie, pcie.PRODUCES, "first_generation")
    assert value(first["pcie.generation"]) == 1
    assert value(first["pcie.share"]) > value(sound["pcie.share"])


def test_without_the_links_figures_its_share_is_not_told(torch: Torch, nvml: FakeNvml) -> None:
    calls = nvml.devices[0]["calls"]
    calls["nvmlDeviceGetCurrPcieLinkGeneration"] = {"error": 3}
    found = measured(pcie.measure_pcie, pcie.PRODUCES)
    assert isinstance(found["pcie.share"], Known)
    assert found["pcie.share"].absent
    assert value(found["pcie.to_device"]) > 0
    calls["nvmlDeviceGetCurrPcieLinkGeneration"] = 9
    assert isinstance(measured(pcie.measure_pcie, pcie.PRODUCES)["pcie.share"], Unknown)
    torch.integrated = True
    for item in measured(pcie.measure_pcie, pcie.PRODUCES).values():
        assert item.absent == "host and device share one memory"


def test_the_limit_lies_between_a_sound_link_and_a_bad_one() -> None:
    limit = read_limits()["pcie.share.min"].value
    assert isinstance(limit, float)
    assert 50e9 / (16 * 3.938e9) > limit > 25e9 / (16 * 3.938e9)


# load


def test_the_device_is_read_while_it_multiplies(torch: Torch, nvml: FakeNvml) -> None:
    nvml.devices[0]["calls"]["nvmlDeviceGetCurrentClocksEventReasons"] = 4
    found = measured(load.measure_load, load.PRODUCES)
    most = 2 * 8192**3 / torch.product_s
    assert 0.5 * most < value(found["load.rate"]) <= most
    assert value(found["load.clock.sm"]) == 1_980_000_000
    assert value(found["load.throttle.reasons"]) == ["software power cap"]
    assert value(found["load.temperature"]) == 29
    assert value(found["load.power"]) == 76.412
    assert torch.dtypes == ["bfloat16", "bfloat16"]


@pytest.mark.usefixtures("nvml")
def test_a_device_without_bf16_multiplies_fp16(torch: Torch) -> None:
    torch.capability = (7, 5)
    measured(load.measure_load, load.PRODUCES)
    assert torch.dtypes == ["float16", "float16"]


@pytest.mark.usefixtures("nvml", "torch")
def test_planted_faults_of_the_load_are_seen() -> None:
    sound = measured(load.measure_load, load.PRODUCES)
    paused = measured(load.measure_load, load.PRODUCES, "paused")
    assert value(paused["load.rate"]) < 0.7 * value(sound["load.rate"])
    slow = measured(load.measure_load, load.PRODUCES, "slow_clock")
    assert value(slow["load.clock.sm"]) < 0.5 * value(sound["load.clock.sm"])
    hot = measured(load.measure_load, load.PRODUCES, "thermal_slowdown")
    refused = read_limits()["load.throttle.refused"].value
    assert isinstance(refused, list)
    assert set(value(hot["load.throttle.reasons"])) & set(refused)
    assert not set(value(sound["load.throttle.reasons"])) & set(refused)


def throttled(*lists: list[str]) -> sampling.Sampler:
    return filled(*({"device.throttle.reasons": Known(names, source="NVML")} for names in lists))


def test_a_reason_that_came_and_went_does_not_count() -> None:
    heat = ["hardware thermal slowdown"]
    once = throttled(*[[]] * 15, *[[]] * 14, heat)
    assert value(load.judge(once, [1.0, 1.0])["load.throttle.reasons"]) == []
    often = throttled(*[[]] * 15, *[[]] * 10, *[heat] * 5)
    assert value(load.judge(often, [1.0, 1.0])["load.throttle.reasons"]) == heat
    early = throttled(*[heat] * 10, *[[]] * 20)
    assert value(load.judge(early, [1.0, 1.0])["load.throttle.reasons"]) == []


@pytest.mark.parametrize("item", [Unknown("no permission"), absent("not supported")])
def test_reasons_that_are_not_told_are_not_none(item: Evidence) -> None:
    sampler = filled({"device.throttle.reasons": item})
    assert load.judge(sampler, [1.0, 1.0])["load.throttle.reasons"] == item


def test_a_virtual_gpus_sensors_do_not_exist(monkeypatch: pytest.MonkeyPatch, torch: Torch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("grid-vgpu"))
    for fault in ("", "thermal_slowdown"):
        found = measured(load.measure_load, load.PRODUCES, fault)
        assert found["load.throttle.reasons"].absent
    assert value(found["load.rate"]) > 0
    assert torch.dtypes


# pinned memory


def test_the_largest_piece_that_is_pinned_is_told(torch: Torch) -> None:
    found = measured(pinned.measure_pinned, pinned.PRODUCES)["host.pinned.largest"]
    assert value(found) == GIB
    assert torch.pinned == [64 << 20, 256 << 20, 512 << 20, GIB]
    assert torch.emptied == 4
    torch.pin_limit = 300 << 20
    limited = measured(pinned.measure_pinned, pinned.PRODUCES)["host.pinned.largest"]
    assert value(limited) == 256 << 20
    assert limited.note == "CUDA error: out of memory"


@pytest.mark.usefixtures("torch")
def test_a_limit_on_pinned_memory_is_seen() -> None:
    found = measured(pinned.measure_pinned, pinned.PRODUCES, "limited")["host.pinned.largest"]
    limit = read_limits()["host.pinned.min"].value
    assert isinstance(limit, int)
    assert value(found) < limit


# expandable segments


def expandable_works(fault: str = "") -> Known:
    found = measured(expandable.measure_expandable, expandable.PRODUCES, fault)
    item = found["allocator.expandable.works"]
    assert isinstance(item, Known)
    return item


def test_segments_grow_and_the_setting_is_put_back(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert expandable_works().value is True
    assert torch.settings == ["expandable_segments:True", "expandable_segments:False"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    expandable_works()
    assert torch.settings[-1] == "max_split_size_mb:64"


def test_a_setting_without_effect_and_one_that_is_refused_are_seen(torch: Torch) -> None:
    assert expandable_works("not_set").value is False
    torch.grows = False
    assert "no effect" in expandable_works().note
    torch.refuses = "expandable_segments not supported\nstack"
    refused = expandable_works()
    assert refused.value is False
    assert refused.note == "expandable_segments not supported"
    assert torch.settings[-1] == "expandable_segments:False"


def test_torch_before_2_10_is_set_by_its_own_name(torch: Torch) -> None:
    told: list[str] = []
    torch._C = SimpleNamespace()  # noqa: SLF001 - the stand-in's own
    torch.memory = SimpleNamespace(_set_allocator_settings=told.append)  # type: ignore[attr-defined] # as above
    expandable_works()
    assert told == ["expandable_segments:True", "expandable_segments:False"]


def test_memory_in_no_segment_is_told(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "memory_snapshot", list)
    assert "does not tell" in expandable_works().note


@pytest.mark.parametrize(
    ("instrument", "produces"),
    [
        (pcie.measure_pcie, pcie.PRODUCES),
        (load.measure_load, load.PRODUCES),
        (pinned.measure_pinned, pinned.PRODUCES),
        (expandable.measure_expandable, expandable.PRODUCES),
    ],
)
def test_on_the_cpu_there_is_none_of_it(
    instrument: Callable[[Task], Any], produces: tuple[str, ...]
) -> None:
    found = instrument(Task("cpu"))
    assert set(found) == set(produces)
    assert all(item.absent for item in found.values())


def test_the_sensors_of_a_sample_are_those_that_the_load_reads(nvml: FakeNvml) -> None:
    session = Nvml(nvml)
    told = read_sample(session, read_visible(session)[0])
    assert {"device.clock.sm", "device.temperature", "device.power.draw"} <= set(told)
    assert "device.throttle.reasons" in told
