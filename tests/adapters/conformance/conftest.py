from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # An installed copy of this repository brings the plugin as an entry point of this name, a bare
    # checkout does not.
    config.pluginmanager.import_plugin("adapters.testing.plugin")
