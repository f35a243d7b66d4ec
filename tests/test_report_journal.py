"""The journal: what a run that dies leaves behind, and what is made of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fabricated_report import HEADER, finding, passed

from cift_probe.evidence import Known, Unknown
from cift_probe.report.journal import Journal, JournalError, read_journal
from cift_probe.verdict.finding import Executed, Outcome

DIES = """
import os, signal, sys
from pathlib import Path
from cift_probe.evidence import Known
from cift_probe.report.journal import Journal
journal = Journal(Path(sys.argv[1]))
journal.header({"run_id": "doomed"})
journal.evidence("facts", "device.count", Known(1, "1", "NVML"))
journal.started("MEM001[gpu0,p]", "check")
journal.started("sliced-step[gpu0,p]", "instrument")
os.kill(os.getpid(), signal.SIGKILL)
"""
Begin = Callable[[], Journal]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture
def begin(path: Path) -> Iterator[Begin]:
    opened: list[Journal] = []

    def begin_session() -> Journal:
        opened.append(Journal(path))
        opened[-1].header(HEADER)
        return opened[-1]

    yield begin_session
    for journal in opened:
        journal.close()


def test_what_was_written_is_read_back(begin: Begin, path: Path) -> None:
    journal = begin()
    journal.started("HST001", "check")
    journal.evidence("facts", "host.memory.total", Known(7, "B", "/proc", band=0.5, note="so"))
    journal.evidence("measured", "step.peak[gpu0]", Unknown("it broke", "bench"))
    journal.finding(passed("HST001"))
    journal.not_run({"STB001[gpu0]": "a soak check"})
    journal.end(10)
    told = read_journal(path)
    assert told.header == HEADER
    assert told.evidence["facts"] == {"host.memory.total": Known(7, "B", "/proc", 0.5, "so")}
    assert told.evidence["measured"] == {"step.peak[gpu0]": Unknown("it broke", "bench")}
    assert told.findings == [passed("HST001")]
    assert told.not_run == {"STB001[gpu0]": "a soak check"}
    assert (told.ended, told.exit_code, told.in_flight, told.num_resumed) == (True, 10, "", 0)


def test_every_line_is_on_disk_before_the_next_thing_happens(begin: Begin, path: Path) -> None:
    journal = begin()
    for number in range(3):
        journal.started(f"HST00{number}", "check")
        assert read_journal(path).in_flight == f"HST00{number}"
        journal.finding(passed(f"HST00{number}"))
        assert len(read_journal(path).findings) == number + 1


def test_a_killed_session_names_the_check_and_the_instrument_in_flight(path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", DIES, str(path)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    told = read_journal(path)
    assert told.in_flight == "MEM001[gpu0,p], instrument sliced-step[gpu0,p]"
    assert (told.ended, told.exit_code) == (False, None)
    assert told.evidence == {"facts": {"device.count": Known(1, "1", "NVML")}}


def test_an_instrument_that_has_answered_is_no_longer_in_flight(begin: Begin, path: Path) -> None:
    journal = begin()
    journal.started("MEM001[gpu0]", "check")
    journal.started("sliced-step[gpu0]", "instrument")
    journal.evidence("measured", "step.peak[gpu0]", Known(7, "B"))
    assert read_journal(path).in_flight == "MEM001[gpu0]"


def test_a_finding_ends_its_own_check_alone(begin: Begin, path: Path) -> None:
    journal = begin()
    journal.started("HST001", "check")
    journal.started("HST002", "check")
    journal.finding(passed("HST001"))
    assert read_journal(path).in_flight == "HST002"


def test_an_instrument_that_runs_before_any_check_is_named(begin: Begin, path: Path) -> None:
    begin().started("read_torch_build [gpu0]", "instrument")
    assert read_journal(path).in_flight == "instrument read_torch_build [gpu0]"


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_torn_last_line_is_left_out(begin: Begin, path: Path, cut: int) -> None:
    journal = begin()
    journal.finding(passed("HST001"))
    journal.finding(passed("HST002"))
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_journal(path).findings == [passed("HST001")]


def test_a_resumed_session_writes_behind_a_torn_line(begin: Begin, path: Path) -> None:
    journal = begin()
    journal.finding(passed("HST001"))
    journal.started("HST002", "check")
    with path.open("ab") as file:
        file.write(b'{"entry":"finding","fin')
    resumed = begin()
    assert read_journal(path).in_flight == ""
    resumed.finding(passed("HST002"))
    resumed.end(0)
    told = read_journal(path)
    assert [item.check for item in told.findings] == ["HST001", "HST002"]
    assert (told.num_resumed, told.ended) == (1, True)


def test_a_finding_that_says_it_was_resumed_is_counted(begin: Begin, path: Path) -> None:
    journal = begin()
    journal.finding(finding("HST001", Outcome.PASS, executed=Executed.RESUMED))
    journal.finding(passed("HST002"))
    assert read_journal(path).num_resumed == 1


def test_a_session_that_goes_on_has_not_ended(begin: Begin, path: Path) -> None:
    begin().end(1)
    begin().started("HST001", "check")
    told = read_journal(path)
    assert (told.ended, told.exit_code, told.in_flight) == (False, None, "HST001")


def test_a_broken_line_in_the_middle_is_refused_with_its_number(begin: Begin, path: Path) -> None:
    journal = begin()
    journal.finding(passed("HST001"))
    journal.end(0)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:40] + b"\n" + lines[2])
    with pytest.raises(JournalError) as caught:
        read_journal(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ")
    assert "delete that line" in message
    assert "\n" not in message


@pytest.mark.parametrize("content", [b"", b'{"entry":"header","con', b"\n"])
def test_a_journal_without_a_header_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(JournalError, match="start a new run"):
        read_journal(path)


def test_a_missing_journal_is_named(path: Path) -> None:
    with pytest.raises(JournalError, match=r"journal\.jsonl: cannot be read"):
        read_journal(path)


def test_values_that_json_lacks_do_not_stop_the_journal(begin: Begin, path: Path) -> None:
    journal = begin()
    journal.evidence("measured", "loss", Known(float("nan"), "1"))
    journal.evidence("measured", "losses", Known([1.0, float("-inf")], "1"))
    journal.evidence("measured", "step.required", Known(7, "B", "bench", band=float("inf")))
    journal.evidence("facts", "file", Known("name-\udcff", source="a folder"))
    journal.evidence("facts", "path", Known(Path("/srv"), source="a folder"))
    journal.finding(finding("HST001", Outcome.FAIL, found=Known(float("inf"), "1")))
    journal.end(1)
    told = read_journal(path)
    assert told.evidence["measured"] == {
        "loss": Known("nan", "1"),
        "losses": Known([1.0, "-inf"], "1"),
        "step.required": Unknown("7 with an error band of inf", "bench"),
    }
    assert told.evidence["facts"]["file"] == Known("name-\\udcff", source="a folder")
    assert told.evidence["facts"]["path"] == Known("/srv", source="a folder")
    assert told.findings[0].found == Known("inf", "1")


def test_what_was_selected_is_not_replaced_by_a_silent_prerequisite(
    begin: Begin, path: Path
) -> None:
    journal = begin()
    journal.finding(passed("GPU001[gpu0]"))
    journal.finding(finding("GPU001[gpu0]", Outcome.PASS, executed=Executed.PREREQUISITE))
    assert read_journal(path).findings == [passed("GPU001[gpu0]")]


def test_the_last_finding_of_a_check_counts(begin: Begin, path: Path) -> None:
    journal = begin()
    journal.finding(finding("GPU001[gpu0]", Outcome.UNKNOWN))
    journal.finding(passed("GPU001[gpu0]"))
    assert read_journal(path).findings == [passed("GPU001[gpu0]")]
