"""Each planted fault is seen, named, and survived."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import worker_faults

from cift_probe import worker as module
from cift_probe.worker import FaultKind, Worker, WorkerFaultError

DEADLINE_S = 20.0
SHORT_S = 0.3
# Stands under every CUDA error that torch raises.
TORCH_ADVICE = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(module, "GRACE_S", 0.3)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # the worker must see to it itself
    with Worker() as started:
        yield started


def call(worker: Worker, function: Callable[..., Any], payload: object = None) -> Any:
    return worker.call(f"worker_faults:{function.__name__}", payload, DEADLINE_S)


def fault_of(
    worker: Worker,
    function: Callable[..., Any],
    payload: object = None,
    deadline_s: float = DEADLINE_S,
) -> WorkerFaultError:
    with pytest.raises(WorkerFaultError) as caught:
        worker.call(f"worker_faults:{function.__name__}", payload, deadline_s)
    return caught.value


def comes_true(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + DEADLINE_S
    while not (done := condition()) and time.monotonic() < until:
        time.sleep(0.01)
    return done


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def ends(pid: int) -> bool:
    return comes_true(lambda: is_gone(pid))


@contextlib.contextmanager
def session(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a parent of its own, which the test may kill, and which ends with the test."""
    preamble = (
        "import os, sys, threading, time\nfrom cift_probe.worker import Worker\nw = Worker()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", preamble + code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        try:
            yield parent
        finally:
            parent.kill()


def pid_in(path: Path) -> int:
    assert comes_true(lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())


# ------------------------------------------------------------------------------ plain calls


def test_one_child_serves_many_calls_and_nothing_starts_before(worker: Worker) -> None:
    assert worker.pid is None
    assert worker.num_started == 0
    first = call(worker, worker_faults.tell_pid)
    assert call(worker, worker_faults.tell_pid) == first == worker.pid
    assert first != os.getpid()
    assert worker.num_started == 1


def test_a_large_payload_comes_back_whole(worker: Worker) -> None:
    payload = {"text": "ü" * 5_000_000, "lines": "a\nb\r\n\u2028", "number": [1, 2.5, None, True]}
    assert call(worker, worker_faults.echo, payload) == payload


def test_the_environment_overlays_the_one_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CIFT_TEST_INHERITED", "yes")
    monkeypatch.setenv("CIFT_TEST_HIDDEN", "0")
    with Worker({"CIFT_TEST_HIDDEN": "", "CIFT_TEST_NEW": "green"}) as worker:
        told = [
            call(worker, worker_faults.read_variable, f"CIFT_TEST_{name}")
            for name in ("INHERITED", "HIDDEN", "NEW")
        ]
    assert told == ["yes", "", "green"]
    assert "CIFT_TEST_NEW" not in os.environ


def test_the_child_imports_from_where_the_parent_does(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "only_here.py").write_text("def shout(text): return text.upper()\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert worker.call("only_here:shout", "found", DEADLINE_S) == "FOUND"


def test_the_child_does_not_import_from_the_working_directory(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stray.py").write_text("def shout(text): return text.upper()\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerFaultError, match="No module named 'stray'"):
        worker.call("stray:shout", "lost", DEADLINE_S)


def test_the_child_leads_a_session_that_the_kernel_would_sacrifice_first(worker: Worker) -> None:
    told = call(worker, worker_faults.read_process)
    assert told["session"] == told["group"] == worker.pid
    assert told["oom_score_adj"] == 1000
    assert told["arguments"] == []


def test_programs_that_the_child_runs_do_not_get_its_channels(worker: Worker) -> None:
    assert call(worker, worker_faults.list_files_of_grandchild) == []


# ------------------------------------------------------------------------------ progress


def test_progress_is_heard_during_a_call(worker: Worker) -> None:
    heard: list[str] = []
    texts = ["half", "a\nline"]
    worker.call("worker_faults:tell_progress", texts, DEADLINE_S, on_progress=heard.append)
    worker.call("worker_faults:tell_odd_progress", None, DEADLINE_S, on_progress=heard.append)
    assert heard == ["half", "a\nline", "not UTF-8: ?"]
    assert call(worker, worker_faults.tell_progress, texts) is None


def test_progress_from_many_threads_does_not_mix(worker: Worker) -> None:
    heard: list[str] = []

    def listen(text: str) -> None:
        heard.append(text)
        time.sleep(0.05)  # meanwhile the channel is full and every thread waits to write

    target = "worker_faults:tell_progress_from_threads"
    assert worker.call(target, 8, DEADLINE_S, on_progress=listen) == "answer"
    assert sorted(heard) == [str(number) * 500_000 for number in range(8)]


def test_progress_outside_a_child_does_nothing() -> None:
    module.progress("nobody hears this")
    assert module._Channel.current is None  # noqa: SLF001 - else the line above proves nothing


def test_progress_does_not_extend_the_deadline(worker: Worker) -> None:
    fault = fault_of(worker, worker_faults.progress_without_end, deadline_s=SHORT_S)
    assert fault.kind is FaultKind.TIMEOUT
    assert "still loading" in fault.detail


def test_an_error_of_the_listener_ends_the_child(worker: Worker) -> None:
    def listen(text: str) -> None:
        raise LookupError(text)

    before = call(worker, worker_faults.tell_pid)
    with pytest.raises(LookupError, match="still loading"):
        worker.call("worker_faults:progress_without_end", None, DEADLINE_S, on_progress=listen)
    assert is_gone(before)
    assert call(worker, worker_faults.tell_pid) != before


# ------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("function", "payload", "kind", "words"),
    [
        (worker_faults.segfault, None, FaultKind.SIGNAL, "died of SIGSEGV"),
        (worker_faults.send_self, signal.SIGBUS, FaultKind.SIGNAL, "SIGBUS; a full /dev/shm"),
        (worker_faults.send_self, signal.SIGRTMIN + 2, FaultKind.SIGNAL, "died of signal 36"),
        (worker_faults.send_self, signal.SIGKILL, FaultKind.SIGNAL, "SIGKILL; the kernel's out-of"),
        (worker_faults.leave, 3, FaultKind.EXIT, "exit code 3; its last words: cannot go on"),
        (worker_faults.fill_memory, None, FaultKind.OUT_OF_HOST_MEMORY, "MemoryError"),
        (worker_faults.be_refused_memory, "errno", FaultKind.OUT_OF_HOST_MEMORY, "Cannot allocate"),
        (worker_faults.be_refused_memory, "torch", FaultKind.OUT_OF_HOST_MEMORY, "DefaultCPUAlloc"),
        (worker_faults.abort_for_memory, None, FaultKind.OUT_OF_HOST_MEMORY, "std::bad_alloc"),
        (worker_faults.write_into_the_channel, "\0\n", FaultKind.GARBAGE, "no reply"),
        (worker_faults.write_into_the_channel, "{}\n", FaultKind.GARBAGE, "no reply"),
        (worker_faults.write_into_the_channel, '{"state": 1}\n', FaultKind.GARBAGE, "no reply"),
        (worker_faults.write_into_the_channel, "x", FaultKind.GARBAGE, "no reply"),
        (worker_faults.close_the_channel, None, FaultKind.GARBAGE, "closed the channel"),
        (
            worker_faults.fail_with,
            "CUDA error: device-side assert triggered",
            FaultKind.STICKY,
            "device-side assert",
        ),
        (
            worker_faults.fail_around,
            "CUDA error: an illegal memory access was encountered",
            FaultKind.STICKY,
            "the step failed",
        ),
    ],
)
def test_a_lost_child_is_named_and_replaced(
    worker: Worker,
    function: Callable[..., Any],
    payload: object,
    kind: FaultKind,
    words: str,
) -> None:
    before = call(worker, worker_faults.tell_pid)
    fault = fault_of(worker, function, payload)
    assert fault.kind is kind
    assert words in fault.detail
    assert fault.detail.startswith(f"worker_faults:{function.__name__} ")
    assert str(fault) == fault.detail
    assert worker.pid is None
    assert is_gone(before)
    assert call(worker, worker_faults.tell_pid) != before
    assert worker.num_started == 2


@pytest.mark.parametrize(
    ("function", "payload", "words"),
    [
        (worker_faults.fail, None, "raised: ValueError: the target's own error"),
        (worker_faults.fail_with, "CUDA out of memory. Tried to allocate 2.00 GiB", "2.00 GiB"),
        (worker_faults.fail_with, "CUDA error: out of memory", "CUDA error: out of memory"),
        (worker_faults.fail_unprintably, None, "no such file: ?"),
        (worker_faults.exit_politely, None, "raised: SystemExit: 4"),
        (worker_faults.return_nan, None, "not JSON: ValueError: Out of range float"),
        (worker_faults.return_object, None, "not JSON: TypeError"),
    ],
)
def test_an_ordinary_exception_leaves_the_child_in_place(
    worker: Worker, function: Callable[..., Any], payload: object, words: str
) -> None:
    before = call(worker, worker_faults.tell_pid)
    fault = fault_of(worker, function, payload)
    assert fault.kind is FaultKind.RAISED
    assert words in fault.detail
    assert "Traceback" in fault.stderr_tail
    assert call(worker, worker_faults.tell_pid) == before


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module:run", "No module named 'no_such_module'"),
        ("worker_faults:no_such_function", "no attribute 'no_such_function'"),
        ("worker_faults", "cannot be imported"),
    ],
)
def test_a_missing_target_is_said(worker: Worker, target: str, words: str) -> None:
    with pytest.raises(WorkerFaultError, match=words) as caught:
        worker.call(target, None, DEADLINE_S)
    assert caught.value.kind is FaultKind.RAISED
    assert caught.value.detail.startswith(f"{target} cannot be imported: ")


def test_a_payload_that_is_not_json_reaches_no_child(worker: Worker) -> None:
    with pytest.raises(TypeError):
        call(worker, worker_faults.echo, object())
    with pytest.raises(ValueError, match="Out of range float"):
        call(worker, worker_faults.echo, float("inf"))
    assert worker.num_started == 0
    assert call(worker, worker_faults.echo, 1) == 1


def test_a_line_without_end_does_not_fill_the_session(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(worker, worker_faults.tell_pid)
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 1 << 16)
    fault = fault_of(worker, worker_faults.echo, "x" * (1 << 20))
    assert fault.kind is FaultKind.GARBAGE
    assert "65536 bytes" in fault.detail


def test_a_fault_survives_the_way_between_processes(worker: Worker) -> None:
    fault = fault_of(worker, worker_faults.fail)
    copy = pickle.loads(pickle.dumps(fault))  # noqa: S301 - our own bytes
    assert (copy.kind, copy.detail) == (fault.kind, fault.detail)
    assert copy.stderr_tail == fault.stderr_tail


@pytest.mark.parametrize(
    ("text", "sticky"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("Triton Error [CUDA]: an illegal instruction was encountered", True),
        ("CUDA error: illegal memory access", True),
        ("CUDA error: misaligned address", True),
        ("CUDA error: unspecified launch failure", True),
        ("CUDA error: the launch timed out and was terminated", True),
        ("CUDA error: hardware stack error", True),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("GPU 0000:3B:00.0: GPU has fallen off the bus.", True),
        ("NVML: GPU is lost", True),
        ("CUDA_ERROR_LAUNCH_FAILED", True),
        ("cudaErrorIllegalAddress", True),
        ("CUDA driver error: 719", True),
        ("CUDA error 700 at kernel.cu:12", True),
        (f"CUDA error: out of memory\n{TORCH_ADVICE}", False),
        ("CUDA error: too many resources requested for launch", False),
        ("CUDA error 701", False),
        ("CUDA error 2", False),
        ("CUDA error 7001", False),
        ("CUBLAS_STATUS_NOT_SUPPORTED", False),
        ("DataLoader worker (pid 7) is killed by signal: Illegal instruction.", False),
        ("batch of 700 rows", False),
    ],
)
def test_a_sticky_error_is_told_from_one_that_passes(text: str, sticky: bool) -> None:  # noqa: FBT001 - a parameter of the test
    assert module.is_sticky(text) is sticky


# ------------------------------------------------------------------------------ time


def test_a_hanging_child_is_ended_at_its_deadline_and_tells_where_it_hung(worker: Worker) -> None:
    before = call(worker, worker_faults.tell_pid)
    fault = fault_of(worker, worker_faults.wait_where_the_stack_says_so, deadline_s=SHORT_S)
    assert fault.kind is FaultKind.TIMEOUT
    assert "no answer within 0.3 s" in fault.detail
    assert "in wait_where_the_stack_says_so" in fault.stderr_tail
    assert is_gone(before)
    assert call(worker, worker_faults.tell_pid) != before


def test_a_child_that_ignores_sigterm_is_ended_too(worker: Worker) -> None:
    before = call(worker, worker_faults.tell_pid)
    fault = fault_of(worker, worker_faults.hang_in_spite_of_sigterm, deadline_s=SHORT_S)
    assert fault.kind is FaultKind.TIMEOUT
    assert is_gone(before)
    assert call(worker, worker_faults.tell_pid) != before


def test_a_child_that_does_not_read_is_ended_too(worker: Worker) -> None:
    before = call(worker, worker_faults.tell_pid)
    os.kill(before, signal.SIGSTOP)
    fault = fault_of(worker, worker_faults.echo, "x" * 5_000_000, deadline_s=SHORT_S)
    assert fault.kind is FaultKind.TIMEOUT
    assert is_gone(before)


def test_a_child_that_dies_while_it_is_sent_a_request_is_named(worker: Worker) -> None:
    pid = call(worker, worker_faults.tell_pid)
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    timer.start()
    fault = fault_of(worker, worker_faults.echo, "x" * 5_000_000)
    timer.join()
    assert fault.kind is FaultKind.SIGNAL
    assert "SIGKILL" in fault.detail


def test_a_child_stuck_in_the_kernel_does_not_hang_the_session(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = call(worker, worker_faults.tell_pid)
    with monkeypatch.context() as patch:
        patch.setattr(module, "REAP_S", 0.1)
        patch.setattr(os, "killpg", lambda *_: None)
        patch.setattr(subprocess.Popen, "terminate", lambda _: None)
        # the lifeline would do what the patched calls do not
        os.kill(pid, signal.SIGSTOP)
        patch.setattr(module._Child, "is_dead", lambda _: False)  # noqa: SLF001 - stands for state D
        fault = fault_of(worker, worker_faults.echo, 1, deadline_s=SHORT_S)
    assert fault.kind is FaultKind.TIMEOUT
    assert f"process {pid} survives SIGKILL" in fault.detail
    assert ends(pid)
    assert call(worker, worker_faults.tell_pid) != pid


# ------------------------------------------------------------------------------ output


def test_what_a_library_prints_is_no_reply_and_its_end_is_kept(worker: Worker) -> None:
    assert call(worker, worker_faults.print_much, 100_000) == "real"
    fault = fault_of(worker, worker_faults.segfault)
    assert "Segmentation fault" in fault.stderr_tail
    assert "in segfault" in fault.stderr_tail
    assert "forged" not in fault.stderr_tail
    assert "\0" not in fault.stderr_tail


def test_tail_and_detail_are_bounded(worker: Worker) -> None:
    fault = fault_of(worker, worker_faults.fail_loudly, 100_000)
    assert len(fault.stderr_tail) == module.TAIL_CHARS
    assert len(fault.detail) <= module.DETAIL_CHARS + 100


# ------------------------------------------------------------------------------ processes


def test_what_the_child_started_ends_with_it_at_the_deadline(
    worker: Worker, tmp_path: Path
) -> None:
    path = tmp_path / "pid"
    call(worker, worker_faults.tell_pid)
    fault_of(worker, worker_faults.start_grandchild_and_hang, str(path), 1.0)
    assert ends(pid_in(path))


def test_a_death_is_seen_though_what_the_child_forked_holds_the_channel(
    worker: Worker, tmp_path: Path
) -> None:
    path = tmp_path / "pid"
    fault = fault_of(worker, worker_faults.start_grandchild_and_die, str(path))
    assert fault.kind is FaultKind.SIGNAL
    assert ends(pid_in(path))


def test_a_fork_of_the_child_neither_answers_nor_serves(worker: Worker, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    heard: list[str] = []
    target = "worker_faults:fork_and_return"
    told = worker.call(target, str(path), DEADLINE_S, on_progress=heard.append)
    assert (told, heard) == ("from the child", [])
    assert ends(pid_in(path))
    assert call(worker, worker_faults.tell_pid) == worker.pid
    assert worker.num_started == 1


def test_a_child_that_died_between_calls_is_replaced_quietly(worker: Worker) -> None:
    before = call(worker, worker_faults.tell_pid)
    os.kill(before, signal.SIGKILL)
    assert ends(before)
    assert call(worker, worker_faults.tell_pid) != before


def test_a_child_that_spoke_between_calls_is_replaced(worker: Worker) -> None:
    before = call(worker, worker_faults.tell_pid)
    call(worker, worker_faults.write_into_the_channel_later)
    time.sleep(0.3)
    assert call(worker, worker_faults.tell_pid) != before


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Hear SIGINT, to which a shell without job control makes background processes deaf."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_child_and_is_passed_on(worker: Worker) -> None:
    before = call(worker, worker_faults.tell_pid)
    with pytest.raises(KeyboardInterrupt):
        call(worker, worker_faults.interrupt_parent)
    assert worker.pid is None
    assert is_gone(before)
    assert call(worker, worker_faults.tell_pid) != before


def test_a_retired_child_is_replaced_and_a_closed_worker_stays_closed(worker: Worker) -> None:
    worker.retire("nothing to end yet")
    before = call(worker, worker_faults.tell_pid)
    worker.retire("its memory did not return to the base line")
    assert is_gone(before)
    after = call(worker, worker_faults.tell_pid)
    assert after != before
    worker.close()
    worker.close()
    assert is_gone(after)
    with pytest.raises(RuntimeError, match="closed"):
        call(worker, worker_faults.tell_pid)
    assert worker.num_started == 2


def test_a_worker_that_is_forgotten_takes_its_child_along() -> None:
    worker = Worker()
    pid = call(worker, worker_faults.tell_pid)
    del worker
    gc.collect()
    assert is_gone(pid)


# ------------------------------------------------------------------------------ threads


def test_a_second_call_at_the_same_time_is_refused(worker: Worker) -> None:
    begun = threading.Event()
    results: list[object] = []

    def run() -> None:
        target = "worker_faults:tell_progress_from_threads"
        results.append(worker.call(target, 1, DEADLINE_S, on_progress=lambda _: listen()))

    def listen() -> None:
        begun.set()
        refused.wait(DEADLINE_S)

    refused = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(DEADLINE_S)
    with pytest.raises(RuntimeError, match="one call at a time"):
        call(worker, worker_faults.echo, 1)
    refused.set()
    thread.join()
    assert results == ["answer"]


def test_retiring_from_another_thread_ends_the_call_in_flight(worker: Worker) -> None:
    pid = call(worker, worker_faults.tell_pid)
    timer = threading.Timer(0.2, worker.retire, ("the card is too hot",))
    timer.start()
    with pytest.raises(RuntimeError, match="the card is too hot"):
        call(worker, worker_faults.wait_where_the_stack_says_so)
    timer.join()
    assert is_gone(pid)
    assert call(worker, worker_faults.tell_pid) != pid


def test_retiring_from_the_listener_ends_the_call_in_flight(worker: Worker) -> None:
    target = "worker_faults:progress_without_end"
    with pytest.raises(RuntimeError, match="too hot: still loading"):
        worker.call(
            target, None, DEADLINE_S, on_progress=lambda text: worker.retire(f"too hot: {text}")
        )
    assert worker.pid is None
    assert call(worker, worker_faults.echo, 1) == 1


def test_a_child_outlives_the_thread_that_started_it(worker: Worker) -> None:
    thread = threading.Thread(target=call, args=(worker, worker_faults.tell_pid))
    thread.start()
    thread.join()
    pid = worker.pid
    time.sleep(0.1)
    assert call(worker, worker_faults.tell_pid) == pid


# ------------------------------------------------------------------------------ start


def test_a_python_that_is_not_there_is_said() -> None:
    with Worker(python="/no/such/python") as missing:
        fault = fault_of(missing, worker_faults.echo)
    assert fault.kind is FaultKind.START
    assert "/no/such/python" in fault.detail


def test_a_python_that_ends_at_once_is_said() -> None:
    with Worker(python="/bin/false") as failing:
        fault = fault_of(failing, worker_faults.echo)
    assert fault.kind is FaultKind.START
    assert "/bin/false ended its process with exit code 1" in fault.detail


def test_a_python_that_never_says_hello_is_said(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    slow.chmod(0o755)
    with Worker(python=str(slow), start_deadline_s=SHORT_S) as worker:
        fault = fault_of(worker, worker_faults.echo)
    assert fault.kind is FaultKind.START
    assert "no answer within 0.3 s" in fault.detail
    assert ends(pid_in(tmp_path / "pid"))


# ------------------------------------------------------------------------------ the parent's death


def test_child_and_grandchild_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """The worker's thread is not the main one and C code holds the child's interpreter lock."""
    code = (
        "target = 'worker_faults:start_grandchild_and_hold_the_interpreter_lock'\n"
        "run = lambda: (print(w.call('worker_faults:tell_pid', None, 60), flush=True),"
        " w.call(target, sys.argv[1], 600))\n"
        "threading.Thread(target=run).start()\n"
    )
    with session(code, str(tmp_path / "pid")) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        grandchild = pid_in(tmp_path / "pid")
        assert not is_gone(child)
        parent.kill()
    assert ends(child)
    assert ends(grandchild)


def test_a_child_does_not_outlive_its_parent_though_a_fork_holds_the_lifeline() -> None:
    code = (
        "print(w.call('worker_faults:tell_pid', None, 60), flush=True)\n"
        "pid = os.fork()\n"
        "if pid == 0: time.sleep(600)\n"
        "print(pid, flush=True)\n"
        "w.call('worker_faults:wait_where_the_stack_says_so', None, 600)\n"
    )
    with session(code) as parent:
        assert parent.stdout is not None
        child, fork = int(parent.stdout.readline()), int(parent.stdout.readline())
        parent.kill()
    child_ended = ends(child)
    fork_lives = not is_gone(fork)
    os.kill(fork, signal.SIGKILL)
    assert child_ended
    assert fork_lives


def test_a_parent_that_ends_without_closing_leaves_nothing_behind(tmp_path: Path) -> None:
    code = "print(w.call('worker_faults:tell_pid', None, 60), w.call(*sys.argv[1:3], 60))\n"
    target = "worker_faults:start_grandchild"
    with session(code, target, str(tmp_path / "pid")) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.read().split()]
        assert parent.wait() == 0
    assert len(pids) == 2
    assert all(ends(pid) for pid in pids)


def test_a_fork_of_the_parent_does_not_end_the_child() -> None:
    code = (
        "print(w.call('worker_faults:tell_pid', None, 60), flush=True)\n"
        "if os.fork() == 0: w.close(); sys.exit()\n"
        "os.wait()\n"
        "print(w.call('worker_faults:tell_pid', None, 60), flush=True)\n"
    )
    with session(code) as parent:
        assert parent.stdout is not None
        before, after = parent.stdout.read().split()
    assert before == after


def test_what_the_child_started_is_ended_though_a_fork_holds_the_lifeline(tmp_path: Path) -> None:
    code = (
        "w.call('worker_faults:tell_pid', None, 60)\n"
        "pid = os.fork()\n"
        "if pid == 0: time.sleep(600)\n"
        "print(pid, flush=True)\n"
        "try: w.call('worker_faults:start_grandchild_and_hang', sys.argv[1], 1)\n"
        "except RuntimeError: print('ended', flush=True)\n"
        "time.sleep(600)\n"
    )
    with session(code, str(tmp_path / "pid")) as parent:
        assert parent.stdout is not None
        fork = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ended\n"
        grandchild_ended = ends(pid_in(tmp_path / "pid"))
        fork_lives = not is_gone(fork)
        os.kill(fork, signal.SIGKILL)
    assert grandchild_ended
    assert fork_lives


# ------------------------------------------------------------------------------ host memory


@pytest.mark.parametrize(
    ("entry", "file"),
    [
        ("0::/job\n", "job/memory.events"),
        ("0::/outside/of/the/container\n", "memory.events"),
        ("4:memory:/job\n0::/\n", "memory/job/memory.oom_control"),
        ("4:cpu,memory:/outside\n", "memory/memory.oom_control"),
    ],
)
def test_kills_are_read_from_the_cgroup_of_either_version(
    tmp_path: Path, entry: str, file: str
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("9:name=systemd:/\n" + entry)
    assert module.read_oom_kills(tmp_path) is None
    path = tmp_path / "sys/fs/cgroup" / file
    path.parent.mkdir(parents=True)
    path.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert module.read_oom_kills(tmp_path) == 2


@pytest.mark.parametrize(
    ("counts", "kind", "words"),
    [
        ((4, 4), FaultKind.SIGNAL, "could not be confirmed"),
        ((None, None), FaultKind.SIGNAL, "could not be confirmed"),
        ((None, 4), FaultKind.SIGNAL, "could not be confirmed"),
        ((4, None), FaultKind.SIGNAL, "could not be confirmed"),
        ((4, 5), FaultKind.OUT_OF_HOST_MEMORY, "killed by the kernel because host memory ran out"),
    ],
)
def test_a_kill_for_memory_is_a_fact_only_when_the_cgroup_counted_it(
    worker: Worker,
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int | None, int | None],
    kind: FaultKind,
    words: str,
) -> None:
    call(worker, worker_faults.tell_pid)
    told = iter(counts)
    monkeypatch.setattr(module, "read_oom_kills", lambda: next(told))
    fault = fault_of(worker, worker_faults.send_self, signal.SIGKILL)
    assert fault.kind is kind
    assert words in fault.detail
