from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # An installed copy of this repository brings the plugin as an entry point of this name, a bare
    # checkout does not.
    config.pluginmanager.import_plugin("adapters.testing.plugin")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """CI tries half of the checks with each built-in, and each check with half of them: all
    thousand take a tenth of its time (`scripts/test --all`).
    """
    processors: dict[str, int] = {}
    checks: dict[str, int] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.originalname == "test_builtin":
            subject, check = item.callspec.params["_processor_and_check"]
            row = processors.setdefault(subject.processor.name, len(processors))
            if (row + checks.setdefault(check.name, len(checks))) % 2:
                item.add_marker(pytest.mark.campaign)
