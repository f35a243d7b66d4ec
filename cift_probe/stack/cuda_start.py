"""Print, as a JSON object, whether the driver's own library starts, and what it tells of devices.

Run as a program of its own (it needs no installed package and no torch), because a failed start
stays with its process. Creates no context and takes no device memory.
Source: CUDA Driver API, cuInit, cuDeviceGetAttribute (numbers of CUdevice_attribute in cuda.h).
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
import uuid
from pathlib import Path
from typing import Any

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_UUID_BYTES = 16
ATTRIBUTES = {
    "integrated": 18,
    "managed": 83,
    "pageable": 88,
    "managed_concurrent": 89,
    "virtual_memory": 102,
}


def read_start() -> dict[str, Any]:
    """Return code and seconds of cuInit, version, path of the library, attributes by device UUID.

    `code` is None where the library cannot be loaded, and `problem` then says why.
    """
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return {"code": None, "problem": str(error), "devices": {}}
    started = time.perf_counter()
    code = int(cuda.cuInit(0))
    found: dict[str, Any] = {"code": code, "seconds": time.perf_counter() - started}
    found |= {"path": _mapped("libcuda.so"), "devices": {}}
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        found["version"] = number.value
    if code == 0:
        found["devices"] = _devices(cuda)
    return found


def _devices(cuda: Any) -> dict[str, dict[str, int]]:
    count = ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(count)):
        return {}
    found = {}
    for index in range(count.value):
        device, raw = ctypes.c_int(), (ctypes.c_ubyte * _UUID_BYTES)()
        failed = cuda.cuDeviceGet(ctypes.byref(device), index)
        if failed or cuda.cuDeviceGetUuid_v2(ctypes.byref(raw), device):
            continue
        found[str(uuid.UUID(bytes=bytes(raw)))] = _attributes(cuda, device)
    return found


def _attributes(cuda: Any, device: Any) -> dict[str, int]:
    found = {}
    for name, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0:
            found[name] = value.value
    return found


def _mapped(name: str) -> str | None:
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return None
    paths = [line[line.find("/") :] for line in lines if f"/{name}" in line]
    return str(Path(paths[0]).resolve()) if paths else None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read_start()))
