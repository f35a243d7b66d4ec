"""A child process that does all device work, so that the session neither dies nor hangs with it.

The parent side is `Worker`. The child is this same module, run as a program: it imports a target
("package.module:function"), calls it with a JSON payload and sends back what it returned. The two
talk in JSON lines over pipes of their own; what libraries print goes to a file, whose end becomes
part of a fault. Needs Linux; knows nothing of torch.

Three things end the child with the parent, however the parent dies: the end of the request pipe
while the child is idle; a lifeline pipe, on whose hang-up the kernel itself kills the child's
process group, data-loader processes included, even while C code holds the interpreter lock; and
PR_SET_PDEATHSIG, should a fork of the parent hold the lifeline open.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import fcntl
import importlib
import json
import logging
import os
import re
import select
import selectors
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

FaultKind: TypeAlias = Literal[
    "timeout", "signal", "exit", "out_of_host_memory", "garbage", "raised", "sticky", "start"
]

TICK_S = 0.05  # how often a waiting parent looks at the clock and at the child's state
GRACE_S = 1.0  # between SIGTERM and SIGKILL
REAP_S = 5.0  # a process inside a hung driver call outlives SIGKILL; waiting longer is in vain
CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 28  # a child gone wild may not fill the session's memory
TAIL_CHARS = 4000
DETAIL_CHARS = 600
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

LOGGER = logging.getLogger(__name__)

# Errors after which "the process must be terminated and relaunched" (CUDA Runtime API, cudaError;
# 214, 220, 226, 700, 702, 709, 710, 714-719, 721), by text, name and number. Neighbours such as
# 701 (launch out of resources) and out of memory leave the process usable. Every CUDA error of
# torch advises to "enable device-side assertions", hence "assert triggered".
_STICKY = re.compile(
    r"""device-side\ assert\ triggered | an?\ illegal\ (memory\ access|instruction)
    | misaligned\ address | unspecified\ launch\ failure | hardware\ stack\ error
    | invalid\ program\ counter | global/shared\ address\ space | launch\ timed\ out
    | uncorrectable\ (ECC|NVLink)\ error | fallen\ off\ the\ bus | (gpu|device)\ (is\ )?lost
    | (cudaError|CUDA_ERROR_|hipError)(Assert|Illegal_?(Address|Instruction)|Misaligned_?Address
      |Launch_?(Failure|Failed|Timeout)|Hardware_?Stack_?Error|Invalid_?(Pc|Address_?Space)
      |(ECC|Nvlink)_?Uncorrectable|Contained|Context_?Is_?Destroyed|Tensor_?Memory_?Leak)\b
    | \b(cuda|hip)\w*\ (\w+\ )?error(\ code)?[\ :=(]{1,3}
      (214|220|226|70[029]|71[04-9]|721)\b""",
    re.IGNORECASE | re.VERBOSE,
)

_SIGNAL_HINTS = {
    signal.SIGKILL: "the kernel's out-of-memory killer is the usual sender, which the memory "
    "cgroup did not confirm",
    signal.SIGBUS: "a full /dev/shm is the usual cause",
    signal.SIGILL: "a library built for another CPU is the usual cause",
}


class WorkerFaultError(RuntimeError):
    """The child gave no result; `kind` says how, `detail` what a user is told.

    `stderr_tail` is the end of what the child wrote to stdout and stderr during the call, at most
    4000 characters, followed by the traceback when the target raised.
    """

    def __init__(self, kind: FaultKind, detail: str, stderr_tail: str = "") -> None:
        """Keep the three parts."""
        super().__init__(kind, detail, stderr_tail)
        self.kind = kind
        self.detail = detail
        self.stderr_tail = stderr_tail

    def __str__(self) -> str:
        """Return the sentence for the user."""
        return self.detail


class _Request(msgspec.Struct, frozen=True):
    call: int
    target: str
    payload: Any


class _Hello(msgspec.Struct, frozen=True, tag="hello", tag_field="is"):
    pid: int


class _Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="is"):
    text: str


class _Result(msgspec.Struct, frozen=True, tag="result", tag_field="is"):
    call: int
    value: Any


class _Raised(msgspec.Struct, frozen=True, tag="raised", tag_field="is"):
    call: int
    stage: Literal["import", "call", "result"]
    chain: list[str]
    traceback: str
    host_memory: bool


_Message: TypeAlias = _Hello | _Progress | _Result | _Raised
_decode_message: Callable[[bytes], _Message] = msgspec.json.Decoder(_Message).decode


def _encode(message: msgspec.Struct) -> bytes:
    # Not msgspec's encoder: it writes NaN as null, and a lost number would pass for "no value".
    plain = msgspec.to_builtins(message)
    return json.dumps(plain, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def is_sticky(text: str) -> bool:
    """Say whether an error text means that its process can never use the device again."""
    return _STICKY.search(text) is not None


def parse_oom_kills(text: str) -> int | None:
    """Return `oom_kill` of a `memory.events` (cgroup v2) or `memory.oom_control` (v1) file."""
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def read_oom_kills(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how many processes of our memory cgroup the kernel has killed for memory, or None."""
    candidates = [cgroup / "memory.events", cgroup / "memory/memory.oom_control"]
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                candidates.insert(0, cgroup / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                candidates.insert(0, cgroup / "memory" / path.lstrip("/") / "memory.oom_control")
    for candidate in candidates:
        with contextlib.suppress(OSError):
            kills = parse_oom_kills(candidate.read_text())
            if kills is not None:
                return kills
    return None


class _Child:
    """One child process, the parent's ends of its pipes, and the file that it prints to."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        """Start the process; raises OSError when there is no such python."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:

            def pipe() -> tuple[int, int]:
                read_end, write_end = os.pipe()
                return read_end, write_end

            request_end, self._requests = pipe()
            self._replies, reply_end = pipe()
            lifeline_end, lifeline = pipe()
            for fd in (self._requests, self._replies, lifeline):
                ours.callback(os.close, fd)
            for fd in (request_end, reply_end, lifeline_end):
                theirs.callback(os.close, fd)
            os.set_blocking(self._requests, False)
            self._output = ours.enter_context(tempfile.TemporaryFile())
            # Appending lets the parent truncate between calls without leaving a hole of zeros.
            fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)
            # PR_SET_PDEATHSIG follows the starting thread; only the main one lives to the end.
            starter = "main" if threading.current_thread() is threading.main_thread() else "other"
            ends = (request_end, reply_end, lifeline_end)
            self._process = subprocess.Popen(  # noqa: S603 - an interpreter that the caller chose
                # -P: like the parent, import nothing from the working directory by accident.
                [python, "-P", "-u", "-m", "cift_probe.worker"]
                + [str(part) for part in (*ends, os.getpid(), starter)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=ends,
                start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone
            )
            self._ours = ours.pop_all()
        self.pid = self._process.pid
        self._owner = os.getpid()
        self._partial = bytearray()
        self._last_words: str | None = None
