"""`python -m cift_probe` and the command `cift`."""

from __future__ import annotations

import os
import sys

_INTERRUPTED = 2
_UNREADABLE_OUTPUT = 3


def main() -> int:
    """Run the command line and return its exit code.

    A reader that goes away (`| head`), a full or closed output and Ctrl-C during start-up end
    the command with a code, not with a traceback.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - kept
        # a console without "±" and "…" shows "?", and the exit code stays the answer's
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    code = _UNREADABLE_OUTPUT
    try:
        from cift_probe.cli import run_command

        code = run_command(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        # what is still in the buffer cannot be written, and would raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return code  # the reader has what it wanted; the answer stands
        print(f"cift: {error.strerror}: {error.filename or 'output'}", file=sys.stderr)  # noqa: T201
        return _UNREADABLE_OUTPUT
    return code


if __name__ == "__main__":
    raise SystemExit(main())
