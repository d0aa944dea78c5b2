"""The model of a command line: a path, or a name that the launch scripts know."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from worker.errors import StartupError
from worker.models import model_cache, prepare_default_model
from worker.tiny_model import TinyModelError, write_tiny_model

DEFAULT, TINY = "default", "tiny"
DEFAULT_DTYPE = "float32"


def model_options(name: str) -> list[str]:
    """The worker's options for the model `name`: `DEFAULT` is as the launch scripts serve it, in
    their type unless WORKER_DTYPE names another.

    Raises:
        StartupError: see `model_path`.
    """
    given = name != DEFAULT or os.environ.get("WORKER_DTYPE")
    return ["--model-path", model_path(name), *([] if given else ["--dtype", DEFAULT_DTYPE])]


def model_path(name: str) -> str:
    """The checkpoint or GGUF file of `name`; `DEFAULT` and `TINY` are made in the cache if needed.

    Raises:
        StartupError: it cannot be made.
    """
    cache = model_cache(os.environ)
    try:
        if name == DEFAULT:
            return str(prepare_default_model(cache, _say, keeps_blocks=True))
        return str(write_tiny_model(_tiny(cache))) if name == TINY else name
    except TinyModelError as error:
        raise StartupError(str(error)) from None


def _tiny(cache: Path) -> Path:
    """Where the launch scripts keep it, too."""
    return cache.parent / "tiny-model"


def _say(line: str) -> None:
    sys.stderr.write(f"worker inspect: {line}\n")
