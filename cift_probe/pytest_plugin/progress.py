"""Shows which instrument runs and for how long, through pytest's capturing."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import pytest

_TICK_S = 1.0


class Progress:
    """Hears the bench; writes a line per instrument, or a running clock on a terminal."""

    def __init__(self, config: pytest.Config) -> None:
        """Write to the terminal that `config` reports to, if it has one."""
        self._config = config
        self._stop: threading.Event | None = None
        self._clock: threading.Thread | None = None
        self.hear_started: Callable[[str], None] = _ignore

    def started(self, label: str, estimate_s: float) -> None:
        """Show that an instrument has begun."""
        self.hear_started(label)
        with self._terminal() as terminal:
            if terminal is None:
                return
            if not terminal.isatty:
                terminal.ensure_newline()
                terminal.write_line(f"  … {label} (about {estimate_s:.0f} s)")
                return
            terminal.ensure_newline()
            real_stdout = os.dup(1)  # capturing is off here, so 1 is the terminal itself
        self._stop = threading.Event()
        arguments = (self._stop, real_stdout, label, estimate_s)
        self._clock = threading.Thread(target=_tick, args=arguments, daemon=True)
        self._clock.start()

    def ended(self, label: str, duration_s: float) -> None:
        """Show how long an instrument took."""
        if self._stop is not None and self._clock is not None:
            self._stop.set()
            self._clock.join()
            self._stop = self._clock = None
        with self._terminal() as terminal:
            if terminal is not None:
                terminal.write_line(f"  … {label}: {duration_s:.1f} s")

    @contextlib.contextmanager
    def _terminal(self) -> Iterator[pytest.TerminalReporter | None]:
        manager = self._config.pluginmanager.getplugin("capturemanager")
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        quiet = terminal is None or terminal.verbosity < 0 or hasattr(self._config, "workerinput")
        if quiet:
            yield None
        elif manager is None:
            yield terminal
        else:
            with manager.global_and_fixture_disabled():
                yield terminal


def _ignore(_label: str) -> None:
    """Tell nobody."""


def _tick(stop: threading.Event, descriptor: int, label: str, estimate_s: float) -> None:
    seconds = 0
    try:
        while True:
            text = f"\r  … {label}: {seconds} s of about {estimate_s:.0f} s"
            os.write(descriptor, text.encode())
            if stop.wait(_TICK_S):
                os.write(descriptor, b"\r" + b" " * len(text) + b"\r")
                return
            seconds += 1
    finally:
        os.close(descriptor)
