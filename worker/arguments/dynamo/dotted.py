"""Flags of Dynamo's worker that name an argument of TensorRT-LLM, and keys in it, by dots."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from worker.arguments.dynamo.layer import Layer, Setting
from worker.errors import ConfigurationError

PREFIX = "--trtllm."


def take_dotted(argv: Sequence[str], layer: Layer) -> list[str]:
    """Take flags such as ``--trtllm.kv_cache_config.max_tokens 8192``.

    Args:
        argv: Arguments of the command line.
        layer: Takes the settings.

    Returns:
        The other arguments.

    Raises:
        ConfigurationError: a flag has no value or no name, or another flag says otherwise.
    """
    left, waiting = [], list(argv)
    while waiting:
        flag = waiting.pop(0)
        if not flag.startswith(PREFIX):
            left.append(flag)
            continue
        if not waiting or waiting[0].startswith("--"):
            raise ConfigurationError(f"argument {flag}: expected one argument")
        path = tuple(flag.removeprefix(PREFIX).split("."))
        if not all(path):
            raise ConfigurationError(f"{flag}: must name an argument, and keys in it, separated by dots")
        layer.add_setting(Setting(path, _scalar(waiting.pop(0)), flag))
    return left


def _scalar(text: str) -> Any:
    """The value that Dynamo reads in a text: a word, a number, or the text."""
    words = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
