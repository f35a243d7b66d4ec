"""`cift facts`: what this machine says of itself, in one list to look at or to hand on.

A superset of what the tools print that issue templates ask for. Each line: the tool's items, and
the keys that answer them here.

torch.utils.collect_env
  torch_version, is_debug_build, cuda_compiled_version, hip_compiled_version,
  hip_runtime_version, miopen_runtime_version: torch.version, torch.debug, torch.cuda.version,
  torch.hip.version, torch.hip.runtime.version, torch.miopen.version
  gcc_version, clang_version, cmake_version, cuda_runtime_version: toolchain.*.version
  os, libc_version, python_version, python_platform: host.os, host.libc.version,
  host.python.build, host.platform
  is_cuda_available, is_xpu_available, is_xnnpack_available: torch.cuda.available,
  torch.accelerator, torch.xnnpack
  cuda_module_loading, caching_allocator_config: environment.variables
  nvidia_driver_version, nvidia_gpu_models, cudnn_version: driver.version, device.name,
  torch.cudnn.version
  pip_version, pip_packages, conda_packages: package.pip, package.related, package.conda
  cpu_info: host.cpu.*, host.architecture, host.virtual, host.numa.num_nodes
python -m bitsandbytes
  platform, libc, Python, PyTorch with CUDA, HIP, XPU: as above, torch.xpu.version
  related packages: package.*
  CUDA version and capability it found, its native libraries: torch.cuda.version,
  device.capability, bitsandbytes.binaries, bitsandbytes.native.errors; copies of the runtime on
  paths: library.loaded
accelerate env, transformers env
  versions: package.*; accelerator: torch.accelerator; memory: host.memory.total; GPU:
  device.name; path and default configuration: environment.accelerate.*
python -m xformers.info
  version, build.*: package.xformers, xformers.built; operators: xformers.operators; Triton:
  package.triton; torch, CUDA, GPU: as above
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import msgspec

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.verdict.display import evidence_text, one_line

SCHEMA = "cift-facts/1"
_WIDTH = 180  # of a value in the text form; the JSON form has all of it
_DESCRIPTION = """\
Prints what is known about this machine: host, driver, devices, torch build, packages, libraries.
Nothing is tried out on a device, and nothing is changed.

  cift facts                      grouped, to read
  cift facts --json               to keep, to compare, or for `cift compat` elsewhere
  cift facts --json --redact      without serials, UUIDs, host and user names

exit codes: 0 told, 4 wrong call, 2 interrupted, 3 the output cannot be written
"""
_GROUPS = {
    "host": "host",
    "storage": "disk",
    "driver": "driver",
    "device": "device",
    "torch": "torch",
    "library": "loaded libraries",
    "package": "packages",
    "flash_attn": "packages",
    "bitsandbytes": "packages",
    "xformers": "packages",
    "environment": "environment",
    "toolchain": "toolchain",
}


class _Silent:
    """Hears which child is asked and says nothing: this command takes seconds."""

    def started(self, label: str, estimate_s: float) -> None:
        """Say nothing."""

    def ended(self, label: str, duration_s: float) -> None:
        """Say nothing."""


def parser(kind: type[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Return the command's options in a parser of `kind`."""
    made = kind(
        prog="cift facts",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", action="store_true", help="one JSON object")
    made.add_argument(
        "--redact", action="store_true", help="leave out serials, UUIDs, host and user names"
    )
    return made


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    from cift_probe.report.canonical import storable

    found = read()
    if options.redact:
        found = without_names(found)
    if options.json:
        plain = storable({"schema": SCHEMA, "evidence": entries(found)})
        text = json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False)
    else:
        text = "\n".join(page(found))
    print(text)  # noqa: T201 - a command-line tool prints
    return 0


def read() -> dict[str, Evidence]:
    """Return all facts of this machine by stored key; torch is asked in child processes."""
    from cift_probe import facts
    from cift_probe.measure.bench import Bench

    bench = Bench(facts.visible_uuid, {}, None, _Silent())
    try:
        return facts.read_everything(facts.read_devices(), bench.call)
    finally:
        bench.close()


def entries(found: Mapping[str, Evidence]) -> dict[str, dict[str, Any]]:
    """Return the facts as they stand in a report, with every unit written out.

    An entry without a value has its reason under `unknown` too: a reader needs no table of ours
    to tell the two apart.
    """
    return {key: _entry(item) for key, item in sorted(found.items())}


def without_names(found: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """Return the facts without what names a device, a machine or a person, as in a report."""
    from cift_probe.report.redact import redact
    from cift_probe.report.schema import Suite
    from cift_probe.report.writer import build_report

    report = build_report(
        suite=Suite(name="cift facts", version="", run_id="", started=""),
        evidence={"facts": dict(found)},
        findings=[],
        answers=[],
        plans=[],
        not_run={},
    )
    return redact(report).evidence["facts"]


def page(found: Mapping[str, Evidence]) -> Iterator[str]:
    """Yield the lines of the text form: a group per source, one device after the other."""
    rows = sorted((*_place(key), item) for key, item in _ordered(found))
    for title, group in groupby(rows, key=lambda row: row[1]):
        lines = [(name, _text(item)) for _, _, name, item in group]
        width = max(len(name) for name, _ in lines)
        yield title
        yield from (f"  {name:<{width}}  {text}" for name, text in lines)
        yield ""


def _entry(item: Evidence) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(item, str_keys=True, enc_hook=str)
    if isinstance(item, Unknown):
        return {"source": "", **plain, "unknown": item.reason}
    return {"value": None, "unit": "", "source": "", **plain}


def _ordered(found: Mapping[str, Evidence]) -> Iterator[tuple[str, Evidence]]:
    return iter(sorted(found.items()))


def _place(key: str) -> tuple[int, str, str]:
    """Return rank and title of a key's group, and its name there."""
    name, _, label = key.rstrip("]").partition("[")
    group = _GROUPS.get(name.partition(".")[0], "other")
    rank = [*dict.fromkeys(_GROUPS.values()), "other"].index(group)
    return rank, f"{group} {label}".strip(), name


def _text(item: Evidence) -> str:
    if isinstance(item, Known) and isinstance(item.value, dict):
        shown = ", ".join(f"{name} {value}" for name, value in item.value.items()) or "none"
        item = msgspec.structs.replace(item, value=shown)
    text = one_line(evidence_text(item))
    return text if len(text) <= _WIDTH else text[:_WIDTH] + " …"
