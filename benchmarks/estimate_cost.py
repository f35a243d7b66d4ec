"""What an estimate costs, tier by tier, beside what starting Python and importing the stack costs.

    python benchmarks/estimate_cost.py [MODEL]

Prints seconds, each the best of a few: `python -c pass`, `cift estimate` (formula), importing
torch and TRL, tracing whole periods and full depth of the model, and 25 models x 40 cards x 3
methods by the formula. Programs run from bytecode, as pip installs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cift_probe.advise import fit
from cift_probe.devices import read_devices
from cift_probe.evidence import Unknown
from cift_probe.expect import traced
from cift_probe.models import read_models
from cift_probe.plan import Plan, default_plan

ROOT = Path(__file__).resolve().parent.parent
NUM_QUICK, NUM_SLOW = 10, 2
IMPORT_STACK = "import torch, transformers, peft, bitsandbytes; from trl import SFTTrainer"


def main(arguments: list[str]) -> int:
    """Print one line per thing that is timed."""
    model = arguments[0] if arguments else "llama-3.1-8b"
    nothing = best([sys.executable, "-c", "pass"], NUM_QUICK)
    ask = [sys.executable, "-m", "cift_probe", "estimate", model, "--gpu", "rtx-4090"]
    formula = best(ask, NUM_QUICK)
    stack = best([sys.executable, "-c", IMPORT_STACK], NUM_SLOW)
    print(f"python -c pass: {nothing:.3f} s")
    print(f"cift estimate {model}: {formula:.3f} s, {formula - nothing:.3f} s above it")
    print(f"importing torch and trl: {stack:.1f} s")
    for depth in ("periods", "full"):
        seconds, own = trace(model, depth)
        print(f"traced, {depth}: {seconds:.1f} s, of which {own:.1f} s beyond the imports")
    print(f"25 models x 40 cards x 3 methods: {many():.2f} s")
    return 0


def best(command: list[str], count: int) -> float:
    """Return the shortest of `count` runs, in seconds."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        for _ in range(count + 1):  # the first one writes the bytecode
            started = time.perf_counter()
            subprocess.run(  # noqa: S603 - our own
                command, cwd=ROOT, env=environment, capture_output=True, check=True
            )
            found.append(time.perf_counter() - started)
    return min(found[1:])


def trace(model: str, depth: Any) -> tuple[float, float]:
    """Return seconds of a trace, with and without the imports of its child processes."""
    imports: list[float] = []
    started = time.perf_counter()
    found = traced.trace(default_plan(model), depth=depth, on_import=imports.append)
    seconds = time.perf_counter() - started
    if isinstance(found, Unknown):
        raise SystemExit(found.reason)
    return seconds, seconds - sum(imports)


def many() -> float:
    """Return seconds of processor time for a table of models and cards."""
    cards = list(read_devices().values())[:40]
    started = time.process_time()
    for model in list(read_models())[:25]:
        for method in ("qlora", "lora", "full"):
            stored: Any = "nf4" if method == "qlora" else "none"
            plan = Plan(name="p", model=model, method=method, quantisation=stored)
            for device in cards:
                fit.answer(plan, device.name, device, fit.formula(plan, device))
    return time.process_time() - started


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
