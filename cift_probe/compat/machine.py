"""A machine that is only described: its cards, driver and packages, held against the rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from packaging.version import InvalidVersion, Version

from cift_probe.compat.case import Case, parse_capability
from cift_probe.diagnose.kinds import read_kinds
from cift_probe.expect.rows import Fact, Ruling, read_compat, rulings
from cift_probe.expect.wheels import Capability, find_wheel, serving, wheels_for

PACKAGES = (
    "transformers",
    "peft",
    "trl",
    "accelerate",
    "datasets",
    "bitsandbytes",
    "flash_attn",
    "triton",
    "numpy",
    "tokenizers",
    "huggingface_hub",
)
# a build of torch as its version says it; none but cuXYZ has CUDA
_BUILD = re.compile(r"(?:cpu|rocm[\d.]+|xpu|cu(?P<major>\d{2})(?P<minor>\d))")
_MENDED_BY_WHEEL = frozenset({"arch_missing", "cpu_only_wheel", "driver_too_old"})
# highest CUDA that a driver branch serves: CUDA Toolkit release notes, table 3
_BRANCHES = (
    (580, "13.0"),
    (575, "12.9"),
    (570, "12.8"),
    (560, "12.6"),
    (555, "12.5"),
    (550, "12.4"),
    (545, "12.3"),
    (535, "12.2"),
    (530, "12.1"),
    (525, "12.0"),
    (520, "11.8"),
    (515, "11.7"),
    (510, "11.6"),
    (495, "11.5"),
    (470, "11.4"),
    (450, "11.0"),
)


class MachineError(ValueError):
    """A description that cannot be used; one line that says what to change."""


class Machine(msgspec.Struct, frozen=True):
    """What is known of a machine; None and missing keys where nothing is.

    `capabilities` are those of all its GPUs, `arch_list` torch's own where the machine was asked.
    """

    capabilities: dict[str, Capability] = {}
    driver: Version | None = None
    driver_cuda: Version | None = None
    torch: Version | None = None
    torch_cuda: Version | None = None
    cpu_torch: bool = False
    arch_list: tuple[str, ...] = ()
    python: Version | None = None
    system: str = ""
    packages: dict[str, Version] = {}
    settings: dict[str, str] = {}

    @property
    def lowest(self) -> Capability | None:
        """The lowest compute capability, which decides for all."""
        return min(self.capabilities.values(), default=None)

    @property
    def cuda_of_driver(self) -> Version | None:
        """The CUDA that the driver serves: told, or by its branch."""
        if self.driver_cuda is not None or self.driver is None:
            return self.driver_cuda
        branch = self.driver.major
        return next((Version(cuda) for least, cuda in _BRANCHES if branch >= least), None)


def judge_machine(machine: Machine) -> list[Ruling]:
    """Return what all rules say of a machine, the worst first."""
    found = [*rulings(facts_of(machine)), *_build(machine), *_driver(machine)]
    order = ("fail", "warn", "unknown", "pass")
    kept: dict[tuple[str, str], Ruling] = {}
    for item in sorted(found, key=lambda item: order.index(item.outcome)):
        kept.setdefault((item.kind, item.outcome), item)
    if machine.driver is None and machine.driver_cuda is not None:
        kept.pop(("driver_too_old", "unknown"), None)  # its CUDA says what the version would
    failed = {kind for kind, outcome in kept if outcome in {"fail", "warn", "unknown"}}
    return [item for item in kept.values() if item.outcome != "pass" or item.kind not in failed]


def facts_of(machine: Machine) -> dict[str, Fact]:
    """Return the facts that rows ask for, without those that are not known."""
    lowest = machine.lowest
    versions = {
        "gpu.capability": None if lowest is None else Version(f"{lowest[0]}.{lowest[1]}"),
        "driver": machine.driver,
        "torch": machine.torch,
        "torch.cuda": machine.torch_cuda,
        "python": machine.python,
        **machine.packages,
    }
    facts: dict[str, Fact] = {key: item for key, item in versions.items() if item is not None}
    facts["os"] = machine.system or "linux"
    return facts | machine.settings


def _driver(machine: Machine) -> Iterator[Ruling]:
    """Yield what the driver's CUDA says, where its version is not told."""
    runtime, driver = machine.torch_cuda, machine.driver_cuda
    if machine.driver is not None or driver is None or runtime is None:
        return
    outcome = "fail" if driver.major < runtime.major else "pass"
    reason = f"the driver serves CUDA {driver}, torch is built for {runtime}"
    source = "NVIDIA CUDA Compatibility, Minor Version Compatibility"
    yield _ruling("driver_too_old", outcome, reason, source)


def _build(machine: Machine) -> Iterator[Ruling]:
    """Yield what the build of torch says: no CUDA, or no code for a GPU."""
    lowest = machine.lowest
    if machine.torch is None:
        return
    if machine.cpu_torch:
        outcome = "fail" if machine.capabilities else "pass"
        reason = f"torch {machine.torch} is a build without CUDA (for the CPU, or another vendor)"
        yield _ruling("cpu_only_wheel", outcome, reason, "torch's package metadata")
        return
    if lowest is None:
        return
    names, source = list(machine.arch_list), "torch.cuda.get_arch_list()"
    if not names and machine.torch_cuda is not None:
        wheel = find_wheel(machine.torch, machine.torch_cuda)
        names, source = (wheel.names, wheel.source) if wheel else ([], "")
    text = f"capability {lowest[0]}.{lowest[1]}"
    if not names:
        reason = f"no row of data/wheels.toml says what torch {machine.torch} has code for"
        if machine.torch_cuda is None:
            reason = "the CUDA of torch's build is not told: write for instance --torch 2.13+cu130"
        yield _ruling("arch_missing", "unknown", reason, "data/wheels.toml")
        return
    served = serving(lowest, names)
    reason = f"{served} serves {text}" if served else f"{', '.join(names)} has no code for {text}"
    yield _ruling("arch_missing", "pass" if served else "fail", reason, source)


def _ruling(kind: str, outcome: Any, reason: str, source: str) -> Ruling:
    row = read_kinds()[kind]
    return Ruling("build", kind, outcome, reason, row.title, row.fix, source)


def install_line(machine: Machine, ruling: Ruling) -> str:
    """Return the command that mends a finding, or nothing where none does."""
    lowest = machine.lowest
    if ruling.kind in _MENDED_BY_WHEEL:
        fitting = wheels_for(lowest, machine.cuda_of_driver) if lowest is not None else []
        if not fitting:
            return ""
        best = fitting[0]
        return f'pip install "torch=={best.torch}.*" --index-url {best.index}'
    row = read_compat().get(ruling.row)
    if row is None or any(key not in PACKAGES for key in row.needs):
        return ""
    asked = " ".join(f'"{name.replace("_", "-")}{spec}"' for name, spec in row.needs.items())
    return f"pip install {asked}"


def described(options: Mapping[str, Any], capabilities: dict[str, Capability]) -> Machine:
    """Return the machine of command-line options; raises MachineError."""
    torch = options.get("torch")
    version = _version("torch", torch)
    build = str(torch or "").partition("+")[2].strip()
    local = _BUILD.fullmatch(build)
    if build and local is None:
        message = f"--torch: {build[:40]!r} is no build; write for instance 2.13.0+cu130 or +cpu"
        raise MachineError(message)
    cuda = _version("torch-cuda", options.get("torch_cuda"))
    if local and local["major"]:
        cuda = Version(f"{local['major']}.{local['minor']}")
    return Machine(
        capabilities=capabilities,
        driver=_version("driver", options.get("driver")),
        driver_cuda=_version("driver-cuda", options.get("driver_cuda")),
        torch=version,
        torch_cuda=cuda,
        cpu_torch=bool(local and not local["major"]),
        python=_version("python", options.get("python")),
        system=str(options.get("os") or "linux"),
        packages={
            name: found
            for name in PACKAGES
            if (found := _version(name, options.get(name))) is not None
        },
    )


def _version(name: str, text: Any) -> Version | None:
    if text is None:
        return None
    try:
        return Version(str(text).strip().partition("+")[0])
    except InvalidVersion as error:
        shown = str(text)[:40]
        message = f"--{name.replace('_', '-')} {shown!r} is no version; write for instance 2.13.0"
        raise MachineError(message) from error


def from_evidence(told: Mapping[str, Any]) -> Machine:
    """Return the machine that a report or `cift facts --json` tells of: {key: value}."""
    scoped = {key.partition("[")[0]: value for key, value in told.items()}
    capabilities = {
        key.partition("[")[2].rstrip("]"): found
        for key, value in told.items()
        if key.startswith("device.capability[") and (found := parse_capability(value)) is not None
    }

    def version(*keys: str) -> Version | None:
        return Case(scoped).version(*keys)

    listed = scoped.get("torch.arch.list")
    cuda = version("torch.cuda.version")
    return Machine(
        capabilities=capabilities,
        driver=version("driver.version"),
        driver_cuda=version("driver.cuda.version", "driver.cuda"),
        torch=version("torch.version", "package.torch"),
        torch_cuda=cuda,
        cpu_torch="torch.cuda.version" in scoped and cuda is None,
        arch_list=tuple(map(str, listed)) if isinstance(listed, list) else (),
        python=version("python.version", "host.python.version"),
        system=_system(str(scoped.get("host.os", scoped.get("host.system", "")))),
        packages={
            name: present
            for name in PACKAGES
            if (present := version(f"package.{name}", f"package.{name}.version")) is not None
        },
    )


def _system(text: str) -> str:
    low = text.lower()
    if "microsoft" in low or "wsl" in low:
        return "wsl"
    return "windows" if "windows" in low else "linux"
