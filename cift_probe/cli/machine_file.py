"""Files that tell of a machine: a report, the folder of a run, or `cift facts --json`."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cift_probe.evidence import Evidence, Known

_MAX_FILE_BYTES = 64 << 20


class MachineFileError(ValueError):
    """A file that cannot be used; one line that says what to change."""


def read_json(place: str) -> Any:
    """Return the JSON in a file, in the report of a run's folder, or of standard input ("-")."""
    try:
        if place == "-":
            return json.load(sys.stdin)
        path = Path(place)
        if path.is_dir():
            path = path / "report.json"
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_FILE_BYTES:
            message = f"{place}: is no file of at most 64 MiB; name the JSON of one machine"
            raise MachineFileError(message)
        return json.loads(path.read_bytes())
    except OSError as error:
        message = f"{place}: cannot be read ({error.strerror}); name a JSON file"
        raise MachineFileError(message) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, MachineFileError):
            raise
        message = f"{place}: is no JSON: {error}"
        raise MachineFileError(message) from error


def read_values(place: str) -> dict[str, Any]:
    """Return {key: value} of what a file knows of a machine; raises MachineFileError."""
    told = read_json(place)
    return {key: row["value"] for key, row in _rows(told, place) if "value" in row}


def read_machine(place: str) -> tuple[list[Mapping[str, Any]], dict[str, Evidence]]:
    """Return the findings and the evidence of a file; raises MachineFileError."""
    told = read_json(place)
    evidence: dict[str, Evidence] = {
        key: Known(
            row["value"],
            str(row.get("unit", "")),
            str(row.get("source", "")),
            absent=str(row.get("absent", "")),
        )
        for key, row in _rows(told, place)
        if "value" in row
    }
    findings = told.get("findings")
    rows = findings if isinstance(findings, list) else []
    return [row for row in rows if isinstance(row, Mapping)], evidence


def _rows(told: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield keys and rows of evidence: a report has them by witness, facts in one table."""
    tables = told.get("evidence") if isinstance(told, Mapping) else None
    if not isinstance(tables, Mapping):
        message = f"{place}: has no evidence; name a report.json or the output of cift facts --json"
        raise MachineFileError(message)
    for key, row in tables.items():
        if not isinstance(row, Mapping):
            continue
        flat = {"value", "is", "unknown"} & set(row)
        for name, item in ({key: row} if flat else row).items():
            if isinstance(item, Mapping):
                yield str(name), item
