"""Run instruments sound and with each of their planted faults, on this machine's device.

    python scripts/plant_faults.py gpu0 [INSTRUMENT[:FAULT,FAULT] ...]

Prints seconds, what stayed allocated, and every value; for a fault, the values that differ from
the sound run by more than a tenth. A fault that no value shows is marked, and the exit code is 1.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cift_probe import facts
from cift_probe.measure.bench import read_instruments
from cift_probe.measure.declare import Instrument, Task
from cift_probe.plan import REFERENCE_PLAN, read_plan
from cift_probe.worker import Worker, WorkerFaultError

RUN = "cift_probe.measure.inside:run"
LONG = 120  # characters of a value that are shown
NOTABLE = 0.1


def main(arguments: list[str]) -> int:
    """Run the named instruments, or all of them."""
    device, names = arguments[0], arguments[1:]
    instruments = read_instruments()
    unseen = 0
    with Worker({"CUDA_VISIBLE_DEVICES": facts.visible_uuid(device) or ""}) as worker:
        for asked in names or sorted(instruments):
            name, _, only = asked.partition(":")
            item = instruments[name]
            sound = run(worker, item, device, "")
            print(f"== {name}: {sound['told']}")
            for key, evidence in sound["evidence"].items():
                print(f"     {key} = {text(evidence)}")
            for fault in only.split(",") if only else item.faults:
                unseen += compare(worker, item, device, fault, sound)
    return 1 if unseen else 0


def compare(
    worker: Worker, item: Instrument, device: str, fault: str, sound: dict[str, Any]
) -> bool:
    """Print what a fault changes; return whether nothing changed."""
    planted = run(worker, item, device, fault)
    changed = [
        f"{key} = {text(evidence)}"
        for key, evidence in planted["evidence"].items()
        if differs(sound["evidence"].get(key, {}), evidence)
    ]
    mark = "" if changed else "  <-- nothing shows it"
    print(f"   {item.name} with {fault}: {planted['told']}{mark}")
    for line in changed:
        print(f"     {line}")
    sys.stdout.flush()
    return not changed


def run(worker: Worker, item: Instrument, device: str, fault: str) -> dict[str, Any]:
    """Return evidence of one run, and in words how long it took and what it left."""
    plan = msgspec.to_builtins(read_plan(REFERENCE_PLAN)) if item.per_plan else None
    task = msgspec.to_builtins(Task(device, plan=plan, fault=fault))
    started = time.monotonic()
    try:
        request = {"target": item.target, "task": task}
        answer = worker.call(RUN, request, item.deadline_s)
    except WorkerFaultError as error:
        worker.retire("what it left behind is not known")
        return {"evidence": {"fault": {"reason": error.detail}}, "told": error.detail[:LONG]}
    seconds = time.monotonic() - started
    left = answer["allocated_bytes"]
    if left:
        worker.retire("memory is measured in a process at the base line")
    return {"evidence": answer["evidence"], "told": f"{seconds:.1f} s, {left} bytes left"}


def differs(sound: dict[str, Any], planted: dict[str, Any]) -> bool:
    """Tell whether a value has changed by more than a tenth, or in kind."""
    one, other = sound.get("value"), planted.get("value")
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(other - one) > NOTABLE * max(abs(one), abs(other))
    return text(sound) != text(planted) and not isinstance(one, dict)


def text(evidence: dict[str, Any]) -> str:
    """Return a value, or why there is none, in one short line."""
    told = evidence.get("reason") or evidence.get("absent") or evidence.get("value")
    return str(told)[:LONG]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
