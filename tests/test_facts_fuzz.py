"""No text of a machine can crash a parser of facts, or keep it busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cift_probe.facts import (
    cuda_start,
    driver_files,
    gpu_links,
    kernel_log,
    loaded,
    processor,
    storage,
    system,
    toolchain,
    wheels,
)
from cift_probe.facts import settings as environment

TOTAL: dict[str, Callable[[str], Any]] = {
    "library version": cuda_start.parse_library_version,
    "module": driver_files.parse_module,
    "modules": driver_files.parse_modules,
    "fabric manager": driver_files.parse_manager_version,
    "bus id": gpu_links.parse_bus_id,
    "xids": kernel_log.parse_xids,
    "maps": loaded.parse_maps,
    "library": loaded.parse_library,
    "features": processor.parse_features,
    "allocator": environment.parse_allocator,
    "accelerate": environment.parse_accelerate,
    "mounts": storage.parse_mounts,
    "choice": system.parse_choice,
    "tool": toolchain.parse_tool_version,
    "nvcc": toolchain.parse_nvcc_version,
    "xformers": wheels.parse_xformers,
    "conda": lambda text: wheels.parse_conda(text.splitlines()),
    "binaries": lambda text: wheels.parse_binaries(text.splitlines()),
    "wheels": lambda text: wheels.parse_cuda_wheels(dict.fromkeys(text.splitlines(), text)),
    "glibc": lambda text: wheels.parse_glibc(text.encode("utf-8", "replace")),
    "guest": lambda text: system.parse_guest(text, text),
}
REFUSING: dict[str, Callable[[str], Any]] = {  # these may say ValueError, and nothing else
    "range": system.parse_range,
    "cache size": processor.parse_cache_size,
}
# pieces of the real texts, so that a random text is not always far from all of them
PIECES = st.sampled_from(
    [
        *("NVRM: Xid (PCI:0000:1b:00): 79, ", "NVRM version: NVIDIA UNIX ", "Open Kernel Module "),
        *("580.95.05", "libcublas.so.13", " r-xp 0 08:01 1 /usr/lib/", "GLIBC_2.", "nvidia-cublas"),
        *("-cu12", "[always] ", "expandable_segments:True,", "release 12.4", "gcc (", ") 12.2.0"),
        *("flags\t: ", "\n", "[", "]", ":", "-", "0-3,8", "{", '"version"', "  a: b", " - ", "/"),
    ]
)
TEXTS = st.one_of(
    st.text(max_size=200),
    st.binary(max_size=200).map(lambda raw: raw.decode(errors="replace")),
    st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=30).map("".join),
)
LONG = [
    *("a" * 300_000, "(" * 300_000, "[" * 300_000, "0" * 300_000, "1." * 150_000, "-" * 300_000),
    *("GLIBC_2." * 40_000, "NVRM: Xid (PCI:" * 20_000, "NVRM version: NVIDIA UNIX " * 12_000),
    *("nvidia-" * 40_000, "flags : " * 40_000, "a: " * 100_000, "( " * 150_000, "/" * 300_000),
    *("Kernel Module " * 20_000, "lib" * 100_000, " " * 300_000, "\t" * 300_000, "{" * 100_000),
]
SECONDS = 2.0  # on a slow machine under load; a text of such a length takes milliseconds


@pytest.mark.parametrize("name", TOTAL)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_any_text_is_parsed(name: str, text: str) -> None:
    TOTAL[name](text)


@pytest.mark.parametrize("name", REFUSING)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_any_text_is_parsed_or_refused(name: str, text: str) -> None:
    with suppress(ValueError):
        REFUSING[name](text)


@pytest.mark.parametrize("name", [*TOTAL, *REFUSING])
def test_no_text_keeps_a_parser_busy(name: str) -> None:
    parse = (TOTAL | REFUSING)[name]
    for text in LONG:
        started = time.perf_counter()
        with suppress(ValueError):
            parse(text)
        assert time.perf_counter() - started < SECONDS, text[:20]


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)
    )
)
def test_any_answer_of_a_child_is_evidence(told: Any) -> None:
    assert set(loaded.parse_loaded(told)) == set(loaded.KEYS)
    assert set(cuda_start.parse_start(told)) == set(cuda_start.MACHINE_KEYS)
    assert set(cuda_start.parse_attributes(told, "GPU-1")) == set(cuda_start.DEVICE_KEYS)
