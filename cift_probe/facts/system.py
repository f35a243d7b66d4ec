"""What the kernel and the C library say of this host: limits, pages, links, virtual or real.

Every reader takes the root of the file system, so that a recorded tree stands in for a machine.
Sources: proc(5), getrlimit(2), and the kernel's admin guide (cgroup-v2 "pids.max", "Transparent
Hugepage Support", "overcommit-accounting", pcie_aspm, "System Suspend").
"""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

from cift_probe.evidence import Evidence, Known, Unknown, absent
from cift_probe.facts import cgroup
from cift_probe.facts.host import read_meminfo
from cift_probe.facts.processor import parse_features

_ROOT = Path("/")
_LIMITS = (
    ("host.memlock.limit", "RLIMIT_MEMLOCK", "B"),
    ("host.nofile.limit", "RLIMIT_NOFILE", "1"),
    ("host.nproc.limit", "RLIMIT_NPROC", "1"),
    ("host.stack.limit", "RLIMIT_STACK", "B"),
    ("host.core.limit", "RLIMIT_CORE", "B"),
    ("host.address_space.limit", "RLIMIT_AS", "B"),
)
_MOST_CPUS = 1 << 14  # NR_CPUS of the largest kernels is half of this
_STRICT = 2  # vm.overcommit_memory: never grant more than swap and a share of memory
_GUESTS = (
    ("kvm", "kvm"),
    ("qemu", "kvm"),
    ("vmware", "vmware"),
    ("virtualbox", "virtualbox"),
    ("xen", "xen"),
    ("microsoft corporation", "hyper-v"),
    ("amazon ec2", "kvm"),
    ("google compute", "kvm"),
)


def parse_choice(text: str) -> str:
    """Return the word in brackets, as /sys marks what is chosen; empty where none is.

    >>> parse_choice("always [madvise] never")
    'madvise'
    """
    match = re.search(r"\[([\w-]{1,40})\]", text)
    return match[1] if match else ""


def parse_range(text: str) -> set[int]:
    """Return the numbers of a list of ranges ("0-3,8"); raises ValueError for another form."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high <= low + _MOST_CPUS:
            message = f"{part!r} is no range"
            raise ValueError(message)
        found.update(range(low, high + 1))
    return found


def parse_guest(vendor: str, product: str) -> str:
    """Return which kind of virtual machine the firmware's names stand for; empty for none known."""
    text = f"{vendor} {product}".lower()
    return next((name for word, name in _GUESTS if word in text), "")


def read_system(root: Path = _ROOT) -> dict[str, Evidence]:
    """Return what kernel, C library and firmware say of the host, by name."""
    return {
        **{key: _limit(name, unit) for key, name, unit in _LIMITS},
        **_c_library(),
        **_firmware(root),
        **_pages(root),
        "host.pids.left": cgroup.read_pids_left(root),
        "host.platform": Known(platform.platform(), source="platform.platform"),
        "host.architecture": Known(platform.machine(), source="uname"),
        "host.python.bits": Known(sys.maxsize.bit_length() + 1, "1", "sys.maxsize"),
        "host.python.build": Known(" ".join(sys.version.split()), source="sys.version"),
        "host.numa.num_nodes": _nodes(root),
        "host.pcie.aspm.policy": _chosen(root, "sys/module/pcie_aspm/parameters/policy"),
        "host.suspend.count": _count(root, "sys/power/suspend_stats/success"),
        "host.uptime": _uptime(root),
    }


def _c_library() -> dict[str, Evidence]:
    name, version = platform.libc_ver()
    source = "platform.libc_ver"
    if name != "glibc":
        other = absent(f"the C library is {name or 'not glibc'}", source)
        return {"host.libc.version": other}
    return {"host.libc.version": Known(version, "version", source)}


def _firmware(root: Path) -> dict[str, Evidence]:
    vendor, product = (
        _text(root, f"sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")
    )
    tree = (_text(root, "proc/device-tree/model") or "").strip("\0 \n")
    source = "/sys/class/dmi/id"
    nothing = Unknown("the firmware's names are not shown here", source)
    told: dict[str, Evidence] = {
        "host.machine.vendor": Known(vendor.strip(), source=source) if vendor else nothing,
        "host.machine.product": (
            Known(product.strip(), source=source)
            if product
            else Known(tree, source="/proc/device-tree/model")
            if tree
            else nothing
        ),
    }
    guest = parse_guest(vendor or "", product or "")
    flags = parse_features(_text(root, "proc/cpuinfo") or "").get("flags", [])
    if guest or (isinstance(flags, list) and "hypervisor" in flags):
        told["host.virtual"] = Known(guest or "unnamed", source="firmware and processor flags")
    else:
        told["host.virtual"] = absent("no sign of a virtual machine", "firmware, processor flags")
    return told


def _pages(root: Path) -> dict[str, Evidence]:
    told = read_meminfo(root)
    source = "/proc/meminfo"
    free = told.get("SwapFree")
    return {
        "host.swap.free": (
            Known(free, "B", source)
            if free is not None
            else Unknown("there is no SwapFree", source)
        ),
        "host.hugepages.transparent": _chosen(root, "sys/kernel/mm/transparent_hugepage/enabled"),
        "host.page.size": Known(os.sysconf("SC_PAGE_SIZE"), "B", "sysconf"),
        "host.memory.commit.left": _commit(root, told),
    }


def _commit(root: Path, told: dict[str, int]) -> Evidence:
    source = "/proc/sys/vm/overcommit_memory"
    mode = (_text(root, source.lstrip("/")) or "").strip()
    if not mode:
        return Unknown("the kernel does not show how it commits memory", source)
    if mode != str(_STRICT):
        return absent(f"the kernel overcommits (mode {mode})", source)
    limit, used = told.get("CommitLimit"), told.get("Committed_AS")
    if limit is None or used is None:
        return Unknown("the kernel commits strictly, and does not tell how much", "/proc/meminfo")
    note = "vm.overcommit_memory is 2: an allocation beyond it is refused, whatever is free"
    return Known(max(0, limit - used), "B", "/proc/meminfo CommitLimit", note=note)


def _nodes(root: Path) -> Evidence:
    source = "/sys/devices/system/node/online"
    text = _text(root, source.lstrip("/"))
    if text is None:
        return Unknown("the kernel does not show memory nodes", source)
    try:
        return Known(len(parse_range(text)), "1", source)
    except ValueError as error:
        return Unknown(str(error), source)


def _chosen(root: Path, path: str) -> Evidence:
    text = _text(root, path)
    if text is None:
        return absent("this kernel has no such setting", f"/{path}")
    word = parse_choice(text)
    return Known(word, source=f"/{path}") if word else Unknown("no choice is marked", f"/{path}")


def _count(root: Path, path: str) -> Evidence:
    text = (_text(root, path) or "").strip()
    if not text.isdecimal():
        return Unknown("the kernel does not count them here", f"/{path}")
    return Known(int(text), "1", f"/{path}")


def _uptime(root: Path) -> Evidence:
    match = re.match(r"\d{1,12}(?:\.\d{1,6})?", _text(root, "proc/uptime") or "")
    if match is None:
        return Unknown("the kernel does not tell", "/proc/uptime")
    return Known(float(match[0]), "s", "/proc/uptime")


def _limit(name: str, unit: str) -> Evidence:
    source = f"getrlimit {name}"
    try:
        import resource
    except ImportError:
        return absent(f"{sys.platform} has no such limit", source)
    soft, _ = resource.getrlimit(getattr(resource, name))
    return (
        absent("no limit", source) if soft == resource.RLIM_INFINITY else Known(soft, unit, source)
    )


def _text(root: Path, path: str) -> str | None:
    try:
        return (root / path).read_text(errors="replace")
    except OSError:
        return None
