"""Keys of requests, from files, so that no process list and no log shows them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from worker.errors import StartupError


class KnownKeys:
    """Keys, of which a request must bring one. Looking takes equally long for every wrong one.

    Args:
        keys: The keys.
    """

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __contains__(self, key: bytes) -> bool:
        given = _digest(key)
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{flag} {path}: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise StartupError(f"{flag} {path}: has no key")
    return keys
