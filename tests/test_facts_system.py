"""Facts that kernel, C library and firmware tell of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_nvml import RECORDED

from cift_probe.evidence import Evidence, Known, Unknown
from cift_probe.facts import cgroup, processor, system


def value(item: Evidence) -> Any:
    assert isinstance(item, Known), item
    assert not item.absent, item
    return item.value


def is_absent(item: Evidence) -> bool:
    return isinstance(item, Known) and bool(item.absent)


def write(root: Path, **files: str) -> Path:
    """Write files below `root`; "__" stands for "/"."""
    for name, text in files.items():
        place = root / name.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("always [madvise] never", "madvise"),
        ("[default] performance powersave powersupersave", "default"),
        ("default performance", ""),
        ("", ""),
    ],
)
def test_what_is_chosen_stands_in_brackets(text: str, word: str) -> None:
    assert system.parse_choice(text) == word


@pytest.mark.parametrize(
    ("text", "numbers"), [("0", {0}), ("0-3,8\n", {0, 1, 2, 3, 8}), ("0-0", {0}), ("2,1", {1, 2})]
)
def test_ranges_are_read(text: str, numbers: set[int]) -> None:
    assert system.parse_range(text) == numbers


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "0-999999999999", "1,,2", "1-2-3"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|invalid literal"):
        system.parse_range(text)


@pytest.mark.parametrize(
    ("vendor", "product", "kind"),
    [
        ("QEMU", "Standard PC (Q35 + ICH9, 2009)", "kvm"),
        ("Amazon EC2", "p5.48xlarge", "kvm"),
        ("VMware, Inc.", "VMware7,1", "vmware"),
        ("Microsoft Corporation", "Virtual Machine", "hyper-v"),
        ("NVIDIA", "DGXH100", ""),
        ("", "", ""),
    ],
)
def test_a_guest_is_known_by_its_firmware(vendor: str, product: str, kind: str) -> None:
    assert system.parse_guest(vendor, product) == kind


def test_a_limit_is_absent_or_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    told = {resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY, resource.RLIMIT_STACK: 8 << 20}
    monkeypatch.setattr("resource.getrlimit", lambda kind: (told.get(kind, 1024), 0))
    found = system.read_system()
    assert is_absent(found["host.memlock.limit"])
    assert found["host.stack.limit"] == Known(8 << 20, "B", "getrlimit RLIMIT_STACK")
    assert found["host.nofile.limit"] == Known(1024, "1", "getrlimit RLIMIT_NOFILE")


@pytest.mark.parametrize("name", ["musl", ""])
def test_a_c_library_that_is_not_glibc_has_no_version(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: (name, ""))
    assert is_absent(system.read_system()["host.libc.version"])
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    assert system.read_system()["host.libc.version"] == Known(
        "2.36", "version", "platform.libc_ver"
    )


def test_a_real_machine_names_its_maker(tmp_path: Path) -> None:
    write(
        tmp_path,
        sys__class__dmi__id__sys_vendor="NVIDIA\n",
        sys__class__dmi__id__product_name="DGXH100\n",
        proc__cpuinfo="flags\t\t: fpu sse2\n",
        sys__devices__system__node__online="0-1\n",
        sys__module__pcie_aspm__parameters__policy="default [powersave] powersupersave\n",
        sys__kernel__mm__transparent_hugepage__enabled="[always] madvise never\n",
        sys__power__suspend_stats__success="3\n",
        proc__uptime="44330.12 80000.00\n",
        proc__meminfo="SwapFree: 4 kB\n",
        proc__sys__vm__overcommit_memory="0\n",
    )
    found = system.read_system(tmp_path)
    told = {
        "host.machine.vendor": "NVIDIA",
        "host.machine.product": "DGXH100",
        "host.numa.num_nodes": 2,
        "host.pcie.aspm.policy": "powersave",
        "host.hugepages.transparent": "always",
        "host.suspend.count": 3,
        "host.uptime": 44330.12,
        "host.swap.free": 4096,
    }
    assert {key: value(found[key]) for key in told} == told
    assert is_absent(found["host.virtual"])
    assert is_absent(found["host.memory.commit.left"])


def test_a_guest_may_be_known_by_its_processor_alone(tmp_path: Path) -> None:
    write(tmp_path, proc__cpuinfo="flags\t\t: fpu hypervisor sse2\n")
    assert value(system.read_system(tmp_path)["host.virtual"]) == "unnamed"


def test_a_board_without_firmware_names_is_known_by_its_device_tree() -> None:
    found = system.read_system(RECORDED / "jetson-orin")
    assert value(found["host.machine.product"]) == "NVIDIA Jetson AGX Orin Developer Kit"
    assert isinstance(found["host.machine.vendor"], Unknown)


def test_an_empty_tree_is_unknown_or_absent_and_never_a_default(tmp_path: Path) -> None:
    found = system.read_system(tmp_path) | processor.read_processor(tmp_path)
    unknown = {key for key, item in found.items() if isinstance(item, Unknown)}
    assert {
        *("host.machine.vendor", "host.machine.product", "host.numa.num_nodes", "host.uptime"),
        *("host.suspend.count", "host.swap.free", "host.memory.commit.left"),
        *("host.cpu.flags", "host.cpu.vendor", "host.cpu.caches", "host.cpu.vulnerabilities"),
    } <= unknown
    assert is_absent(found["host.pcie.aspm.policy"])
    assert is_absent(found["host.cpu.governor"])


@pytest.mark.parametrize(
    ("meminfo", "left"),
    [
        ("CommitLimit: 100 kB\nCommitted_AS: 40 kB\n", 60 << 10),
        ("CommitLimit: 100 kB\nCommitted_AS: 140 kB\n", 0),
        ("CommitLimit: 100 kB\n", None),
    ],
)
def test_a_kernel_that_commits_strictly_tells_what_is_left(
    meminfo: str, left: int | None, tmp_path: Path
) -> None:
    write(tmp_path, proc__sys__vm__overcommit_memory="2\n", proc__meminfo=meminfo)
    item = system.read_system(tmp_path)["host.memory.commit.left"]
    assert isinstance(item, Unknown) if left is None else value(item) == left


def test_nonsense_in_a_file_is_unknown(tmp_path: Path) -> None:
    write(
        tmp_path,
        sys__devices__system__node__online="none\n",
        sys__module__pcie_aspm__parameters__policy="default\n",
        proc__uptime="never",
    )
    found = system.read_system(tmp_path)
    for key in ("host.numa.num_nodes", "host.pcie.aspm.policy", "host.uptime"):
        assert isinstance(found[key], Unknown)


GROUP = "sys__fs__cgroup__a"
MEMBER = {
    "proc__self__cgroup": "0::/a\n",
    "proc__self__mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({f"{GROUP}__pids.max": "100\n", f"{GROUP}__pids.current": "40\n"}, 60),
        ({f"{GROUP}__pids.max": "100\n", f"{GROUP}__pids.current": "140\n"}, 0),
        ({f"{GROUP}__pids.max": "max\n", f"{GROUP}__pids.current": "40\n"}, None),
        (
            {
                f"{GROUP}__pids.max": "100\n",
                f"{GROUP}__pids.current": "40\n",
                "sys__fs__cgroup__pids.max": "50\n",
                "sys__fs__cgroup__pids.current": "41\n",
            },
            9,
        ),
    ],
)
def test_the_group_that_leaves_the_fewest_tasks_counts(
    files: dict[str, str], left: int | None, tmp_path: Path
) -> None:
    write(tmp_path, **MEMBER, **files)
    item = cgroup.read_pids_left(tmp_path)
    assert is_absent(item) if left is None else value(item) == left


def test_a_limit_on_tasks_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    write(tmp_path, **MEMBER, **{f"{GROUP}__pids.max": "many\n"})
    assert isinstance(cgroup.read_pids_left(tmp_path), Unknown)
    write(tmp_path, proc__self__cgroup="garbage\n")
    assert isinstance(cgroup.read_pids_left(tmp_path), Unknown)


# processor


def test_features_of_two_families_are_read() -> None:
    intel = "vendor_id\t: GenuineIntel\nphysical id\t: 0\nflags\t\t: fpu vme\n\nphysical id\t: 1\n"
    assert processor.parse_features(intel) == {
        "flags": ["fpu", "vme"],
        "vendor": "GenuineIntel",
        "num_sockets": 2,
    }
    assert processor.parse_features("Features\t: fp asimd\n") == {"flags": ["fp", "asimd"]}
    assert processor.parse_features("flags\t:\n") == {}


@pytest.mark.parametrize(("text", "size"), [("512K\n", 512 << 10), ("32M", 32 << 20), ("8", 8)])
def test_a_caches_size_is_read(text: str, size: int) -> None:
    assert processor.parse_cache_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "5T", "-1K", "1.5M"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no size"):
        processor.parse_cache_size(text)


def test_the_processors_folders_are_read(tmp_path: Path) -> None:
    cpu = "sys__devices__system__cpu"
    write(
        tmp_path,
        **{
            f"{cpu}__cpu0__cpufreq__scaling_governor": "powersave\n",
            f"{cpu}__cpu0__cpufreq__cpuinfo_max_freq": "3800000\n",
            f"{cpu}__cpu0__cache__index0__level": "1\n",
            f"{cpu}__cpu0__cache__index0__type": "Data\n",
            f"{cpu}__cpu0__cache__index0__size": "48K\n",
            f"{cpu}__cpu0__cache__index3__level": "3\n",
            f"{cpu}__cpu0__cache__index3__type": "Unified\n",
            f"{cpu}__cpu0__cache__index3__size": "32M\n",
            f"{cpu}__cpu0__cache__uevent": "",
            f"{cpu}__vulnerabilities__meltdown": "Not affected\n",
        },
    )
    found = processor.read_processor(tmp_path)
    assert value(found["host.cpu.governor"]) == "powersave"
    assert found["host.cpu.clock.max"] == Known(3_800_000_000, "Hz", "cpufreq")
    assert value(found["host.cpu.caches"]) == {"L1d": 48 << 10, "L3": 32 << 20}
    assert value(found["host.cpu.vulnerabilities"]) == {"meltdown": "Not affected"}
