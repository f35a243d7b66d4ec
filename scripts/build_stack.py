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

ROOT = Path(__file__).resolve().parent.parent
WHEELS = "https://download.pytorch.org/whl"
# PyTorch's index per CUDA release that a driver serves, newest first. Any driver of CUDA 12
# serves the wheel of 12.6 (minor version compatibility), which has the longest list of devices.
INDEX_BY_CUDA = (((13, 0), "cu130"), ((12, 0), "cu126"))
OLDEST_PYTHON = (3, 11)


def main() -> int:
    """Build or renew the environment; return the exit code."""
    options = parse_arguments()
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"python is {found}; install 3.11 or later, or name it: make BOOTSTRAP=python3.12")
        return 2
    index = "cpu" if options.cpu else choose_index(read_driver_cuda())
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


def read_driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA release that the driver serves, or None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0 or not version.value:
        return None
    return version.value // 1000, version.value % 1000 // 10


def choose_index(driver_cuda: tuple[int, int] | None) -> str:
    """Return the name of PyTorch's wheel index for a driver.

    >>> choose_index((12, 2)), choose_index((13, 1)), choose_index(None)
    ('cu126', 'cu130', 'cpu')
    """
    if driver_cuda is None:
        return "cpu"
    for oldest, name in INDEX_BY_CUDA:
        if driver_cuda >= oldest:
            return name
    release = ".".join(map(str, driver_cuda))
    print(f"the driver serves CUDA {release}, older than any wheel of the tested torch: taking the")
    print("CPU build; hint: update the driver to branch 525 or later")
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
