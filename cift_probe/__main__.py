"""`python -m cift_probe` and the command `cift`."""

from __future__ import annotations

import sys

from cift_probe.cli import run_command


def main() -> int:
    """Run the command line and return its exit code."""
    return run_command(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
