"""Each planted fault is seen, named, and survived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cift_probe.worker import FaultKind, Worker, WorkerFaultError

DEADLINE_S = 20.0


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker() as started:
        yield started


def fault_of(worker: Worker, name: str, deadline_s: float = DEADLINE_S) -> WorkerFaultError:
    with pytest.raises(WorkerFaultError) as caught:
        worker.call(f"worker_faults:{name}", None, deadline_s)
    return caught.value


def gone(pid: int) -> bool:
    for _ in range(50):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_one_child_serves_many_calls(worker: Worker) -> None:
    first = worker.call("worker_faults:tell_pid", None, DEADLINE_S)
    assert worker.call("worker_faults:tell_pid", None, DEADLINE_S) == first == worker.pid
    assert first != os.getpid()
    assert worker.num_started == 1


def test_a_large_payload_comes_back_whole(worker: Worker) -> None:
    payload = {"text": "ü" * 10_000_000}
    assert worker.call("worker_faults:echo", payload, DEADLINE_S) == payload


def test_what_a_library_prints_is_no_reply(worker: Worker) -> None:
    assert worker.call("worker_faults:print_much", None, DEADLINE_S) == "real"


def test_the_environment_reaches_the_child_alone() -> None:
    with Worker({"CIFT_TEST_COLOUR": "green"}) as worker:
        told = worker.call("os:getenv", "CIFT_TEST_COLOUR", DEADLINE_S)
    assert told == "green"
    assert "CIFT_TEST_COLOUR" not in os.environ


def test_progress_is_heard_during_a_call(worker: Worker) -> None:
    heard: list[str] = []
    worker.call("worker_faults:tell_progress", None, DEADLINE_S, on_progress=heard.append)
    assert heard == ["half", "done"]


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("segfault", FaultKind.SIGNAL, "SIGSEGV"),
        ("kill_self", FaultKind.SIGNAL, "could not be confirmed"),
        ("leave", FaultKind.EXIT, "exit code 3"),
        ("fill_memory", FaultKind.OUT_OF_HOST_MEMORY, "80 GiB"),
        ("write_garbage", FaultKind.GARBAGE, "garbage"),
        ("device_assert", FaultKind.STICKY, "device-side assert"),
    ],
)
def test_a_lost_child_is_named_and_replaced(
    worker: Worker, name: str, kind: FaultKind, words: str
) -> None:
    before = worker.call("worker_faults:tell_pid", None, DEADLINE_S)
    fault = fault_of(worker, name)
    assert fault.kind is kind
    assert words in fault.detail
    assert "worker_faults" in fault.detail
    assert gone(before)
    assert worker.call("worker_faults:tell_pid", None, DEADLINE_S) != before


@pytest.mark.parametrize("name", ["fail", "out_of_device_memory"])
def test_an_ordinary_exception_leaves_the_child_in_place(worker: Worker, name: str) -> None:
    before = worker.call("worker_faults:tell_pid", None, DEADLINE_S)
    fault = fault_of(worker, name)
    assert fault.kind is FaultKind.RAISED
    assert "worker_faults.py" in fault.stderr_tail
    assert worker.call("worker_faults:tell_pid", None, DEADLINE_S) == before


@pytest.mark.parametrize("name", ["hang", "hang_and_refuse_to_end"])
def test_a_hanging_child_is_stopped_at_its_deadline(worker: Worker, name: str) -> None:
    before = worker.call("worker_faults:tell_pid", None, DEADLINE_S)
    fault = fault_of(worker, name, 0.3)
    assert fault.kind is FaultKind.TIMEOUT
    assert "0.3 s" in fault.detail
    assert gone(before)


def test_what_a_child_started_ends_with_it(worker: Worker, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with pytest.raises(WorkerFaultError):
        worker.call("worker_faults:start_grandchild_and_hang", str(path), 1.5)
    assert gone(int(path.read_text()))


def test_the_last_words_of_a_child_are_kept(worker: Worker) -> None:
    assert "Segmentation fault" in fault_of(worker, "segfault").stderr_tail


def test_an_interrupt_ends_the_child_and_is_passed_on(worker: Worker) -> None:
    before = worker.call("worker_faults:tell_pid", None, DEADLINE_S)
    with pytest.raises(KeyboardInterrupt):
        worker.call("worker_faults:interrupt_parent", None, DEADLINE_S)
    assert worker.pid is None
    assert gone(before)


def test_a_retired_child_is_replaced(worker: Worker) -> None:
    before = worker.call("worker_faults:tell_pid", None, DEADLINE_S)
    worker.retire("test")
    assert gone(before)
    assert worker.call("worker_faults:tell_pid", None, DEADLINE_S) != before
    assert worker.num_started == 2


def test_a_missing_target_is_said(worker: Worker) -> None:
    assert "no_such_function" in fault_of(worker, "no_such_function").detail


def test_a_python_that_does_not_start_is_said() -> None:
    with Worker(python="/no/such/python") as missing:
        assert fault_of(missing, "echo").kind is FaultKind.START
    with Worker(python="/bin/false") as failing:
        assert fault_of(failing, "echo").kind is FaultKind.START


def test_a_child_does_not_outlive_a_killed_parent() -> None:
    code = (
        "import sys, time; from cift_probe.worker import Worker; w = Worker();"
        "print(w.call('worker_faults:tell_pid', None, 20), flush=True);"
        "w.call('worker_faults:hang', None, 600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.send_signal(signal.SIGKILL)
    assert gone(pid)
