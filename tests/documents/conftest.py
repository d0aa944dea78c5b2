from __future__ import annotations

import sys
from pathlib import Path

import pytest

from worker.tiny_model import write_tiny_model

sys.path.append(str(Path(__file__).parents[1] / "launch"))  # launched_script runs a launch script


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that stands for the reader's own in the documents' programs."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "my-model")
