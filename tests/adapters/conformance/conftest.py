from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # An installed copy of this repository brings the plugin by its entry point, a bare checkout does not.
    if not any(
        config.pluginmanager.get_name(plugin) and _is_ours(plugin) for plugin in config.pluginmanager.get_plugins()
    ):
        config.pluginmanager.import_plugin("adapters.testing.plugin")


def _is_ours(plugin: object) -> bool:
    return getattr(plugin, "__name__", "") == "adapters.testing.plugin"
