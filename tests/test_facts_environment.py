"""Facts about driver files, CUDA's start, loaded libraries, settings, toolchain and wheels."""

from __future__ import annotations

import ctypes
import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import RECORDED, FakeNvml

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.facts import cuda_start, driver_files, loaded, settings, toolchain, wheels
from cift_probe.sensors import Nvml
from cift_probe.stack import cuda_start as start_program
from cift_probe.stack import loaded as loaded_program
from cift_probe.worker import FaultKind, WorkerFaultError

UUID = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


def value(item: Evidence) -> Any:
    assert isinstance(item, Known), item
    assert not item.absent, item
    return item.value


def is_absent(item: Evidence) -> bool:
    return isinstance(item, Known) and bool(item.absent)


# CUDA's start


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (802, "fabric"),
        (803, "different versions"),
        (804, "forward-compatibility"),
        (999, "suspend"),
        (100, "no device"),
        (101, "MIG"),
        (46, "compute mode"),
        (3, "nvidia_uvm"),
        (4711, "not listed"),
    ],
)
def test_a_code_of_the_start_is_told_with_its_meaning(code: int, words: str) -> None:
    found = cuda_start.parse_start({"code": code, "devices": {}})
    assert value(found["driver.start.code"]) == code
    [text] = value(found["driver.start.errors"])
    assert str(code) in text
    assert words in text


def test_a_good_start_has_no_error_and_names_the_library() -> None:
    path = "/usr/local/cuda-13.0/compat/libcuda.so.580.95.05"
    found = cuda_start.parse_start({"code": 0, "seconds": 1.5, "path": path, "devices": {}})
    assert value(found["driver.start.errors"]) == []
    assert found["driver.start.duration"].source == found["driver.start.code"].source
    assert value(found["driver.start.duration"]) == 1.5
    assert value(found["driver.library.cuda.path"]) == path
    assert value(found["driver.library.cuda.version"]) == "580.95.05"


def test_a_library_without_a_version_in_its_name_has_none() -> None:
    told = {"code": 0, "path": "/usr/lib/wsl/lib/libcuda.so.1", "devices": {}}
    assert is_absent(cuda_start.parse_start(told)["driver.library.cuda.version"])
    hidden = cuda_start.parse_start({"code": 0, "path": None, "seconds": "fast"})
    assert isinstance(hidden["driver.start.duration"], Unknown)
    assert isinstance(hidden["driver.library.cuda.version"], Unknown)


@pytest.mark.parametrize("told", [None, [], {}, {"code": None, "problem": "no libcuda"}, "x"])
def test_no_answer_is_unknown_throughout(told: object) -> None:
    found = cuda_start.parse_start(told)
    assert set(found) == set(cuda_start.MACHINE_KEYS)
    assert all(isinstance(item, Unknown) for item in found.values())
    told_of_device = cuda_start.parse_attributes(told, UUID)
    assert all(isinstance(item, Unknown) for item in told_of_device.values())


def test_attributes_are_those_of_the_device_with_the_uuid() -> None:
    mine = {"managed": 1, "managed_concurrent": 0, "virtual_memory": 1, "integrated": 0}
    told = {"code": 0, "devices": {UUID[4:]: mine, "another": {"managed": 0}}}
    found = cuda_start.parse_attributes(told, UUID)
    assert value(found["device.managed"]) is True
    assert value(found["device.managed.concurrent"]) is False
    assert isinstance(found["device.pageable"], Unknown)


class Driver:
    """A libcuda of one device; `code` is cuInit's answer."""

    def __init__(self, code: int = 0) -> None:
        """Answer the start with `code`."""
        self.code = code

    def cuInit(self, _flags: int) -> int:  # noqa: N802 - the driver's name
        return self.code

    def cuDriverGetVersion(self, number: Any) -> int:  # noqa: N802 - as above
        number.target.value = 13000
        return 0

    def cuDeviceGetCount(self, number: Any) -> int:  # noqa: N802 - as above
        number.target.value = 1
        return 0

    def cuDeviceGet(self, _device: Any, _index: int) -> int:  # noqa: N802 - as above
        return 0

    def cuDeviceGetUuid_v2(self, raw: Any, _device: Any) -> int:  # noqa: N802 - as above
        raw.target[:] = bytes(range(16))
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, _device: Any) -> int:  # noqa: N802 - as above
        value.target.value = int(number == 83)
        return int(number == 102)  # this one is refused


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: made)
    monkeypatch.setattr(ctypes, "byref", lambda thing: SimpleNamespace(target=thing))
    return made


def test_the_program_asks_the_driver_and_leaves_out_what_it_refuses(driver: Driver) -> None:
    told = start_program.read_start()
    assert told["code"] == 0
    assert told["version"] == 13000
    assert told["seconds"] >= 0
    assert told["devices"] == {
        UUID[4:]: {"integrated": 0, "managed": 1, "pageable": 0, "managed_concurrent": 0}
    }
    driver.code = 802
    assert start_program.read_start()["devices"] == {}


def test_a_missing_library_is_the_programs_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> Any:
        message = "libcuda.so.1: cannot open shared object file"
        raise OSError(message)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert start_program.read_start() == {
        "code": None,
        "problem": "libcuda.so.1: cannot open shared object file",
        "devices": {},
    }


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise SystemExit(3)", "failed"),
        ("print('no json')", "failed"),
        ("import time; time.sleep(60)", "not started"),
    ],
)
def test_a_program_that_fails_is_told(
    program: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "start.py"
    place.write_text(program)
    monkeypatch.setattr(cuda_start, "_PROGRAM", place)
    monkeypatch.setattr(cuda_start, "_DEADLINE_S", 1.0)
    told = cuda_start.read_answer.__wrapped__()
    assert words in told["problem"]


# loaded libraries

SITE = "/venv/lib/python3.12/site-packages"
MAPS = f"""\
7f00-7f01 r-xp 00000000 08:01 11 {SITE}/nvidia/cu13/lib/libcublas.so.13
7f01-7f02 r--p 00001000 08:01 11 {SITE}/nvidia/cu13/lib/libcublas.so.13
7f02-7f03 r-xp 00000000 08:01 12 {SITE}/nvidia/cu13/lib/libcublasLt.so.13
7f03-7f04 r-xp 00000000 08:01 13 /usr/lib/x86_64-linux-gnu/libcudnn.so.9.1.0 (deleted)
7f04-7f05 r-xp 00000000 08:01 14 /usr/lib/x86_64-linux-gnu/libc.so.6
7f05-7f06 rw-p 00000000 00:00 0 [heap]
7f06-7f07 r-xp 00000000 08:01 15 /opt/with space/libcudart.so.13.0.96
"""


def test_the_paths_of_libraries_are_read_once_each() -> None:
    assert loaded.parse_maps(MAPS) == [
        f"{SITE}/nvidia/cu13/lib/libcublas.so.13",
        f"{SITE}/nvidia/cu13/lib/libcublasLt.so.13",
        "/usr/lib/x86_64-linux-gnu/libcudnn.so.9.1.0",
        "/usr/lib/x86_64-linux-gnu/libc.so.6",
        "/opt/with space/libcudart.so.13.0.96",
    ]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/x/libcublasLt.so.13", "libcublasLt"),
        ("/x/libcublas.so", "libcublas"),
        ("/x/libcuda.so.580.95.05", "libcuda"),
        ("/x/libnvidia-ml.so.1", "libnvidia-ml"),
        ("/x/libcublas.so.13.py", ""),
        ("/x/libcudart-d0da41ae.so.11.0", ""),
        ("/x/libm.so.6", ""),
        ("", ""),
    ],
)
def test_a_cuda_library_is_known_by_its_name(path: str, name: str) -> None:
    assert loaded.parse_library(path) == name


def test_a_copy_of_the_system_in_the_place_of_a_wheels_is_named() -> None:
    shipped = [f"{SITE}/nvidia/cudnn/lib/libcudnn.so.9", f"{SITE}/nvidia/cu13/lib/libcublas.so.13"]
    found = loaded.parse_loaded({"maps": MAPS, "shipped": shipped})
    assert value(found["library.shadowed"]) == [
        {
            "name": "libcudnn",
            "loaded": "/usr/lib/x86_64-linux-gnu/libcudnn.so.9.1.0",
            "shipped": f"{SITE}/nvidia/cudnn/lib/libcudnn.so.9",
        }
    ]
    assert value(found["library.doubled"]) == []
    assert value(found["library.split"]) == []
    assert value(found["library.loaded"])["libcudart"] == "/opt/with space/libcudart.so.13.0.96"


def test_without_wheels_a_systems_copy_is_right() -> None:
    found = loaded.compare_copies(loaded.parse_maps(MAPS), [])
    assert found == {"doubled": [], "shadowed": [], "split": []}


def test_two_copies_and_a_torn_pair_are_named() -> None:
    paths = [
        "/a/libcublas.so.12",
        "/b/libcublasLt.so.12",
        "/a/libcudart.so.12",
        "/b/libcudart.so.13",
    ]
    found = loaded.compare_copies(paths, [])
    assert [item["name"] for item in found["doubled"]] == ["libcudart"]
    assert found["split"] == ["/a/libcublas.so.12", "/b/libcublasLt.so.12"]


@pytest.mark.parametrize("told", [None, [], {}, {"maps": 5}])
def test_a_child_without_an_answer_is_unknown(told: object) -> None:
    found = loaded.read_loaded(lambda *_: told)
    assert set(found) == set(loaded.KEYS)
    assert all(isinstance(item, Unknown) for item in found.values())


def test_a_child_that_dies_is_the_reason() -> None:
    def call(*_: object) -> object:
        raise WorkerFaultError(FaultKind.RAISED, "ImportError: libcublas.so.11: undefined", "")

    found = loaded.read_loaded(call)
    assert all(isinstance(i, Unknown) and "undefined" in i.reason for i in found.values())
    assert all(isinstance(item, Unknown) for item in loaded.read_loaded(None).values())


def test_the_child_tells_what_is_mapped_and_what_wheels_carry(tmp_path: Path) -> None:
    store = tmp_path / "store" / "libcublas.so.13"
    store.parent.mkdir()
    store.touch()
    for folder in ("nvidia/cu13/lib", "nvidia/cudnn/lib", "torch/lib", "other/lib"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "nvidia/cu13/lib/libcublas.so.13").symlink_to(store)
    for name in ("nvidia/cudnn/lib/libcudnn.so.9", "torch/lib/libc10.so", "other/lib/libx.so"):
        (tmp_path / name).touch()
    assert loaded_program.shipped(tmp_path, ("nvidia/*/lib", "torch/lib")) == sorted(
        [
            str(tmp_path / "nvidia/cudnn/lib/libcudnn.so.9"),
            str(store),
            str(tmp_path / "torch/lib/libc10.so"),
        ]
    )
    torch_alone = [str(tmp_path / "torch/lib/libc10.so")]
    assert loaded_program.shipped(tmp_path, ("torch/lib",)) == torch_alone
    told = loaded_program.read_loaded({})
    assert any("libc" in path for path in loaded.parse_maps(told["maps"]))


@pytest.mark.parametrize(
    ("asked", "counted"),
    [
        (["filelock", 'nvidia-cudnn-cu13==9.19 ; platform_system == "Linux"'], True),
        (["filelock"], False),  # a container's or conda's own build, for the system's libraries
        (None, False),
    ],
)
def test_nvidias_wheels_count_where_torch_asks_for_them(
    asked: list[str] | None,
    counted: bool,  # noqa: FBT001 - a column of the table above
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loaded_program, "requires", lambda _name: asked)
    assert ("nvidia/*/lib" in loaded_program.read_folders()) is counted
    assert "torch/lib" in loaded_program.read_folders()


def test_a_torch_without_metadata_has_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> list[str]:
        raise PackageNotFoundError

    monkeypatch.setattr(loaded_program, "requires", missing)
    assert loaded_program.read_folders() == ("torch/lib",)


# settings


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": "True"}),
        (
            " max_split_size_mb : 128 ,backend:native",
            {"max_split_size_mb": "128", "backend": "native"},
        ),
        ("a:[x:1,y:2],b:3", {"a": "[x:1,y:2]", "b": "3"}),
        ("no colon,:x,,]", {}),
    ],
)
def test_an_allocator_variable_is_split_as_torch_splits_it(text: str, told: dict[str, str]) -> None:
    assert settings.parse_allocator(text) == told


def test_accelerates_configuration_is_read_without_addresses() -> None:
    text = (
        "compute_environment: LOCAL_MACHINE\nmixed_precision: 'bf16'\nmain_process_ip: 10.0.0.7\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: false\nnum_processes: 8\n- item\n"
    )
    assert settings.parse_accelerate(text) == {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": "bf16",
        "fsdp_config.fsdp_version": "2",
        "fsdp_config.fsdp_offload_params": "false",
        "num_processes": "8",
    }


@pytest.mark.parametrize(
    ("selection", "lost"),
    [
        ("0", []),
        ("0,1", []),
        ("1,0,7", ["7"]),
        ("GPU-nothing", ["GPU-nothing"]),
        ("gpu0", ["gpu0"]),
        ("0, 2,x", ["2", "x"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_entries_that_name_no_device_are_told(selection: str, lost: list[str]) -> None:
    nvml = Nvml(FakeNvml("mixed-cards"))
    assert value(settings.read_unmatched(nvml, selection, lambda: None)) == lost


def test_without_a_selection_or_a_driver_there_is_nothing_to_match() -> None:
    assert is_absent(settings.read_unmatched(Nvml(FakeNvml("h200")), None))
    silent = settings.read_unmatched(Nvml(FakeNvml("driver-not-loaded")), "0")
    assert isinstance(silent, Unknown)


def test_only_listed_variables_are_kept(tmp_path: Path) -> None:
    variables = {"HF_TOKEN": "secret", "LD_LIBRARY_PATH": "/x", "PYTORCH_ALLOC_CONF": "a:1"}
    found = settings.read_settings(Nvml(FakeNvml("h200")), variables, tmp_path)
    assert value(found["environment.variables"]) == {
        "LD_LIBRARY_PATH": "/x",
        "PYTORCH_ALLOC_CONF": "a:1",
    }
    assert "secret" not in str(found)
    assert not {"HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"} & set(settings.NAMES)


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({}, None),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:false"}, False),
        (
            {
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
                "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            },
            False,  # torch reads the older name first
        ),
    ],
)
def test_what_is_asked_of_the_allocator(
    variables: dict[str, str],
    asked: bool | None,  # noqa: FBT001 - a column of the table above
    tmp_path: Path,
) -> None:
    found = settings.read_settings(Nvml(FakeNvml("h200")), variables, tmp_path)
    item = found["environment.allocator.expandable"]
    assert is_absent(item) if asked is None else value(item) is asked


@pytest.mark.parametrize("variable", ["", "HF_HOME", "XDG_CACHE_HOME"])
def test_accelerates_configuration_is_found_as_accelerate_finds_it(
    variable: str, tmp_path: Path
) -> None:
    below = {"": ".cache/huggingface", "HF_HOME": "", "XDG_CACHE_HOME": "huggingface"}[variable]
    place = tmp_path / below / "accelerate/default_config.yaml"
    place.parent.mkdir(parents=True)
    place.write_text("use_cpu: false\n")
    variables = {variable: str(tmp_path)} if variable else {}
    found = settings.read_settings(Nvml(FakeNvml("h200")), variables, tmp_path)
    assert value(found["environment.accelerate.config"]) == {"use_cpu": "false"}
    nothing = settings.read_settings(Nvml(FakeNvml("h200")), {}, tmp_path / "nobody")
    assert is_absent(nothing["environment.accelerate.config"])


# toolchain


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("gcc (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0\nCopyright", "13.3.0"),
        ("gcc (GCC) 11.4.1 20231218 (Red Hat 11.4.1-3)", "11.4.1"),
        ("Ubuntu clang version 18.1.3 (1ubuntu1)", "18.1.3"),
        ("cmake version 3.28.3", "3.28.3"),
        ("1.11.1.git.kitware.jobserver-1", ""),
        ("1.11.1", "1.11.1"),
        ("(only 1.2 in brackets)", "1.2"),
        ("", ""),
    ],
)
def test_a_tools_version_is_read(text: str, version: str) -> None:
    assert toolchain.parse_tool_version(text) == version


def test_nvccs_version_is_its_release() -> None:
    text = (
        "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.4, V12.4.131\n"
    )
    assert toolchain.parse_nvcc_version(text) == "12.4"
    assert toolchain.parse_nvcc_version("command not found 12.4") == ""


def tool(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / name
    place.write_text("#!/bin/sh\nexit 1\n")
    place.chmod(0o755)
    return place


def test_the_toolkit_is_found_beside_nvcc(tmp_path: Path) -> None:
    nvcc = tool(tmp_path / "cuda/bin", "nvcc")
    told = {"PATH": str(nvcc.parent)}
    found = toolchain.read_toolchain(told, lambda _place: "release 13.0, V13.0.88")
    assert value(found["toolchain.cuda.home"]) == str(tmp_path / "cuda")
    assert value(found["toolchain.nvcc.version"]) == "13.0"
    assert is_absent(found["toolchain.compiler"])
    assert is_absent(found["toolchain.gcc.version"])


def test_cuda_home_wins_and_may_lack_nvcc(tmp_path: Path) -> None:
    told = {"PATH": "", "CUDA_HOME": str(tmp_path)}
    found = toolchain.read_toolchain(told, lambda _place: "")
    assert value(found["toolchain.cuda.home"]) == str(tmp_path)
    assert is_absent(found["toolchain.nvcc.version"])


@pytest.mark.parametrize(
    ("tools", "variable", "chosen"),
    [
        (["gcc", "clang"], "", "gcc"),
        (["clang"], "", "clang"),
        (["gcc", "mycc"], "mycc -O2", "mycc"),
        (["gcc"], "mycc", None),
        ([], "", None),
    ],
)
def test_the_compiler_is_chosen_as_triton_chooses_it(
    tools: list[str], variable: str, chosen: str | None, tmp_path: Path
) -> None:
    for name in tools:
        tool(tmp_path, name)
    told = {"PATH": str(tmp_path)} | ({"CC": variable} if variable else {})
    item = toolchain.read_toolchain(told, lambda _place: "x 1.2")["toolchain.compiler"]
    if chosen is None:
        assert is_absent(item)
    else:
        assert value(item) == str(tmp_path / chosen)


def test_a_tool_that_cannot_be_asked_is_unknown(tmp_path: Path) -> None:
    def refuse(_place: str) -> str:
        raise PermissionError

    tool(tmp_path, "gcc")
    found = toolchain.read_toolchain({"PATH": str(tmp_path)}, refuse)
    assert isinstance(found["toolchain.gcc.version"], Unknown)
    silent = toolchain.read_toolchain({"PATH": str(tmp_path)}, lambda _place: "")
    assert isinstance(silent["toolchain.gcc.version"], Unknown)
    assert isinstance(
        toolchain.read_toolchain({"PATH": str(tmp_path)})["toolchain.gcc.version"], Unknown
    )


def test_headers_and_builders_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    assert is_absent(toolchain.read_toolchain({"PATH": ""})["toolchain.python.headers"])
    (tmp_path / "Python.h").touch()
    assert value(toolchain.read_toolchain({"PATH": ""})["toolchain.python.headers"])
    monkeypatch.setattr(toolchain, "_BUILDERS", ("packaging", "no-such-package"))
    assert value(toolchain.read_toolchain({"PATH": ""})["toolchain.builders"]) == ["packaging"]
    monkeypatch.setattr(toolchain, "_BUILDERS", ())
    assert is_absent(toolchain.read_toolchain({"PATH": ""})["toolchain.builders"])


# wheels


@pytest.mark.parametrize(
    ("installed", "libraries"),
    [
        ({"nvidia-cublas-cu11": "11.11.3.6", "nvidia-cublas-cu12": "12.8.4.1"}, ["cublas"]),
        ({"nvidia-cublas-cu12": "12.8.4.1", "nvidia-cublas": "13.1.0.3"}, []),  # two folders
        ({"nvidia-cudnn-cu12": "9.10", "nvidia-cudnn-cu13": "9.19"}, ["cudnn"]),
        (
            {"nvidia-cuda-runtime-cu11": "11.8", "nvidia-cuda-runtime-cu12": "12.1"},
            ["cuda-runtime"],
        ),
        ({"nvidia-cublas": "13.1.0.3", "nvidia-cufft": "12.0.0.61"}, []),
        ({"nvidia-ml-py": "13.615", "nvidia-nccl-cu13": "2.28"}, []),
        ({}, []),
    ],
)
def test_libraries_of_two_cuda_majors_are_found(
    installed: dict[str, str], libraries: list[str]
) -> None:
    assert [item["library"] for item in wheels.parse_cuda_wheels(installed)] == libraries


def test_the_highest_glibc_counts() -> None:
    assert wheels.parse_glibc(b"\0GLIBC_2.9\0GLIBC_2.17\0GLIBC_2.2.5\0GLIBC_PRIVATE") == "2.17"
    assert wheels.parse_glibc(b"musl") == ""


def test_native_binaries_are_told_by_platform() -> None:
    names = [
        "libbitsandbytes_cuda118.so",
        "libbitsandbytes_cuda130.so",
        "libbitsandbytes_rocm714.so",
    ]
    names += ["libbitsandbytes_cpu.so", "libbitsandbytes_cuda13x.so", "__init__.py"]
    assert wheels.parse_binaries(names) == {"cuda": ["11.8", "13.0"], "rocm": ["7.14"], "cpu": [""]}


@pytest.mark.parametrize("text", ["", "[]", "5", '{"version": 5}', "{", '{"version": null}'])
def test_a_build_record_that_is_none_says_nothing(text: str) -> None:
    assert wheels.parse_xformers(text) == {}


def environment(folder: Path) -> None:
    for package in ("bitsandbytes", "xformers", "torch"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
    (folder / "torch/lib").mkdir()
    (folder / "torch/lib/libc10.so").write_bytes(b"GLIBC_2.17\0")
    (folder / "bitsandbytes/libbitsandbytes_cuda130.so").write_bytes(b"GLIBC_2.34\0")
    (folder / "bitsandbytes/libbitsandbytes_xpu2026.so").write_bytes(b"GLIBC_2.39\0")
    record = {"version": {"cuda": "1300", "torch": "2.11"}, "env": {"NVCC_FLAGS": None, "A": "b"}}
    (folder / "xformers/cpp_lib.json").write_text(json.dumps(record))


def test_what_wheels_carry_and_need_is_read_from_their_folders(tmp_path: Path) -> None:
    environment(tmp_path)
    found = wheels.read_wheels(
        {"torch": "2.11", "x": "1"}, ["/nowhere", str(tmp_path)], str(tmp_path)
    )
    assert value(found["package.related"]) == {"torch": "2.11"}
    assert value(found["bitsandbytes.folder"]) == str(tmp_path / "bitsandbytes")
    assert value(found["bitsandbytes.cuda.versions"]) == ["13.0"]
    assert value(found["xformers.built"]) == {
        "version.cuda": "1300",
        "version.torch": "2.11",
        "env.A": "b",
    }
    needed = found["package.glibc.needed"]
    assert value(needed) == "2.34"  # the binary for another vendor's device does not count
    assert needed.source.endswith("libbitsandbytes_cuda130.so")
    assert is_absent(found["package.conda"])


def test_an_environment_without_them_has_none(tmp_path: Path) -> None:
    found = wheels.read_wheels({}, [str(tmp_path)], str(tmp_path))
    for key in ("bitsandbytes.folder", "xformers.built", "package.glibc.needed"):
        assert is_absent(found[key])
    (tmp_path / "xformers").mkdir()
    (tmp_path / "xformers/__init__.py").touch()
    assert is_absent(wheels.read_wheels({}, [str(tmp_path)])["xformers.built"])
    (tmp_path / "xformers/cpp_lib.json").write_text("{")
    assert isinstance(wheels.read_wheels({}, [str(tmp_path)])["xformers.built"], Unknown)


def test_condas_packages_are_read_from_its_records(tmp_path: Path) -> None:
    (tmp_path / "conda-meta").mkdir()
    for name in (
        "pytorch-2.5.1-py3.12_cuda12.4_0.json",
        "history",
        "mkl-2023.1.0-h213f_46344.json",
    ):
        (tmp_path / "conda-meta" / name).touch()
    found = wheels.read_wheels({}, [], str(tmp_path))["package.conda"]
    assert value(found) == {"pytorch": "2.5.1", "mkl": "2023.1.0"}


# driver files

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    "GCC version:  gcc version 13.3.0\n"
)
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (OPEN, ("580.95.05", "open")),
        (CLOSED, ("535.183.01", "proprietary")),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  440.100  Fri",
            ("440.100", "proprietary"),
        ),
        ("GCC version 13.3.0", ("", "")),
        ("", ("", "")),
    ],
)
def test_the_kernels_module_is_read(text: str, told: tuple[str, str]) -> None:
    assert driver_files.parse_module(text) == told


def tree(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        place = folder / name.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder


def test_files_of_the_driver_tell_module_library_and_nodes(tmp_path: Path) -> None:
    library = tmp_path / "usr/lib/libnvidia-ml.so.535.183.01"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "usr/lib/libnvidia-ml.so.1").symlink_to(library)
    tree(
        tmp_path,
        proc__driver__nvidia__version=OPEN,
        proc__modules="nvidia_uvm 1 0 - Live 0x0\nnvidia 2 1 nvidia_uvm,\next4 1 0 - Live 0x0\n",
        proc__self__maps="7f-80 r-xp 0 08:01 1 /usr/lib/libnvidia-ml.so.1\n",
        dev__nvidia0="",
        dev__nvidiactl="",
        dev__null="",
    )
    (tmp_path / "dev/nvidia-nvswitch0").touch()
    found = driver_files.read_driver_files(Nvml(FakeNvml("h200")), tmp_path)
    assert value(found["driver.module.version"]) == "580.95.05"
    assert value(found["driver.module.kind"]) == "open"
    assert value(found["driver.modules"]) == ["nvidia", "nvidia_uvm"]
    assert value(found["driver.nodes"]) == ["nvidia-nvswitch0", "nvidia0", "nvidiactl"]
    assert value(found["driver.nvswitch.count"]) == 1
    assert value(found["driver.library.ml.version"]) == "535.183.01"
    assert is_absent(found["driver.fabric_manager.version"])


def test_where_the_kernel_hides_its_module_nvml_vouches_for_it(tmp_path: Path) -> None:
    found = driver_files.read_driver_files(Nvml(FakeNvml("h200")), tmp_path)
    assert value(found["driver.module.version"]) == "580.95.05"
    assert isinstance(found["driver.module.kind"], Unknown)
    assert isinstance(found["driver.library.ml.version"], Unknown)
    assert isinstance(found["driver.modules"], Unknown)
    assert isinstance(found["driver.nodes"], Unknown)
    refused = driver_files.read_driver_files(Nvml(FakeNvml("driver-not-loaded")), tmp_path)
    assert is_absent(refused["driver.module.version"])  # no bus, no node: no GPU either


def test_a_library_of_windows_has_no_version(tmp_path: Path) -> None:
    maps = "7f-80 r-xp 0 08:01 1 /usr/lib/wsl/lib/libnvidia-ml.so.1\n"
    tree(tmp_path, proc__self__maps=maps)
    found = driver_files.read_driver_files(Nvml(FakeNvml("wsl-4090")), tmp_path)
    assert is_absent(found["driver.library.ml.version"])


def test_the_fabric_manager_is_asked_for_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path / "usr/bin", "nv-fabricmanager")
    nvml = Nvml(FakeNvml("h200"))
    text = "Fabric Manager version is : 535.183.01\n"
    found = driver_files.read_driver_files(nvml, tmp_path, lambda _place: text)
    assert value(found["driver.fabric_manager.version"]) == "535.183.01"
    assert value(found["driver.fabric_manager.running"]) is False
    process = SimpleNamespace(name=lambda: "nv-fabricmanager")
    monkeypatch.setattr("psutil.process_iter", lambda: [process])
    found = driver_files.read_driver_files(nvml, tmp_path)
    assert value(found["driver.fabric_manager.running"]) is True
    assert isinstance(
        found["driver.fabric_manager.version"], Unknown
    )  # the stand-in prints nothing
    (tmp_path / "usr/bin/nv-fabricmanager").unlink()
    found = driver_files.read_driver_files(nvml, tmp_path)
    assert value(found["driver.fabric_manager.running"]) is True


def test_recorded_machines_show_their_driver_files() -> None:
    told = {
        machine: driver_files.read_driver_files(Nvml(FakeNvml(machine)), RECORDED / machine)
        for machine in ("hgx-h100-fabric", "wsl-4090")
    }
    assert value(told["hgx-h100-fabric"]["driver.module.version"]) == "535.216.01"
    assert value(told["hgx-h100-fabric"]["driver.nvswitch.count"]) == 4
    assert value(told["wsl-4090"]["driver.nodes"]) == ["dxg"]


def test_a_library_newer_than_the_module_is_told_where_nvml_refuses() -> None:
    machine = "driver-mismatch"
    nvml = Nvml(FakeNvml(machine))
    assert "different versions" in nvml.problem
    found = driver_files.read_driver_files(nvml, RECORDED / machine)
    assert value(found["driver.module.version"]) == "440.33.01"
    assert value(found["driver.library.ml.version"]) == "440.100"


def test_without_a_gpu_there_is_no_driver_to_compare(tmp_path: Path) -> None:
    nvml = Nvml(FakeNvml("library-missing"))
    for folder in ("dev", "sys/bus/pci/devices"):
        (tmp_path / folder).mkdir(parents=True)
    found = driver_files.read_driver_files(nvml, tmp_path)
    for key in ("driver.module.version", "driver.module.kind", "driver.library.ml.version"):
        assert is_absent(found[key])
    (tmp_path / "dev/nvidia0").touch()
    found = driver_files.read_driver_files(nvml, tmp_path)
    for key in ("driver.module.version", "driver.module.kind", "driver.library.ml.version"):
        assert isinstance(found[key], Unknown)


# bitsandbytes' native library

BINARIES = [f"libbitsandbytes_cuda{version}.so" for version in ("118", "121", "128", "130", "132")]


@pytest.mark.parametrize(
    ("runtime", "override", "version"),
    [
        ("13.0", None, "130"),
        ("13.1", None, "130"),
        ("12.9", None, "128"),
        ("12.0", None, "121"),
        ("14.0", None, ""),
        ("10.2", None, ""),
        ("13.0", "118", "118"),
        ("13.0", "124", ""),
        ("13.0", "", ""),
    ],
)
def test_the_binary_is_chosen_as_bitsandbytes_chooses_it(
    runtime: str, override: str | None, version: str
) -> None:
    wanted = f"libbitsandbytes_cuda{version}.so" if version else ""
    assert (
        loaded_program.choose([*BINARIES, "libbitsandbytes_cuda.so"], runtime, override) == wanted
    )


@pytest.mark.parametrize(
    ("runtime", "override", "version"),
    [("13.0", None, "130"), ("12.9", None, ""), ("12.8", "", "128"), ("12.8", "118", "118")],
)
def test_an_older_bitsandbytes_wants_the_very_version(
    runtime: str, override: str | None, version: str
) -> None:
    wanted = f"libbitsandbytes_cuda{version}.so" if version else ""
    assert loaded_program.choose(BINARIES, runtime, override, exact=True) == wanted


def test_bitsandbytes_chooses_the_same() -> None:
    from bitsandbytes import cextension
    from bitsandbytes.cuda_specs import CUDASpecs

    names = [path.name for path in cextension.PACKAGE_DIR.glob("libbitsandbytes_cuda*.so")]
    for runtime in ("11.8", "12.2", "12.9", "13.0", "13.1", "13.9"):
        major, minor = map(int, runtime.split("."))
        specs = CUDASpecs("9.0", runtime.replace(".", ""), (major, minor))
        theirs = cextension.get_cuda_bnb_library_path(specs).name
        assert loaded_program.choose(names, runtime, None) == theirs


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a bitsandbytes whose one binary is no library, beside a torch of CUDA 13.0."""
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "libbitsandbytes_cuda130.so").write_text("no ELF")
    spec = SimpleNamespace(origin=str(package / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: spec)
    monkeypatch.delenv("BNB_CUDA_VERSION", raising=False)
    version = SimpleNamespace(cuda="13.0")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=version))
    return package


def test_a_binary_that_does_not_load_is_told_with_the_loaders_words(installed: Path) -> None:
    told = loaded_program.read_native({})
    assert told["chosen"] == "libbitsandbytes_cuda130.so"
    assert str(installed) in told["error"]
    found = loaded.read_native(lambda *_: told)
    assert value(found["bitsandbytes.native"]) == "libbitsandbytes_cuda130.so"
    assert value(found["bitsandbytes.native.errors"]) == [told["error"]]


@pytest.mark.parametrize(
    ("number", "chosen"),
    [
        ("0.49.2", ""),
        ("0.50.0", "libbitsandbytes_cuda130.so"),
        (None, "libbitsandbytes_cuda130.so"),
    ],
)
def test_the_release_decides_whether_a_near_binary_serves(
    installed: Path, monkeypatch: pytest.MonkeyPatch, number: str | None, chosen: str
) -> None:
    def told(_name: str) -> str:
        if number is None:
            raise PackageNotFoundError
        return number

    assert installed.is_dir()
    monkeypatch.setattr(loaded_program, "version", told)
    near = SimpleNamespace(version=SimpleNamespace(cuda="13.1"))
    monkeypatch.setitem(sys.modules, "torch", near)
    assert loaded_program.read_native({})["chosen"] == chosen


def test_a_binary_that_loads_has_no_error(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("ctypes.CDLL", opened.append)
    told = loaded_program.read_native({})
    assert opened == [str(installed / "libbitsandbytes_cuda130.so")]
    assert value(loaded.parse_native(told)["bitsandbytes.native.errors"]) == []


def test_a_missing_binary_is_an_error_and_a_missing_package_is_none(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed / "libbitsandbytes_cuda130.so").unlink()
    found = loaded.parse_native(loaded_program.read_native({}))
    assert is_absent(found["bitsandbytes.native"])
    assert value(found["bitsandbytes.native.errors"]) == ["none of 0 is for CUDA 13.0"]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=None)))
    assert "without CUDA" in loaded_program.read_native({})["missing"]
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    found = loaded.parse_native(loaded_program.read_native({}))
    assert is_absent(found["bitsandbytes.native.errors"])


@pytest.mark.parametrize("told", [None, [], {}, {"error": 5}])
def test_no_answer_about_the_binary_is_unknown(told: object) -> None:
    found = loaded.read_native(lambda *_: told)
    assert set(found) == set(loaded.NATIVE_KEYS)
    assert all(isinstance(item, Unknown) for item in found.values())


def test_a_child_that_dies_loading_it_is_the_reason() -> None:
    def call(*_: object) -> object:
        raise WorkerFaultError(FaultKind.SIGNAL, "the child died of SIGSEGV", "")

    for reader in (call, None):
        found = loaded.read_native(reader)
        assert all(isinstance(item, Unknown) for item in found.values())
