"""Models by name, file or Hub id: the fields of a published config.json.

A row of `data/models.toml`, a local `config.json` or its folder, a copy in the Hub's local cache,
or, where there is network, the Hub itself. Nothing is written, and no library of the stack is
imported.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from cift_probe.data import read_rows

MODELS = "models.toml"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_FILE_BYTES = 4 << 20
_MAX_COUNT = 1 << 28  # far above every size that a model has
_TIMEOUT_S = 10.0
_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
# sizes that a configuration may leave out, but not fill with anything else
_SIZES = (
    "intermediate_size",
    "moe_intermediate_size",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "sliding_window",
    "max_position_embeddings",
)
_FLAGS = ("tie_word_embeddings", "attention_bias", "use_sliding_window")
# older families write these names; transformers maps them in each config's `attribute_map`
_OLDER_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
}


class ModelError(ValueError):
    """A model that cannot be used; one line that says what to change."""


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model as its published config.json describes it.

    `num_parameters` counts shared tensors once; a test builds every row of the table and compares.
    None where nobody counted.
    """

    config: dict[str, Any]
    source: str
    date: str = ""
    hub_id: str = ""
    num_parameters: int | None = None
    note: str = ""

    @property
    def model_type(self) -> str:
        """The architecture's name in transformers."""
        return str(self.config["model_type"])

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""
        return self.count("num_hidden_layers")

    @property
    def max_position_embeddings(self) -> int | None:
        """The longest sequence in tokens; None where the configuration sets no limit."""
        found = self._find("max_position_embeddings")
        return found if isinstance(found, int) and found > 0 else None

    def count(self, name: str) -> int:
        """Return a size that the configuration must have; raises ModelError without it."""
        found = self._find(name)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < _MAX_COUNT:
            shown = repr(found)[:40]
            message = f"{self.source}: {name} = {shown} is no whole number of 1 to {_MAX_COUNT - 1}"
            raise ModelError(message)
        return found

    def _find(self, name: str) -> Any:
        for key in (name, *_OLDER_NAMES.get(name, ())):
            if self.config.get(key) is not None:
                return self.config[key]
        return None


def load_model(name: str) -> ModelShape:
    """Return a model by the name of its row, its Hub id, its config.json or folder.

    Raises ModelError with one line that says what to change.
    """
    rows = read_models()
    if name in rows:
        return rows[name]
    for row in rows.values():
        if row.hub_id and row.hub_id.lower() == name.lower():
            return row
    path = Path(name or "?").expanduser()  # an empty name is the current folder to a path
    if path.name == "config.json" or path.exists():
        return _load_file(path / "config.json" if path.is_dir() else path)
    if _HUB_ID.fullmatch(name):
        return _load_from_hub(name)
    close = difflib.get_close_matches(name, sorted(rows), n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(rows)}."
    message = f"{name[:80]!r} is no model of data/{MODELS}{hint} Or name a config.json or Hub id"
    raise ModelError(message)


@cache
def read_models() -> dict[str, ModelShape]:
    """Return all models by name; raises DataError for a malformed row."""
    return read_rows(MODELS, ModelShape)


def parse_config(content: bytes, place: str) -> ModelShape:
    """Return the model in the bytes of a config.json; raises ModelError.

    Of a model for text and images the text part is taken, and `note` says so.
    """
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        message = f"{place}: is no JSON: {error}"
        raise ModelError(message) from error
    if not isinstance(config, dict):
        message = f"{place}: is no JSON object; name a model's config.json"
        raise ModelError(message)
    note = ""
    if isinstance(config.get("text_config"), dict):
        outer, config = config, dict(config["text_config"])
        config.setdefault("model_type", outer.get("model_type"))
        note = "the text part alone; what sees images is not counted"
    if not isinstance(config.get("model_type"), str):
        message = f"{place}: has no model_type; name the config.json of a transformers model"
        raise ModelError(message)
    shape = ModelShape(config, place, note=note)
    _check(shape)
    return shape


def _check(shape: ModelShape) -> None:
    """Raise ModelError for a field that no model can have, naming field and value."""
    for field in (*_NEEDED, *(name for name in _SIZES if shape.config.get(name) is not None)):
        shape.count(field)
    for field in _FLAGS:
        value = shape.config.get(field)
        if value is not None and not isinstance(value, bool):
            message = f"{shape.source}: {field} = {str(value)[:40]} is neither true nor false"
            raise ModelError(message)
    heads, hidden = shape.count("num_attention_heads"), shape.count("hidden_size")
    groups = shape.config.get("num_key_value_heads") or heads
    if heads % groups or (shape.config.get("head_dim") is None and hidden % heads):
        message = (
            f"{shape.source}: {heads} attention heads go neither into {groups} key-value heads "
            f"nor into a hidden size of {hidden}"
        )
        raise ModelError(message)
    types = shape.config.get("layer_types")
    layers = shape.num_hidden_layers
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        message = f"{shape.source}: layer_types is no list of {layers} entries"
        raise ModelError(message)
    stored = shape.config.get("quantization_config")
    how = stored.get("quant_method") if isinstance(stored, dict) else stored
    if how not in {None, "bitsandbytes"}:
        message = (
            f"{shape.source}: its weights are stored in {str(how)[:40]}, which no tier models; "
            "name the model that it was made from"
        )
        raise ModelError(message)


def _load_file(path: Path) -> ModelShape:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
            message = f"{path}: is no file of at most 4 MiB; name a model's config.json or folder"
            raise ModelError(message)
        return parse_config(path.read_bytes(), str(path))
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror}); name a readable config.json"
        raise ModelError(message) from error


def _load_from_hub(name: str) -> ModelShape:
    import urllib.error  # 50 ms of start-up that only a look at the Hub needs
    import urllib.request

    cached = _cached(name)
    if cached is not None:
        return _load_file(cached)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        message = f"{name}: is not in the local cache, and HF_HUB_OFFLINE forbids the network"
        raise ModelError(message)
    base = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    address = f"{base}/{name}/resolve/main/config.json"
    if not base.startswith(("https://", "http://")):
        message = f"HF_ENDPOINT = {base[:80]!r} is no http address"
        raise ModelError(message)
    request = urllib.request.Request(address)  # noqa: S310 - the scheme was checked above
    if token := os.environ.get("HF_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - as above
            content = answer.read(_MAX_FILE_BYTES)
    except urllib.error.HTTPError as error:
        hint = "; a gated model needs HF_TOKEN" if error.code in {401, 403} else ""
        message = f"{name}: the Hub answered {error.code} {error.reason}{hint}"
        raise ModelError(message) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        message = f"{name}: the Hub cannot be reached ({reason}); name a local config.json"
        raise ModelError(message) from error
    return parse_config(content, f"{name} config.json")


def _cached(name: str) -> Path | None:
    """Return the config.json of the Hub's own cache, the newest snapshot first."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache_dir = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    folder = cache_dir / f"models--{name.replace('/', '--')}" / "snapshots"
    try:
        found = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    except OSError:
        return None
    return found[-1] if found else None
