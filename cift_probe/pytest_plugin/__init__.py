"""The whole pytest surface of the product: every hook and fixture, by name.

`recorder.Recorder`, registered when a session starts, adds the hooks that follow a run
(`pytest_runtest_logstart`, `pytest_runtest_logreport`, xdist's `pytest_testnodedown`).
"""

from cift_probe.pytest_plugin.fixtures import expected, facts, measured, scope
from cift_probe.pytest_plugin.hooks import (
    pytest_addoption,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_deselected,
    pytest_generate_tests,
    pytest_pyfunc_call,
    pytest_report_header,
    pytest_report_teststatus,
    pytest_runtest_makereport,
    pytest_sessionfinish,
    pytest_sessionstart,
    pytest_terminal_summary,
    pytest_unconfigure,
    pytest_xdist_auto_num_workers,
)

__all__ = [
    "expected",
    "facts",
    "measured",
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_deselected",
    "pytest_generate_tests",
    "pytest_pyfunc_call",
    "pytest_report_header",
    "pytest_report_teststatus",
    "pytest_runtest_makereport",
    "pytest_sessionfinish",
    "pytest_sessionstart",
    "pytest_terminal_summary",
    "pytest_unconfigure",
    "pytest_xdist_auto_num_workers",
    "scope",
]
