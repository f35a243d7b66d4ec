"""The paged optimizer's instrument, with a driver, a torch and a bitsandbytes that only count."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.expect.limits import read_limits
from cift_probe.measure import paged
from cift_probe.measure.declare import Task

MIB = 1 << 20
STATE = 2 * 4 * 2**25


class Card:
    """Free memory, what torch counts of it, and the driver, torch and bitsandbytes that share it.

    Pages are of 2 MiB. `concurrent` is the driver's answer about managed memory.
    """

    def __init__(self) -> None:
        """Let nothing be taken of 8 GiB."""
        self.free = 8 << 30
        self.allocated = self.reserved = 0
        self.concurrent = 1
        self.integrated = False
        self.kept: list[Any] = []
        self.stepped: list[int] = []
        self.other_process = 0

    # torch and torch.cuda in one

    bfloat16, uint8 = "bfloat16", "uint8"

    @property
    def cuda(self) -> Card:
        return self

    @property
    def nn(self) -> SimpleNamespace:
        return SimpleNamespace(Parameter=lambda tensor: tensor)

    def zeros(self, num_parameters: int, **_: Any) -> Any:
        self.take(2 * num_parameters)
        return SimpleNamespace(num_parameters=num_parameters, grad=None)

    def ones_like(self, weight: Any) -> Any:
        return self.zeros(weight.num_parameters)

    def take(self, num_bytes: int) -> None:
        """Hand out torch's own memory."""
        self.free -= num_bytes
        self.allocated += num_bytes
        self.reserved += num_bytes

    def get_device_properties(self, _index: int) -> Any:
        return SimpleNamespace(is_integrated=self.integrated)

    def synchronize(self) -> None:
        """Do nothing: all has ended."""

    def mem_get_info(self) -> tuple[int, int]:
        return self.free, 8 << 30

    def memory_reserved(self) -> int:
        return self.reserved

    def memory_allocated(self) -> int:
        return self.allocated

    # bitsandbytes

    def page(self, num_bytes: int, **_: Any) -> Any:
        """Take managed memory, which only the driver counts."""
        self.free -= num_bytes
        return SimpleNamespace(data_ptr=lambda: num_bytes)

    def optimizer(self, *, is_paged: bool) -> Any:
        def build(weights: list[Any]) -> Any:
            [weight] = weights
            return SimpleNamespace(step=lambda: self.step(weight.num_parameters, is_paged=is_paged))

        return build

    def step(self, num_parameters: int, *, is_paged: bool) -> None:
        self.stepped.append(num_parameters)
        self.free -= self.other_process
        for _ in range(2):
            if is_paged:
                self.kept.append(self.page(4 * num_parameters))
            else:
                self.take(4 * num_parameters)

    def bitsandbytes(self) -> Any:
        manager = SimpleNamespace(paged_tensors=self.kept)
        functional = SimpleNamespace(
            get_paged=self.page,
            fill=lambda _tensor, _value: None,
            GlobalPageManager=SimpleNamespace(get_instance=lambda: manager),
        )
        optim = SimpleNamespace(
            PagedAdamW32bit=self.optimizer(is_paged=True),
            AdamW32bit=self.optimizer(is_paged=False),
        )
        return SimpleNamespace(functional=functional, optim=optim)

    # the driver

    def driver(self, _name: str) -> Any:
        return SimpleNamespace(
            cuInit=lambda _flags: 0,
            cuDeviceGet=lambda _device, _ordinal: 0,
            cuDeviceGetAttribute=self.tell,
            cuMemFree_v2=self.give_back,
        )

    def tell(self, place: Any, number: int, _device: Any) -> int:
        assert number == 89
        ctypes.cast(place, ctypes.POINTER(ctypes.c_int))[0] = self.concurrent
        return 0

    def give_back(self, pointer: Any) -> int:
        self.free += pointer.value  # a pointer is its own size here
        return 0


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setitem(sys.modules, "bitsandbytes", made.bitsandbytes())
    monkeypatch.setattr(ctypes, "CDLL", made.driver)
    return made


def measured(fault: str = "") -> dict[str, Evidence]:
    seen = paged.measure_paged(Task("gpu0", fault=fault))
    assert set(seen) == set(paged.PRODUCES)
    return dict(seen)


def numbers(fault: str = "") -> tuple[int, int]:
    values = []
    for item in measured(fault).values():
        assert isinstance(item, Known)
        assert item.unit == "B"
        values.append(int(item.value))
    return values[0], values[1]


def test_the_state_is_seen_on_the_device_and_not_by_torch(card: Card) -> None:
    assert numbers() == (STATE, 0)
    assert card.stepped == [1 << 18, 1 << 25]  # a small one first: kernels take memory too
    assert read_limits()["paged.state"].value == STATE


def test_managed_memory_is_given_back(card: Card) -> None:
    numbers()
    assert card.kept == []
    assert card.free + card.allocated == 8 << 30


@pytest.mark.usefixtures("card")
def test_an_optimizer_that_does_not_page_is_seen() -> None:
    on_device, in_torch = numbers("not_paged")
    assert (on_device, in_torch) == (0, STATE)
    limit = read_limits()["paged.torch.added.max"].value
    assert isinstance(limit, int)
    assert in_torch > limit


def test_memory_that_somebody_pages_too_is_seen(card: Card) -> None:
    on_device, _ = numbers("held_memory")
    assert on_device == STATE + STATE // 2  # another half is paged
    assert read_limits()["paged.state"].band < 0.5
    assert card.free + card.allocated == 8 << 30


def test_another_process_moves_what_is_free(card: Card) -> None:
    card.other_process = 3 * MIB
    assert numbers() == (STATE + 3 * MIB, 0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("concurrent", 0, "concurrentManagedAccess is 0"), ("integrated", True, "share their memory")],
)
def test_where_nothing_is_paged_there_is_nothing_to_measure(
    card: Card, field: str, value: Any, words: str
) -> None:
    setattr(card, field, value)
    for item in measured().values():
        assert isinstance(item, Known)
        assert words in item.absent
    assert card.stepped == []


def test_on_the_cpu_there_is_nothing_to_page() -> None:
    seen = paged.measure_paged(Task("cpu"))
    assert set(seen) == set(paged.PRODUCES)
    assert all(isinstance(item, Known) and item.absent for item in seen.values())


@pytest.mark.usefixtures("card")
def test_without_bitsandbytes_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for item in measured().values():
        assert isinstance(item, Unknown)
        assert "bitsandbytes" in item.reason


def test_a_driver_that_does_not_answer_pages_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> Any:
        message = "libcuda.so.1: cannot open shared object file"
        raise OSError(message)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert paged.read_attribute(89) == 0
    refusing = SimpleNamespace(cuInit=lambda _flags: 100)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: refusing)
    assert paged.read_attribute(89) == 0
