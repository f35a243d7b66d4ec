"""Which native libraries an import of torch brings in; carried out in a child process."""

from __future__ import annotations

import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

_FOLDERS = ("nvidia/*/lib", "nvidia/*/*/lib", "torch/lib")


def read_loaded(_payload: Any) -> dict[str, Any]:
    """Return paths of mapped libraries, and of those that wheels carry.

    Asks whether CUDA is available first, which loads the driver's library. Raises ImportError
    with the loader's words where torch cannot be imported: that is the answer then.
    """
    root = Path(sysconfig.get_path("purelib"))
    with suppress(ModuleNotFoundError):
        import torch

        torch.cuda.is_available()
        root = Path(torch.__file__).parent.parent
    return {"maps": Path("/proc/self/maps").read_text(errors="replace"), "shipped": shipped(root)}


def shipped(root: Path) -> list[str]:
    """Return shared libraries in the folders below `root` where wheels put CUDA's; links resolved.

    The kernel shows resolved paths too: some installers link every file from a store.
    """
    found = (path for pattern in _FOLDERS for path in root.glob(f"{pattern}/*.so*"))
    return sorted({str(path.resolve()) for path in found})
