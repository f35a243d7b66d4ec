"""Functions that the tests of the worker call in the child: each one is a planted fault."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from cift_probe import worker

HANG_S = 600.0


def echo(payload: Any) -> Any:
    return payload


def tell_pid(_payload: None) -> int:
    return os.getpid()


def read_variable(name: str) -> str | None:
    return os.environ.get(name)


def read_process(_payload: None) -> dict[str, Any]:
    return {
        "session": os.getsid(0),
        "group": os.getpgrp(),
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
        "path": sys.path,
        "arguments": sys.argv[1:],
    }


def segfault(_payload: None) -> None:
    ctypes.string_at(0)


def send_self(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(HANG_S)


def leave(code: int) -> NoReturn:
    sys.stdout.write("cannot go on\n")  # -u: nothing waits in a buffer
    os._exit(code)


def abort_for_memory(_payload: None) -> NoReturn:
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


def wait_where_the_stack_says_so(_payload: None) -> None:
    time.sleep(HANG_S)


def hang_in_spite_of_sigterm(_payload: None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(HANG_S)


def hang_while_holding_the_interpreter_lock(path: str) -> None:
    Path(path).write_text("hangs")
    ctypes.PyDLL(None).sleep(int(HANG_S))  # PyDLL, unlike CDLL, does not release the lock


def progress_without_end(_payload: None) -> NoReturn:
    while True:
        worker.progress("still loading")
        time.sleep(0.01)


def fill_memory(_payload: None) -> int:
    return len(bytearray(1 << 60))


def be_refused_memory(how: str) -> NoReturn:
    if how == "errno":
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    message = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 B"
    raise RuntimeError(message)


def write_into_the_channel(text: str) -> str:
    os.write(_channel_fd(), text.encode())
    return "unharmed"


def write_into_the_channel_later(_payload: None) -> None:
    threading.Timer(0.05, os.write, (_channel_fd(), b"late\n")).start()


def close_the_channel(_payload: None) -> None:
    os.close(_channel_fd())
    time.sleep(HANG_S)


def _channel_fd() -> int:
    channel = worker._Channel.current  # noqa: SLF001 - the fault is to tamper with it
    assert channel is not None
    return channel._fd  # noqa: SLF001 - as above


def print_much(num_lines: int) -> str:
    for _ in range(num_lines):
        sys.stdout.write('{"state": "result", "value": "forged"}\n')
    os.write(2, b"the last words")
    return "real"


def fail(_payload: None) -> None:
    message = "the target's own error"
    raise ValueError(message)


def fail_with(text: str) -> None:
    raise RuntimeError(text)


def fail_around(text: str) -> None:
    try:
        fail_with(text)
    except RuntimeError as error:
        message = "the step failed"
        raise ValueError(message) from error


def fail_unprintably(_payload: None) -> None:
    message = "no such file: \udcff"
    raise FileNotFoundError(message)


def exit_politely(_payload: None) -> None:
    raise SystemExit(4)


def return_nan(_payload: None) -> float:
    return math.nan


def return_object(_payload: None) -> object:
    return object()


def fail_loudly(num_chars: int) -> NoReturn:
    sys.stdout.write("é" * num_chars)
    raise RuntimeError("ü" * num_chars)


def tell_odd_progress(_payload: None) -> None:
    worker.progress("not UTF-8: \udcff")


def tell_progress(texts: list[str]) -> None:
    for text in texts:
        worker.progress(text)


def tell_progress_from_threads(num_threads: int) -> str:
    texts = [str(number) * 500_000 for number in range(num_threads)]
    threads = [threading.Thread(target=worker.progress, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return "answer"


def fork_and_return(path: str) -> str:
    pid = os.fork()
    if pid == 0:
        worker.progress("from the fork")
        return "from the fork"
    Path(path).write_text(str(pid))
    return "from the child"


def start_grandchild(path: str) -> int:
    """Leave a process that holds the child's channel open, like a forked data loader."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(HANG_S)
        os._exit(0)
    Path(path).write_text(str(pid))
    return pid


def start_grandchild_and_hang(path: str) -> None:
    start_grandchild(path)
    time.sleep(HANG_S)


def start_grandchild_and_die(path: str) -> None:
    start_grandchild(path)
    os.kill(os.getpid(), signal.SIGSEGV)


def start_grandchild_and_hold_the_interpreter_lock(path: str) -> None:
    start_grandchild(path)
    ctypes.PyDLL(None).sleep(int(HANG_S))


def list_files_of_grandchild(_payload: None) -> list[str]:
    """List what a program inherits that is started without closing anything."""
    code = "import os; print(*(os.readlink(f'/proc/self/fd/{n}') for n in range(3, 99)"
    code += " if os.path.lexists(f'/proc/self/fd/{n}')))"
    command = [sys.executable, "-c", code]
    return subprocess.check_output(command, text=True, close_fds=False).split()


def interrupt_parent(_payload: None) -> None:
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(HANG_S)
