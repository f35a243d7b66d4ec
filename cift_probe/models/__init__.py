"""Models by name, file or Hub id: the fields of a published config.json.

A row of `data/models.toml`, a local `config.json` or its folder, a copy in the Hub's local cache,
or, where there is network, the Hub itself. Nothing is written, and no library of the stack is
imported.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import msgspec

from cift_probe.data import read_rows
from cift_probe.models import families
from cift_probe.models.families import NEEDED, FieldError

MODELS = "models.toml"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_FILE_BYTES = 4 << 20
_MAX_SHOWN = 80


class ModelError(ValueError):
    """A model that cannot be used; one line that says what to change."""


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
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
        found = families.read_field(self.config, "max_position_embeddings")
        return found if isinstance(found, int) and found > 0 else None

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Every field of the model's family, what the file leaves out filled in; raises ModelError.

        Empty for a family that `data/families.toml` does not have.
        """
        try:
            return families.complete(self.config)
        except FieldError as error:
            message = f"{self.source}: {error}"
            raise ModelError(message) from error

    def count(self, name: str) -> int:
        """Return a size that the configuration must have; raises ModelError without it."""
        try:
            return int(families.checked(name, families.read_field(self.config, name)))
        except FieldError as error:
            message = f"{self.source}: {error}"
            raise ModelError(message) from error


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
    path = _place_of(name)
    if path is not None:
        return _load_file(path)
    if _HUB_ID.fullmatch(name):
        return _load_from_hub(name)
    close = difflib.get_close_matches(name, sorted(rows), n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(rows)}."
    shown = repr(name[:_MAX_SHOWN])
    message = f"{shown} is no model of data/{MODELS}{hint} Or name a config.json or Hub id"
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
    for field in NEEDED:
        shape.count(field)
    fields = shape.fields
    heads, hidden = shape.count("num_attention_heads"), shape.count("hidden_size")
    groups = fields.get("num_key_value_heads") or heads
    if heads % groups or (fields and fields.get("head_dim") is None and hidden % heads):
        message = (
            f"{shape.source}: {heads} attention heads go neither into {groups} key-value heads "
            f"nor into a hidden size of {hidden}"
        )
        raise ModelError(message)
    stored = shape.config.get("quantization_config")
    how = stored.get("quant_method") if isinstance(stored, dict) else stored
    if how not in (None, "bitsandbytes"):
        message = (
            f"{shape.source}: its weights are stored in {str(how)[:40]}, which no tier models; "
            "name the model that it was made from"
        )
        raise ModelError(message)


def _place_of(name: str) -> Path | None:
    """Return the config.json that a name stands for; None where it is no place of this machine."""
    try:
        path = Path(name or "?").expanduser()  # an empty name is the current folder to a path
        if path.is_dir():
            return path / "config.json"
        return path if path.name == "config.json" or path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, of no user, with a null byte
        return None


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
    from cift_probe.models import hub  # 50 ms of start-up that only a look at the Hub needs

    cached = hub.find_cached(name)
    if cached is not None:
        return _load_file(cached)
    try:
        content = hub.download(name)
    except hub.HubError as error:
        raise ModelError(str(error)) from error
    return parse_config(content, f"{name} config.json")
