"""Print, as a JSON list, the UUIDs of the CUDA devices in CUDA's own order.

Run as a program of its own (it needs no installed package), because the order is fixed by the
environment in which CUDA starts, and because starting CUDA is not for the parent process. Asks
the driver's library alone: no context is created and no device memory is taken.
Source: CUDA Driver API, cuDeviceGetUuid_v2 (a MIG slice's own UUID where it exists).
"""

from __future__ import annotations

import ctypes
import json
import sys
import uuid

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_UUID_BYTES = 16


def read_order() -> list[str]:
    """Return the UUIDs as NVML writes them; raises OSError when the driver does not answer."""
    cuda = ctypes.CDLL(_LIBRARY)
    count = ctypes.c_int()
    _check(cuda.cuInit(0))
    _check(cuda.cuDeviceGetCount(ctypes.byref(count)))
    found = []
    for index in range(count.value):
        raw = (ctypes.c_ubyte * _UUID_BYTES)()
        device = ctypes.c_int()
        _check(cuda.cuDeviceGet(ctypes.byref(device), index))
        _check(cuda.cuDeviceGetUuid_v2(ctypes.byref(raw), device))
        found.append(f"GPU-{uuid.UUID(bytes=bytes(raw))}")
    return found


def _check(status: int) -> None:
    if status:
        message = f"CUDA error {status}"
        raise OSError(message)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read_order()))
