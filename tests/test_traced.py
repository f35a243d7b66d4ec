"""Tier traced: a step on fake CUDA tensors, against what an H200 measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
import torch

from cift_probe.evidence import Unknown
from cift_probe.expect import traced
from cift_probe.expect.estimate import STACK_REFUSES, Estimate
from cift_probe.expect.traced import holdings, shortcuts
from cift_probe.expect.traced.allocator import Event, replay
from cift_probe.expect.traced.fake_device import read_slots
from cift_probe.plan import Plan

MEASURED = Path(__file__).parent.parent / "reports" / "examples" / "memory-h200.jsonl"
HEADER = """
struct X {
  // virtual in a comment is no function
  virtual ~AcceleratorHooksInterface() = default;
  virtual bool isBuilt() const { return false; }
  virtual bool isAvailable() const {
  }
  virtual bool hasPrimaryContext(DeviceIndex device_index) const = 0;
};
"""


def test_slots_are_counted_in_the_header_that_the_wheel_ships() -> None:
    assert read_slots(HEADER) == {"isBuilt": 2, "isAvailable": 3, "hasPrimaryContext": 4}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("", "does not begin with its destructor"),
        (HEADER.replace("virtual ~", "~"), "does not begin with its destructor"),
        (HEADER.replace("isBuilt", "wasBuilt"), "has no isBuilt"),
    ],
)
def test_a_header_that_has_changed_is_refused(header: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_slots(header)


def measured(name: str) -> dict[str, Any]:
    """Return the row of a plan that ran at full depth on an H200."""
    rows = map(json.loads, MEASURED.read_text().splitlines())
    return next(row for row in rows if row["plan"]["name"] == name and row["tier"] == "measured")


@pytest.mark.parametrize(
    ("name", "depth", "band"),
    [
        # two stacks and three methods; bands are what is owed, the error is printed on failure
        ("llama-3.2-1b-full-trl-2048-2", "full", 0.001),
        ("llama-3.2-1b-lora-raw-2048-2", "full", 0.001),
        ("llama-3.2-1b-qlora-trl-2048-2", "periods", 0.002),
        # no kernel but "math" takes Falcon's heads; 8-bit layers keep their inputs
        ("falcon-7b-qlora", "periods", 0.002),
        ("qwen2.5-1.5b-qlora-int8-raw", "periods", 0.002),
    ],
)
def test_a_trace_meets_what_the_gpu_measured(name: str, depth: Any, band: float) -> None:
    pytest.importorskip("trl")
    row = measured(name)
    found = traced.trace(msgspec.convert(row["plan"], Plan), depth=depth)
    assert isinstance(found, Estimate), found
    assert found.peak_allocated_bytes == pytest.approx(row["peak_bytes"], rel=band)
    for instant, num_bytes in row["instants"].items():
        if depth == "periods" and instant == "between steps":
            continue  # it begins with the preparation, which may be higher in a few layers
        assert found.instants[instant] == pytest.approx(num_bytes, rel=5 * band), instant
    assert found.required_bytes >= found.peak_allocated_bytes
    if depth == "full":
        held = sum(found.components.values())
        assert held == pytest.approx(found.peak_allocated_bytes, rel=0.01)
        assert found.expandable_bytes is not None
        assert found.expandable_bytes <= found.required_bytes


IN_A_CHILD = """
import torch, warnings
warnings.simplefilter("ignore")
from cift_probe.expect.traced import stand_ins
from cift_probe.expect.traced.fake_device import FakeGpu, install
from cift_probe.expect.traced.recorder import Recorder
from torch._subclasses.fake_tensor import FakeTensorMode
install(FakeGpu())
stand_ins.use_facts(stand_ins.Facts((8, 8), 14))
recorder = Recorder({stand_in_s}, {{}})
FakeTensorMode.avoid_device_init = True
with FakeTensorMode(allow_non_fake_inputs=True), recorder:
    {body}
"""


def run_child(
    body: str, stand_ins: str = "stand_ins.STAND_INS"
) -> subprocess.CompletedProcess[str]:
    code = IN_A_CHILD.format(body=body, stand_in_s=stand_ins)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )


def test_an_operation_that_depends_on_data_fails_loudly_without_a_stand_in() -> None:
    body = 'torch.nonzero(torch.ones(4, device="cuda"))'
    assert run_child(body).returncode == 0
    seen = run_child(body, "{}")
    assert seen.returncode != 0
    assert "UnknownOperationError: aten.nonzero.default depends on data" in seen.stderr


WHOLE = """
import json, sys, tempfile
from pathlib import Path
from cift_probe.expect.traced import child, shortcuts
from cift_probe.expect.traced.fake_device import FakeGpu
from cift_probe.plan import Plan
plain = shortcuts.install
shortcuts.install = lambda *modes: plain(*modes) if {wanted} else None
child.prepare(FakeGpu())
plan = Plan(name="x", model="smollm2-135m", sequence_length=256)
seen = child.summary(child.trace(plan, 2, FakeGpu(), Path(tempfile.mkdtemp())))
print(json.dumps(seen))
"""


def test_shortcuts_change_nothing_that_is_told() -> None:
    told = []
    for wanted in (True, False):
        code = WHOLE.format(wanted=wanted)
        environment = os.environ | traced.ENVIRONMENT
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=300, env=environment
        )
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout.splitlines()[-1]))
        told[-1].pop("num_events")  # releases after the last instant come with the collector
    assert told[0] == told[1]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("make", ["to_sparse", "to_sparse_csr", "clone"])
def test_sparse_is_told_as_torch_tells_it(make: str) -> None:
    from torch._subclasses.meta_utils import is_sparse_any

    tensor = getattr(torch.eye(3), make)()
    assert shortcuts.is_sparse(tensor) == is_sparse_any(tensor) == (make != "clone")


def test_every_allocation_and_release_is_recorded_once() -> None:
    body = (
        'one = torch.ones(1000, device="cuda"); two = one * 2; view = two[:10]; del one; '
        "print([event[0] for event in recorder.events], len(recorder.origins))"
    )
    seen = run_child(body)
    assert seen.stdout.split("] ") == ["['a', 'a', 'f'", "2\n"], seen.stderr


def test_gradients_that_the_engine_adds_take_no_further_memory() -> None:
    body = (
        'w = torch.ones(1000, 1000, device="cuda", requires_grad=True); '
        "loss = (w * 2).sum() + (w * 3).sum(); recorder.mark('forward'); loss.backward(); "
        "recorder.mark('backward'); "
        "from cift_probe.expect.traced.allocator import replay; "
        "print(replay(recorder.events).instants['backward'] // 2**20)"
    )
    seen = run_child(body)
    # the weight and two products of 4 MB, summed in place: 11 MiB; out of place it would be 15
    assert int(seen.stdout) == 11, seen.stderr


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("key_heads", [2, 8])
@pytest.mark.parametrize("head", [64, 512])
def test_a_kernel_is_chosen_that_takes_the_tensors(
    dtype: str, capability: tuple[int, int], head: int, key_heads: int, *, masked: bool
) -> None:
    torch = pytest.importorskip("torch")
    from cift_probe.expect.traced import sdpa

    query, key = (
        torch.empty(1, heads, 16, head, dtype=getattr(torch, dtype), device="meta")
        for heads in (8, key_heads)
    )
    mask = torch.empty(1, 1, 16, 16, device="meta") if masked else None
    sdpa.use_capability(capability)
    found = sdpa.choose(query, key, key, mask, enable_gqa=key_heads != 8)
    if found == "flash":  # what the kernel's own checks refuse
        assert not masked
        assert (head, dtype) != (512, dtype)
        assert dtype != "float32"
        assert capability >= (8, 0)
    if found == "efficient":
        assert key_heads == 8
        assert dtype != "bfloat16" or capability >= (8, 0)
    by_hand = {
        ("float16", (7, 5), 64, 2, False): "math",  # a T4 has no flash kernel; heads are grouped
        ("float16", (7, 5), 64, 8, True): "efficient",
        ("bfloat16", (7, 5), 64, 8, True): "math",
        ("float32", (9, 0), 64, 8, False): "efficient",
        ("bfloat16", (8, 0), 64, 2, False): "flash",
        ("bfloat16", (9, 0), 512, 8, False): "efficient",
    }
    assert found == by_hand.get((dtype, capability, head, key_heads, masked), found)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "_version", lambda name: None if name == "trl" else "1")
    found = traced.trace(Plan(name="x", model="smollm2-135m"))
    assert isinstance(found, Unknown)
    assert found.reason.endswith("not installed: trl")


class Answers:
    """A worker whose child has already traced."""

    def __init__(self, _environment: Any) -> None:
        """Start nothing."""

    def __enter__(self) -> Self:
        """Be the worker."""
        return self

    def __exit__(self, *_: object) -> None:
        """End nothing."""

    def call(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {
            "instants": {"loss": 1 << 40},
            "reserved": 1 << 40,
            "required": 1 << 40,
            "expandable": 1 << 40,
            "instant": "loss",
            "components": {},
            "holds": [],
            "num_events": 2,
            "import_s": 1.0,
            "seconds": 1.0,
        }


def test_what_trained_weights_may_add_is_in_the_band_of_8_bit_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traced, "Worker", Answers)
    monkeypatch.setattr(traced, "_version", lambda _name: "1")
    plain, int8 = (
        traced.trace(Plan(name="x", model="smollm2-135m", quantisation=stored))
        for stored in ("nf4", "int8")
    )
    assert isinstance(plain, Estimate)
    assert isinstance(int8, Estimate)
    assert int8.band == pytest.approx(plain.band + 0.05)
    assert int8.required_band == pytest.approx(plain.required_band + 0.05)


class Interrupted(Answers):
    """A worker whose caller pressed Ctrl-C."""

    def call(self, _target: str, told: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        assert Path(told["folder"]).is_dir()
        raise KeyboardInterrupt


def test_an_interrupted_trace_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(traced, "Worker", Interrupted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        traced.trace(Plan(name="x", model="smollm2-135m"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changed", [{"hidden_act": "abc"}, {"layer_types": ["full_attention", "no such"]}]
)
def test_a_model_that_the_stack_cannot_build_is_refused_as_such(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    found = traced.trace(Plan(name="x", model=str(tmp_path), sequence_length=16))
    assert isinstance(found, Unknown)
    assert found.source == STACK_REFUSES, found.reason
    assert "cannot build it" in found.reason


BLOCK = 512  # what the allocator rounds to
EVENTS: list[Event] = [
    ("a", 1, 100 * BLOCK - 9),
    ("a", 2, 40 * BLOCK - 9),
    ("r",),
    ("a", 3, 10 * BLOCK - 9),
    ("m", "between steps"),
    ("a", 4, 30 * BLOCK - 9),
    ("m", "forward of the layers"),
    ("a", 5, 50 * BLOCK - 9),
    ("a", 6, 20 * BLOCK - 9),
    ("f", 6),
    ("f", 4),
    ("m", "backward of the layers"),
    ("f", 5),
    ("m", "clipping"),
]


def test_what_holds_the_peak_is_told_by_component() -> None:
    instant, held = holdings.live_at_peak(EVENTS)
    assert (instant, held) == (
        "backward of the layers",
        {1: 100 * BLOCK, 2: 40 * BLOCK, 3: 10 * BLOCK, 4: 30 * BLOCK, 5: 50 * BLOCK, 6: 20 * BLOCK},
    )
    assert sum(held.values()) == replay(EVENTS).peak_allocated
    operations = dict.fromkeys(held, "aten.mm.default") | {2: "bitsandbytes.quantize_4bit.default"}
    assert holdings.components(EVENTS, operations, held) == {
        "weights": 100 * BLOCK,
        "gradients": 50 * BLOCK,
        "quantised weights and their constants": 40 * BLOCK,
        "saved for backward": 30 * BLOCK,
        "backward of a layer": 20 * BLOCK,
        "adapters and casts": 10 * BLOCK,
    }
