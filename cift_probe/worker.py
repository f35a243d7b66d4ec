"""A child process that does all device work, so that the session neither dies nor hangs with it.

`Worker` is the parent's side. The child is this same module, run as a program: it imports a target
("package.module:function"), calls it with a JSON payload and sends back what it returned, in JSON
lines over a socket pair of their own. What libraries print goes to a file, whose end becomes part
of a fault. Needs Linux; knows nothing of torch. Longer than 400 lines, because both ends of a
protocol belong on one page, and every way in which a child can fail costs a few.

However the parent dies, the child dies too: on the hang-up of a lifeline, at which the kernel
itself kills the child's process group, even while C code holds the interpreter lock; and by
PR_SET_PDEATHSIG, should a fork of the parent hold the lifeline open.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

Json: TypeAlias = Any  # a value that JSON can hold
Listener: TypeAlias = Callable[[str], None]

TICK_S = 0.05  # how often a waiting parent looks at the clock and at the child's state
GRACE_S = 1.0  # between SIGTERM and SIGKILL
REAP_S = 5.0  # a process inside a hung driver call outlives SIGKILL; to wait longer is in vain
MAX_LINE_BYTES = 1 << 28  # a child gone wild may not fill the session's memory
TAIL_CHARS = 4000
DETAIL_CHARS = 600
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# Errors after which "the process must be terminated and relaunched" (CUDA Runtime API, cudaError:
# 214, 220, 226, 700, 702, 709, 710, 714-719, 721), by text, name and number. Neighbours such as
# 701 (too many resources) and out of memory leave the process usable. Every CUDA error of torch
# ends in the advice to "enable device-side assertions", hence "assert triggered".
_STICKY = re.compile(
    r"""device-side\ assert\ triggered | illegal\ (memory\ access|instruction\ was)
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
_HINTS = {
    signal.SIGKILL: "; the kernel's out-of-memory killer is the usual sender, which could not be "
    "confirmed from the memory cgroup",
    signal.SIGBUS: "; a full /dev/shm is the usual cause",
    signal.SIGILL: "; a library built for another CPU is the usual cause",
}


class FaultKind(StrEnum):
    """How a call went wrong; after all but RAISED the child is gone."""

    TIMEOUT = "timeout"
    SIGNAL = "signal"
    EXIT = "exit"
    OUT_OF_HOST_MEMORY = "out_of_host_memory"
    GARBAGE = "garbage"
    RAISED = "raised"
    STICKY = "sticky"
    START = "start"


@dataclasses.dataclass(eq=False)
class WorkerFaultError(RuntimeError):
    """The child gave no result: `kind` says how, `detail` what a user is told.

    `stderr_tail` is the end of what the child wrote to stdout and stderr during the call and, when
    the target raised, of the traceback: at most 4000 characters.
    """

    kind: FaultKind
    detail: str
    stderr_tail: str = ""

    def __str__(self) -> str:
        """Return the sentence for the user."""
        return self.detail


class _Reply(msgspec.Struct, frozen=True):
    state: Literal["progress", "result", "fault"]
    value: Json = None
    kind: FaultKind = FaultKind.RAISED
    text: str = ""
    trace: str = ""


def _encode(message: Json, errors: str = "strict") -> bytes:
    # Not msgspec's encoder: it writes NaN as null, and a lost number would pass for "no value".
    plain = msgspec.to_builtins(message)
    return json.dumps(plain, allow_nan=False, ensure_ascii=False).encode(errors=errors) + b"\n"


def is_sticky(text: str) -> bool:
    """Say whether an error text means that its process can never use the device again."""
    return _STICKY.search(text) is not None


def read_oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes of our memory cgroup (v2 or v1) the kernel killed for memory."""
    mounted = root / "sys/fs/cgroup"
    names = {"": "memory.events", "memory": "memory.oom_control"}  # v2's hierarchy has no name
    files = [mounted / controller / name for controller, name in names.items()]  # in a container
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in names.keys() & controllers.split(","):
                files.insert(0, mounted / controller / path.lstrip("/") / names[controller])
    for file in files:
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
            return int(found[1]) if found else None
    return None


def parse_death(returncode: int, num_oom_kills: int | None, output: str) -> tuple[FaultKind, str]:
    """Return kind and words for a child that ended without an answer.

    `returncode` is as in subprocess; `num_oom_kills` is what the cgroup counted during the
    call, None where it does not tell.
    """
    if returncode >= 0:
        last_line = output.rstrip().rpartition("\n")[2][-DETAIL_CHARS:]
        words = f"; its last words: {last_line}" if last_line else ""
        return FaultKind.EXIT, f"ended its process with exit code {returncode}{words}"
    if -returncode == signal.SIGKILL and num_oom_kills:
        what = "was killed by the kernel because host memory ran out"
        return (
            FaultKind.OUT_OF_HOST_MEMORY,
            f"{what} (out-of-memory kills in the cgroup: {num_oom_kills})",
        )
    if -returncode == signal.SIGABRT and "std::bad_alloc" in output:
        return FaultKind.OUT_OF_HOST_MEMORY, "aborted because host memory ran out (std::bad_alloc)"
    if -returncode not in set(signal.Signals):  # real-time signals have no names
        return FaultKind.SIGNAL, f"died of signal {-returncode}"
    number = signal.Signals(-returncode)
    return FaultKind.SIGNAL, f"died of {number.name}{_HINTS.get(number, '')}"


class _Child:
    """One child process, the parent's ends of its channels, and the file that it prints to."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            output = ours.enter_context(tempfile.TemporaryFile())
            # Appending lets the parent truncate between calls without leaving a hole of zeros.
            fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
            (near, far), (held, lifeline) = socket.socketpair(), socket.socketpair()
            for stack, end in ((ours, near), (ours, held), (theirs, far), (theirs, lifeline)):
                stack.enter_context(end)
            near.settimeout(TICK_S)
            # PR_SET_PDEATHSIG follows the starting thread, and only the main one lives to the end.
            in_main = threading.current_thread() is threading.main_thread()
            fds = (far.fileno(), lifeline.fileno())
            self._process = subprocess.Popen(  # noqa: S603 - an interpreter the caller chose
                # -P: the working directory is imported from only where the parent does so.
                [python, "-P", "-u", "-m", "cift_probe.worker"]
                + [str(number) for number in (*fds, os.getpid(), int(in_main))],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone
            )
            self._ours = ours.pop_all()
        self._socket, self._output, self._owner = near, output.fileno(), os.getpid()
        self._last_words: str | None = None
        self.pid = self._process.pid
        self.name = python  # until there is a target to name in messages
        self.stop = ""  # why the call in flight shall end early

    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def is_idle(self) -> bool:
        """Say whether the process lives and is silent, as it must be between calls."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not (poll.poll(0) or self.is_dead())

    def exchange(self, request: bytes, deadline_s: float, on_progress: Listener | None) -> Json:
        """Return the answer to a request; raise WorkerFaultError when there is none."""
        os.ftruncate(self._output, 0)
        before = read_oom_kills()
        until = time.monotonic() + deadline_s
        progress = ""
        for line in self._lines(request):
            if self.stop:
                message = f"{self.name} was ended on the way: {self.stop}"
                raise RuntimeError(message)
            if line is not None:
                try:
                    reply = msgspec.json.decode(line, type=_Reply)
                except msgspec.MsgspecError as error:
                    what = f"sent {line[:80]!r}, which is no reply: {error}"
                    raise self._fault(what) from None
                if reply.state == "result":
                    return reply.value
                if reply.state == "fault":
                    raise self._fault(reply.text, reply.kind, reply.trace)
                progress = f" (last progress: {reply.text})"
                if on_progress is not None:
                    on_progress(reply.text)
            if time.monotonic() >= until:
                what = f"gave no answer within {deadline_s:g} s and was ended{progress}"
                raise self._fault(what, FaultKind.TIMEOUT)
        raise self._obituary(before)

    def _obituary(self, oom_kills_before: int | None) -> WorkerFaultError:
        try:
            returncode = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return self._fault("closed the channel on which its answer should come")
        before, after = oom_kills_before, read_oom_kills()
        num_oom_kills = None if before is None or after is None else after - before
        kind, what = parse_death(returncode, num_oom_kills, self._tail())
        return self._fault(what, kind)

    def _lines(self, request: bytes) -> Iterator[bytes | None]:
        """Send a request; yield the lines that come, and None at every tick; end with the child.

        No deadlock: the child writes nothing before it has read the request to its end.
        """
        unsent, partial = memoryview(request), bytearray()
        while True:
            was_dead = self.is_dead()  # asked first, or the last line could be missed
            try:
                if unsent:
                    unsent = unsent[self._socket.send(unsent) :]
                elif chunk := self._socket.recv(1 << 20):
                    *lines, rest = chunk.split(b"\n")
                    for line in lines:
                        yield bytes(partial + line)
                        partial.clear()
                    partial += rest
                else:
                    return
            except TimeoutError:
                if was_dead:  # a process that it forked holds the other end
                    return
            except ConnectionError:
                return
            if len(partial) > MAX_LINE_BYTES:
                what = f"sent a line of more than {MAX_LINE_BYTES} bytes"
                raise self._fault(what)
            yield None

    def _fault(
        self, what: str, kind: FaultKind = FaultKind.GARBAGE, trace: str = ""
    ) -> WorkerFaultError:
        """Return the fault to raise, the child being ended unless its kind lets it live."""
        if kind is not FaultKind.RAISED and not self.end():
            what += f"; process {self.pid} survives SIGKILL, so it hangs in the kernel or a driver"
        return WorkerFaultError(kind, f"{self.name} {what}", (self._tail() + trace)[-TAIL_CHARS:])

    def _tail(self) -> str:
        if self._last_words is not None:
            return self._last_words
        window = 4 * TAIL_CHARS  # the longest UTF-8 sequence has four bytes
        start = max(0, os.fstat(self._output).st_size - window)
        return os.pread(self._output, window, start).decode(errors="replace")[-TAIL_CHARS:]

    def end(self) -> bool:
        """End the whole process group; say False when the child survives even SIGKILL."""
        if self._last_words is not None or os.getpid() != self._owner:  # a fork of the parent
            return self.is_dead()
        try:
            self._process.terminate()  # faulthandler writes where it stood
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(REAP_S)
            self._last_words = self._tail()
            self._ours.close()
        return self.is_dead()


@dataclasses.dataclass(eq=False)
class Worker(contextlib.AbstractContextManager["Worker"]):
    """Calls functions in a child process; one call at a time, from any thread.

    `environment` overlays the environment that the child inherits; an empty string is set as it
    is. `start_deadline_s` bounds the start of a child, apart from the deadline of a call. Nothing
    is started before the first call; `num_started` counts the children since.
    """

    environment: Mapping[str, str] | None = dataclasses.field(default=None, repr=False)  # tokens
    python: str = dataclasses.field(default=sys.executable, kw_only=True)
    start_deadline_s: float = dataclasses.field(default=60.0, kw_only=True)
    num_started: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        """Own no process yet."""
        self._child: _Child | None = None
        self._busy = threading.Lock()
        self._caller: int | None = None  # the thread whose call is in flight
        self._is_closed = False

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
        request = _encode([target, payload])
        if not self._busy.acquire(blocking=False):
            message = f"{target}: the worker takes one call at a time, and is busy with another"
            raise RuntimeError(message)
        self._caller = threading.get_ident()
        try:
            child = self._idle_child()
            child.name = target
            return child.exchange(request, deadline_s, on_progress)
        except BaseException as error:  # an interrupt, or what on_progress raised, too
            if not (isinstance(error, WorkerFaultError) and error.kind is FaultKind.RAISED):
                self._end_child()
            raise
        finally:
            self._caller = None
            self._busy.release()

    def retire(self, reason: str) -> None:
        """End the child; the next call starts a fresh one.

        A call in flight, of another thread or around this one's `on_progress`, ends in a
        RuntimeError that names the reason.
        """
        child = self._child
        if child is not None:
            child.stop = reason or "retired"
        if self._caller != threading.get_ident():
            with self._busy:
                self._end_child()

    def close(self) -> None:
        """End the child for good; harmless when repeated."""
        self._is_closed = True
        self.retire("the worker was closed")

    def __exit__(self, *_: object) -> None:
        """Close the worker."""
        self.close()

    def _idle_child(self) -> _Child:
        if self._is_closed:
            message = "the worker is closed"
            raise RuntimeError(message)
        if self._child is not None and self._child.is_idle():
            return self._child
        self._end_child()
        paths = [(self.environment or {}).get("PYTHONPATH", ""), *map(os.path.abspath, sys.path)]
        overlay = {**(self.environment or {}), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        try:
            child = self._child = _Child(self.python, {**os.environ, **overlay})
            weakref.finalize(self, child.end)  # which also runs when the interpreter exits
            self.num_started += 1
            child.exchange(b"", self.start_deadline_s, None)
        except (OSError, WorkerFaultError) as error:
            detail = f"the worker process could not be started: {error}"
            fault = WorkerFaultError(FaultKind.START, detail, getattr(error, "stderr_tail", ""))
            raise fault from None
        return child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


class _Channel:
    """The child's end of the socket pair."""

    current: ClassVar[_Channel | None] = None

    def __init__(self, fd: int) -> None:
        self.owner = os.getpid()
        self._fd = fd
        self._lock = threading.Lock()
        self._in_call = False

    def progress(self, text: str) -> None:
        if os.getpid() == self.owner:  # a fork would write into the middle of a line
            with self._lock:
                if self._in_call:
                    self._write(_encode(_Reply("progress", text=text), "replace"))

    def serve(self, line: bytes) -> None:
        """Run a request and send its answer, after which no progress is sent any more."""
        self._in_call = True
        answer = _run(*json.loads(line))
        if os.getpid() != self.owner:
            os._exit(0)  # a fork made by the target came back here
        with self._lock:
            self._in_call = False
            self._write(answer)

    def _write(self, line: bytes) -> None:
        unsent = memoryview(line)
        while unsent:
            unsent = unsent[os.write(self._fd, unsent) :]


def progress(text: str) -> None:
    """In the child, tell `on_progress` how far the running call is; elsewhere, do nothing."""
    if _Channel.current is not None:
        _Channel.current.progress(text)


def _run(target: str, payload: Json) -> bytes:
    stage = "cannot be imported"
    try:
        module, _, name = target.partition(":")
        function = getattr(importlib.import_module(module), name)
        stage = "raised"
        value = function(payload)
        stage = "returned something that is not JSON"
        return _encode(_Reply("result", value))
    except BaseException as error:  # noqa: BLE001 - SystemExit and its like are answers too
        return _encode(_describe(stage, error), "replace")


def _describe(stage: str, error: BaseException) -> _Reply:
    chain = [error]
    while (link := chain[-1].__cause__ or chain[-1].__context__) and link not in chain:
        chain.append(link)
    texts = ["".join(traceback.format_exception_only(link)) for link in chain]
    kind = FaultKind.RAISED
    if any(map(is_sticky, texts)):
        kind = FaultKind.STICKY
    elif any(map(_is_host_memory, chain, texts)):
        kind = FaultKind.OUT_OF_HOST_MEMORY
    text = textwrap.shorten(texts[0], DETAIL_CHARS, placeholder=" ...")
    trace = "".join(traceback.format_exception(error))[-TAIL_CHARS:]
    return _Reply("fault", kind=kind, text=f"{stage}: {text}", trace=trace)


def _is_host_memory(error: BaseException, text: str) -> bool:
    # torch raises a plain RuntimeError that names its allocator.
    refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return refused or isinstance(error, MemoryError) or "DefaultCPUAllocator" in text


def _tie_to_parent(lifeline: int, parent: int, *, by_main_thread: bool) -> None:
    # The kernel sends the chosen signal to the owner when the other end is closed.
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
    os.write(fd, _encode(_Reply("result")))
    with open(fd, "rb", closefd=False) as requests:
        for line in requests:
            channel.serve(line)


if __name__ == "__main__":
    # Targets import this module by its name: run that copy, which then knows the channel.
    importlib.import_module("cift_probe.worker").main()
