"""Files of keys, which no process list and no log shows."""

from __future__ import annotations

from pathlib import Path

from worker.errors import StartupError


def keys_in(path: str | None, flag: str) -> list[str]:
    """The keys in a file, one per line; blank lines and those that begin with # are none.

    Args:
        path: The file; without one there are no keys.
        flag: The option that names it, for errors.

    Raises:
        StartupError: the file cannot be read, or has none.
    """
    if path is None:
        return []
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{flag} {path}: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise StartupError(f"{flag} {path}: has no key")
    return keys
