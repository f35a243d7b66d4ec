"""Kinds of reading devices: permissions, fields that do not exist, indices, sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cift_probe.compat.case import Case, Judgement, gib

_REFUSED = re.compile(r"insufficient.?permission|no.?permission", re.IGNORECASE)
_ABSENT = re.compile(r"not.?supported|\[?n/a\]?", re.IGNORECASE)
_MIG_TOTAL = re.compile(r"<mig_device>.*?<total>\s*(\d+)\s*MiB", re.DOTALL)
_NAMED_GB = re.compile(r"\b(\d{1,4})\s?GB\b", re.IGNORECASE)
_VISIBLE = re.compile(
    r"(?:\d+|-1|GPU-[0-9a-f-]+|MIG-[0-9a-zA-Z/-]+)(?:,(?:-?\d+|GPU-[0-9a-f-]+|MIG-[0-9a-zA-Z/-]+))*|"
)
_BAND = 0.15  # a driver shows 2 to 8 % less than a name says; ECC took 6 % more on old boards


def permission(case: Case) -> Judgement | None:
    """Tell a refused field from an absent one; the slice's own block may have it."""
    text = str(case.get("xml") or "")
    if "<" in text and _REFUSED.search(text):
        own = _MIG_TOTAL.search(text)
        if own:
            return Judgement(
                "nvml_no_permission", "pass", f"the slice's own block has {own[1]} MiB"
            )
        return Judgement("nvml_no_permission", "unknown", "refused, and no block of a slice has it")
    told = [str(case.get("error", "nvml_error") or ""), *map(str, _fields(case)), *_rows(case)]
    if any(_REFUSED.search(item) for item in told):
        own_field = case.flag("mig_device_ok", "slice_readable", "own_block_ok")
        own_field = own_field or case.size("slice_total", "mig_total") is not None
        reason = "the field is refused; it is not 0"
        return Judgement("nvml_no_permission", "pass" if own_field else "unknown", reason)
    return None


def unsupported(case: Case) -> Judgement | None:
    """Tell fields that a device, virtual GPU or driver does not have, in any brackets."""
    about = case.has("field", "fields", "columns", "error", "nvml_error") or any(_rows(case))
    values = [str(case.get("error", "nvml_error") or ""), *map(str, _fields(case)), *_rows(case)]
    if not about or any(_REFUSED.search(item) for item in values):
        return None
    if any(item and _ABSENT.search(item) for item in values):
        reason = "this device does not have the field; read it elsewhere"
        return Judgement("nvml_field_unsupported", "not_applicable", reason)
    return None


def _fields(case: Case) -> Iterator[Any]:
    found = case.get("fields", "values_read")
    if isinstance(found, Mapping):
        yield from found.values()
    value = case.get("value", "field_value")
    if value is not None:
        yield value


def _rows(case: Case) -> Iterator[str]:
    """Yield texts that are rows of nvidia-smi's CSV."""
    for text in case.texts():
        if text.count(",") >= 2 and "\n" not in text.strip() and ("[" in text or "N/A" in text):  # noqa: PLR2004
            yield text


def visible(case: Case) -> Judgement | None:
    """Read forms of CUDA_VISIBLE_DEVICES; UUIDs name devices where integers do not."""
    values = case.get("values", "cuda_visible_devices", "CUDA_VISIBLE_DEVICES", "cvd")
    if values is None:
        return None
    listed = values if isinstance(values, list | tuple) else [values]
    count = case.number("num_gpus", "gpu_count")
    indices = [int(n) for n in re.findall(r"(?<![\w-])\d+(?![\w-])", ",".join(map(str, listed)))]
    if count is not None and any(index >= count for index in indices):
        reason = f"{listed} names a device beyond the {count:g} there are"
        return Judgement("device_index_mismatch", "fail", reason)
    if all(
        isinstance(item, str | int) and _VISIBLE.fullmatch(str(item).replace(" ", ""))
        for item in listed
    ):
        return Judgement("device_index_mismatch", "pass", "every form names its devices")
    return Judgement(
        "device_index_mismatch", "unknown", f"{listed} names no device in a known form"
    )


def mapping(case: Case) -> Judgement | None:
    """Match CUDA's devices to NVML's by UUID; equal indices prove nothing."""
    cuda, nvml = case.get("cuda", "cuda_devices"), case.get("nvml", "nvml_devices", "smi")
    if not isinstance(cuda, list) or not isinstance(nvml, list):
        return None
    known = {_uuid(row) for row in nvml}
    ours = [_uuid(row) for row in cuda]
    if any(name is None for name in ours) or None in known:
        names = [
            [row.get("name") for row in rows if isinstance(row, Mapping)] for rows in (cuda, nvml)
        ]
        differs = names[0] != names[1] and all(all(n) for n in names if n)
        reason = "without UUIDs an index names nothing"
        return Judgement("device_index_mismatch", "fail" if differs else "unknown", reason)
    lost = [name for name in ours if not any(_same(str(name), str(other)) for other in known)]
    if lost:
        return Judgement("device_index_mismatch", "fail", f"{lost[0]} is none of NVML's devices")
    return Judgement("device_index_mismatch", "pass", "UUIDs match every device")


def _same(one: str, other: str) -> bool:
    return (
        one == other
        or other.startswith(one)
        or one.removeprefix("GPU-") == other.removeprefix("GPU-")
    )


def _uuid(row: Any) -> str | None:
    return str(row["uuid"]) if isinstance(row, Mapping) and row.get("uuid") else None


def capacity(case: Case) -> Judgement | None:
    """Take the driver's total, or on unified memory the host's; a name is no measurement."""
    integrated = case.flag("is_integrated", "integrated", "unified")
    free, available = (
        case.size("mem_get_info_free", "cuda_free", "device_free", "free"),
        case.size("mem_available", "meminfo_available", "host_available"),
    )
    if integrated and free is not None and available is not None:
        reason = f"unified memory: {gib(available)} are available, not {gib(free)}"
        return Judgement("device_memory_misread", "pass", reason)
    host = case.size("meminfo_total", "mem_total", "host_total")
    if integrated and host is not None and case.has("nvml_total", "nvml_total_mib", "total"):
        reason = f"unified memory: the host's {gib(host)} are the device's"
        return Judgement("device_memory_misread", "pass", reason)
    total = case.size("nvml_total", "total", "driver_total", "cuda_total", "device_total")
    name = str(case.get("name", "gpu", "product_name") or "")
    sold = [float(size) * (1 << 30) for size in _NAMED_GB.findall(name)]
    if total is None or not sold or case.has("world_size", "allocated_gib", "allocated"):
        return None
    reason = f"{name} shows {gib(total)}"
    if all(abs(total - size) > _BAND * size for size in sold):
        return Judgement("device_memory_misread", "warn", f"{reason}; the driver's figure counts")
    return Judgement("device_memory_misread", "pass", reason)


JUDGES = (permission, unsupported, visible, mapping, capacity)
