"""Models: a row, a file, a folder, the Hub's cache or the Hub itself, and what is refused."""

from __future__ import annotations

import io
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from cift_probe.models import ModelError, ModelShape, load_model, parse_config, read_models

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
HUB_ID = "somebody/a-model"
VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN")


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let the Hub's cache be an empty folder, and the network a line that was cut."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(urllib.request, "urlopen", cut)
    return tmp_path / "hf" / "hub"


def cut(*_: Any, **__: Any) -> Any:
    message = "Network is unreachable"
    raise urllib.error.URLError(message)


def written(path: Path, config: Any = CONFIG) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def refusal(name: str) -> str:
    """Return the one line with which a model is refused."""
    with pytest.raises(ModelError) as caught:
        load_model(name)
    text = str(caught.value)
    assert "\n" not in text
    return text


# ---- rows ----


@pytest.mark.parametrize("name", sorted(read_models()))
def test_a_row_describes_a_model_of_the_published_size(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from cift_probe.stack.pattern import config_of

    row = load_model(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(row))
    assert sum(item.numel() for item in model.parameters()) == row.num_parameters


def test_a_row_has_the_sizes_that_every_plan_needs() -> None:
    for name, row in read_models().items():
        assert row.num_hidden_layers > 0, name
        assert row.count("hidden_size") > 0, name
        assert row.source, name


def test_a_row_is_found_by_its_hub_id_in_any_case() -> None:
    assert load_model("huggingfacetb/smollm2-135m") is load_model("smollm2-135m")


def test_an_unknown_name_names_the_near_ones() -> None:
    assert "did you mean" in refusal("lama-3.1-8b")
    assert "there are" in refusal("#")


# ---- files ----


@pytest.mark.parametrize("end", ["", "/config.json"])
def test_a_model_is_read_from_its_folder_or_file(tmp_path: Path, end: str) -> None:
    path = written(tmp_path / "model" / "config.json")
    found = load_model(str(path.parent) + end)
    assert found == ModelShape(CONFIG, str(path))
    assert (found.num_hidden_layers, found.max_position_embeddings) == (4, None)


def test_older_names_of_a_size_are_understood() -> None:
    older = {"model_type": "gpt2", "n_layer": 3, "n_embd": 8, "n_head": 2, "vocab_size": 9}
    found = parse_config(json.dumps(older | {"n_positions": 77}).encode(), "here")
    assert (found.num_hidden_layers, found.count("hidden_size")) == (3, 8)
    assert found.max_position_embeddings == 77


def test_of_a_model_that_sees_the_text_part_is_taken() -> None:
    inner = {key: value for key, value in CONFIG.items() if key != "model_type"}
    found = parse_config(json.dumps({"model_type": "seer", "text_config": inner}).encode(), "here")
    assert (found.model_type, found.num_hidden_layers) == ("seer", 4)
    assert "text part" in found.note


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", "is no JSON object"),
        ({**CONFIG, "model_type": None}, "has no model_type"),
        ({**CONFIG, "num_hidden_layers": 0}, "num_hidden_layers = 0 is no whole"),
        ({**CONFIG, "num_hidden_layers": True}, "num_hidden_layers = True"),
        ({**CONFIG, "hidden_size": "64"}, "hidden_size = '64'"),
        ({**CONFIG, "hidden_size": 1 << 41}, "hidden_size = 2199023255552"),
        ({**CONFIG, "vocab_size": 1.5}, "vocab_size = 1.5"),
        (
            {key: value for key, value in CONFIG.items() if key != "vocab_size"},
            "vocab_size is missing",
        ),
    ],
)
def test_a_malformed_file_is_refused_with_its_name(tmp_path: Path, config: Any, words: str) -> None:
    path = written(tmp_path / "config.json", config)
    text = refusal(str(path))
    assert words in text
    assert str(path) in text


def test_a_file_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    assert "is no file of at most 4 MiB" in refusal(str(tmp_path / "config.json"))
    (tmp_path / "config.json").mkdir()
    assert "is no file of at most 4 MiB" in refusal(str(tmp_path))
    large = tmp_path / "large"
    large.mkdir()
    with (large / "config.json").open("wb") as file:
        file.truncate((4 << 20) + 1)
    assert "is no file of at most 4 MiB" in refusal(str(large))


def test_a_file_that_cannot_be_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forbidden(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    path = written(tmp_path / "config.json")
    monkeypatch.setattr(Path, "read_bytes", forbidden)
    assert refusal(str(path)) == (
        f"{path}: cannot be read (Permission denied); name a readable config.json"
    )


# ---- the Hub's local cache ----


def test_a_copy_in_the_cache_is_read_without_network(empty_cache: Path) -> None:
    snapshots = empty_cache / "models--somebody--a-model" / "snapshots"
    old = written(snapshots / "bbb" / "config.json", {**CONFIG, "num_hidden_layers": 2})
    new = written(snapshots / "aaa" / "config.json")
    os.utime(old, (1_000, 1_000))
    assert load_model(HUB_ID) == ModelShape(CONFIG, str(new))


def test_a_cache_of_its_own_place_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    written(place / "models--somebody--a-model" / "snapshots" / "aaa" / "config.json")
    monkeypatch.setenv("HF_HUB_CACHE", str(place))
    assert load_model(HUB_ID).num_hidden_layers == 4


@pytest.mark.parametrize("value", ["1", "on", "Yes", "TRUE"])
def test_offline_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    def called(*_: Any, **__: Any) -> Any:
        pytest.fail("the network was used")

    monkeypatch.setattr(urllib.request, "urlopen", called)
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert "HF_HUB_OFFLINE forbids the network" in refusal(HUB_ID)


# ---- the Hub ----


def answering(content: bytes, asked: list[urllib.request.Request]) -> Callable[..., Any]:
    def urlopen(request: urllib.request.Request, timeout: float) -> Any:
        assert timeout > 0
        asked.append(request)
        return io.BytesIO(content)

    return urlopen


def refusing(code: int, reason: str) -> Callable[..., Any]:
    def urlopen(request: urllib.request.Request, timeout: float) -> Any:
        assert timeout > 0
        raise urllib.error.HTTPError(request.full_url, code, reason, Message(), None)

    return urlopen


def test_the_hub_is_asked_for_one_small_file(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[urllib.request.Request] = []
    monkeypatch.setattr(urllib.request, "urlopen", answering(json.dumps(CONFIG).encode(), asked))
    assert load_model(HUB_ID) == ModelShape(CONFIG, f"{HUB_ID} config.json")
    [request] = asked
    assert request.full_url == f"https://huggingface.co/{HUB_ID}/resolve/main/config.json"
    assert request.get_header("Authorization") is None


def test_a_mirror_and_a_token_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[urllib.request.Request] = []
    monkeypatch.setattr(urllib.request, "urlopen", answering(json.dumps(CONFIG).encode(), asked))
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example/")
    monkeypatch.setenv("HF_TOKEN", "a-token")
    load_model(HUB_ID)
    assert asked[0].full_url == f"http://mirror.example/{HUB_ID}/resolve/main/config.json"
    assert asked[0].get_header("Authorization") == "Bearer a-token"


@pytest.mark.parametrize(
    ("code", "reason", "hint"),
    [(401, "Unauthorized", True), (403, "Forbidden", True), (404, "Not Found", False)],
)
def test_a_refusal_of_the_hub_is_told_and_a_gate_named(
    monkeypatch: pytest.MonkeyPatch, code: int, reason: str, *, hint: bool
) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", refusing(code, reason))
    text = refusal(HUB_ID)
    assert f"the Hub answered {code} {reason}" in text
    assert ("HF_TOKEN" in text) is hint


def test_a_hub_that_cannot_be_reached_is_told() -> None:
    assert "the Hub cannot be reached (Network is unreachable)" in refusal(HUB_ID)


def test_an_address_that_is_none_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    assert "is no http address" in refusal(HUB_ID)


def test_an_answer_that_is_no_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", answering(b"<html>", []))
    assert "is no JSON" in refusal(HUB_ID)
