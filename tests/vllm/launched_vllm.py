"""``ENGINE=vllm launch/agg.sh``, whose worker is in the environment that has vLLM."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from launched_script import REPOSITORY, LaunchedScript, launched

OPTIONS = ("--kv-cache-memory", "1GiB", "--context-length", "1024", "--engine-args", '{"enforce_eager": true}')
FRONTEND = REPOSITORY / ".venv"
"""The environment of what is in front of the worker."""


@contextmanager
def agg(directory: Path, **variables: str) -> Iterator[LaunchedScript]:
    """The script with the default model, from where it is kept, and a directory for sockets whose
    name is short enough.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "DLW_"))}
    kept = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    chosen = {"ENGINE": "vllm", "DLW_VENV": str(FRONTEND), "DLW_VLLM_VENV": sys.prefix, "MODEL_PATH": ""}
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(prefix="dlw-") as short:
        for name in os.environ.keys() - own.keys():
            patch.delenv(name)
        where = {"XDG_CACHE_HOME": kept, "TMPDIR": short}
        with launched(directory, *OPTIONS, variables={**chosen, **where, **variables}) as script:
            yield script
        assert list(Path(short).iterdir()) == []
