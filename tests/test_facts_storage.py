from pathlib import Path
from types import SimpleNamespace

import pytest

from cift_probe.evidence import Known, Unknown
from cift_probe.facts import storage


@pytest.mark.parametrize(
    ("variables", "path", "origin"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a", "HF_HUB_CACHE"),
        ({"HUGGINGFACE_HUB_CACHE": "/c", "HF_HOME": "/b"}, "/c", "HUGGINGFACE_HUB_CACHE"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/x"}, "/b/hub", "HF_HOME"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub", "XDG_CACHE_HOME"),
        ({"HF_HUB_CACHE": ""}, "/h/.cache/huggingface/hub", "default of huggingface_hub"),
        ({"HF_HOME": "~/m"}, "/h/m/hub", "HF_HOME"),
        ({"HF_HOME": "$HOME/n"}, "/h/n/hub", "HF_HOME"),
    ],
)
def test_the_model_cache_is_found_as_the_hub_library_finds_it(
    variables: dict[str, str], path: str, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/h")
    assert storage.parse_cache(variables) == (Path(path), origin)


def test_free_room_is_read_from_the_nearest_folder_that_exists_and_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(f_bavail=5, f_frsize=1, f_files=9, f_favail=3)

    monkeypatch.setattr("os.statvfs", usage)
    missing = tmp_path / "not/there"
    found = storage.read_storage(
        {"HF_HOME": str(missing), "TMPDIR": str(tmp_path), "TRITON_HOME": str(tmp_path)},
        tmp_path / "work",
    )
    assert set(asked) == {tmp_path}
    assert list(tmp_path.iterdir()) == []
    cache = found["storage.cache.free"]
    assert isinstance(cache, Known)
    assert (cache.value, cache.unit) == (5, "B")
    assert cache.note == f"of {tmp_path}; {missing}/hub does not exist yet"
    temporary = found["storage.temporary.free"]
    assert isinstance(temporary, Known)
    assert temporary.note == ""
    assert [found[f"storage.{name}.path"] for name in ("work", "temporary")] == [
        Known(str(tmp_path / "work"), source="working folder"),
        Known(str(tmp_path), source="TMPDIR"),
    ]


def test_room_that_cannot_be_read_is_unknown_with_the_systems_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("os.statvfs", refuse)
    found = storage.read_storage({}, tmp_path)
    for name in ("work", "cache", "temporary"):
        item = found[f"storage.{name}.free"]
        assert isinstance(item, Unknown)
        assert "Stale file handle" in item.reason


def test_a_working_folder_that_was_removed_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> Path:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "cwd", gone)
    found = storage.read_storage({"HF_HOME": "/b"})
    assert isinstance(found["storage.work.free"], Unknown)
    assert isinstance(found["storage.work.path"], Unknown)


def test_a_user_without_a_home_folder_has_an_unknown_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def homeless(_path: Path) -> Path:
        message = "Could not determine home directory."
        raise RuntimeError(message)

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert isinstance(storage.read_storage({})["storage.cache.path"], Unknown)


def test_a_temporary_folder_that_does_not_exist_is_passed_over(tmp_path: Path) -> None:
    variables = {"TMPDIR": str(tmp_path / "no"), "TEMP": str(tmp_path)}
    assert storage.parse_temporary(variables) == (tmp_path, "TEMP")
    assert storage.parse_temporary({})[1] == "default of the system"


MOUNTS = """\
22 1 0:21 / / rw,relatime - overlay overlay rw
30 22 0:30 / /data rw - nfs4 host:/export rw
31 22 0:31 / /data/my\\040runs rw shared:1 - ext4 /dev/sda1 rw
32 22 0:32 / /da rw - tmpfs tmpfs rw
33 22 0:33 / /data rw - fuse.s3fs s3fs rw
no mount at all
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", "overlay"),
        ("/database", "overlay"),
        ("/data", "fuse.s3fs"),  # mounted last, hides the one below
        ("/data/x", "fuse.s3fs"),
        ("/data/my runs/1", "ext4"),
        ("/da/t", "tmpfs"),
    ],
)
def test_a_folder_lies_on_its_nearest_mount(folder: str, kind: str) -> None:
    assert storage.find_kind(folder, storage.parse_mounts(MOUNTS)) == kind


def test_without_mounts_the_kind_is_unknown(tmp_path: Path) -> None:
    found = storage.read_storage({}, tmp_path, root=tmp_path)
    assert isinstance(found["storage.work.filesystem"], Unknown)
    assert storage.find_kind("/x", []) == ""


def test_whether_a_folder_may_be_written_is_asked_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert storage.read_storage({}, tmp_path)["storage.work.writable"].value is True  # type: ignore[union-attr] # is Known
    monkeypatch.setattr("os.access", lambda path, _mode: Path(path) != tmp_path)
    found = storage.read_storage({"HF_HOME": "/"}, tmp_path)
    assert found["storage.work.writable"].value is False  # type: ignore[union-attr] # as above
    assert found["storage.cache.writable"].value is True  # type: ignore[union-attr] # as above


def test_a_file_system_without_a_fixed_number_of_inodes_has_none_to_run_out_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = SimpleNamespace(f_bavail=5, f_frsize=1, f_files=0, f_favail=0)
    monkeypatch.setattr("os.statvfs", lambda _path: told)
    item = storage.read_storage({}, tmp_path)["storage.work.inodes.free"]
    assert isinstance(item, Known)
    assert item.absent


@pytest.mark.parametrize(
    ("variables", "path"),
    [
        ({"TRITON_CACHE_DIR": "/t", "TRITON_HOME": "/u"}, "/t"),
        ({"TRITON_HOME": "/u"}, "/u/.triton/cache"),
        ({}, "/h/.triton/cache"),
    ],
)
def test_tritons_cache_is_found_as_triton_finds_it(
    variables: dict[str, str], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/h")
    assert storage.parse_kernels(variables)[0] == Path(path)
