"""The report: one document that says what was tested, what came out, and from which evidence.

`python -m cift_probe.report.schema` writes the JSON Schema next to this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from cift_probe.evidence import Evidence
from cift_probe.verdict.answer import Answer
from cift_probe.verdict.finding import Finding

SCHEMA_VERSION = "1.0"
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """Which suite ran, how it was started, and whether it came to its end.

    `started` and `finished` are ISO 8601 times, `finished` empty where the run ended early.
    `selection` is what was asked, as a command line. `stack_origin` says which environment was
    tested: one that was built for this run, or one that was there. `vram_cap_bytes` is the
    memory a device was limited to, None without a limit. `in_flight` names what was running
    when an incomplete run ended. `instruments` holds each instrument's version by name;
    `num_resumed` counts findings taken over from an earlier run.
    """

    name: str
    version: str
    run_id: str
    started: str
    finished: str = ""
    selection: str = ""
    stack_origin: str = ""
    vram_cap_bytes: int | None = None
    exit_code: int | None = None
    complete: bool = False
    in_flight: str = ""
    instruments: dict[str, int] = {}
    num_resumed: int = 0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader looks for first: counts by outcome, and labels of what did not pass.

    `failed` are `must` checks that failed or broke, `undecided` are checks of any severity
    without a decision, `advice` are failed checks that do not set the exit code. `not_run`
    gives the reason by label. `text` is one sentence of conformance.
    """

    counts: dict[str, int]
    failed: list[str]
    undecided: list[str]
    advice: list[str]
    not_run: dict[str, str]
    text: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one run says.

    `evidence` holds every entry by witness and stored key; the items of a finding's `evidence`
    ("facts:device.memory.free[gpu0]") point into it. `machine` and `software` are picked from
    it for readers. `digest` is over the canonical bytes of this document with an empty digest.
    """

    schema_version: str
    suite: Suite
    machine: dict[str, Evidence]
    software: dict[str, Evidence]
    plans: list[dict[str, Any]]
    evidence: dict[str, dict[str, Evidence]]
    findings: list[Finding]
    answers: list[Answer]
    summary: Summary
    digest: str = ""


def schema_text() -> str:
    """Return the JSON Schema of a report, as it stands in `report.schema.json`."""
    schema = msgspec.json.schema(Report)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = f"cift report {SCHEMA_VERSION}"
    return json.dumps(schema, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write_schema() -> None:
    """Write the JSON Schema next to this module."""
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")


if __name__ == "__main__":
    write_schema()
