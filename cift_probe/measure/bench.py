"""The bench: runs instruments in child processes, one child per device, and survives them."""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

import msgspec

import cift_probe.measure as package
from cift_probe.evidence import Evidence, Known, Scope, Unknown
from cift_probe.measure.declare import REGISTRY, Instrument, Task
from cift_probe.measure.inside import Request, Result
from cift_probe.worker import FaultKind, Worker, WorkerFaultError

_RUN = "cift_probe.measure.inside:run"
_IMPORT_ESTIMATE_S = 5.0  # a first call imports torch
_QUIET = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order, so that indices agree
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


class Listener(Protocol):
    """Hears when an instrument starts and ends, for progress and journal."""

    def started(self, label: str, estimate_s: float) -> None:
        """Note that `label` runs now and is expected to take `estimate_s` seconds."""

    def ended(self, label: str, duration_s: float) -> None:
        """Note that `label` has ended after `duration_s` seconds."""


def read_instruments() -> dict[str, Instrument]:
    """Return every instrument of this package by name; nothing but declarations is run.

    In the order of names: modules import one another in another order in each process.
    """
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(REGISTRY.items()))


class Bench:
    """Runs each instrument at most once per device and plan, in that device's child."""

    def __init__(
        self,
        visible: Callable[[str], str | None],
        plans: Mapping[str, dict[str, Any]],
        vram_cap: int | None,
        listener: Listener,
        *,
        trial: bool = True,
    ) -> None:
        """Prepare a bench; starts no process.

        `visible` gives the value of CUDA_VISIBLE_DEVICES that shows one device alone, or None
        when there is no such device. `plans` holds plain plans by name. `trial` is the tasks'.
        """
        self.instruments = read_instruments()
        self._maker = {key: item for item in self.instruments.values() for key in item.produces}
        self._visible = visible
        self._plans = plans
        self._vram_cap = vram_cap
        self._listener = listener
        self._trial = trial
        self._workers: dict[str, Worker] = {}
        self._dirty: set[str] = set()

    def produce(self, name: str, scope: Scope) -> Mapping[str, Evidence]:
        """Run the instrument that produces `name`; a fault makes all it produces Unknown."""
        instrument = self._maker.get(name)
        if instrument is None:
            return {}
        where = Scope(scope.device, scope.plan if instrument.per_plan else "")
        source = f"instrument {instrument.name}/{instrument.version}"
        evidence = self._run(instrument, where)
        stored: dict[str, Evidence] = {}
        for key in instrument.produces:
            item = evidence.get(key, Unknown("the instrument said nothing about it"))
            stored[where.key(key)] = msgspec.structs.replace(item, source=_join(source, item))
        return stored

    def call(self, device: str, target: str, payload: Any, deadline_s: float) -> Any:
        """Call a function in the child of a device; facts that need torch are read this way."""
        started = time.monotonic()
        label = Scope(device).key(target.rpartition(":")[2])
        self._listener.started(label, _IMPORT_ESTIMATE_S)
        try:
            return self._worker(device).call(target, payload, deadline_s)
        finally:
            self._listener.ended(label, time.monotonic() - started)

    def close(self) -> None:
        """End all children."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def _run(self, instrument: Instrument, where: Scope) -> dict[str, Evidence]:
        device = where.device or "cpu"
        if device != "cpu" and self._visible(device) is None:
            return dict.fromkeys(instrument.produces, Unknown(f"this machine has no {device}"))
        worker = self._worker(device)
        if instrument.clean and device in self._dirty:
            worker.retire("memory is measured in a process whose memory is at the base line")
            self._dirty.discard(device)
        task = Task(device, self._plans.get(where.plan), self._vram_cap, trial=self._trial)
        payload = msgspec.to_builtins(Request(instrument.target, task))
        label = where.key(instrument.name)
        started = time.monotonic()
        self._listener.started(label, instrument.estimate_s)
        try:
            reply = worker.call(_RUN, payload, instrument.deadline_s)
            result = msgspec.convert(reply, Result)
        except WorkerFaultError as fault:
            self._dirty.discard(device)
            if fault.kind is FaultKind.RAISED:
                self._dirty.add(device)  # what it has left behind is not known
            detail = fault.detail.replace(_RUN, f"instrument {instrument.name}")
            return dict.fromkeys(instrument.produces, Unknown(detail))
        except msgspec.ValidationError as error:
            self._dirty.add(device)  # what is still allocated was told in the answer
            reason = f"instrument {instrument.name} answered in a wrong shape: {error}"
            return dict.fromkeys(instrument.produces, Unknown(reason))
        finally:
            self._listener.ended(label, time.monotonic() - started)
        if result.allocated_bytes:
            self._dirty.add(device)
        return result.evidence

    def _worker(self, device: str) -> Worker:
        if device not in self._workers:
            environment = {"CUDA_VISIBLE_DEVICES": self._visible(device) or "", **_QUIET}
            self._workers[device] = Worker(environment)
        return self._workers[device]


def _join(source: str, item: Known | Unknown) -> str:
    return f"{source}: {item.source}" if item.source else source
