"""Web pages of other origins that may read answers: Cross-Origin Resource Sharing.

Source: the Fetch standard, "CORS protocol". A browser asks first with OPTIONS (a preflight), and
hands an answer to the page only if its headers allow the page's origin.
"""

from __future__ import annotations

from collections.abc import Collection

from worker.frontdoor.request_reader import Head

_EXPOSED = b"x-request-id, request-id, retry-after"
_MAX_AGE_S = 600


class Cors:
    """Header lines that tell browsers which pages may read answers.

    Args:
        origins: Origins whose pages may read answers, in lower case; ``*`` for all.
    """

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def lines(self, head: Head | None) -> bytes:
        """Header lines of an answer, each with its CRLF: whether the page may read it."""
        if not self._origins:
            return b""
        origin = b"" if head is None else head.headers.get(b"origin", b"")
        if not origin or not (b"*" in self._origins or origin.lower() in self._origins):
            return b"vary: origin\r\n"
        return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: %b\r\nvary: origin\r\n" % (
            origin,
            _EXPOSED,
        )

    def is_preflight(self, head: Head) -> bool:
        """Whether a browser asks what a page may send."""
        return (
            bool(self._origins)
            and head.method == b"OPTIONS"
            and b"origin" in head.headers
            and b"access-control-request-method" in head.headers
        )

    @staticmethod
    def preflight_lines(head: Head, methods: Collection[str]) -> bytes:
        """Further header lines of the answer to a preflight: what a page may send.

        Args:
            head: Head of the preflight.
            methods: Methods of the path.
        """
        lines = b"access-control-allow-methods: %b\r\naccess-control-max-age: %d\r\n" % (
            ", ".join(methods).encode(),
            _MAX_AGE_S,
        )
        asked = head.headers.get(b"access-control-request-headers")
        return lines if asked is None else lines + b"access-control-allow-headers: %b\r\n" % asked
