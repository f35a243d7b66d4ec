"""Which known failure a described situation is: rules over fields, and readers of texts.

A judge looks at the fields that decide one kind and says nothing where they are missing. Kinds
and outcomes are a closed set (`data/kinds.toml`).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import Version

from cift_probe.compat import (
    builds,
    extensions,
    formats,
    health,
    host,
    memory,
    packages,
    reading,
    startup,
    training,
)
from cift_probe.compat.case import Case, Judgement, parse_version
from cift_probe.compat.machine import PACKAGES
from cift_probe.diagnose.kinds import read_kinds
from cift_probe.expect.rows import Fact, rulings

_JUDGES = (
    *startup.JUDGES,
    *builds.JUDGES,
    *packages.JUDGES,
    *extensions.JUDGES,
    *formats.JUDGES,
    *training.JUDGES,
    *memory.JUDGES,
    *host.JUDGES,
    *reading.JUDGES,
    *health.JUDGES,
)
_WORST = ("fail", "warn", "unknown", "not_applicable", "pass")


def judge(fields: Mapping[str, Any]) -> list[Judgement]:
    """Return what is said of a situation, the worst first; empty where nothing is known of it."""
    case = Case(fields)
    found = [said for rule in _JUDGES if (said := rule(case)) is not None]
    found += [said for text in case.texts() for said in _of_text(text)]
    found = found or list(_of_versions(case))
    kept: dict[str, Judgement] = {}
    for said in found:
        kept.setdefault(said.kind, said)  # fields decide before the words of a text
    return sorted(kept.values(), key=lambda item: _WORST.index(item.outcome))


def _of_versions(case: Case) -> Iterator[Judgement]:
    """Yield what the rows of versions say, where no judge of fields has anything to say."""
    installed = case.get("packages", "installed", "versions")
    told = {**case.fields, **(installed if isinstance(installed, Mapping) else {})}
    facts: dict[str, Fact] = {
        name: version
        for name in ("torch", "driver", "python", *PACKAGES)
        if (version := parse_version(told.get(name))) is not None
    }
    cuda, capability = case.cuda(), case.capability()
    if cuda is not None:
        facts["torch.cuda"] = cuda
    if capability is not None:
        facts["gpu.capability"] = Version(f"{capability[0]}.{capability[1]}")
    for item in rulings(facts):
        if item.outcome != "unknown":
            yield Judgement(item.kind, item.outcome, item.reason)


def _of_text(text: str) -> list[Judgement]:
    from cift_probe.diagnose.diagnosis import (
        diagnose,  # its patterns take longer to load than all rules
    )

    seen = diagnose(io.BytesIO(text.encode("utf-8", errors="replace")))
    kinds = read_kinds()
    return [Judgement(item.kind, kinds[item.kind].outcome, item.lines[0].text) for item in seen]


__all__ = ["Case", "Judgement", "judge"]
