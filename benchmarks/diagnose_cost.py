"""What `cift diagnose` costs on logs of 100 MB: seconds and resident memory, beside `grep -c`.

    python benchmarks/diagnose_cost.py

Logs are made up in a temporary folder: training progress, one message over and over, words that
begin like messages, one endless line, and bytes that are no text.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIZE = 100_000_000
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 47.53 GiB of which 800.00 MiB is free.\n"
)
STEP = "{'loss': 1.234, 'grad_norm': 0.51, 'learning_rate': 0.0002, 'epoch': 0.13} info 12/980\n"
WORDS = "INFO finance infinite pinned tied 1379 802 gcc nvcc numpy bf16 labels packing exclusive\n"


def main() -> int:
    """Print one line per log."""
    print("log | diagnose s | resident MiB | grep -c s")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        for name, block in logs():
            with path.open("wb") as file:
                for _ in range(SIZE // len(block) + 1):
                    file.write(block)
            seconds, resident = run([sys.executable, "-m", "cift_probe", "diagnose", str(path)])
            baseline, _ = run(["grep", "-c", "out of memory", str(path)])
            print(f"{name} | {seconds:.1f} | {resident / 2**20:.0f} | {baseline:.1f}", flush=True)
    return 0


def logs() -> Iterator[tuple[str, bytes]]:
    """Yield a name and a block of about a megabyte that is written again and again."""
    yield "progress", STEP.encode() * 10_000
    yield "one message", OOM.encode() * 8_000
    yield "words that begin like messages", WORDS.encode() * 12_000
    yield "one endless line", b"out of memory " * 80_000
    yield "no text", random.Random(20).randbytes(1 << 20)  # noqa: S311 - reproducible


def run(command: list[str]) -> tuple[float, int]:
    """Return seconds and peak resident bytes of a program."""
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)  # noqa: S603 - ours
    _, _, usage = os.wait4(process.pid, 0)
    return time.perf_counter() - started, usage.ru_maxrss * 1024


if __name__ == "__main__":
    raise SystemExit(main())
