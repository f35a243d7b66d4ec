"""Tables and rules about a machine's parts."""

from __future__ import annotations

from datetime import date

from cift_probe import expect
from cift_probe.evidence import Evidence, Known, Ledger, Scope
from cift_probe.expect import machine
from cift_probe.facts import cuda_start


def expected(name: str, **facts: Evidence) -> Evidence:
    ledger = Ledger("facts")
    for key, evidence in facts.items():
        ledger.enter(key.replace("__", "."), evidence)
    [found] = expect.produce(name, Scope(), ledger, {}).values()
    return found


def test_every_xid_has_a_class_a_meaning_and_a_source() -> None:
    rows = machine.read_xids()
    assert len(rows) >= 20
    for number, row in rows.items():
        assert number.isdecimal()
        assert row.meaning
        assert "NVIDIA" in row.source
        assert date.fromisoformat(row.date)


def test_what_a_program_causes_is_no_fault_of_the_hardware() -> None:
    found = expected(machine.HARDWARE)
    assert isinstance(found, Known)
    assert {48, 64, 74, 79, 94, 95, 119} <= set(found.value)
    assert not {13, 31, 43, 45, 63, 92} & set(found.value)
    assert found.source


def test_every_code_of_the_start_says_what_to_do() -> None:
    rows = cuda_start.read_errors()
    assert {"100", "101", "802", "803", "804", "999"} <= set(rows)
    for code, row in rows.items():
        assert code.isdecimal()
        assert row.name.startswith("CUDA_ERROR_")
        assert row.meaning
        assert row.fix
        assert row.source
        assert date.fromisoformat(row.date)


def test_torch_may_see_a_little_less_than_the_driver() -> None:
    total, dedicated = Known(100, "B", "NVML"), Known("dedicated")
    found = expected(
        "device.memory.capacity", device__memory__total=total, device__memory__kind=dedicated
    )
    assert found == Known(100, "B", "NVML, within 5 %", band=0.05)
    shared = expected(
        "device.memory.capacity", device__memory__total=total, device__memory__kind=Known("unified")
    )
    assert isinstance(shared, Known)
    assert shared.absent


def test_a_clock_and_processors_follow_from_the_facts() -> None:
    clock = expected("load.clock.sm.min", device__clock__sm__max=Known(1_980_000_000, "Hz", "NVML"))
    assert clock == Known(990_000_000, "Hz", "half of NVML")
    cores = expected("host.cpu.num_usable.min", device__count=Known(8, "1"))
    assert isinstance(cores, Known)
    assert (cores.value, cores.unit) == (16, "1")
