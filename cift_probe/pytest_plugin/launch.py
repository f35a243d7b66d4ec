"""`cift run`: pytest on the suites that came with this installation, from any folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cift_probe.pytest_plugin.options import suites_folder

CONFIG = Path(__file__).with_name("cift-run.ini")


def launch(arguments: list[str]) -> int:
    """Run the suites with `arguments` of the command line; returns the exit code.

    The configuration is the product's own, so that a pytest.ini in the current folder, which
    belongs to somebody else's tests, changes nothing here.
    """
    suites = suites_folder()
    own = ["-p", "cift_probe.pytest_plugin", "-c", str(CONFIG), "--rootdir", str(suites.parent)]
    own += ["-p", "no:cacheprovider"]  # nothing is left beside the suites
    # behind the user's options, since the last -W wins: `cift run` has the plugin loaded already
    quiet = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    # PYTEST_ADDOPTS belongs to the user's own tests as well
    os.environ.pop("PYTEST_ADDOPTS", None)
    return int(pytest.main([*own, *arguments, *quiet, str(suites)]))
