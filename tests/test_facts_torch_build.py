import sys
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.facts import torch_build
from cift_probe.stack import build
from cift_probe.worker import FaultKind, WorkerFaultError

Call = Callable[[str, Any, float], Any]
TOLD = {
    "version": "2.11.0+cu130",
    "file": "/site-packages/torch/__init__.py",
    "cuda": "13.0",
    "hip": None,
    "arch_list": ["sm_75", "sm_90", "compute_120"],
    "cxx11_abi": True,
    "cudnn": "9.15.1",
    "nccl": "2.28.9",
    "available": True,
    "count": 1,
    "error": None,
}


def answering(told: object) -> Call:
    def call(target: str, payload: object, deadline_s: float) -> object:
        module, _, function = target.partition(":")
        assert module == build.__name__
        assert callable(getattr(build, function))
        assert payload == {}
        assert deadline_s > 0
        return told

    return call


def read(**changes: object) -> dict[str, Evidence]:
    return torch_build.read_torch_build(answering(TOLD | changes), "gpu0")


def test_the_build_is_told_with_units_and_the_start_belongs_to_the_device() -> None:
    found = read()
    told = {
        key: (item.value, item.unit)
        for key, item in found.items()
        if isinstance(item, Known) and not item.absent
    }
    assert told == {
        "torch.version": ("2.11.0+cu130", "version"),
        "torch.file": ("/site-packages/torch/__init__.py", ""),
        "torch.cuda.version": ("13.0", "version"),
        "torch.arch.list": (["sm_75", "sm_90", "compute_120"], ""),
        "torch.cxx11_abi": (True, ""),
        "torch.cudnn.version": ("9.15.1", "version"),
        "torch.nccl.version": ("2.28.9", "version"),
        "torch.cuda.available[gpu0]": (True, ""),
        "torch.cuda.count[gpu0]": (1, "1"),
    }
    absent = {key for key, item in found.items() if isinstance(item, Known) and item.absent}
    assert absent == {"torch.hip.version", "torch.cuda.error[gpu0]"}


def test_without_a_gpu_label_the_start_is_stored_without_scope() -> None:
    for label in ("", "cpu"):
        assert "torch.cuda.available" in torch_build.read_torch_build(answering(TOLD), label)


def test_a_cpu_wheel_has_no_cuda_and_says_so() -> None:
    found = read(cuda=None, arch_list=None, cudnn=None, nccl=None, available=False, error="no")
    for key in ("torch.cuda.version", "torch.arch.list"):
        item = found[key]
        assert isinstance(item, Known)
        assert item.absent == "this torch was built without CUDA"
    error, available = found["torch.cuda.error[gpu0]"], found["torch.cuda.available[gpu0]"]
    assert isinstance(error, Known)
    assert isinstance(available, Known)
    assert (error.value, available.value, available.note) == ("no", False, "no")


@pytest.mark.parametrize("call", [None, answering(None), answering([1])])
def test_without_a_child_or_an_answer_everything_is_unknown(call: Call | None) -> None:
    for found in (
        torch_build.read_torch_build(call, "gpu0"),
        torch_build.read_torch_device(call, "gpu0"),
    ):
        assert found
        assert all(isinstance(item, Unknown) for item in found.values())


def test_a_fault_of_the_child_is_the_reason_of_every_fact() -> None:
    def call(_target: str, _payload: object, _deadline_s: float) -> object:
        kind = FaultKind.SIGNAL
        raise WorkerFaultError(kind, "the child died of SIGSEGV", "tail")

    for found in (
        torch_build.read_torch_build(call, "gpu0"),
        torch_build.read_torch_device(call, "gpu0"),
    ):
        reasons = {item.reason for item in found.values() if isinstance(item, Unknown)}
        assert reasons == {"the child died of SIGSEGV"}
        assert all(isinstance(item, Unknown) for item in found.values())


def test_torch_that_is_not_installed_is_absent() -> None:
    found = torch_build.read_torch_build(answering({"missing": "torch is not installed"}))
    assert {item.absent for item in found.values() if isinstance(item, Known)} == {
        "torch is not installed"
    }
    assert not any(isinstance(item, Unknown) for item in found.values())


def test_a_field_that_the_child_left_out_is_unknown() -> None:
    told = {key: value for key, value in TOLD.items() if key not in ("cudnn", "cxx11_abi")}
    found = torch_build.read_torch_build(answering(told))
    assert isinstance(found["torch.cudnn.version"], Unknown)
    assert isinstance(found["torch.cxx11_abi"], Unknown)


def test_the_device_is_told_with_units() -> None:
    told = {
        "name": "NVIDIA H200",
        "uuid": "GPU-5e0d",
        "capability": "9.0",
        "total_memory": 150_000_000_000,
        "free_memory": 149_000_000_000,
        "bf16": True,
        "integrated": False,
        "num_multiprocessors": 132,
        "shared_memory": 232448,
    }
    found = torch_build.read_torch_device(answering(told), "gpu1")
    assert {
        key: (item.value, item.unit) for key, item in found.items() if isinstance(item, Known)
    } == {
        "torch.device.name[gpu1]": ("NVIDIA H200", ""),
        "torch.device.uuid[gpu1]": ("GPU-5e0d", ""),
        "torch.device.capability[gpu1]": ("9.0", "capability"),
        "torch.device.memory.total[gpu1]": (150_000_000_000, "B"),
        "torch.device.memory.free[gpu1]": (149_000_000_000, "B"),
        "torch.device.bf16[gpu1]": (True, ""),
        "torch.device.integrated[gpu1]": (False, ""),
        "torch.device.num_multiprocessors[gpu1]": (132, "1"),
        "torch.device.shared_memory[gpu1]": (232448, "B"),
    }


def test_the_cpu_is_no_cuda_device_and_no_child_is_asked() -> None:
    found = torch_build.read_torch_device(None, "cpu")
    assert {item.absent for item in found.values() if isinstance(item, Known)} == {
        "the CPU is no CUDA device"
    }


@pytest.mark.parametrize(
    ("told", "selected", "uuid"),
    [
        ("5e0d-1", None, "GPU-5e0d-1"),
        ("GPU-5e0d-1", "GPU-5e0d-1", "GPU-5e0d-1"),
        ("5e0d-1", "0", "GPU-5e0d-1"),
        ("1111-2", "MIG-1111-2", "MIG-1111-2"),
        ("5e0d-1", "MIG-1111-2", None),
        (None, "0", None),
    ],
)
def test_a_uuid_is_written_as_nvml_writes_it(
    told: str | None, selected: str | None, uuid: str | None
) -> None:
    assert build.parse_uuid(told, selected) == uuid


@pytest.mark.parametrize(
    ("number", "text"), [(91002, "9.10.2"), (90000, "9.0.0"), (8907, "8.9.7"), (8005, "8.0.5")]
)
def test_both_schemes_of_cudnn_numbers_are_read(number: int, text: str) -> None:
    assert build.parse_cudnn(number) == text


def fake_torch(**changes: object) -> SimpleNamespace:
    def is_available() -> bool:
        text = "CUDA initialization: The NVIDIA driver on your system is too old\n(found 11040)."
        warnings.warn(text, UserWarning, stacklevel=1)
        return False

    told: dict[str, object] = {
        "__version__": "2.11.0+cu130",
        "__file__": "torch/__init__.py",
        "version": SimpleNamespace(cuda="13.0", hip=None, debug=False, git_version="70d99e9"),
        "cuda": SimpleNamespace(
            is_available=is_available,
            device_count=lambda: 0,
            nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
        ),
        "backends": SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91501)),
        "_C": SimpleNamespace(_cuda_getArchFlags=lambda: "sm_75 sm_90 compute_90"),
        "compiled_with_cxx11_abi": lambda: True,
        "__config__": SimpleNamespace(show=lambda: "PyTorch built with:\n  - GCC 13.3\n"),
        "accelerator": SimpleNamespace(current_accelerator=lambda: SimpleNamespace(type="cuda")),
    }
    return SimpleNamespace(**(told | changes))


def test_where_cuda_does_not_start_the_reason_and_the_architectures_are_still_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    told = build.read_torch_build({})
    told.pop("xnnpack", None)  # there where another test has imported the real one
    assert told == {
        "version": "2.11.0+cu130",
        "file": "torch/__init__.py",
        "cuda": "13.0",
        "hip": None,
        "arch_list": ["sm_75", "sm_90", "compute_90"],
        "cxx11_abi": True,
        "nccl": "2.28.9",
        "available": False,
        "count": 0,
        "error": "CUDA initialization: The NVIDIA driver on your system is too old (found 11040).",
        "cudnn": "9.15.1",
        "debug": False,
        "git": "70d99e9",
        "xpu": None,
        "accelerator": "cuda",
        "hip_runtime": None,
        "miopen": None,
    }


def test_versions_of_rocm_are_read_from_the_configuration() -> None:
    text = "PyTorch built with:\n  - GCC 11.2\n  - HIP Runtime 6.2.41133\n  - MIOpen 3.2.0\n"
    assert build.parse_rocm(text) == {"hip_runtime": "6.2.41133", "miopen": "3.2.0"}
    assert build.parse_rocm("") == {"hip_runtime": None, "miopen": None}


def refuse() -> None:
    raise RuntimeError


@pytest.mark.parametrize(("current", "told"), [(lambda: None, "none"), (refuse, None)])
def test_an_accelerator_that_is_none_or_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, current: Callable[[], None], told: str | None
) -> None:
    fake = fake_torch(accelerator=SimpleNamespace(current_accelerator=current))
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert build.read_torch_build({})["accelerator"] == told


@pytest.mark.parametrize("settings", [{}, {"allocator_settings": {}}, None])
def test_an_allocator_that_does_not_tell_its_settings(settings: object) -> None:
    memory = SimpleNamespace(_snapshot=lambda: settings)
    assert build._expandable(SimpleNamespace(cuda=SimpleNamespace(memory=memory))) is None  # noqa: SLF001 - its own corner


def test_without_a_warning_the_error_of_starting_cuda_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init() -> None:
        message = "No CUDA GPUs are available"
        raise RuntimeError(message)

    cuda = SimpleNamespace(
        is_available=lambda: False,
        device_count=lambda: 0,
        nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
        init=init,
    )
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda=cuda))
    assert build.read_torch_build({})["error"] == "No CUDA GPUs are available"


def test_a_cudnn_that_does_not_match_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def version() -> int:
        message = "cuDNN version incompatibility"
        raise RuntimeError(message)

    backends = SimpleNamespace(cudnn=SimpleNamespace(version=version))
    monkeypatch.setitem(sys.modules, "torch", fake_torch(backends=backends))
    assert "cudnn" not in build.read_torch_build({})


def test_a_missing_torch_is_told_and_a_broken_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def __init__(self, name: str) -> None:
            self.name = name

        def find_spec(self, name: str, *_rest: object) -> None:
            if name == "torch":
                raise ModuleNotFoundError(name=self.name)

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder("torch")])
    assert build.read_torch_build({}) == {"missing": "torch is not installed"}
    monkeypatch.setattr(sys, "meta_path", [Finder("numpy")])
    with pytest.raises(ModuleNotFoundError):
        build.read_torch_build({})


def test_the_device_is_read_from_torchs_own_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def is_bf16_supported(*, including_emulation: bool) -> bool:
        asked.append(including_emulation)
        return False

    properties = SimpleNamespace(
        name="Tesla T4",
        uuid="aa-bb",
        major=7,
        minor=5,
        total_memory=15_000,
        is_integrated=0,
        multi_processor_count=40,
        shared_memory_per_block_optin=65536,
    )
    cuda = SimpleNamespace(
        get_device_properties={0: properties}.__getitem__,
        mem_get_info={0: (14_000, 15_000)}.__getitem__,
        is_bf16_supported=is_bf16_supported,
        memory=SimpleNamespace(
            _snapshot=lambda: {"allocator_settings": {"expandable_segments": True}}
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda=cuda))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert build.read_torch_device({}) == {
        "name": "Tesla T4",
        "uuid": "GPU-aa-bb",
        "capability": "7.5",
        "total_memory": 15_000,
        "free_memory": 14_000,
        "bf16": False,
        "integrated": False,
        "num_multiprocessors": 40,
        "shared_memory": 65536,
        "expandable_segments": True,
    }
    assert asked == [False]  # emulation is no support


def test_operators_are_told_as_xformers_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    features = {"memory_efficient_attention.fa2F": "available", "is_triton_available": True}
    info = SimpleNamespace(get_features_status=lambda: features)
    monkeypatch.setitem(sys.modules, "xformers", SimpleNamespace(info=info))
    monkeypatch.setitem(sys.modules, "xformers.info", info)
    told = build.read_operators({})
    assert told == {"operators": features | {"is_triton_available": "True"}}
    found = torch_build.read_operators(lambda *_: told)["xformers.operators"]
    assert isinstance(found, Known)
    assert found.value["memory_efficient_attention.fa2F"] == "available"


def test_without_xformers_it_has_no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, name: str, *_rest: object) -> None:
            if name == "xformers":
                raise ModuleNotFoundError(name=name)

    monkeypatch.delitem(sys.modules, "xformers", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder()])
    told = build.read_operators({})
    assert told == {"missing": "xformers is not installed"}
    found = torch_build.read_operators(lambda *_: told)["xformers.operators"]
    assert isinstance(found, Known)
    assert found.absent
    assert isinstance(torch_build.read_operators(None)["xformers.operators"], Unknown)


def test_an_xformers_that_does_not_load_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ModuleType("xformers")
    broken.__path__ = []
    monkeypatch.setitem(sys.modules, "xformers", broken)
    with pytest.raises(ModuleNotFoundError):
        build.read_operators({})
