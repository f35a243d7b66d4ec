"""Loads the plugin, and nothing else: see cift_probe/pytest_plugin/__init__.py."""

pytest_plugins = ["cift_probe.pytest_plugin"]
