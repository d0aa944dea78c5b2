"""Options whose text is a JSON object."""

from __future__ import annotations

from typing import Any

from adapters.strict_json import decoder
from worker.errors import ConfigurationError


def json_object(text: str, flag: str) -> dict[str, Any]:
    """The JSON object that is given with ``flag``. Raises `ConfigurationError` for another text, or
    for a key that is there twice.
    """
    try:
        found = decoder().decode(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{flag}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{flag}: must be a JSON object, got {text[:60]!r}")
    return found
