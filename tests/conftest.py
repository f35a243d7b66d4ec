"""Fixtures of the project's own tests; `pytester` runs pytest inside pytest."""

pytest_plugins = ["pytester"]
