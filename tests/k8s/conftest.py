from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helm_chart import install_helm

sys.path.append(str(Path(__file__).parents[1] / "e2e"))  # e2e_stack runs processes


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with Helm's library."""
    folder = tmp_path_factory.mktemp("helm")
    install_helm(folder)
    return folder
