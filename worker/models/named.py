"""Models that have a name instead of a path: the default one, and the tiny one."""

from __future__ import annotations

import os
from pathlib import Path

from worker.errors import StartupError
from worker.models.checkpoint import Say, model_cache
from worker.models.default_model import prepare_default_model

DEFAULT, TINY = "default", "tiny"
DEFAULT_DTYPE = "float32"
"""Data type of the default model in the launch scripts, unless WORKER_DTYPE names another."""


def named_model(name: str, say: Say, keeps_blocks: bool = True) -> Path | None:
    """The checkpoint of `DEFAULT` or `TINY`, made in the cache if needed; None for another name.

    Args:
        name: A path means itself, be it called like one of them: ``./default``.
        say: Takes lines about the progress.
        keeps_blocks: See `convert_gguf`; of `DEFAULT`.

    Raises:
        StartupError: it cannot be made.
    """
    cache = model_cache(os.environ)
    if name == DEFAULT:
        return prepare_default_model(cache, say, keeps_blocks)
    if name != TINY:
        return None
    from worker.tiny_model import TinyModelError, write_tiny_model  # imports torch

    try:
        return write_tiny_model(cache.parent / "tiny-model")  # where the launch scripts keep it, too
    except TinyModelError as error:
        raise StartupError(str(error)) from None
