"""Write `cift_probe/data/families.toml` from the configuration classes of transformers.

    python scripts/family_defaults.py

What a config.json leaves out has the default of its class, and those defaults decide weights and
kernels. The file is remade when transformers moves; a test compares it with the installed one.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cift_probe.models.families import FAMILIES, KINDS

_PLACE = Path(__file__).parents[1] / "cift_probe" / "data" / FAMILIES
_NAMES = (
    *("falcon", "gemma2", "gemma3_text", "glm4", "gpt_neox", "granite", "llama", "mistral"),
    *("mixtral", "olmo2", "olmoe", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
    "starcoder2",
)
# read from the keyword arguments of a class, not declared by it
_LEGACY = {"gemma3_text": {"sliding_window_pattern": 6}}
_ANY_HEAD = re.compile(r"self\.head_dim = getattr\(config, ['\"]head_dim['\"]")
_HEAD = """\
# What a config.json that leaves a field out means, by model_type: defaults of the configuration
# classes of transformers, written by scripts/family_defaults.py. `optional` may be null.
"""


def family_of(name: str) -> dict[str, Any]:
    """Return the row of one model_type: source, aliases, optional fields, defaults."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[name]
    declared = {item.name: item for item in dataclasses.fields(made) if item.name in KINDS}
    optional = {item for item, field in declared.items() if "None" in str(field.type)}
    defaults = {
        item: field.default for item, field in declared.items() if field.default is not None
    } | _LEGACY.get(name, {})
    if "head_dim" not in declared and _ANY_HEAD.search(_modeling_source(made)):
        optional.add("head_dim")  # read where a configuration has it, though no field of the class
    factor = (made().rope_parameters or {}).get("partial_rotary_factor")
    if factor is not None:
        defaults["partial_rotary_factor"] = factor
    return {
        "source": f"transformers {transformers.__version__}, {made.__name__}",
        "optional": sorted(optional),
        "aliases": {old: new for old, new in made.attribute_map.items() if new in declared},
        "defaults": dict(sorted(defaults.items())),
    }


def _modeling_source(made: type) -> str:
    place = made.__module__.replace("configuration_", "modeling_")
    return inspect.getsource(importlib.import_module(place))


def render(families: dict[str, dict[str, Any]], date: str) -> str:
    """Return the table as TOML."""
    lines = [_HEAD]
    for name, row in families.items():
        lines += [f"[{name}]", f'source = "{row["source"]}"', f'date = "{date}"']
        lines.append("optional = [" + ", ".join(f'"{item}"' for item in row["optional"]) + "]")
        for part in ("aliases", "defaults"):
            if row[part]:
                lines.append(f"[{name}.{part}]")
                lines += [f"{key} = {_toml(value)}" for key, value in row[part].items()]
        lines.append("")
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def main() -> int:
    """Write the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    families = {name: family_of(name) for name in _NAMES}
    text = render(families, datetime.now(UTC).date().isoformat())
    _PLACE.write_text(text, encoding="utf-8")
    print(f"{_PLACE}: {len(families)} families")
    return 0


if __name__ == "__main__":
    sys.exit(main())
