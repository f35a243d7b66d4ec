"""A child process that does the work which may crash, hang or be killed; without torch.

The session calls functions in the child by name. Requests and replies are JSON lines on two
pipes of their own, so that nothing a library prints can garble them. Whatever ends the child
becomes a `WorkerFaultError` that says what happened; the next call starts a fresh child.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self

import msgspec


class FaultKind(StrEnum):
    """What happened to a call. After all kinds but RAISED the child is gone."""

    TIMEOUT = "timeout"
    SIGNAL = "signal"
    EXIT = "exit"
    OUT_OF_HOST_MEMORY = "out_of_host_memory"
    GARBAGE = "garbage"
    RAISED = "raised"
    STICKY = "sticky"
    START = "start"


_TAIL_BYTES = 4096
_CHUNK_BYTES = 65536
_GRACE_S = 2.0
_LOOK_S = 0.5
_ENV_PATH = "CIFT_WORKER_PATH"
_ENV_PARENT = "CIFT_WORKER_PARENT"
# Errors after which the CUDA context of a process is gone for good: CUDA Runtime API,
# cudaError_t 700, 702, 710, 714 to 719 and 214, and the driver's words for a lost device.
_STICKY = re.compile(
    r"device-side assert|illegal memory access|illegal instruction|misaligned address|"
    r"unspecified launch failure|launch timed out|hardware stack error|invalid program counter|"
    r"uncorrectable ECC|GPU is lost|fallen off the bus|cudaError(?:Assert|IllegalAddress)",
    re.IGNORECASE,
)


class WorkerFaultError(RuntimeError):
    """A call that brought no result: what happened, in one sentence, and the child's last words."""

    def __init__(self, kind: FaultKind, detail: str, stderr_tail: str = "") -> None:
        """Describe a fault of `kind`."""
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.stderr_tail = stderr_tail


class _Message(msgspec.Struct, omit_defaults=True):
    """One line from the child: exactly one of these fields is set."""

    hello: int = 0
    progress: str = ""
    returned: msgspec.Raw = msgspec.Raw(b"")
    raised: str = ""
    memory: bool = False
    traceback: str = ""


class Worker:
    """One child process at a time, started when it is needed, replaced when it is lost."""

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        python: str = sys.executable,
        start_deadline_s: float = 60.0,
    ) -> None:
        """Prepare a worker whose child sees `environment` on top of this process's."""
        self._environment = dict(environment or {})
        self._python = python
        self._start_deadline_s = start_deadline_s
        self._child: _Child | None = None
        self._lock = threading.Lock()
        self.num_started = 0
        _LIVE.add(self)

    @property
    def pid(self) -> int | None:
        """The process id of the child, or None when there is none."""
        return None if self._child is None else self._child.process.pid

    def call(
        self,
        target: str,
        payload: Any,
        deadline_s: float,
        *,
        on_progress: Callable[[str], None] | None = None,
    ) -> Any:
        """Call "module:function" with one JSON value in the child and return its JSON value.

        Raises WorkerFaultError when there is no result within `deadline_s` seconds, and
        RuntimeError when another thread is using this worker.
        """
        if not self._lock.acquire(blocking=False):
            message = "this worker is busy with another call; use one worker per thread"
            raise RuntimeError(message)
        try:
            child = self._ready()
            child.send({"target": target, "payload": payload})
            return self._reply(child, target, deadline_s, on_progress or _ignore)
        except BaseException as error:
            # an interrupted child would answer the next caller with this call's result
            if not isinstance(error, WorkerFaultError) or error.kind is not FaultKind.RAISED:
                self._end()
            raise
        finally:
            self._lock.release()

    def retire(self, reason: str) -> None:
        """End the child, for `reason`; the next call starts a fresh one."""
        del reason  # for the reader of the calling line
        self._end()

    def close(self) -> None:
        """End the child; may be called again."""
        self._end()

    def __enter__(self) -> Self:
        """Return the worker itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the child."""
        self.close()

    def _ready(self) -> _Child:
        if self._child is not None and self._child.process.poll() is None:
            return self._child
        self._end()
        try:
            self._child = _Child(self._python, self._environment)
        except OSError as error:
            detail = f"{self._python} could not be started: {error}"
            raise WorkerFaultError(FaultKind.START, detail) from error
        self.num_started += 1
        child = self._child
        try:
            hello = child.receive(time.monotonic() + self._start_deadline_s)
        except (TimeoutError, EOFError, ValueError) as error:
            tail = child.tail()
            detail = f"the child process did not start: {_last_line(tail) or type(error).__name__}"
            raise WorkerFaultError(FaultKind.START, detail, tail) from error
        if not hello.hello:
            raise WorkerFaultError(
                FaultKind.START, "the child process said something else than hello"
            )
        return child

    def _reply(
        self, child: _Child, target: str, deadline_s: float, on_progress: Callable[[str], None]
    ) -> Any:
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                message = child.receive(deadline)
            except TimeoutError:
                detail = f"{target} did not end within {deadline_s:g} s and was stopped"
                raise WorkerFaultError(FaultKind.TIMEOUT, detail, child.tail()) from None
            except EOFError:
                raise child.epitaph(target) from None
            except ValueError as error:
                detail = f"{target}: the child process answered with garbage: {error}"
                raise WorkerFaultError(FaultKind.GARBAGE, detail, child.tail()) from error
            if message.progress:
                on_progress(message.progress)
            elif message.raised:
                raise _raised(target, message)
            elif message.returned:
                return msgspec.json.decode(message.returned)
            else:
                detail = f"{target}: the child process answered with an empty message"
                raise WorkerFaultError(FaultKind.GARBAGE, detail, child.tail())

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """A running child process and the pipes to it."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives with the child
        request_read, self._request = os.pipe()
        self._answer, answer_write = os.pipe()
        self._buffer = b""
        self._oom_kills = _read_oom_kills()
        surroundings = {
            **os.environ,
            **environment,
            _ENV_PATH: os.pathsep.join(sys.path),
            _ENV_PARENT: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        command = [python, "-c", _BOOT, str(request_read), str(answer_write)]
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=surroundings,
                pass_fds=(request_read, answer_write),
                start_new_session=True,  # Ctrl-C is the parent's to handle; the group ends as one
            )
        except OSError:
            self._close_pipes()
            self._output.close()
            raise
        finally:
            os.close(request_read)
            os.close(answer_write)
        os.set_blocking(self._answer, False)

    def send(self, request: Any) -> None:
        """Write one request; a child that is gone is noticed by `receive`."""
        line = msgspec.json.encode(request) + b"\n"
        with contextlib.suppress(BrokenPipeError):
            view = memoryview(line)
            while view:  # the child reads whole requests before it writes, so this ends
                view = view[os.write(self._request, view) :]

    def receive(self, deadline: float) -> _Message:
        """Return the next message; raises TimeoutError, EOFError, ValueError for garbage."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answer, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError
                if not selector.select(min(remaining, _LOOK_S)):
                    # what the child started may hold the pipe open after the child is gone
                    if self.process.poll() is not None:
                        raise EOFError
                    continue
                chunk = os.read(self._answer, _CHUNK_BYTES)
                if not chunk:
                    raise EOFError
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return msgspec.json.decode(line, type=_Message)
        except msgspec.DecodeError as error:
            message = f"{line[:80]!r} ({error})"
            raise ValueError(message) from error

    def epitaph(self, target: str) -> WorkerFaultError:
        """Say what ended a child that closed its pipe."""
        try:
            code = self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return WorkerFaultError(
                FaultKind.GARBAGE, f"{target}: the child closed its pipe", self.tail()
            )
        tail = self.tail()
        if code >= 0:
            detail = f"{target}: the child process ended with exit code {code}"
            return WorkerFaultError(FaultKind.EXIT, detail, tail)
        name = signal.Signals(-code).name
        if -code == signal.SIGKILL:
            return self._killed(target, tail)
        detail = f"{target}: the child process was ended by {name}"
        return WorkerFaultError(FaultKind.SIGNAL, detail, tail)

    def tail(self) -> str:
        """Return the end of what the child printed."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _TAIL_BYTES))
        return self._output.read().decode(errors="replace")

    def end(self) -> None:
        """Stop the child and all it started: politely first, then for certain."""
        self._close_pipes()
        for number, grace in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
            if self.process.poll() is not None:
                break
            self._signal_group(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        self._signal_group(signal.SIGKILL)  # what it started may have outlived it
        self._output.close()

    def _killed(self, target: str, tail: str) -> WorkerFaultError:
        before, after = self._oom_kills, _read_oom_kills()
        if before is not None and after is not None and after > before:
            detail = f"{target}: the kernel killed the child for lack of host memory (cgroup)"
            return WorkerFaultError(FaultKind.OUT_OF_HOST_MEMORY, detail, tail)
        detail = (
            f"{target}: the child process was ended by SIGKILL; the kernel does that when host "
            "memory runs out, which could not be confirmed here"
        )
        return WorkerFaultError(FaultKind.SIGNAL, detail, tail)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _close_pipes(self) -> None:
        for descriptor in (self._request, self._answer):
            with contextlib.suppress(OSError):
                os.close(descriptor)


_LIVE: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for worker in list(_LIVE):
        worker.close()


def is_sticky(text: str) -> bool:
    """Tell whether an error text means that the CUDA context of its process is gone for good."""
    return _STICKY.search(text) is not None


def _raised(target: str, message: _Message) -> WorkerFaultError:
    detail = f"{target}: {message.raised}"
    kind = FaultKind.RAISED
    if message.memory:
        kind, detail = (
            FaultKind.OUT_OF_HOST_MEMORY,
            f"{target}: host memory ran out ({message.raised})",
        )
    elif is_sticky(message.raised):
        kind = FaultKind.STICKY
        detail += "; the CUDA context of that process is lost, a new one is started"
    return WorkerFaultError(kind, detail, message.traceback)


def _read_oom_kills() -> int | None:
    """Return how often the kernel has killed in this process's cgroup, or None if not told."""
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.split(":", 2)[2] for line in entries if line.startswith("0::"))
        text = Path(f"/sys/fs/cgroup{own}/memory.events").read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])
    except (OSError, StopIteration, KeyError, ValueError):
        return None


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _ignore(_text: str) -> None:
    """Tell nobody."""


# ---- the child's side ----

_BOOT = f"""
import os, sys
sys.path[:] = os.environ.pop({_ENV_PATH!r}).split(os.pathsep)
from cift_probe.worker import serve
serve(int(sys.argv[1]), int(sys.argv[2]))
"""
_PR_SET_PDEATHSIG = 1
_ANSWER: list[int] = []
_WRITING = threading.Lock()


def progress(text: str) -> None:
    """Tell the caller, from inside a call, how far it is; does nothing outside a child."""
    if _ANSWER:
        _write(_Message(progress=text))


def serve(request: int, answer: int) -> None:
    """Answer requests until the parent closes the pipe: the child's main loop."""
    _die_with_parent()
    _ANSWER.append(answer)
    _write(_Message(hello=1))
    with os.fdopen(request, "rb") as requests:
        for line in requests:
            _write(_carry_out(msgspec.json.decode(line)))


def _carry_out(request: Any) -> _Message:
    try:
        module, _, name = request["target"].partition(":")
        result = getattr(import_module(module), name)(request["payload"])
        return _Message(returned=msgspec.Raw(msgspec.json.encode(result)))
    except MemoryError as error:
        return _Message(raised=f"MemoryError: {error}", memory=True, traceback=_trace())
    except Exception as error:  # noqa: BLE001 - whatever a target raises is the caller's to judge
        text = f"{type(error).__name__}: {error}"
        return _Message(raised=text, traceback=_trace())


def _trace() -> str:
    return traceback.format_exc()[-_TAIL_BYTES:]


def _write(message: _Message) -> None:
    line = msgspec.json.encode(message) + b"\n"
    with _WRITING:
        view = memoryview(line)
        while view:
            view = view[os.write(_ANSWER[0], view) :]


def _die_with_parent() -> None:
    # The signal is sent when the thread that started us ends, so a worker is used from the
    # thread that started it; the closed request pipe ends an idle child in any case.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[_ENV_PARENT]):
        raise SystemExit(0)  # the parent ended before we could ask to be told
