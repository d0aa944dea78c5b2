"""YAML files of options: plain data, and each key once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from yaml import YAMLError

from adapters.strict_yaml import read_yaml
from worker.errors import ConfigurationError, one_line


def load_yaml(path: str, flag: str = "--extra-engine-args") -> dict[str, Any]:
    """The mapping in the file that ``flag`` names. Raises `ConfigurationError`."""
    try:
        content = read_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        reason = one_line(error)
        raise ConfigurationError(f"{flag} {path}: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"{flag} {path}: must be a mapping of option names to values")
    _check_data(f"{flag} {path}: ", "", content, set())
    return {str(key): value for key, value in content.items()}


_MAX_DEPTH = 32


def _check_data(source: str, place: str, value: Any, checked: set[int], depth: int = 0) -> None:
    """Raises `ConfigurationError` for what is no JSON data: YAML has dates, and mappings that hold
    themselves.

    Args:
        source: Beginning of the message.
        place: Path of the value.
        value: The value.
        checked: Ids of lists and mappings that were checked: aliases repeat them.
        depth: Lists and mappings around it.
    """
    if depth > _MAX_DEPTH:
        raise ConfigurationError(f"{source}{place[:60]}: is nested more than {_MAX_DEPTH} deep, or holds itself")
    if isinstance(value, dict | list):
        if id(value) in checked:
            return
        parts = value.items() if isinstance(value, dict) else ((f"[{i}]", each) for i, each in enumerate(value))
        for key, inner in parts:
            name = f".{key}" if place and isinstance(value, dict) else str(key)
            _check_data(source, place + name, inner, checked, depth + 1)
        checked.add(id(value))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{source}{place}: must be a finite number, got {value}")
    elif not isinstance(value, str | int | float | None):
        problem = f"must be JSON data, got a {type(value).__name__}, {value}; text goes in quotes"
        raise ConfigurationError(f"{source}{place}: {problem}")
