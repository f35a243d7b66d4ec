"""`cift facts`: everything that the sources tell, in two forms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_nvml import RECORDED, FakeNvml
from suite_runner import run_cift

from cift_probe import facts
from cift_probe.cli import facts as command
from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.facts import settings
from cift_probe.report.canonical import storable

UUID = "8a6f0c5e-2f6d-4a53-9a0b-0c3a3d1f5b11"
FOUND: dict[str, Evidence] = {
    "device.memory.total[gpu1]": Known(24 << 30, "B", "NVML"),
    "device.uuid[gpu1]": Known(f"GPU-{UUID}", source="NVML"),
    "device.ecc.mode[gpu1]": absent("not supported", "NVML"),
    "host.memory.limit": Unknown(f"no permission for GPU-{UUID}", "cgroup"),
    "package.torch": Known("2.13.0", "version", "metadata"),
    "weather.today": Known(["fine", "dry"], note="out of the window"),
}


def test_an_entry_is_written_as_in_a_report_and_says_what_is_missing() -> None:
    told = command.entries(FOUND)
    assert list(told) == sorted(FOUND)
    for key, entry in told.items():
        assert msgspec.convert(entry, Evidence) == FOUND[key]
    assert told["device.memory.total[gpu1]"] == {
        "is": "known",
        "value": 24 << 30,
        "unit": "B",
        "source": "NVML",
    }
    assert told["host.memory.limit"]["unknown"] == f"no permission for GPU-{UUID}"
    assert "value" not in told["host.memory.limit"]
    assert told["device.ecc.mode[gpu1]"]["value"] is None
    assert told["weather.today"]["unit"] == ""


def test_the_page_groups_aligns_and_never_breaks_a_line() -> None:
    lines = list(command.page({**FOUND, "host.os": Known("De\nbian" + "x" * 999)}))
    assert [line for line in lines if line and line[0] != " "] == [
        "host",
        "device gpu1",
        "packages",
        "other",
    ]
    assert "  device.memory.total  24.00 GiB" in lines
    assert "  device.ecc.mode      absent: not supported" in lines
    assert any(line.endswith(" …") and "De\\nbian" in line for line in lines)
    assert max(map(len, lines)) < 250


def test_names_are_left_out_everywhere() -> None:
    clean = command.without_names(FOUND)
    assert set(clean) == set(FOUND)
    assert UUID not in json.dumps(command.entries(clean))
    assert clean["package.torch"] == FOUND["package.torch"]


@pytest.mark.parametrize("form", [[], ["--json"], ["--json", "--redact"]])
def test_the_command_tells_this_machine(tmp_path: Path, form: list[str]) -> None:
    session = run_cift(tmp_path, "facts", *form)
    assert session.code == 0, session.text
    if form:
        told = json.loads(session.text)
        assert told["schema"] == "cift-facts/1"
        assert told["evidence"]["torch.version"]["value"]
        assert told["evidence"]["host.memory.total"]["unit"] == "B"
    else:
        assert "\n  host.memory.total" in session.text
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_call_is_refused(tmp_path: Path) -> None:
    assert run_cift(tmp_path, "facts", "--yaml").code == 4


def test_every_source_is_read_for_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("mixed-cards"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    asked: list[tuple[str, str]] = []

    def call(device: str, target: str, _payload: Any, _deadline_s: float) -> Any:
        asked.append((device, target.rpartition(":")[2]))
        return {"available": True, "name": device}

    devices = facts.read_devices()
    found = facts.read_everything(devices, call)
    for label in ("gpu0", "gpu1"):
        assert found[f"torch.device.name[{label}]"] == Known(
            label, source="import torch, in a child process"
        )
        assert f"device.memory.total[{label}]" in found
        assert f"torch.cuda.available[{label}]" in found
        assert (label, "read_torch_device") in asked
    assert {"host.os", "storage.work.free", "package.torch", "driver.version"} <= set(found)


def test_no_source_is_left_out() -> None:
    def reader(key: str) -> object:
        return next(read for prefix, read in facts._SOURCES if key.startswith(prefix))  # noqa: SLF001 - the table itself

    keys = (*facts._OF_MACHINE, *facts._OF_TORCH, *facts._OF_DEVICE)  # noqa: SLF001 - as above
    asked = {reader(key) for key in keys}
    assert asked == {read for _, read in facts._SOURCES}  # noqa: SLF001 - as above


def test_torch_stays_out_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it would raise
    assert isinstance(facts.read_everything([], None)["host.os"], Known)


# What other tools print, and where `cift facts` has it. Keys of a device carry its label.
COLLECT_ENV = {
    "torch_version": ["torch.version"],
    "is_debug_build": ["torch.debug"],
    "cuda_compiled_version": ["torch.cuda.version"],
    "gcc_version": ["toolchain.gcc.version"],
    "clang_version": ["toolchain.clang.version"],
    "cmake_version": ["toolchain.cmake.version"],
    "os": ["host.os"],
    "libc_version": ["host.libc.version"],
    "python_version": ["host.python.build", "host.python.bits"],
    "python_platform": ["host.platform"],
    "is_cuda_available": ["torch.cuda.available"],
    "cuda_runtime_version": ["toolchain.nvcc.version"],
    "cuda_module_loading": ["environment.variables"],
    "nvidia_driver_version": ["driver.version"],
    "nvidia_gpu_models": ["device.name[gpu0]"],
    "cudnn_version": ["torch.cudnn.version"],
    "is_xpu_available": ["torch.accelerator", "torch.xpu.version"],
    "pip_version": ["package.pip"],
    "pip_packages": ["package.related"],
    "conda_packages": ["package.conda"],
    "hip_compiled_version": ["torch.hip.version"],
    "hip_runtime_version": ["torch.hip.runtime.version"],
    "miopen_runtime_version": ["torch.miopen.version"],
    "caching_allocator_config": ["environment.variables"],
    "is_xnnpack_available": ["torch.xnnpack"],
    "cpu_info": [
        *("host.architecture", "host.cpu.model", "host.cpu.vendor", "host.cpu.num_logical"),
        *("host.cpu.num_physical", "host.cpu.num_sockets", "host.cpu.clock.max", "host.virtual"),
        *("host.cpu.flags", "host.cpu.caches", "host.numa.num_nodes", "host.cpu.vulnerabilities"),
    ],
}
ACCELERATE = {
    "`Accelerate` version": ["package.accelerate"],
    "Platform": ["host.platform"],
    "`accelerate` bash location": ["environment.accelerate.command"],
    "Python version": ["host.python.version"],
    "Numpy version": ["package.numpy"],
    "PyTorch version": ["torch.version"],
    "PyTorch accelerator": ["torch.accelerator"],
    "System RAM": ["host.memory.total"],
    "`Accelerate` configs": ["environment.accelerate.config"],
}
TRANSFORMERS = {
    "`transformers` version": ["package.transformers"],
    "Platform": ["host.platform"],
    "Python version": ["host.python.version"],
    "Huggingface_hub version": ["package.huggingface_hub"],
    "Safetensors version": ["package.safetensors"],
    "Accelerate version": ["package.accelerate"],
    "Accelerate config": ["environment.accelerate.config"],
    "DeepSpeed version": ["package.deepspeed"],
    "PyTorch version (accelerator?)": ["torch.version", "torch.accelerator"],
    "Using distributed or parallel set-up in script?": [],  # it asks the reader to fill this in
}
# of devices that this machine lacks; the tools themselves leave them out here
WITH_A_GPU = ["device.name[gpu0]", "device.capability[gpu0]"]
BITSANDBYTES = ["host.platform", "host.libc.version", "bitsandbytes.binaries", "library.loaded"]
XFORMERS = [
    "package.xformers",
    "xformers.operators",
    "package.triton",
    "xformers.built",
    "torch.cuda.available",
]


@pytest.fixture(scope="module")
def here() -> dict[str, Evidence]:
    return command.read()


def test_everything_that_collect_env_prints_has_its_key(here: dict[str, Evidence]) -> None:
    from torch.utils import collect_env

    assert set(collect_env.SystemEnv._fields) <= set(COLLECT_ENV)
    wanted = {key for keys in COLLECT_ENV.values() for key in keys}
    assert wanted - set(WITH_A_GPU) <= set(here)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_MODULE_LOADING"):
        assert name in settings.NAMES
    told = collected()
    assert here["torch.version"] == Known(
        told["torch_version"], "version", here["torch.version"].source
    )
    assert told["libc_version"].removeprefix("glibc-") == value(here["host.libc.version"])
    gcc = told["gcc_version"]
    assert gcc is None or value(here["toolchain.gcc.version"]) in gcc


def collected() -> dict[str, Any]:
    """Return what collect_env finds, in a process of its own: other tests touch torch's modules."""
    code = (
        "import json; from torch.utils import collect_env; "
        "print(json.dumps(collect_env.get_env_info()._asdict(), default=str))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_everything_that_accelerate_prints_has_its_key(
    here: dict[str, Evidence], capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.commands import env

    told = env.env_command(env.env_command_parser().parse_args([]))
    capsys.readouterr()
    assert set(told) <= set(ACCELERATE)
    assert {key for keys in ACCELERATE.values() for key in keys} <= set(here)
    assert told["`Accelerate` version"] == value(here["package.accelerate"])


def test_everything_that_transformers_prints_has_its_key(
    here: dict[str, Evidence], capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers.cli import system

    told: Any = system.env()
    capsys.readouterr()
    assert set(told) <= set(TRANSFORMERS)
    assert {key for keys in TRANSFORMERS.values() for key in keys} <= set(here)


def test_everything_that_bitsandbytes_and_xformers_print_has_its_key(
    here: dict[str, Evidence],
) -> None:
    from bitsandbytes.diagnostics import main

    assert {f"package.{name}" for name in main._RELATED_PACKAGES} <= set(here)  # noqa: SLF001 - its list
    assert set(BITSANDBYTES) | set(XFORMERS) <= set(here)


def test_the_keys_of_a_gpu_are_told_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("h200"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert set(WITH_A_GPU) <= set(facts.read_everything(["gpu0"], None))


@pytest.mark.parametrize(
    "machine", sorted(path.parent.name for path in RECORDED.glob("*/nvml.json"))
)
def test_every_recorded_machine_is_told_as_json_and_as_a_page(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(machine))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = facts.read_everything(facts.read_devices(), None)
    clean = command.without_names(found)
    assert json.loads(json.dumps(storable(command.entries(clean)), allow_nan=False))
    assert set(clean) == set(found)
    assert all("\n" not in line for line in command.page(found))


def test_the_list_of_the_module_names_the_tools() -> None:
    assert command.__doc__ is not None
    for name in COLLECT_ENV:
        assert name in command.__doc__
    for tool in ("bitsandbytes", "accelerate env", "transformers env", "xformers.info"):
        assert tool in command.__doc__


def value(item: Evidence) -> Any:
    assert isinstance(item, Known), item
    return item.value
