"""The one form in which a report is stored and digested: valid JSON, sorted, UTF-8."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import msgspec

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.verdict.answer import Answer
from cift_probe.verdict.finding import Finding

_DIGEST = "digest"
_PREFIX = "sha256:"


def storable(content: Any) -> Any:
    r"""Return plain JSON values for structs and plain values.

    What JSON or UTF-8 lack is written as text, never dropped: NaN and infinities as `nan`, `inf`
    and `-inf` (relations of the suite read them back), bytes of a file name that are no text as
    `\udcff`, objects of other types as `str()` gives them.
    """
    return _plain(msgspec.to_builtins(content, str_keys=True, enc_hook=str))


def canonical_text(content: Any) -> str:
    """Return the canonical text: keys sorted, one value per line, no NaN, a newline at the end.

    Raises ValueError for a number that JSON lacks: `storable` has not seen it.
    """
    text = json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text + "\n"


def digest_of(document: dict[str, Any]) -> str:
    """Return the digest of a document of plain values, taken with an empty `digest`.

    Works on what stands in a file, not on what this version reads from it, so that a field that
    somebody added changes it as well.
    """
    text = canonical_text({**document, _DIGEST: ""})
    return _PREFIX + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def storable_evidence(evidence: Evidence) -> Evidence:
    """Return evidence whose band is a number.

    A value whose band is not finite is one that nobody vouches for: Unknown, with value and band
    in the reason. Without its band it would pass for an exact one.
    """
    if isinstance(evidence, Known) and not math.isfinite(evidence.band):
        reason = f"{evidence.value} with an error band of {evidence.band}"
        return Unknown(reason, evidence.source)
    return evidence


def storable_finding(finding: Finding) -> Finding:
    """Return a finding with two sides as `storable_evidence` gives them."""
    found, limit = (
        None if side is None else storable_evidence(side) for side in (finding.found, finding.limit)
    )
    return msgspec.structs.replace(finding, found=found, limit=limit)


def storable_answer(answer: Answer) -> Answer:
    """Return an answer without numbers that are none: what is NaN was not measured."""
    gone = {
        name: None
        for name in answer.__struct_fields__
        if isinstance(value := getattr(answer, name), float) and not math.isfinite(value)
    }
    return msgspec.structs.replace(answer, **gone) if gone else answer


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value
