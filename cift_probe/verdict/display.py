"""Evidence as a reader sees it: base units become GiB and MHz here, and nowhere else."""

from __future__ import annotations

from cift_probe.evidence import Evidence, Known, Unknown

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_MAX_LISTED = 12


def one_line(text: str) -> str:
    """Return a text in which nothing breaks the line or moves the cursor."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def bytes_text(num_bytes: float) -> str:
    """Return a byte count with a binary prefix.

    >>> bytes_text(13_053 * 1024**2)
    '12.75 GiB'
    """
    size = float(num_bytes)
    for prefix in _BINARY[:-1]:
        if abs(size) < _STEP:
            return f"{size:.0f} B" if prefix == "B" else f"{size:.2f} {prefix}"
        size /= _STEP
    return f"{size:.2f} {_BINARY[-1]}"


def _number_text(value: float, unit: str) -> str:
    if unit == "B":
        return bytes_text(value)
    if unit == "Hz":
        return f"{value / 1e6:.0f} MHz"
    if unit == "B/s":
        return f"{value / 1e9:.1f} GB/s"
    if unit == "FLOP/s":
        return f"{value / 1e12:.1f} TFLOP/s"
    number = f"{value:d}" if isinstance(value, int) else f"{value:.4g}"
    return number if unit in ("", "1") else f"{number} {unit}"


def evidence_text(evidence: Evidence | None) -> str:
    """Return one line for a value, an absence or a missing piece of evidence."""
    if evidence is None:
        return ""
    if isinstance(evidence, Unknown):
        return f"unknown: {evidence.reason}"
    if evidence.absent:
        return f"absent: {evidence.absent}"
    return _value_text(evidence)


def _value_text(evidence: Known) -> str:
    value = evidence.value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        text = _number_text(value, evidence.unit)
        return f"{text} ± {evidence.band:.1%}" if evidence.band else text
    if isinstance(value, list | tuple):
        shown = ", ".join(str(item) for item in value[:_MAX_LISTED])
        more = len(value) - _MAX_LISTED
        return (shown + (f", … ({more} more)" if more > 0 else "")) or "none"
    return str(value)
