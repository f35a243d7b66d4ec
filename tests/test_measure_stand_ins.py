"""Instruments that need a GPU, on stand-ins: a compiler only looked for, memory only counted."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.measure import inside, memory_space, triton_compile, triton_kernel
from cift_probe.measure.declare import Task

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def number(evidence: Evidence) -> float:
    assert isinstance(evidence, Known)
    return float(evidence.value)


def raising(text: str) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(text)

    return fail


# ---- triton, with a compiler that is only looked for ----


@pytest.fixture
def triton_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Task:
    """Let the instrument run on the CPU, its kernel replaced by one that looks for CC."""
    import torch

    draw = torch.randn

    def compile_and_run(values: Any, result: Any) -> None:
        compiler = os.environ.get("CC", sys.executable)
        if not Path(compiler).is_file():
            message = f"Failed to find C compiler.\n{compiler}: not found"
            raise RuntimeError(message)
        assert os.listdir(os.environ["TRITON_CACHE_DIR"]) == []  # noqa: PTH208 - a name
        result.copy_(values + 1)

    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(triton_compile, "find_spec", lambda _: SimpleNamespace(origin=None))
    monkeypatch.setattr(torch, "randn", lambda count, **_: draw(count))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(triton_kernel, "add_one", compile_and_run)
    return Task("gpu0")


def test_a_kernel_that_compiles_into_an_empty_cache_is_right(
    triton_on_cpu: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/the/users/own")
    seen = triton_compile.measure_triton(triton_on_cpu)
    assert set(seen) == set(triton_compile.PRODUCES)
    assert seen["triton.compiles"] == Known(value=True)
    assert os.environ["TRITON_CACHE_DIR"] == "/the/users/own"


@pytest.mark.usefixtures("triton_on_cpu")
def test_a_missing_compiler_is_told_with_the_compilers_words() -> None:
    seen = triton_compile.measure_triton(Task("gpu0", fault="no_compiler"))
    compiles = seen["triton.compiles"]
    assert isinstance(compiles, Known)
    assert compiles.value is False
    assert compiles.note == "RuntimeError: /nonexistent/compiler: not found"
    assert "CC" not in os.environ
    assert "TRITON_CACHE_DIR" not in os.environ


def test_a_kernel_with_a_wrong_result_does_not_count(
    triton_on_cpu: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernel, "add_one", lambda values, result: result.copy_(values))
    compiles = triton_compile.measure_triton(triton_on_cpu)["triton.compiles"]
    assert isinstance(compiles, Known)
    assert compiles.value is False
    assert "wrong" in compiles.note


def test_a_lost_context_is_not_the_compilers_fault(
    triton_on_cpu: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernel, "add_one", raising("CUDA error: misaligned address"))
    with pytest.raises(RuntimeError, match="misaligned"):
        triton_compile.measure_triton(triton_on_cpu)


def test_a_compiler_named_by_cc_is_the_only_one_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CC", "/nonexistent/compiler")
    found = triton_compile._c_compiler()  # noqa: SLF001 - the pure part
    assert isinstance(found, Known)
    assert found.absent == "none of /nonexistent/compiler is on the path"
    monkeypatch.setenv("CC", sys.executable)
    assert triton_compile._c_compiler() == Known(sys.executable, "", "PATH and CC")  # noqa: SLF001


def test_an_assembler_that_does_not_start_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = SimpleNamespace(origin=str(tmp_path / "triton" / "__init__.py"))
    monkeypatch.setattr(triton_compile, "find_spec", lambda _: spec)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    found = triton_compile._ptxas()  # noqa: SLF001 - the pure part
    assert isinstance(found, Unknown)
    assert "triton/backends/nvidia/bin/ptxas" in found.reason
    monkeypatch.setenv("TRITON_PTXAS_PATH", sys.executable)
    answered = triton_compile._ptxas()  # noqa: SLF001 - the pure part
    assert isinstance(answered, Known)
    assert answered.value.startswith(f"{sys.executable}: Python ")


# ---- memory, with an allocator that only counts ----

GIB = 1 << 30


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


class CountedMemory:
    """torch and torch.cuda in one: counts bytes, and takes them back when a tensor is gone."""

    OutOfMemoryError = OutOfMemoryError
    uint8 = "uint8"

    total = 12 * GIB  # 2 of them are context and driver reserve
    free = served = 10 * GIB  # what is told, and what is really there
    reserved = 0
    num_written = 0
    fraction = 0.25

    @property
    def cuda(self) -> CountedMemory:
        return self

    def empty(self, size: int, **_: Any) -> Any:
        if size > self.served:
            raise OutOfMemoryError
        memory = self
        memory.free -= size
        memory.served -= size

        class Tensor:
            def fill_(self, value: int) -> None:
                memory.num_written += size if value == 1 else 0  # the second write is timed

            def __del__(self) -> None:
                memory.free += size
                memory.served += size

        return Tensor()

    ones = empty

    def mem_get_info(self) -> tuple[int, int]:
        return self.free, self.total

    def set_per_process_memory_fraction(self, share: float) -> None:
        self.fraction = share

    def memory_reserved(self) -> int:
        return self.reserved

    def memory_allocated(self) -> int:
        return 0

    def empty_cache(self) -> None:
        """Do nothing: it keeps none."""

    def synchronize(self) -> None:
        """Do nothing: all has ended."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedMemory]:
    counted = CountedMemory()
    monkeypatch.setattr(memory_space, "_write_pace", lambda *_: 1e-12)  # always as fast
    monkeypatch.setitem(sys.modules, "torch", counted)
    yield counted
    assert counted.free == 10 * GIB  # all was given back


def space(**asked: Any) -> tuple[float, float]:
    seen = memory_space.measure_memory_space(Task("gpu0", **asked))
    assert set(seen) == set(memory_space.PRODUCES)
    if asked.get("fault") != "spilled":
        told = seen["device.spill"]
        assert isinstance(told, Known)
        assert "speed of the device" in told.absent
    return number(seen["device.allocatable.share"]), number(seen["device.usable.bytes"])


def test_four_fifths_of_free_memory_are_handed_out_and_written(memory: CountedMemory) -> None:
    assert space() == (0.8, 10 * GIB)
    assert memory.num_written == 8 * GIB
    assert memory.fraction == 1.0  # the card is asked without a cap


@pytest.mark.usefixtures("memory")
def test_memory_that_somebody_holds_is_not_usable() -> None:
    assert space(fault="held_memory")[1] == space()[1] * 3 // 4


@pytest.mark.usefixtures("memory")
def test_memory_that_is_refused_is_not_allocatable() -> None:
    assert space(fault="refused") == (0.1, 10 * GIB)


@pytest.mark.usefixtures("memory")
def test_memory_that_comes_from_the_host_is_not_usable() -> None:
    assert space(fault="spilled") == (0.1, GIB)
    seen = memory_space.measure_memory_space(Task("gpu0", fault="spilled"))
    assert number(seen["device.spill"]) == GIB
    assert seen["device.spilled"] == Known(value=True, source="pace of writing pieces of 1 GiB")
    sound = memory_space.measure_memory_space(Task("gpu0"))["device.spilled"]
    assert isinstance(sound, Known)
    assert sound.value is False


def test_memory_that_runs_out_early_counts_as_far_as_it_went(memory: CountedMemory) -> None:
    memory.served = 3 * GIB
    assert space() == (0.3, 10 * GIB)


@pytest.mark.parametrize(("cap", "usable"), [(4 * GIB, 2 * GIB), (40 * GIB, 10 * GIB), (GIB, 0)])
@pytest.mark.usefixtures("memory")
def test_a_cap_bounds_what_is_usable_but_not_what_is_tried(cap: int, usable: int) -> None:
    assert space(vram_cap=cap) == (0.8, usable)


@pytest.mark.parametrize(
    ("cap", "fraction"), [(None, 1.0), (8 * GIB, 0.5), (100 * GIB, 1.0), (GIB, 0.0)]
)
def test_a_cap_becomes_a_share_of_the_card(
    memory: CountedMemory, cap: int | None, fraction: float
) -> None:
    inside.cap_memory(cap)
    assert memory.fraction == fraction


def test_what_the_allocator_itself_reserves_is_not_taken_by_others(memory: CountedMemory) -> None:
    memory.reserved = GIB
    inside.cap_memory(8 * GIB)
    assert memory.fraction == pytest.approx(7 / 12)


def test_an_embedding_that_an_8_bit_optimizer_registered_is_let_go() -> None:
    """As transformers' Trainer registers it; without letting go no slice after it is clean."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch = pytest.importorskip("torch")
    embedding = torch.nn.Embedding(10, 10)
    gone = weakref.ref(embedding)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(embedding, "weight", {"optim_bits": 32})
    del embedding, manager
    inside.allocated_after_cleaning()
    assert gone() is None
    assert bitsandbytes.optim.GlobalOptimManager.get_instance().module_weight_config_triple == []


@pytest.mark.parametrize(
    ("cap_gib", "allocatable_gib"),
    [(None, 77), (80, 77), (100, 77), (24, 21), (3, 0), (2, 0)],
)
def test_what_can_be_allocated_is_what_others_leave_of_the_card(
    monkeypatch: pytest.MonkeyPatch, cap_gib: int | None, allocatable_gib: int
) -> None:
    """Of 80 GiB 72 are free and 5 are this allocator's own: 3 are others'."""
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (72 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 << 30)
    cap = None if cap_gib is None else cap_gib << 30
    assert inside.allocatable(cap) == allocatable_gib << 30
