"""Whether installed training packages get what their own metadata asks for.

A compiled package (torchvision, xformers) pins the torch it was built with; an upgrade of one
package alone breaks the bounds of another. Source: Requires-Dist of each distribution, with the
markers of this interpreter (packaging.python.org, "Dependency specifiers").
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from cift_probe.evidence import Evidence, Known
from cift_probe.facts import packages

# whose requirements are looked at: what a fine-tuning stack is made of, and what is compiled for it
NAMES = (
    *packages.NAMES,
    *("torchvision", "torchaudio", "torchao", "torchtune", "unsloth", "unsloth_zoo", "axolotl"),
    *("llamafactory", "liger_kernel", "lightning", "litgpt", "evaluate", "sentence_transformers"),
)
_LONGEST = 2000  # characters of one requirement; real ones have a hundred


def parse_requirements(metadata: str) -> list[Requirement]:
    """Return what core metadata requires on this interpreter; extras and nonsense are left out."""
    found = []
    for line in metadata.partition("\n\n")[0].splitlines():
        name, colon, text = line.partition(":")
        if not colon or name != "Requires-Dist" or len(text) > _LONGEST:
            continue
        try:
            asked = Requirement(text.strip())
            applies = asked.marker is None or asked.marker.evaluate({"extra": ""})
        except (InvalidRequirement, ValueError, KeyError):  # markers refuse unknown names
            continue
        if applies:
            found.append(asked)
    return found


def compare(
    package: str, asked: Iterable[Requirement], version_of: Callable[[str], str | None]
) -> list[str]:
    """Return one sentence for each requirement of a package that is not met."""
    broken = []
    for item in asked:
        there = version_of(canonicalize_name(item.name))
        needs = f"{package} needs {item.name}{item.specifier}"
        if there is None:
            broken.append(f"{needs}, which is not installed")
        elif not _meets(there, item):
            broken.append(f"{needs}, installed is {there}")
    return broken


def read_conflicts(paths: Sequence[str] | None = None) -> dict[str, Evidence]:
    """Return the requirements of training packages that this environment does not meet."""
    folders = list(sys.path if paths is None else paths)
    installed = packages.read_installed(folders)
    broken: list[str] = []
    for name in NAMES:
        number = installed.get(canonicalize_name(name))
        if number is not None:
            asked = parse_requirements(packages.read_metadata(name, folders))
            broken += compare(f"{name} {number}", asked, installed.get)
    return {"package.conflicts": Known(broken, source="Requires-Dist of training packages")}


def _meets(version: str, asked: Requirement) -> bool:
    try:
        return asked.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True  # a version that is none is told where it is read: package.*
