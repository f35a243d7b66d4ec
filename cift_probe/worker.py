"""A child process that does all device work, so that the session neither dies nor hangs with it.

The parent side is `Worker`. The child is this same module, run as a program: it imports a target
("package.module:function"), calls it with a JSON payload and sends back what it returned, in JSON
lines over a socket pair of their own. What libraries print goes to a file, whose end becomes part
of a fault. Needs Linux; knows nothing of torch.

However the parent dies, the child goes too: when idle, at the end of the requests; else on the
hang-up of a lifeline pipe, at which the kernel itself kills the child's process group, even while
C code holds the interpreter lock; and by PR_SET_PDEATHSIG, should a fork of the parent hold the
lifeline open.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import fcntl
import importlib
import json
import os
import re
import select
import signal
import socket
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
from typing import Any, ClassVar, Literal, Self, TypeAlias

import msgspec

FaultKind: TypeAlias = Literal[
    "timeout", "signal", "exit", "out_of_host_memory", "garbage", "raised", "sticky", "start"
]
Json: TypeAlias = Any  # a value that JSON can hold
Listener: TypeAlias = Callable[[str], None]

TICK_S = 0.05  # how often a waiting parent looks at the clock and at the child's state
GRACE_S = 1.0  # between SIGTERM and SIGKILL
REAP_S = 5.0  # a process inside a hung driver call outlives SIGKILL; to wait longer is in vain
CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 28  # a child gone wild may not fill the session's memory
TAIL_CHARS = 4000
DETAIL_CHARS = 600
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# Errors after which "the process must be terminated and relaunched" (CUDA Runtime API, cudaError:
# 214, 220, 226, 700, 702, 709, 710, 714-719, 721), by text, name and number. Neighbours such as
# 701 (too many resources) and out of memory leave the process usable. Every CUDA error of torch
# ends in the advice to "enable device-side assertions", hence "assert triggered".
_STICKY = re.compile(
    r"""device-side\ assert\ triggered | illegal\ (memory\ access|instruction)\ was
    | misaligned\ address | unspecified\ launch\ failure | hardware\ stack\ error
    | invalid\ program\ counter | global/shared\ address\ space | launch\ timed\ out
    | uncorrectable\ (ECC|NVLink)\ error | fallen\ off\ the\ bus | \b(gpu|device)\ (is\ )?lost\b
    | (cudaError|CUDA_ERROR_|hipError)(Assert|Illegal_?(Address|Instruction)|Misaligned_?Address
      |Launch_?(Failure|Failed|Timeout)|Hardware_?Stack_?Error|Invalid_?(Pc|Address_?Space)
      |(ECC|Nvlink)_?Uncorrectable|Contained|Context_?Is_?Destroyed|Tensor_?Memory_?Leak)\b
    | \b(cuda|hip)[a-z]*\ ?(\w+\ )?error(\ code)?[\ :=(]{1,3}(214|2[02]0|226|70[029]|71[04-9]|721)\b
    """,
    re.IGNORECASE | re.VERBOSE,
)
_SIGNAL_HINTS = {
    signal.SIGKILL: "; the kernel's out-of-memory killer is the usual sender, but the memory "
    "cgroup does not confirm it",
    signal.SIGBUS: "; a full /dev/shm is the usual cause",
    signal.SIGILL: "; a library built for another CPU is the usual cause",
}
_UNENDED: list[subprocess.Popen[bytes]] = []  # kept, so that no finaliser warns or waits for them


class WorkerFaultError(RuntimeError):
    """The child gave no result: `kind` says how, `detail` what a user is told.

    `stderr_tail` is the end of what the child wrote to stdout and stderr during the call and, when
    the target raised, of the traceback: at most 4000 characters.
    """

    def __init__(self, kind: FaultKind, detail: str, stderr_tail: str = "") -> None:
        """Keep the three parts."""
        super().__init__(kind, detail, stderr_tail)
        self.kind: FaultKind = kind
        self.detail = detail
        self.stderr_tail = stderr_tail

    def __str__(self) -> str:
        """Return the sentence for the user."""
        return self.detail


class _Message(msgspec.Struct, frozen=True):
    call: int  # 0 is the greeting of a child that is ready


class _Request(_Message, frozen=True):
    target: str
    payload: Json


class _Progress(_Message, frozen=True, tag="progress"):
    text: str


class _Result(_Message, frozen=True, tag="result"):
    value: Json


class _Fault(_Message, frozen=True, tag="fault"):
    kind: Literal["raised", "sticky", "out_of_host_memory"]
    what: str
    trace: str


_REPLY = msgspec.json.Decoder(_Progress | _Result | _Fault)


def _encode(message: _Message) -> bytes:
    # Not msgspec's encoder: it writes NaN as null, and a lost number would pass for "no value".
    plain = msgspec.to_builtins(message)
    return json.dumps(plain, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def is_sticky(text: str) -> bool:
    """Say whether an error text means that its process can never use the device again."""
    return _STICKY.search(text) is not None


def read_oom_kills(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how many processes of our memory cgroup (v2 or v1) the kernel killed for memory."""
    # In a container the path of /proc may lie outside what is mounted: then the root is ours.
    files = [cgroup / "memory.events", cgroup / "memory/memory.oom_control"]
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.insert(0, cgroup / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                files.insert(0, cgroup / "memory" / path.lstrip("/") / "memory.oom_control")
    for file in files:
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
            return int(found[1]) if found else None
    return None


def parse_death(returncode: int, num_oom_kills: int, output: str) -> tuple[FaultKind, str]:
    """Return kind and words for a child that ended without an answer.

    `returncode` is as in subprocess; `num_oom_kills` is what the cgroup counted during the call.
    """
    if returncode >= 0:
        return "exit", f"ended its process with exit code {returncode}"
    if -returncode == signal.SIGKILL and num_oom_kills > 0:
        what = "was killed by the kernel because host memory ran out; kills that the memory cgroup"
        return "out_of_host_memory", f"{what} counted meanwhile: {num_oom_kills}"
    if -returncode == signal.SIGABRT and "std::bad_alloc" in output:
        return "out_of_host_memory", "aborted because host memory ran out (std::bad_alloc)"
    try:
        number = signal.Signals(-returncode)
    except ValueError:  # real-time signals have no names
        return "signal", f"died of signal {-returncode}"
    return "signal", f"died of {number.name}{_SIGNAL_HINTS.get(number, '')}"


class _Child:
    """One child process, the parent's ends of its channels, and the file that it prints to."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            output = ours.enter_context(tempfile.TemporaryFile())
            # Appending lets the parent truncate between calls without leaving a hole of zeros.
            fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
            self._socket, far = socket.socketpair()
            lifeline, held = os.pipe()
            ours.enter_context(self._socket).settimeout(TICK_S)
            ours.callback(os.close, held)
            theirs.enter_context(far)
            theirs.callback(os.close, lifeline)
            # PR_SET_PDEATHSIG follows the starting thread, and only the main one lives to the end.
            in_main = threading.current_thread() is threading.main_thread()
            numbers = map(str, (far.fileno(), lifeline, os.getpid(), int(in_main)))
            self._process = subprocess.Popen(  # noqa: S603 - an interpreter the caller chose
                # -P: the working directory is imported from only where the parent does so.
                [python, "-P", "-u", "-m", "cift_probe.worker", *numbers],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(far.fileno(), lifeline),
                start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone
            )
            self._ours = ours.pop_all()
        self._output = output.fileno()
        self._owner = os.getpid()
        self._partial = bytearray()
        self._last_words: str | None = None
        self.pid = self._process.pid
        self.stop = ""  # why the call in flight shall end early

    def is_dead(self) -> bool:
        try:  # WNOWAIT: until it is reaped, its pid is given to nobody else
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.pid, flags) is not None
        except ChildProcessError:
            return True

    def dies_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not (dead := self.is_dead()) and time.monotonic() < until:
            time.sleep(TICK_S / 5)
        return dead

    def is_idle(self) -> bool:
        """Say whether the process lives and is silent, as it must be between calls."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not (self._partial or poll.poll(0) or self.is_dead())

    def exchange(
        self, request: bytes, call: int, deadline_s: float, on_progress: Listener | None = None
    ) -> _Result | _Fault:
        """Return the answer to a request; raise WorkerFaultError, with the child ended, if none."""
        os.ftruncate(self._output, 0)
        num_oom_kills = read_oom_kills()
        until = time.monotonic() + deadline_s
        progress = ""
        for line in self._lines(request):
            if self.stop:
                message = f"the worker was ended during a call: {self.stop}"
                raise RuntimeError(message)
            if line is not None:
                try:
                    reply = _REPLY.decode(line)
                except msgspec.MsgspecError as error:
                    raise self.fault("garbage", f"sent {line[:80]!r}: {error}") from None
                if reply.call != call:
                    raise self.fault("garbage", f"answered call {reply.call} instead of {call}")
                if not isinstance(reply, _Progress):
                    return reply
                progress = f" (last progress: {reply.text})"
                if on_progress is not None:
                    on_progress(reply.text)
            if time.monotonic() >= until:
                what = f"gave no answer within {deadline_s:g} s and was ended{progress}"
                raise self.fault("timeout", what)
        if not self.dies_within(GRACE_S):
            raise self.fault("garbage", "closed the channel on which its answer should come")
        returncode = self.end() or 0
        kills = (read_oom_kills() or 0) - (num_oom_kills or 0)
        raise self.fault(*parse_death(returncode, kills, self._tail()))

    def _lines(self, request: bytes) -> Iterator[bytes | None]:
        """Send a request; yield the lines that come, and None at every tick; end with the child.

        No deadlock: the child writes nothing before it has read the request to its end.
        """
        unsent = memoryview(request)
        while True:
            was_dead = self.is_dead()  # asked first, or the last line could be missed
            try:
                if unsent:
                    unsent = unsent[self._socket.send(unsent) :]
                else:
                    chunk = self._socket.recv(CHUNK_BYTES)
                    if not chunk:
                        return
                    yield from self._whole_lines(chunk)
            except TimeoutError:
                if was_dead:  # a process that it forked holds the other end
                    return
            except ConnectionError:
                return
            yield None

    def _whole_lines(self, chunk: bytes) -> Iterator[bytes]:
        self._partial += chunk
        if b"\n" in chunk:
            *lines, self._partial = self._partial.split(b"\n")
            yield from map(bytes, lines)
        if len(self._partial) > MAX_LINE_BYTES:
            raise self.fault("garbage", f"sent a line of more than {MAX_LINE_BYTES} bytes")

    def fault(self, kind: FaultKind, what: str, trace: str = "") -> WorkerFaultError:
        """Return the fault to raise, after ending the child unless it may live on."""
        if kind != "raised" and self.end() is None:
            what += f"; process {self.pid} survives SIGKILL, so it hangs in the kernel or a driver"
        return WorkerFaultError(kind, what, (self._tail() + trace)[-TAIL_CHARS:])

    def _tail(self) -> str:
        if self._last_words is not None:
            return self._last_words
        window = 4 * TAIL_CHARS  # the longest UTF-8 sequence has four bytes
        start = max(0, os.fstat(self._output).st_size - window)
        return os.pread(self._output, window, start).decode(errors="replace")[-TAIL_CHARS:]

    def end(self) -> int | None:
        """End the whole process group; return the exit code, None if it survives even SIGKILL."""
        if self._last_words is None and os.getpid() == self._owner:  # not in a fork of the parent
            try:
                if not self.is_dead():
                    os.kill(self.pid, signal.SIGTERM)  # faulthandler writes the stacks
                    self.dies_within(GRACE_S)
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(REAP_S)
                if self._process.returncode is None:
                    _UNENDED.append(self._process)
                self._last_words = self._tail()
                self._ours.close()
        return self._process.returncode


class Worker:
    """Calls functions in a child process; one call at a time, from any thread.

    `environment` overlays the environment that the child inherits; an empty string is set as it
    is. `start_deadline_s` bounds the start of a child, apart from the deadline of a call.

    >>> with Worker({"CUDA_VISIBLE_DEVICES": ""}) as worker:
    ...     worker.call("operator:neg", 3, deadline_s=60.0)
    -3
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        python: str = sys.executable,
        start_deadline_s: float = 60.0,
    ) -> None:
        """Start nothing yet: the first call does."""
        self._overlay = dict(environment or {})
        self._python = python
        self._start_deadline_s = start_deadline_s
        self._child: _Child | None = None
        self._busy = threading.Lock()
        self._caller: int | None = None  # the thread whose call is in flight
        self._is_closed = False
        self._num_calls = 0
        self.num_started = 0

    @property
    def pid(self) -> int | None:
        """The child's process id, or None when there is no child."""
        return self._child.pid if self._child else None

    def call(
        self, target: str, payload: Json, deadline_s: float, *, on_progress: Listener | None = None
    ) -> Json:
        """Return what `target` ("package.module:function") makes of `payload`.

        `on_progress` hears what the target says through `progress`, which does not extend the
        deadline. Raises WorkerFaultError when there is no result (only "raised" leaves the child
        alive), RuntimeError when the worker is closed, busy or retired meanwhile, TypeError or
        ValueError when the payload is not JSON. Any other exception ends the child on its way.
        """
        if not self._busy.acquire(blocking=False):
            message = f"{target}: the worker takes one call at a time, and is busy with another"
            raise RuntimeError(message)
        try:
            self._caller = threading.get_ident()
            self._num_calls += 1
            request = _encode(_Request(self._num_calls, target, payload))
            child = self._idle_child()
            reply = child.exchange(request, self._num_calls, deadline_s, on_progress)
            if isinstance(reply, _Fault):
                raise child.fault(reply.kind, reply.what, reply.trace)
        except WorkerFaultError as fault:
            if fault.kind != "raised":
                self._end_child()
            detail = fault.detail if fault.kind == "start" else f"{target} {fault.detail}"
            raise WorkerFaultError(fault.kind, detail, fault.stderr_tail) from None
        except BaseException:  # an interrupt, or what on_progress raised: leave nothing behind
            self._end_child()
            raise
        finally:
            self._caller = None
            self._busy.release()
        return reply.value

    def retire(self, reason: str) -> None:
        """End the child; the next call starts a fresh one.

        A call in flight, of another thread or around this one's `on_progress`, ends in a
        RuntimeError that names the reason.
        """
        if self._child is not None:
            self._child.stop = reason or "retired"
        if self._caller != threading.get_ident():
            with self._busy:
                self._end_child()

    def close(self) -> None:
        """End the child for good; harmless when repeated."""
        self._is_closed = True
        self.retire("the worker was closed")

    def __enter__(self) -> Self:
        """Return the worker, to be closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the worker."""
        self.close()

    def _idle_child(self) -> _Child:
        if self._is_closed:
            message = "the worker is closed"
            raise RuntimeError(message)
        if self._child is not None and not self._child.is_idle():
            self._end_child()
        return self._child or self._start()

    def _start(self) -> _Child:
        paths = [self._overlay.get("PYTHONPATH", ""), *map(os.path.abspath, sys.path)]
        overlay = {**self._overlay, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        what = f"the worker process could not be started: {self._python}"
        try:
            child = self._child = _Child(self._python, {**os.environ, **overlay})
            weakref.finalize(self, child.end)  # also runs when the interpreter exits
            self.num_started += 1
            child.exchange(b"", 0, self._start_deadline_s)
        except OSError as error:
            raise WorkerFaultError("start", f"{what}: {error}") from None
        except WorkerFaultError as fault:
            raise WorkerFaultError("start", f"{what} {fault.detail}", fault.stderr_tail) from None
        return child

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def progress(text: str) -> None:
    """In the child, tell `on_progress` how far the running call is; elsewhere, do nothing."""
    if _Channel.current is not None:
        _Channel.current.progress(text)


class _Channel:
    """The child's end of the socket."""

    current: ClassVar[_Channel | None] = None

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.call = 0
        self.owner = os.getpid()
        self._lock = threading.Lock()

    def progress(self, text: str) -> None:
        if os.getpid() == self.owner:  # a fork would write into its parent's lines
            with self._lock:
                if self.call:
                    self._write(_encode(_Progress(self.call, _printable(text))))

    def answer(self, line: bytes) -> None:
        with self._lock:
            self.call = 0
            self._write(line)

    def _write(self, line: bytes) -> None:
        unsent = memoryview(line)
        while unsent:
            unsent = unsent[os.write(self.fd, unsent) :]


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _run(channel: _Channel, line: bytes) -> bytes:
    request = msgspec.json.decode(line, type=_Request)
    channel.call = request.call
    stage = "cannot be imported"
    try:
        module, _, name = request.target.partition(":")
        function = getattr(importlib.import_module(module), name)
        stage = "raised"
        value = function(request.payload)
        stage = "returned something that is not JSON"
        return _encode(_Result(request.call, value))
    except BaseException as error:  # noqa: BLE001 - SystemExit and its like are answers too
        return _encode(_describe(request.call, stage, error))


def _describe(call: int, stage: str, error: BaseException) -> _Fault:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    texts = ["".join(traceback.format_exception_only(link)) for link in chain]
    kind: Literal["raised", "sticky", "out_of_host_memory"] = "raised"
    if any(map(is_sticky, texts)):
        kind = "sticky"
    elif any(map(_is_host_memory, chain, texts)):
        kind = "out_of_host_memory"
    text = textwrap.shorten(texts[0], DETAIL_CHARS, placeholder=" ...")
    trace = "".join(traceback.format_exception(error))[-TAIL_CHARS:]
    return _Fault(call, kind, _printable(f"{stage}: {text}"), _printable(trace))


def _is_host_memory(error: BaseException, text: str) -> bool:
    out_of_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
    # torch raises a plain RuntimeError that names its allocator.
    return out_of_memory or isinstance(error, MemoryError) or "DefaultCPUAllocator" in text


def _tie_to_parent(lifeline: int, parent: int, *, by_main_thread: bool) -> None:
    # The kernel sends the chosen signal to the pipe's owner when the other end is closed.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    if by_main_thread:
        import ctypes  # the parent has no use for it

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if os.getppid() != parent or poll.poll(0):  # it died before all this
        os._exit(0)


def main() -> None:
    """Serve calls until the requests end; `sys.argv` is what `_Child` wrote."""
    fd, lifeline, parent, by_main_thread = map(int, sys.argv[1:])
    del sys.argv[1:]
    for inherited in (fd, lifeline):
        os.set_inheritable(inherited, False)  # noqa: FBT003 - its signature knows no keyword
    _tie_to_parent(lifeline, parent, by_main_thread=bool(by_main_thread))
    with contextlib.suppress(OSError):  # for want of memory, rather this process than the session
        Path("/proc/self/oom_score_adj").write_text("1000")
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    _Channel.current = channel = _Channel(fd)
    channel.answer(_encode(_Result(0, None)))
    for line in open(fd, "rb", closefd=False):
        answer = _run(channel, line)
        if os.getpid() != channel.owner:
            os._exit(0)  # a fork that the target made came back here
        channel.answer(answer)


if __name__ == "__main__":
    # Targets import this module by its name: run that copy, which then knows the channel.
    importlib.import_module("cift_probe.worker").main()
