import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_nvml import RECORDED

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.facts import cgroup, host

GIB = 1 << 30
KIB = 1 << 10


def value(item: Evidence) -> object:
    assert isinstance(item, Known), item
    assert not item.absent, item
    return item.value


def absent_reason(item: Evidence) -> str:
    assert isinstance(item, Known)
    assert item.value is None
    return item.absent


def read(machine: str) -> dict[str, Evidence]:
    return host.read_host(RECORDED / machine)


def test_a_container_of_cgroup_v2_limits_memory_and_processors() -> None:
    found = read("host-docker-v2")
    # limit 32 GiB, use 12 GiB, of which 2 GiB are page cache that the kernel would drop
    assert value(found["host.memory.available"]) == 22 * GIB
    assert value(found["host.memory.limit"]) == 32 * GIB
    assert value(found["host.memory.total"]) == 60817408 * KIB
    assert value(found["host.cpu.num_usable"]) == 4.0
    assert value(found["host.cpu.num_logical"]) == 8
    assert value(found["host.cpu.num_physical"]) == 4
    assert value(found["host.container"]) == "docker"
    assert value(found["host.os"]) == "Debian GNU/Linux 12 (bookworm)"
    assert value(found["host.kernel"]) == "6.8.0-45-generic"
    assert value(found["host.wsl"]) is False
    assert {item.unit for item in found.values() if isinstance(item, Known)} == {
        "",
        "1",
        "B",
        "version",
    }


def test_a_container_of_cgroup_v1_is_found_below_its_mount() -> None:
    found = read("host-docker-v1")
    assert value(found["host.memory.limit"]) == 16 * GIB
    assert value(found["host.memory.available"]) == 12 * GIB
    assert value(found["host.cpu.num_usable"]) == 1.5
    assert value(found["host.container"]) == "docker"


def test_the_smallest_limit_and_the_least_room_are_sought_in_every_group_above() -> None:
    found = read("host-slurm")
    limit, available = found["host.memory.limit"], found["host.memory.available"]
    assert value(limit) == 64 * GIB
    assert value(available) == 48 * GIB
    assert isinstance(available, Known)
    assert available.source.endswith("job_4711")
    assert value(found["host.cpu.num_usable"]) == 4


def test_a_larger_limit_with_less_room_decides_what_is_available() -> None:
    folder = Path("/x")
    levels = [cgroup.Level(folder, 10, 9), cgroup.Level(folder / "up", 20, 3)]
    found = host._available(Known(100, "B"), levels)  # noqa: SLF001 - no recorded tree has both
    assert (value(found), value(cgroup.read_memory_limit(levels))) == (3, 10)


def test_no_limit_is_absent_and_the_host_decides() -> None:
    found = read("host-no-limit")
    assert absent_reason(found["host.memory.limit"]) == "no cgroup limits memory"
    assert value(found["host.memory.available"]) == 120000000 * KIB
    assert value(found["host.cpu.num_usable"]) == 4
    assert value(found["host.cpu.num_physical"]) == 2
    assert absent_reason(found["host.container"]) == "not in a container"


def test_a_limit_that_cannot_be_read_is_unknown_and_so_is_what_is_available() -> None:
    for machine, reason in (("host-broken", "memory.max"), ("host-unmounted", "not mounted")):
        found = read(machine)
        for key in ("host.memory.limit", "host.memory.available", "host.cpu.num_usable"):
            item = found[key]
            assert isinstance(item, Unknown), (machine, key)
            assert reason in item.reason or "cpu" in item.reason
    assert isinstance(read("host-broken")["host.memory.total"], Unknown)
    assert isinstance(read("host-broken")["host.cpu.model"], Unknown)
    assert isinstance(read("host-broken")["host.cpu.num_logical"], Unknown)


def test_a_limit_whose_use_is_not_told_leaves_available_unknown(tmp_path: Path) -> None:
    for path, text in {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "35 23 0:29 / /cg rw - cgroup2 cgroup2 rw\n",
        "proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 90 kB\n",
        "cg/memory.max": "4096\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert isinstance(host.read_memory(tmp_path)["host.memory.available"], Unknown)
    (tmp_path / "cg/memory.current").write_text("1024\n")
    assert value(host.read_memory(tmp_path)["host.memory.available"]) == 3072
    (tmp_path / "cg/memory.current").write_text("9000\n")
    assert value(host.read_memory(tmp_path)["host.memory.available"]) == 0
    (tmp_path / "proc/self/mountinfo").unlink()
    assert isinstance(host.read_memory(tmp_path)["host.memory.limit"], Unknown)


def test_a_group_outside_of_the_mount_is_the_mount_itself(tmp_path: Path) -> None:
    for path, text in {
        "proc/self/cgroup": "0::/../../other\n",
        "proc/self/mountinfo": "35 23 0:29 / /cg\\040x rw - cgroup2 cgroup2 rw\n",
        "cg x/memory.max": "4096\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert value(host.read_memory(tmp_path)["host.memory.limit"]) == 4096


def test_a_gvisor_sandbox_has_its_own_memory_and_no_groups() -> None:
    found = read("host-gvisor")
    assert value(found["host.container"]) == "gvisor"
    assert value(found["host.memory.available"]) == 8100000 * KIB
    assert absent_reason(found["host.memory.limit"])
    assert value(found["host.cpu.num_usable"]) == 2
    assert isinstance(found["host.cpu.num_physical"], Unknown)


def test_wsl_is_recognised_by_its_kernel() -> None:
    found = read("wsl-4090")
    assert value(found["host.wsl"]) is True
    assert value(found["host.os"]) == "Ubuntu 24.04.1 LTS"
    assert value(found["host.swap.total"]) == 8388608 * KIB
    assert not host.parse_wsl("Linux version 6.8.0-45-generic (buildd@lcy02)")


def test_an_arm_processor_is_named_by_implementer_and_part() -> None:
    found = read("host-grace")
    assert value(found["host.cpu.model"]) == "Arm implementer 0x41, part 0xd4f"
    assert value(found["host.cpu.num_logical"]) == 3
    assert isinstance(found["host.cpu.num_physical"], Unknown)


def test_an_empty_tree_gives_unknowns_and_no_crash(tmp_path: Path) -> None:
    found = host.read_host(tmp_path)
    unknown = {key for key, item in found.items() if isinstance(item, Unknown)}
    assert unknown == {
        "host.cpu.model",
        "host.cpu.num_logical",
        "host.cpu.num_physical",
        "host.cpu.num_usable",
        "host.memory.available",
        "host.memory.total",
        "host.swap.total",
    }


def test_this_machine_is_read_without_an_unknown_memory() -> None:
    found = host.read_host()
    total, available = found["host.memory.total"], found["host.memory.available"]
    assert isinstance(total, Known)
    assert isinstance(available, Known)
    assert 0 < available.value <= total.value


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"APPTAINER_CONTAINER": "/a.sif"}, "apptainer"),
        ({"SINGULARITY_CONTAINER": "/a.sif"}, "apptainer"),
        ({"container": "systemd-nspawn"}, "systemd-nspawn"),
        ({}, ""),
    ],
)
def test_a_container_is_recognised_by_variables(environment: dict[str, str], name: str) -> None:
    assert host.parse_container({"/proc/version": "Linux"}, environment) == name


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("11:memory:/kubepods/burstable/pod1/docker-abc.scope", "kubernetes"),
        ("0::/machine.slice/libpod-ab.scope", "podman"),
        ("0::/system.slice/containerd-x.scope", "containerd"),
        ("0::/lxc.payload.box", "lxc"),
        ("0::/user.slice", ""),
    ],
)
def test_a_container_is_recognised_by_its_group(group: str, name: str) -> None:
    assert host.parse_container({"/proc/self/cgroup": group}, {}) == name


def test_podman_is_recognised_by_its_file() -> None:
    assert host.parse_container({"/run/.containerenv": ""}, {}) == "podman"


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("max\n", None),
        ("4096\n", 4096),
        ("9223372036854771712", None),
        (str(1 << 60), None),
        (str((1 << 60) - 1), (1 << 60) - 1),
        ("0", 0),
    ],
)
def test_a_limit_is_bytes_or_none(text: str, limit: int | None) -> None:
    assert cgroup.parse_limit(text) == limit


@pytest.mark.parametrize("text", ["", "plenty", "-1"])
def test_a_limit_that_is_none_of_these_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|negative"):
        cgroup.parse_limit(text)


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("max 100000", None),
        ("-1\n 100000\n", None),
        ("150000 100000", 1.5),
        ("0 100000", 0.0),
        ("3 1", 3.0),
    ],
)
def test_a_quota_is_processors_or_none(text: str, quota: float | None) -> None:
    assert cgroup.parse_quota(text) == quota


@pytest.mark.parametrize("text", ["", "100000", "100000 0", "a b"])
def test_a_quota_that_is_none_of_these_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not enough|positive|invalid"):
        cgroup.parse_quota(text)


def test_shared_memory_is_measured_and_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    assert (
        value(host.read_shared_memory(tmp_path)["host.shm.size"]) == real.f_blocks * real.f_frsize
    )
    told = SimpleNamespace(f_blocks=10, f_bavail=3, f_bfree=5, f_frsize=4096, f_bsize=1)
    monkeypatch.setattr("os.statvfs", lambda _path: told)
    found = host.read_shared_memory(tmp_path)
    assert value(found["host.shm.size"]) == 40960
    assert value(found["host.shm.free"]) == 12288
    assert value(found["host.shm.writable"]) is True
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_that_refuses_a_file_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_named: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    writable = host.read_shared_memory(tmp_path)["host.shm.writable"]
    assert value(writable) is False
    assert isinstance(writable, Known)
    assert writable.note == "Permission denied"


def test_shared_memory_that_does_not_exist_has_no_room(tmp_path: Path) -> None:
    found = host.read_shared_memory(tmp_path / "shm")
    assert [value(found[f"host.shm.{name}"]) for name in ("size", "free", "writable")] == [
        0,
        0,
        False,
    ]


def test_shared_memory_whose_size_is_refused_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.statvfs", refuse)
    found = host.read_shared_memory(tmp_path)
    assert value(found["host.shm.writable"]) is True
    assert isinstance(found["host.shm.size"], Unknown)
    assert isinstance(found["host.shm.free"], Unknown)


def test_lines_of_another_form_are_no_memberships() -> None:
    text = "garbage\n1:cpu\n:/a\n2:cpu:relative\n3:cpu,memory:/a:b\n0::/c (deleted)\n"
    assert cgroup.parse_memberships(text) == [
        cgroup.Membership(frozenset({"cpu", "memory"}), "/a:b"),
        cgroup.Membership(frozenset(), "/c"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "35 23 0:29 / /cg rw cgroup2 cgroup2 rw",
        "35 23 0:29 / - cgroup2 cgroup2 rw",
        "35 23 0:29 / /cg rw - cgroup2 cgroup2",
        "35 23 0:29 / /cg rw - tmpfs cgroup2 rw",
        "35 23 0:29 / /cg rw - tmpfs cgroup rw",
    ],
)
def test_lines_of_another_form_are_no_mounts(line: str) -> None:
    good = "41 33 0:31 /d /cg\\040x ro - cgroup cgroup rw,cpu,cpuacct"
    expected = cgroup.Mount(1, frozenset({"rw", "cpu", "cpuacct"}), "/d", "/cg x")
    assert cgroup.parse_mounts(f"{line}\n{good}\n") == [expected]
    shortest = "35 23 0:29 / /cg - cgroup2 cgroup2 rw"
    assert cgroup.parse_mounts(shortest) == [cgroup.Mount(2, frozenset(), "/", "/cg")]


def plant(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("group", "limit"), [("/a/b", 50), ("/a", 70), ("/ab", 70), ("/c/b", 70), ("/a/../b", 70)]
)
def test_only_groups_below_the_root_of_the_mount_are_sought_in_it(
    group: str, limit: int, tmp_path: Path
) -> None:
    files = {
        "proc/self/cgroup": f"0::{group}\n",
        "proc/self/mountinfo": "35 23 0:29 /a /cg rw - cgroup2 cgroup2 rw\n",
        "cg/memory.max": "70",
        "cg/b/memory.max": "50",
    }
    found = host.read_memory(plant(tmp_path, files))["host.memory.limit"]
    assert value(found) == limit


def test_each_controller_of_v1_is_sought_in_its_own_group(tmp_path: Path) -> None:
    mounts = ("cpu", "memory", "pids")
    files = {
        "proc/self/cgroup": "3:cpu:/c\n2:memory:/m\n1:pids:/p\n0::/unmounted\n",
        "proc/self/mountinfo": "".join(
            f"4{i} 33 0:31 / /cg/{name} ro - cgroup cgroup rw,{name}\n"
            for i, name in enumerate(mounts)
        ),
        "cg/memory/m/memory.limit_in_bytes": "70",
        "cg/memory/c/memory.limit_in_bytes": "50",
        "cg/memory/p/memory.limit_in_bytes": "40",
        "cg/cpu/c/cpu.cfs_quota_us": "5000",
        "cg/cpu/c/cpu.cfs_period_us": "10000",
        "cg/cpu/m/cpu.cfs_quota_us": "1000",
        "cg/cpu/m/cpu.cfs_period_us": "10000",
    }
    root = plant(tmp_path, files)
    assert value(host.read_memory(root)["host.memory.limit"]) == 70
    assert cgroup.read_cpu_quota(root) == 0.5


def test_the_environment_of_this_process_says_nothing_of_a_recorded_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert value(host.read_host()["host.container"]) == "kubernetes"
    assert absent_reason(read("host-no-limit")["host.container"]) == "not in a container"


def test_a_system_without_proc_is_asked_through_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_text", lambda _root, _path: None)
    monkeypatch.setattr("psutil.cpu_count", lambda *, logical: 7 if not logical else 0)
    monkeypatch.setattr("os.cpu_count", lambda: 9)
    memory = SimpleNamespace(total=100, available=60)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(total=20))
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1, 2})
    found = host.read_host()
    assert value(found["host.memory.total"]) == 100
    assert value(found["host.swap.total"]) == 20
    assert value(found["host.cpu.num_physical"]) == 7
    assert value(found["host.cpu.num_logical"]) == 9
    assert value(found["host.cpu.num_usable"]) == 3
    monkeypatch.setattr("psutil.cpu_count", lambda *, logical: None if not logical else 0)
    monkeypatch.setattr("os.cpu_count", lambda: None)
    found = host.read_host()
    assert isinstance(found["host.cpu.num_physical"], Unknown)
    assert isinstance(found["host.cpu.num_logical"], Unknown)


def test_an_arm_processor_without_a_part_has_no_name() -> None:
    assert "model" not in host.parse_cpuinfo("processor : 0\nCPU implementer : 0x41\n")
    pi = "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd0b\n\nModel : Raspberry Pi 5\n"
    assert host.parse_cpuinfo(pi)["model"] == "Raspberry Pi 5"


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write files below a root; return the root."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_a_limit_above_the_visible_groups_of_v1_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/pod\n",
            "proc/self/mountinfo": "41 33 0:31 / /cg rw - cgroup cgroup rw,memory\n",
            "cg/pod/memory.limit_in_bytes": "9223372036854771712\n",
            "cg/pod/memory.usage_in_bytes": "1000\n",
            "cg/pod/memory.stat": "hierarchical_memory_limit 41943040\ntotal_inactive_file 0\n",
        },
    )
    levels = cgroup.read_memory_levels(root)
    found = cgroup.read_memory_limit(levels)
    assert value(found) == 41943040


@pytest.mark.parametrize("text", ["garbage\n", "0:/no-second-colon\n"])
def test_a_group_file_that_says_nothing_is_no_freedom(tmp_path: Path, text: str) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": text, "proc/self/mountinfo": ""})
    assert isinstance(cgroup.read_memory_limit(cgroup.read_memory_levels(root)), Unknown)
