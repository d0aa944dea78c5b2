from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from worker.tiny_model import write_tiny_model

sys.path.append(str(Path(__file__).parents[1] / "e2e"))  # e2e_stack runs processes
logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request, otherwise


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(directory)
    return directory
