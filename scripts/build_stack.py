"""Build a virtual environment with the tested stack, its torch chosen for the driver found.

    python scripts/build_stack.py [--venv FOLDER] [--cpu] [--dev]

Needs nothing but python >= 3.11 with venv. Exit code 2 with one line when that is not there or
when an installation fails. Runs in an instant when nothing has changed since the last time.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parent.parent
WHEELS = "https://download.pytorch.org/whl"
# PyTorch's indices, newest first: the driver's CUDA release that one needs, and the capabilities
# that it serves. Within CUDA 12 any driver serves any wheel (minor version compatibility); wheels
# of CUDA 13 dropped what is older than Turing, those of 12.6 do not know Blackwell.
INDICES = (
    ("cu130", (13, 0), (7, 5), (99, 0)),
    ("cu128", (12, 0), (10, 0), (99, 0)),
    ("cu126", (12, 0), (5, 0), (9, 0)),
)
OLDEST_PYTHON = (3, 11)
Pair: TypeAlias = tuple[int, int]


def main() -> int:
    """Build or renew the environment; return the exit code."""
    options = parse_arguments()
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"python is {found}; install 3.11 or later, or name it: make BOOTSTRAP=python3.12")
        return 2
    index = "cpu" if options.cpu else choose_index(*read_driver())
    folder = Path(options.venv).absolute()
    extras = "train,dev" if options.dev else "train"
    stamp, wanted = folder / "cift-stack.txt", describe(index, extras)
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    print(f"building {folder.name}: torch for {index}, extras {extras}", flush=True)
    try:
        if not (folder / "bin" / "python").exists():
            venv.create(folder, with_pip=True)
        install(folder, ["torch"], index_options(index))
        install(folder, ["-e", f"{ROOT}[{extras}]"], [])
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"could not build {folder}: {error}; mend that and run the command again")
        return 2
    stamp.write_text(wanted)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venv", default=".venv", help="folder of the environment")
    parser.add_argument("--cpu", action="store_true", help="a CPU build of torch, whatever is here")
    parser.add_argument("--dev", action="store_true", help="the tools of the project's own tests")
    return parser.parse_args()


def read_driver() -> tuple[Pair | None, list[Pair]]:
    """Return the newest CUDA release that the driver serves, and every device's capability.

    None and no device where there is no driver.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, []
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0 or not version.value:
        return None, []
    release = version.value // 1000, version.value % 1000 // 10
    if library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return release, []
    return release, [read_capability(library, device) for device in range(count.value)]


def read_capability(library: ctypes.CDLL, device: int) -> Pair:
    """Return major and minor compute capability (cuda.h, CU_DEVICE_ATTRIBUTE 75 and 76)."""
    value = ctypes.c_int(0)
    found = []
    for attribute in (75, 76):
        library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        found.append(value.value)
    return found[0], found[1]


def choose_index(driver_cuda: Pair | None, capabilities: list[Pair]) -> str:
    """Return the name of the PyTorch wheel index for a driver and all devices.

    >>> choose_index((12, 2), [(8, 9)]), choose_index((13, 1), [(7, 0)]), choose_index(None, [])
    ('cu126', 'cu126', 'cpu')
    """
    if driver_cuda is None:
        return "cpu"
    for name, needs, oldest, newest in INDICES:
        if driver_cuda >= needs and all(oldest <= item <= newest for item in capabilities):
            return name
    release = ".".join(map(str, driver_cuda))
    devices = ", ".join(".".join(map(str, item)) for item in capabilities) or "none told"
    print(
        f"no wheel of the tested torch serves a driver of CUDA {release} with devices of capability"
    )
    print(f"{devices}: taking the CPU build; hint: update the driver, or hide a device")
    return "cpu"


def index_options(name: str) -> list[str]:
    """Return pip's options for an index; none where pip's own configuration must serve."""
    url = f"{WHEELS}/{name}"
    try:
        urllib.request.urlopen(f"{url}/torch/", timeout=5).close()  # noqa: S310 - a constant https URL
    except (urllib.error.URLError, TimeoutError) as error:
        print(f"{url} does not answer ({error}); taking torch from pip's own sources", flush=True)
        return []
    return ["--index-url", url]


def install(folder: Path, what: list[str], options: list[str]) -> None:
    """Install packages under the constraints; raises CalledProcessError."""
    python = str(folder / "bin" / "python")
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*command, *constraints, *options, *what], check=True)  # noqa: S603 - own list


def describe(index: str, extras: str) -> str:
    """Return what an environment was built from, to tell whether it is still true."""
    sources = [ROOT / "constraints.txt", ROOT / "pyproject.toml"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return f"{index} {extras} {digest} {sys.version_info[:2]}\n"


if __name__ == "__main__":
    raise SystemExit(main())
