"""What packages ask of each other, against what is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cift_probe.evidence import Evidence, Known
from cift_probe.facts import requirements

METADATA = """\
Metadata-Version: 2.1
Name: torchvision
Requires-Dist: torch (==2.11.0)
Requires-Dist: numpy
Requires-Dist: gdown>=4.7.3 ; extra == 'gdown'
Requires-Dist: colorama ; sys_platform == 'nowhere'
Requires-Dist: not a requirement ((
Requires-Dist: x ; unknown_marker == 'y'

Requires-Dist: torch==1.0 (this is prose)
"""


def value(item: Evidence) -> Any:
    assert isinstance(item, Known), item
    return item.value


def test_requirements_of_this_interpreter_are_read_and_nothing_else() -> None:
    found = requirements.parse_requirements(METADATA)
    assert [(item.name, str(item.specifier)) for item in found] == [
        ("torch", "==2.11.0"),
        ("numpy", ""),
    ]


@pytest.mark.parametrize(
    ("installed", "broken"),
    [
        ({"torch": "2.11.0+cu130", "numpy": "2.4"}, []),
        ({"torch": "2.11.0", "numpy": "2.5.0.dev1"}, []),
        ({"torch": "2.13.0", "numpy": "2.4"}, ["v needs torch==2.11.0, installed is 2.13.0"]),
        ({"torch": "2.11.0"}, ["v needs numpy, which is not installed"]),
        ({"torch": "no version", "numpy": "1"}, []),
    ],
)
def test_what_is_not_met_is_said_in_one_sentence(
    installed: dict[str, str], broken: list[str]
) -> None:
    asked = requirements.parse_requirements(METADATA)
    assert requirements.compare("v", asked, installed.get) == broken


def install(folder: Path, name: str, version: str, *asked: str) -> None:
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {item}" for item in asked]
    (place / "METADATA").write_text("\n".join(lines) + "\n\nText.\n")


def test_an_environment_is_read_from_its_metadata(tmp_path: Path) -> None:
    install(tmp_path, "torch", "2.13.0")
    install(tmp_path, "torchvision", "0.24.0", "torch==2.9.0")
    install(tmp_path, "liger_kernel", "0.6", "triton>=2.3", "torch>=2.1")
    install(tmp_path, "weather", "1.0", "torch==1.0")  # nothing of a training stack
    found = requirements.read_conflicts([str(tmp_path)])["package.conflicts"]
    assert value(found) == [
        "torchvision 0.24.0 needs torch==2.9.0, installed is 2.13.0",
        "liger_kernel 0.6 needs triton>=2.3, which is not installed",
    ]


def test_this_environment_is_read() -> None:
    told = value(requirements.read_conflicts()["package.conflicts"])
    assert all(" needs " in sentence for sentence in told)


PIECES = st.sampled_from(
    [
        "Requires-Dist: ",
        "torch",
        ">=2",
        " ; ",
        "extra == 'x'",
        "\n",
        "(",
        "[",
        "==",
        "python_version",
    ]
)


@settings(max_examples=80, deadline=None)
@given(st.one_of(st.text(max_size=200), st.lists(PIECES, max_size=25).map("".join)))
def test_any_metadata_is_read(text: str) -> None:
    requirements.parse_requirements(text)


def test_a_requirement_of_absurd_length_is_passed_over() -> None:
    assert requirements.parse_requirements("Requires-Dist: torch" + " (" * 100_000) == []
