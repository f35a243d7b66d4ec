"""The training instrument: a sound run passes its limits, and every planted fault is seen."""

from __future__ import annotations

import hashlib
import math
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cift_probe import data
from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.measure import training
from cift_probe.measure.declare import Task
from cift_probe.stack import trl_stack

pytestmark = [
    pytest.mark.skipif(find_spec("trl") is None, reason="the extra `train` is not installed"),
    pytest.mark.xdist_group("training"),  # the sound run is shared
]

RATIO_MAX = 0.25
FIRST_MIN = 2.0
EMBEDDED = data.folder("embedded")


def value(evidence: Mapping[str, Evidence], name: str) -> Any:
    found = evidence[f"training.{name}"]
    assert isinstance(found, Known)
    return found.value


@pytest.fixture(scope="module")
def sound() -> Mapping[str, Evidence]:
    return training.measure_training(Task("cpu"))


def with_fault(monkeypatch: pytest.MonkeyPatch, fault: str, steps: int) -> Mapping[str, Evidence]:
    monkeypatch.setattr(training, "STEPS", steps)
    return training.measure_training(Task("cpu", fault=fault))


def test_a_sound_run_learns_within_the_limits(sound: Mapping[str, Evidence]) -> None:
    assert value(sound, "loss.first") > FIRST_MIN
    assert value(sound, "loss.ratio") <= RATIO_MAX / 3  # room for other devices
    assert value(sound, "adapters.changed") == 1.0
    assert value(sound, "frozen.changed") == 0
    assert value(sound, "num_nonfinite") == 0


def test_a_run_says_all_that_the_instrument_declares(sound: Mapping[str, Evidence]) -> None:
    assert set(sound) == set(training.PRODUCES)
    assert value(sound, "steps") == len(value(sound, "loss.series")) == training.STEPS
    assert 0 < value(sound, "step.seconds") * training.STEPS < value(sound, "seconds") * 1.5
    assert value(sound, "gradient_norm.max") > 0
    assert (value(sound, "device"), value(sound, "dtype")) == ("cpu", "bfloat16")
    assert "trl " in sound["training.loss.ratio"].source


def test_first_and_last_are_means_of_the_logged_losses(sound: Mapping[str, Evidence]) -> None:
    series = value(sound, "loss.series")
    assert value(sound, "loss.first") == pytest.approx(sum(series[:3]) / 3)
    assert value(sound, "loss.last") == pytest.approx(sum(series[-5:]) / 5)
    assert value(sound, "loss.ratio") == pytest.approx(sum(series[-5:]) / sum(series[:3]) * 3 / 5)


def test_an_optimizer_that_moves_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = with_fault(monkeypatch, "frozen_adapters", 8)
    assert value(seen, "adapters.changed") == 0.0
    assert value(seen, "loss.ratio") > RATIO_MAX * 3


def test_labels_that_follow_from_nothing_are_seen(
    monkeypatch: pytest.MonkeyPatch, sound: Mapping[str, Evidence]
) -> None:
    steps = 30
    twin = value(sound, "loss.series")
    assert sum(twin[steps - 5 : steps]) / 5 <= RATIO_MAX * sum(twin[:3]) / 3
    seen = with_fault(monkeypatch, "shuffled_labels", steps)
    assert value(seen, "loss.ratio") > RATIO_MAX * 1.5
    assert value(seen, "adapters.changed") == 1.0


def test_one_flipped_bit_in_a_frozen_weight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert value(with_fault(monkeypatch, "corrupted_frozen", 3), "frozen.changed") == 1


def test_a_gradient_that_is_not_a_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = with_fault(monkeypatch, "nan_gradient", 6)
    assert value(seen, "num_nonfinite") >= 3
    assert math.isnan(value(seen, "loss.last"))
    assert math.isnan(value(seen, "gradient_norm.max"))


def a_run(**changed: Any) -> training.Run:
    fields: dict[str, Any] = {
        "losses": [8.0] * 10 + [1.0] * 10,
        "gradient_norms": [2.0] * 20,
        "step_times": [9.0] * 16 + [0.1] * 4,
        "duration": 60.0,
        "adapters": ({"a": "0", "b": "0"}, {"a": "1", "b": "0"}),
        "frozen": ({"w": "0"}, {"w": "0"}),
        "device": "cpu",
        "precision": "bfloat16",
    }
    return training.Run(**(fields | changed))


def test_an_adapter_that_did_not_move_lowers_the_share() -> None:
    assert value(training.evidence_of(a_run()), "adapters.changed") == 0.5


def test_the_step_time_is_the_median_after_the_first_steps() -> None:
    times = [9.0] * 5 + [0.1, 0.1, 0.1, 5.0, 5.0]
    assert value(training.evidence_of(a_run(step_times=times)), "step.seconds") == 0.1


def test_a_frozen_tensor_that_is_gone_counts_as_changed() -> None:
    assert value(training.evidence_of(a_run(frozen=({"w": "0"}, {}))), "frozen.changed") == 1


def test_a_loss_without_a_target_gives_no_ratio() -> None:
    assert math.isnan(value(training.evidence_of(a_run(losses=[0.0] * 20)), "loss.ratio"))


@pytest.mark.parametrize(("precision", "counted"), [("float16", 0), ("bfloat16", 1)])
def test_an_overflow_counts_where_no_scaler_skips_it(precision: str, counted: int) -> None:
    norms = [math.inf] + [2.0] * 19
    seen = training.evidence_of(a_run(gradient_norms=norms, precision=precision))
    assert value(seen, "num_nonfinite") == counted
    assert value(seen, "gradient_norm.max") == (math.inf if counted else 2.0)


@pytest.mark.usefixtures("sound")  # importing torch makes a cache folder, once per process
def test_a_run_leaves_no_file_and_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with_fault(monkeypatch, "", 1)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().out == ""


def test_a_missing_package_makes_everything_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    seen = training.measure_training(Task("cpu"))
    assert set(seen) == set(training.PRODUCES)
    assert all(isinstance(item, Unknown) and "trl" in item.reason for item in seen.values())


@pytest.mark.parametrize("part", ["packed", "scales", "norm", "embed_tokens", "lm_head"])
def test_a_change_of_any_frozen_part_is_counted_once(part: str) -> None:
    model = trl_stack.load_quantised(EMBEDDED, "cpu", "bfloat16")
    for weight in model.parameters():
        weight.requires_grad_(requires_grad=False)
    before = training.digests(model)
    named = dict(model.named_parameters())
    packed = next(weight for weight in named.values() if hasattr(weight, "quant_state"))
    quantised: dict[str, Any] = {"packed": packed, "scales": packed.quant_state.absmax}
    target = quantised[part] if part in quantised else next(named[n] for n in named if part in n)
    target.data.reshape(-1)[0] += 1
    after = training.digests(model)
    assert before[0] == after[0] == {}
    assert training.num_changed(before[1], after[1]) == 1


@pytest.mark.parametrize(
    ("capability", "precision"),
    [((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16"), ((12, 1), "bfloat16")],
)
def test_bfloat16_is_chosen_where_it_is_native(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], precision: str
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert trl_stack.native_precision("cuda:0") == precision


def test_the_trainer_keeps_the_defaults_of_trl(tmp_path: Path) -> None:
    from trl import SFTConfig

    with training.third_party_warnings_ignored():
        trainer = training.build(Task("cpu"), tmp_path, [])
        plain = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    changed = {
        name
        for name, setting in vars(plain).items()
        if not name.startswith("_") and getattr(trainer.args, name) != setting
    }
    assert changed == {
        "max_steps",
        "learning_rate",
        "logging_steps",
        "logging_nan_inf_filter",
        "save_strategy",
        "distributed_state",
    }


def test_the_embedded_files_are_those_that_the_script_made() -> None:
    lines = (EMBEDDED / "checksums.txt").read_text(encoding="ascii").splitlines()
    listed = {name: checksum for checksum, name in (line.split("  ") for line in lines)}
    files = {path.name: path for path in EMBEDDED.iterdir() if path.name != "checksums.txt"}
    assert set(files) == set(listed)
    for name, path in files.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == listed[name], name
    assert sum(path.stat().st_size for path in files.values()) <= 5_000_000


def test_every_linear_weight_fills_whole_quantisation_blocks() -> None:
    from safetensors import safe_open

    with safe_open(EMBEDDED / "model.safetensors", "pt") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118 - no mapping
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    assert len(matrices) == 3 * 7 + 2
    assert all(size % 64 == 0 for shape in matrices.values() for size in shape)
