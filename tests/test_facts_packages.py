import json
import sys
from pathlib import Path

import pytest

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.facts import packages
from cift_probe.facts.packages import WheelTags, parse_symbols, parse_version, parse_wheel_tags

NAMES = ("cuda", "torch", "cxx11_abi", "python")
EXTENSION = "flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so"
SYMBOLS = b"\x7fELF\0libc10.so\0libcudart.so.12\0_ZN3c105ErrorC2ENS_14SourceLocationE"


def install(
    folder: Path,
    name: str,
    version: str,
    *,
    files: tuple[str, ...] = (),
    url: str = "",
    metadata: str | None = None,
) -> Path:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nVersion: of the readme\n"
    (info / "METADATA").write_text(text if metadata is None else metadata)
    (info / "RECORD").write_text("".join(f"{path},sha256=x,1\n" for path in files))
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: cp311-cp311-linux_x86_64\n")
    if url:
        (info / "direct_url.json").write_text(json.dumps({"url": url, "archive_info": {}}))
    return info


def built(folder: Path) -> dict[str, object]:
    found = packages.read_packages([str(folder)])
    told: dict[str, object] = {}
    for name in NAMES:
        item = found[f"flash_attn.built.{name}"]
        told[name] = item.value if isinstance(item, Known) else "unknown"
    return told


def value(item: Evidence) -> object:
    assert isinstance(item, Known), item
    assert not item.absent, item
    return item.value


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        (
            "flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl",
            WheelTags("12", "2.8", cxx11_abi=True),
        ),
        ("2.5.5+cu118torch2.2cxx11abifalse", WheelTags("11.8", "2.2", cxx11_abi=False)),
        (
            "flash_attn-2.7.4.post1+cu124torch2.5.1cxx11abiFALSE-cp311-cp311-win_amd64.whl",
            WheelTags("12.4", "2.5.1", cxx11_abi=False),
        ),
        ("flash_attn-2.8.3+cu130torch2.9-cp312-cp312-linux.whl", WheelTags("13.0", "2.9", None)),
        ("2.8.3", None),
        ("2.8.3+cu12", None),
        ("flash_attn-2.8.3.tar.gz", None),
    ],
)
def test_wheel_tags_are_read_from_file_names_and_local_versions(
    text: str, tags: WheelTags | None
) -> None:
    assert parse_wheel_tags(text) == tags


def test_tags_in_the_version_tell_what_it_was_built_for(tmp_path: Path) -> None:
    install(tmp_path, "flash_attn", "2.8.3+cu12torch2.8cxx11abiTRUE", files=(EXTENSION,))
    assert built(tmp_path) == {"cuda": "12", "torch": "2.8", "cxx11_abi": True, "python": "3.12"}
    units = [packages.read_packages([str(tmp_path)])[f"flash_attn.built.{name}"] for name in NAMES]
    assert [item.unit for item in units if isinstance(item, Known)] == [
        "version",
        "version",
        "",
        "version",
    ]


def test_tags_in_the_url_tell_it_too(tmp_path: Path) -> None:
    url = "https://host/v2.7.4/flash_attn-2.7.4%2Bcu124torch2.5.1cxx11abiFALSE-cp311-x.whl"
    install(tmp_path, "flash_attn", "2.7.4", url=url)
    assert built(tmp_path) == {"cuda": "12.4", "torch": "2.5", "cxx11_abi": False, "python": "3.11"}


def test_a_build_from_source_shows_its_abi_and_cuda_in_its_symbols(tmp_path: Path) -> None:
    install(tmp_path, "flash_attn", "2.8.3", files=("flash_attn/__init__.py", EXTENSION))
    (tmp_path / EXTENSION).write_bytes(SYMBOLS + b"NSt7__cxx1112basic_stringIcE\0")
    assert built(tmp_path) == {
        "cuda": "12",
        "torch": "unknown",
        "cxx11_abi": True,
        "python": "3.12",
    }
    (tmp_path / EXTENSION).write_bytes(SYMBOLS + b"Ss\0")
    assert built(tmp_path)["cxx11_abi"] is False


def test_a_tag_without_abi_leaves_that_to_the_symbols(tmp_path: Path) -> None:
    install(tmp_path, "flash_attn", "2.8.3+cu130torch2.9", files=(EXTENSION,))
    (tmp_path / EXTENSION).write_bytes(SYMBOLS + b"Ss\0")
    assert built(tmp_path) == {"cuda": "13.0", "torch": "2.9", "cxx11_abi": False, "python": "3.12"}


def test_a_build_that_says_nothing_is_unknown_with_a_reason(tmp_path: Path) -> None:
    info = install(tmp_path, "flash_attn", "2.8.3", files=(EXTENSION,), url="file:///src/flash")
    (info / "WHEEL").unlink()
    told = built(tmp_path)
    assert told == {"cuda": "unknown", "torch": "unknown", "cxx11_abi": "unknown", "python": "3.12"}
    item = packages.read_packages([str(tmp_path)])["flash_attn.built.torch"]
    assert isinstance(item, Unknown)
    assert "source" in item.reason


def test_the_stable_abi_serves_later_pythons_too(tmp_path: Path) -> None:
    info = install(tmp_path, "flash_attn", "2.8.3", files=(EXTENSION,))
    plain = packages.read_packages([str(tmp_path)])["flash_attn.built.python"]
    (info / "RECORD").write_text("flash_attn_2_cuda.abi3.so,,\n")
    (info / "WHEEL").write_text("Tag: cp39-abi3-linux_x86_64\n")
    stable = packages.read_packages([str(tmp_path)])["flash_attn.built.python"]
    assert isinstance(plain, Known)
    assert isinstance(stable, Known)
    assert (plain.value, plain.note) == ("3.12", "")
    assert (stable.value, stable.note) == ("3.9", "stable ABI: this release and later ones")


def test_damaged_metadata_is_unknown_and_no_crash(tmp_path: Path) -> None:
    info = install(tmp_path, "flash_attn", "2.8.3", metadata="")
    (info / "direct_url.json").write_text("{")
    (info / "RECORD").unlink()
    (info / "WHEEL").unlink()
    assert set(built(tmp_path).values()) == {"unknown"}
    item = packages.read_version("flash_attn", [str(tmp_path)])
    assert isinstance(item, Unknown)
    (info / "direct_url.json").write_text('["url"]')
    assert set(built(tmp_path).values()) == {"unknown"}


def test_what_is_not_installed_is_absent(tmp_path: Path) -> None:
    found = packages.read_packages([str(tmp_path), str(tmp_path / "missing")])
    for key in ("package.torch", "package.flash_attn", "flash_attn.built.cuda"):
        item = found[key]
        assert isinstance(item, Known)
        assert item.absent.endswith("is not installed")
    wheels = found["package.nvidia.wheels"]
    assert isinstance(wheels, Known)
    assert wheels.absent


def test_the_first_installation_on_the_path_counts_and_is_not_imported(tmp_path: Path) -> None:
    install(tmp_path / "a", "huggingface_hub", "1.0")
    install(tmp_path / "b", "huggingface_hub", "2.0")
    (tmp_path / "a/huggingface_hub.py").write_text("raise SystemExit")
    found = packages.read_packages([str(tmp_path / "a"), str(tmp_path / "b")])
    version = found["package.huggingface_hub"]
    assert isinstance(version, Known)
    assert (version.value, version.unit) == ("1.0", "version")


def test_names_are_matched_however_they_are_spelt(tmp_path: Path) -> None:
    install(tmp_path, "Flash.Attn", "2.8.3")
    assert value(packages.read_version("flash_attn", [str(tmp_path)])) == "2.8.3"


def test_reading_packages_imports_none_of_them() -> None:
    before = set(sys.modules)
    packages.read_packages()
    assert not {"torch", "transformers", "bitsandbytes"} & (set(sys.modules) - before)


def test_a_distribution_installed_twice_is_named_with_its_places(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    install(one, "torch", "2.11.0")
    install(two, "torch", "2.9.0")
    install(two, "numpy", "2.0")
    install(two, "Typing.Extensions", "4.1")
    install(two, "typing_extensions", "4.2")
    install(two, "~orch", "2.8")
    (tmp_path / "link").symlink_to(two)
    found = packages.read_packages([str(one), str(two), str(tmp_path / "link"), str(two)])
    assert isinstance(found["package.duplicates"], Known)
    assert "first" in found["package.duplicates"].note
    assert value(found["package.duplicates"]) == [
        {"name": "torch", "versions": ["2.11.0", "2.9.0"], "folders": [str(one), str(two)]},
        {"name": "typing-extensions", "versions": ["4.1", "4.2"], "folders": [str(two), str(two)]},
    ]


def test_nvidia_wheels_are_listed_by_name(tmp_path: Path) -> None:
    install(tmp_path, "nvidia_cudnn_cu13", "9.15.1.9")
    install(tmp_path, "nvidia_nccl_cu13", "2.28.9")
    install(tmp_path, "nvidiafake", "1.0")
    (tmp_path / "nvidia_cublas-13.1.0-py3.12.egg-info").touch()
    assert value(packages.read_packages([str(tmp_path)])["package.nvidia.wheels"]) == {
        "nvidia-cublas": "13.1.0",
        "nvidia-cudnn-cu13": "9.15.1.9",
        "nvidia-nccl-cu13": "2.28.9",
    }


@pytest.mark.parametrize(
    "text", ["", "Name: x\n", "Name: x\n\nVersion: 1.0\n", "Version: not a version\n", "Version:\n"]
)
def test_metadata_without_a_valid_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="its metadata has"):
        parse_version(text)
    with pytest.raises(ValueError, match=r"'1\.x\.y'"):
        parse_version("Version: 1.x.y\n")


@pytest.mark.parametrize(
    ("image", "told"),
    [
        (b"libcudart.so.13\0_ZN3c104cuda9SetDeviceEi\0", ("13", None)),
        (b"_ZNK3c1010TensorImpl3fooENSt7__cxx1112basic_stringIcE\0_ZN3c101fESs\0", ("", True)),
        (b"_ZN3c106detail14torchCheckFailEPKcS2_jRKSs\0", ("", False)),
        (b"_ZN3c105ClassSsomething\0", ("", None)),
        (b"", ("", None)),
    ],
)
def test_symbols_tell_cuda_and_abi(image: bytes, told: tuple[str, bool | None]) -> None:
    assert parse_symbols(image) == told
