"""Functions that the worker's tests call in the child: each is one planted fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from cift_probe import worker


def echo(payload: Any) -> Any:
    return payload


def tell_pid(_payload: Any) -> int:
    return os.getpid()


def print_much(_payload: Any) -> str:
    os.write(1, b'{"returned": "forged"}\n' * 20_000)
    sys.stdout.write("to stdout as well\n")
    sys.stdout.flush()
    return "real"


def tell_progress(_payload: Any) -> None:
    worker.progress("half")
    worker.progress("done")


def segfault(_payload: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def kill_self(_payload: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(_payload: Any) -> None:
    os._exit(3)


def hang(_payload: Any) -> None:
    time.sleep(600)


def hang_and_refuse_to_end(_payload: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def fill_memory(_payload: Any) -> None:
    message = "cannot allocate 80 GiB"
    raise MemoryError(message)


def write_garbage(_payload: Any) -> None:
    os.write(worker._ANSWER[0], b"\x00 not a message\n")  # noqa: SLF001 - the planted fault


def fail(_payload: Any) -> None:
    message = "the target's own error"
    raise ValueError(message)


def device_assert(_payload: Any) -> None:
    message = "CUDA error: device-side assert triggered"
    raise RuntimeError(message)


def out_of_device_memory(_payload: Any) -> None:
    message = "CUDA out of memory. Tried to allocate 2.00 GiB"
    raise RuntimeError(message)


def start_grandchild_and_hang(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(path).write_text(str(child.pid))
    time.sleep(600)


def interrupt_parent(_payload: Any) -> None:
    threading.Timer(0.2, os.kill, (os.getppid(), signal.SIGINT)).start()
    time.sleep(600)
