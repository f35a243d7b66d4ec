"""The instruments of the kernels: healthy values hold their limits, planted faults do not."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.expect.limits import read_limits
from cift_probe.measure import (
    attention,
    bench,
    compare_tensors,
    compiled,
    flash_attention,
    nf4,
    optimizers,
    quantised,
)
from cift_probe.measure.declare import FUNCTIONS, REGISTRY, Task, instrument

pytestmark = [
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="the extra `train` is missing"),
    pytest.mark.xdist_group("kernels"),  # the healthy values are shared
]

INSTRUMENTS = {
    name: item for name, item in bench.read_instruments().items() if not name.startswith("planted.")
}
NUMBERS = {
    "matmul": ("bf16.matmul.error", "bf16.matmul.worst_element", "fp16.matmul.error"),
    "attention": ("attention.error.forward", "attention.error.backward"),
    "nf4": ("nf4.forward.error", "nf4.backward.error", "nf4.quantisation.error"),
    "quantised": (
        "fp4.forward.error",
        "fp4.backward.error",
        "int8.forward.error",
        "int8.backward.error",
    ),
    "rms_norm": ("rms_norm.forward.error", "rms_norm.backward.error"),
    "optimizers": ("optimizer.fused.error",),
}
# fault -> the values that must leave their limits; a fault that is missing here has its own test
MOVED = {
    ("matmul", "corrupt_element"): {"bf16.matmul.worst_element"},
    ("matmul", "lost_precision"): set(NUMBERS["matmul"]),
    ("attention", "wrong_mask"): set(NUMBERS["attention"]),
    ("attention", "scaled_output"): set(NUMBERS["attention"]),
    ("nf4", "corrupt_block"): {"nf4.forward.error", "nf4.backward.error"},
    ("quantised", "corrupt_block"): {"fp4.forward.error", "fp4.backward.error"},
    ("quantised", "turned_row"): {"int8.forward.error", "int8.backward.error"},
    ("rms_norm", "scaled_row"): set(NUMBERS["rms_norm"]),
    ("rms_norm", "wrong_mean"): set(NUMBERS["rms_norm"]),
    ("optimizers", "stale_gradient"): set(NUMBERS["optimizers"]),
    ("optimizers", "no_decay"): set(NUMBERS["optimizers"]),
}


@cache
def measured(name: str, fault: str = "") -> Mapping[str, Evidence]:
    return FUNCTIONS[name](Task("cpu", fault=fault))


def number(evidence: Evidence) -> float:
    assert isinstance(evidence, Known)
    return float(evidence.value)


def limit(key: str) -> float:
    value = read_limits()[f"{key}.max"].value
    assert isinstance(value, int | float)
    return float(value)


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, keys in NUMBERS.items() for key in keys]
)
def test_a_healthy_device_holds_the_limit_and_is_not_suspiciously_exact(
    name: str, key: str
) -> None:
    assert limit(key) / 100 < number(measured(name)[key]) <= limit(key)


@pytest.mark.parametrize(
    ("name", "fault", "key"),
    [(name, fault, key) for (name, fault), keys in MOVED.items() for key in sorted(keys)],
)
def test_a_planted_fault_exceeds_the_limit(name: str, fault: str, key: str) -> None:
    assert number(measured(name, fault)[key]) > 1.5 * limit(key)


def test_a_damaged_block_of_weights_is_told_from_a_coarse_quantisation() -> None:
    key = "nf4.quantisation.error"
    assert number(measured("nf4", "corrupt_block")[key]) <= limit(key)


@pytest.mark.parametrize("name", sorted(INSTRUMENTS))
def test_every_instrument_declares_a_planted_fault(name: str) -> None:
    assert REGISTRY[name].faults
    assert len(set(REGISTRY[name].faults)) == len(REGISTRY[name].faults)


# `training` takes a minute and has this test of its own in test_training.py
@pytest.mark.parametrize("name", sorted(set(INSTRUMENTS) - {"training"}))
def test_an_instrument_returns_what_it_declares(name: str) -> None:
    assert set(measured(name)) == set(REGISTRY[name].produces)


@pytest.mark.parametrize(
    ("name", "fault"),
    [(n, f) for n, i in INSTRUMENTS.items() if n != "training" for f in i.faults],
)
def test_an_instrument_with_a_planted_fault_returns_what_it_declares(name: str, fault: str) -> None:
    assert set(measured(name, fault)) == set(REGISTRY[name].produces)


def test_an_instrument_without_a_planted_fault_cannot_be_declared() -> None:
    declare = instrument(
        "planted.none", version=1, produces=(), estimate_s=1, deadline_s=1, faults=()
    )
    with pytest.raises(ValueError, match="at least one planted fault"):
        declare(dict)  # type: ignore[arg-type]  # never called


@pytest.mark.parametrize(
    ("name", "key"), [("matmul", "planted.key"), ("planted.clash", "bf16.matmul.error")]
)
def test_two_instruments_share_neither_name_nor_evidence(name: str, key: str) -> None:
    declare = instrument(
        name, version=1, produces=(key,), estimate_s=1, deadline_s=1, faults=("any",)
    )
    with pytest.raises(ValueError, match="already declared"):
        declare(dict)  # type: ignore[arg-type]  # never called


# ---- comparing ----


def tensor(values: Any) -> Any:
    import torch

    return torch.tensor(values)


def test_the_relative_error_is_that_of_the_whole() -> None:
    assert compare_tensors.relative_error(tensor([3.0, 4.5]), tensor([3.0, 4.0])) == 0.1


def test_the_worst_element_is_told_in_root_mean_squares() -> None:
    reference = tensor([2.0, -2.0, 2.0, -2.0])
    assert compare_tensors.worst_element(tensor([2.0, -2.0, 3.0, -2.5]), reference) == 0.5


def test_the_worst_column_is_not_hidden_by_the_others() -> None:
    reference = tensor([[3.0, 300.0], [4.0, 400.0]])
    found = tensor([[3.0, 300.0], [5.0, 400.0]])
    assert compare_tensors.worst_column_error(found, reference) == pytest.approx(0.2)
    assert compare_tensors.relative_error(found, reference) < 0.01


@pytest.mark.parametrize(
    "compare",
    [
        compare_tensors.relative_error,
        compare_tensors.worst_element,
        compare_tensors.worst_column_error,
    ],
)
def test_what_is_no_number_never_looks_like_agreement(
    compare: Callable[[Any, Any], float],
) -> None:
    reference = tensor([[1.0, 2.0], [3.0, 4.0]])
    found = tensor([[1.0, 2.0], [3.0, math.nan]])
    assert compare(reference, reference) == 0.0
    assert math.isnan(compare(found, reference))
    assert math.isnan(compare(reference, reference * 0)) or math.isinf(
        compare(reference, reference * 0)
    )


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_worst_of_errors_is_nan_wherever_it_stands(place: int) -> None:
    errors = [0.1, 0.3, 0.2]
    assert compare_tensors.worst(errors) == 0.3
    errors[place] = math.nan
    assert math.isnan(compare_tensors.worst(errors))


def test_random_values_are_the_same_each_time_and_never_zeros() -> None:
    import torch

    first, again = (
        compare_tensors.random_tensor((64, 64), device="cpu", dtype=torch.float32, scale=0.5)
        for _ in range(2)
    )
    assert torch.equal(first, again)
    assert first.std().item() == pytest.approx(0.5, rel=0.05)
    other = compare_tensors.random_tensor((64, 64), device="cpu", dtype=torch.float32, seed=1)
    assert not torch.equal(first, other)


# ---- attention ----


def test_attention_names_its_back_ends_and_kernel() -> None:
    seen = measured("attention")
    available, kernel = seen["attention.available"], seen["attention.kernel"]
    assert isinstance(available, Known)
    assert isinstance(kernel, Known)
    assert set(available.value) == {"flash", "math"}
    assert kernel.value in available.value


def test_a_back_end_that_is_wrong_for_one_head_size_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        attention,
        "_errors",
        lambda call, *_: (math.nan, math.nan) if call.head_size == 128 else (0.0, 0.0),
    )
    seen = attention.measure_attention(Task("cpu"))
    assert math.isnan(number(seen["attention.error.forward"]))
    assert math.isnan(number(seen["attention.error.backward"]))


def raising(text: str) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(text)

    return fail


def test_no_back_end_at_all_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_errors", raising("no kernel serves this"))
    seen = attention.measure_attention(Task("cpu"))
    assert set(seen) == set(attention.PRODUCES)
    assert all(isinstance(item, Unknown) for item in seen.values())


def test_a_lost_context_is_passed_on_and_no_missing_back_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_errors", raising("CUDA error: illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        attention.measure_attention(Task("cpu"))


# ---- bitsandbytes ----


def test_a_loaded_library_is_named() -> None:
    library = measured("nf4")["nf4.library"]
    assert isinstance(library, Known)
    assert str(library.value).startswith("libbitsandbytes")


def test_a_library_that_did_not_load_is_absent_and_measures_nothing() -> None:
    seen = measured("nf4", "library_missing")
    library = seen["nf4.library"]
    assert isinstance(library, Known)
    assert "loaded no library" in library.absent
    assert all(isinstance(seen[key], Unknown) for key in set(seen) - {"nf4.library"})


@pytest.mark.parametrize(("error", "words"), [("no libcudart\nlong trace", "no libcudart")])
def test_the_stand_in_for_a_failed_library_is_seen_through(error: str, words: str) -> None:
    stand_in = SimpleNamespace(error_msg=error)  # what bitsandbytes puts in place
    package = SimpleNamespace(cextension=SimpleNamespace(lib=stand_in))
    assert nf4._loaded_library(package) is None  # noqa: SLF001 - the pure part
    assert nf4._load_error(package) == words  # noqa: SLF001 - the pure part


@pytest.mark.parametrize(
    ("library", "release"),
    [("libbitsandbytes_cuda128.so", "12.8"), ("libbitsandbytes_cuda130.so", "13.0")],
)
def test_a_library_says_its_cuda_release(library: str, release: str) -> None:
    found = nf4._cuda_release(library, "")  # noqa: SLF001 - the pure part
    assert found == Known(release, "version")


def test_a_library_without_cuda_has_no_release() -> None:
    found = nf4._cuda_release("libbitsandbytes_cpu.so", "")  # noqa: SLF001 - the pure part
    assert isinstance(found, Known)
    assert "not built for CUDA" in found.absent


def test_a_missing_bitsandbytes_makes_everything_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    seen = nf4.measure_nf4(Task("cpu"))
    assert set(seen) == set(nf4.PRODUCES)
    assert all(isinstance(item, Unknown) for item in seen.values())


# ---- flash-attn ----


def test_an_undefined_symbol_is_named() -> None:
    seen = measured("flash_attn", "undefined_symbol")
    imports = seen["flash_attn.imports"]
    assert isinstance(imports, Known)
    assert imports.value is False
    assert "undefined symbol: _ZN3c105ErrorC2" in imports.note
    assert isinstance(seen["flash_attn.error"], Unknown)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_a_package_that_is_not_installed_is_absent() -> None:
    for item in measured("flash_attn").values():
        assert isinstance(item, Known)
        assert "not installed" in item.absent


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Task:
    """Return a GPU's task whose tensors lie on the CPU."""
    monkeypatch.setattr(Task, "torch_device", property(lambda _: "cpu"))
    return Task("gpu0")


def right_attention(inputs: list[Any], call: Any, *, causal: bool = True) -> Any:
    """Return attention in bf16 as the packages lay it out: (1, length, heads, head size)."""
    import torch

    queries, keys, values = (item.transpose(1, 2) for item in inputs)
    rows = [
        torch.nn.functional.scaled_dot_product_attention(
            queries[:, :, start:end],
            keys[:, :, start:end],
            values[:, :, start:end],
            is_causal=causal,
            enable_gqa=True,
        )
        for start, end in zip((0, *call.ends), call.ends, strict=False)
    ]
    return torch.cat(rows, dim=2).transpose(1, 2)


def flash_error(monkeypatch: pytest.MonkeyPatch, attend: Callable[..., Any]) -> Evidence:
    task = on_the_cpu(monkeypatch)
    return flash_attention._error(attend, task, "flash-attn")  # noqa: SLF001 - on the CPU


def test_the_error_of_a_right_stand_in_for_flash_attention_is_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = number(flash_error(monkeypatch, right_attention))
    assert 1e-5 < found < limit("attention.error.backward")


def test_a_stand_in_for_flash_attention_with_a_wrong_mask_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = flash_error(monkeypatch, lambda i, call: right_attention(i, call, causal=False))
    assert number(found) > 10 * limit("attention.error.backward")


def test_a_stand_in_that_lets_packed_rows_see_each_other_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend(inputs: list[Any], call: Any) -> Any:
        return right_attention(inputs, call._replace(ends=call.ends[-1:]))

    assert number(flash_error(monkeypatch, attend)) > 5 * limit("attention.error.backward")


def test_a_stand_in_that_is_wrong_for_one_head_size_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend(inputs: list[Any], call: Any) -> Any:
        return right_attention(inputs, call) * (1.1 if call.head_size == 256 else 1.0)

    assert number(flash_error(monkeypatch, attend)) > 2 * limit("attention.error.backward")


def test_a_gradient_of_flash_attention_that_is_no_number_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend(inputs: list[Any], call: Any) -> Any:
        inputs[0].register_hook(lambda gradient: gradient * math.nan)
        return right_attention(inputs, call)

    assert math.isnan(number(flash_error(monkeypatch, attend)))


def packages(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    monkeypatch.setattr(flash_attention, "import_module", lambda name: modules[name])


def test_flash_attention_is_called_as_its_two_functions_want(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    def whole(*inputs: Any, causal: bool) -> Any:
        assert causal
        return right_attention(list(inputs), SimpleNamespace(ends=(inputs[0].shape[1],)))

    def packed(*told: Any, causal: bool) -> Any:
        queries, keys, values, bounds, same, longest, other = told
        assert causal
        assert bounds.dtype == torch.int32
        assert torch.equal(bounds, same)
        assert longest == other == queries.shape[0]
        rows = [item[None] for item in (queries, keys, values)]
        return right_attention(rows, SimpleNamespace(ends=tuple(bounds[1:].tolist())))[0]

    package = SimpleNamespace(flash_attn_func=whole, flash_attn_varlen_func=packed)
    packages(monkeypatch, flash_attn=package)
    attend = flash_attention._flash()  # noqa: SLF001 - without the package
    assert number(flash_error(monkeypatch, attend)) < limit("attention.error.backward")


def test_xformers_is_called_with_the_masks_that_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Block:
        @staticmethod
        def from_seqlens(lengths: list[int]) -> list[int]:
            return lengths

    def attend(queries: Any, keys: Any, values: Any, attn_bias: Any) -> Any:
        length = queries.shape[1]
        lengths = attn_bias if isinstance(attn_bias, list) else [length]
        ends = tuple(sum(lengths[: index + 1]) for index in range(len(lengths)))
        return right_attention([queries, keys, values], SimpleNamespace(ends=ends))

    masks = SimpleNamespace(LowerTriangularMask=object, BlockDiagonalCausalMask=Block)
    packages(
        monkeypatch,
        **{
            "xformers.ops": SimpleNamespace(memory_efficient_attention=attend),
            "xformers.ops.fmha.attn_bias": masks,
        },
    )
    found = flash_error(monkeypatch, flash_attention._xformers())  # noqa: SLF001 - as above
    assert number(found) < limit("attention.error.backward")


def test_an_unsupported_device_makes_the_error_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = flash_error(monkeypatch, raising("FlashAttention only supports Ampere\nor newer"))
    assert found == Unknown("head size 64: FlashAttention only supports Ampere", "flash-attn")
    with pytest.raises(RuntimeError, match="device-side assert"):
        flash_error(monkeypatch, raising("CUDA error: device-side assert triggered"))


# ---- optimizers of bitsandbytes, and compiled blocks, which run on a GPU alone ----


class Adam:
    """A stand-in for bitsandbytes' AdamW: torch's, which may leave out a step."""

    def __init__(self, weights: list[Any], *, lost: bool = False, **arguments: Any) -> None:
        """Take what AdamW takes."""
        import torch

        self._inner = torch.optim.AdamW(weights, **arguments)
        self._lost = lost
        self.param_groups = self._inner.param_groups

    def step(self) -> None:
        """Take a step, unless the third is left out."""
        self._count = getattr(self, "_count", 0) + 1
        if not (self._lost and self._count == 3):
            self._inner.step()


def optimizer_errors(monkeypatch: pytest.MonkeyPatch, **kinds: Any) -> Mapping[str, Evidence]:
    names = ("AdamW8bit", "PagedAdamW32bit", "PagedAdamW8bit")
    optim = SimpleNamespace(**dict.fromkeys(names, Adam) | kinds)
    package = SimpleNamespace(optim=optim, __version__="0")
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    return optimizers.measure_optimizers(on_the_cpu(monkeypatch))


def test_every_optimizer_is_held_against_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    for evidence in optimizer_errors(monkeypatch).values():
        assert number(evidence) < 1e-4


def test_a_step_that_an_optimizer_leaves_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def losing(weights: list[Any], **arguments: Any) -> Adam:
        return Adam(weights, lost=True, **arguments)

    seen = optimizer_errors(monkeypatch, PagedAdamW8bit=losing)
    assert number(seen["optimizer.paged_8bit.error"]) > 3 * limit("optimizer.paged_8bit.error")
    assert number(seen["optimizer.8bit.error"]) < 1e-4


def test_an_optimizer_that_does_not_run_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = optimizer_errors(monkeypatch, AdamW8bit=raising("no kernel\nfor this"))
    assert seen["optimizer.8bit.error"] == Unknown("no kernel", "bitsandbytes 0, AdamW8bit")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        optimizer_errors(monkeypatch, AdamW8bit=raising("CUDA error: illegal memory access"))


def test_optimizers_of_a_missing_bitsandbytes_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    seen = optimizers.measure_optimizers(on_the_cpu(monkeypatch))
    assert isinstance(seen["optimizer.8bit.error"], Unknown)
    assert isinstance(seen["optimizer.fused.error"], Known)
    assert all(
        isinstance(item, Unknown) for item in quantised.measure_quantised(Task("cpu")).values()
    )


@pytest.mark.parametrize(("fault", "sound"), [("", True), ("scaled_output", False)])
def test_a_compiled_block_is_held_against_itself(fault: str, *, sound: bool) -> None:
    def compiler(block: Any) -> Any:
        return lambda *told, **named: block(*told, **named)  # noqa: PLW0108 - another object than the block

    seen = compiled._steps(compiler, Task("cpu", fault=fault))  # noqa: SLF001 - without a GPU
    assert set(seen) == set(compiled.PRODUCES)
    for key in ("compile.forward.error", "compile.backward.error"):
        assert (number(seen[key]) <= limit(key)) is sound
    assert number(seen["compile.first.seconds"]) > 0


def test_a_block_that_does_not_compile_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_steps", raising("Cannot find a working triton\nmore"))
    seen = compiled.measure_compile(on_the_cpu(monkeypatch))
    assert seen["compile.forward.error"] == Unknown("RuntimeError: Cannot find a working triton")
    monkeypatch.setattr(compiled, "_steps", raising("CUDA error: illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        compiled.measure_compile(on_the_cpu(monkeypatch))
