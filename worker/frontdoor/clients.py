"""Identity of clients: hosts and API keys that are accepted, and the label of a client."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Collection, Sequence
from functools import lru_cache

from worker.arguments import KnownKeys
from worker.frontdoor.errors import Refused
from worker.frontdoor.request_reader import Head
from worker.frontdoor.values import printable
from worker.requests.client import LABEL_CHARACTERS

_LOOPBACK_NAMES = frozenset(("localhost", "localhost.", "127.0.0.1", "::1"))
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""Addresses of IPv4 behind a translator (RFC 6052)."""

_BEARER = b"www-authenticate: Bearer\r\n"
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:@/?#\s]+))(?::[0-9]{0,5})?")


class Hosts:
    """Names under which the front door is served.

    A web page may have its own name lead to 127.0.0.1 (DNS rebinding), and then read answers of
    what is served there without a key: the name in ``Host`` gives it away.

    Args:
        served_on: Address that it listens on.
        allowed: Further names; with any, names are checked whatever the address.
        needs_key: Whether requests bring a key, which a web page does not have.
    """

    def __init__(self, served_on: str, allowed: Collection[str], needs_key: bool) -> None:
        self.are_checked = bool(allowed) or (is_loopback(served_on) and not needs_key)
        self._names = _LOOPBACK_NAMES | {served_on.lower()} | {name.lower() for name in allowed}

    def check(self, head: Head) -> None:
        """Raises `Refused` (403) for another name; HTTP/1.0 need not have one, and browsers do."""
        if not self.are_checked or b"host" not in head.headers:
            return
        host = head.headers[b"host"].decode("latin-1")
        if host_name(host) not in self._names:
            raise Refused(
                403,
                f"host: {printable(host)} is none of the names that this server has: localhost, an address of "
                "loopback, or what --allowed-hosts names",
                "host",
                code="host_not_allowed",
            )


@lru_cache(256)
def host_name(host: str) -> str | None:
    """The name or address in a ``Host`` header, in lower case; None if it is none."""
    found = _HOST.fullmatch(host.lower())
    return None if found is None else found[1] or found[2]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what is served on an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


class Keys:
    """API keys, of which each request must bring one; none: none is needed.

    Args:
        keys: The keys.
    """

    def __init__(self, keys: Collection[str]) -> None:
        self._known = KnownKeys(key.encode() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._known)

    def check(self, authorizations: Sequence[bytes], api_keys: Sequence[bytes] = ()) -> bytes:
        """The key in the ``Authorization`` and ``x-api-key`` lines of a request; each must have a
        valid one.

        Raises:
            Refused: 401.
        """
        keys = [self._of_bearer(each) for each in authorizations] + [self._valid(each) for each in api_keys]
        if not keys or not all(keys):
            problem = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
            raise Refused(401, problem, code="invalid_api_key", headers=_BEARER)
        return keys[0]

    def _of_bearer(self, authorization: bytes) -> bytes:
        scheme, _, key = authorization.partition(b" ")
        found = self._valid(key)
        return found if scheme.lower() == b"bearer" else b""

    def _valid(self, key: bytes) -> bytes:
        """``key``, or nothing if it is none of those known."""
        key = key.strip()
        return key if key in self._known else b""


def _subscriber(peer: bytes) -> bytes:
    """The /64 of a public IPv6 address, of which a subscriber has one at least; else `peer`."""
    try:
        address = ipaddress.ip_address(peer.decode("latin-1"))
    except ValueError:
        return peer
    if address.version == 6 and address.is_global and address.ipv4_mapped is None and address not in _NAT64:
        return str(ipaddress.ip_network((address.packed, 64), strict=False)).encode()
    return peer


@lru_cache(1024)
def label_of(key: bytes, peer: bytes) -> bytes:
    """The label of a client before the workers: it does not show its key, and is the same at
    each front door.

    Args:
        key: API key of the client, empty without one.
        peer: Address, or the value of a trusted proxy's header; it counts without a key.
    """
    whom = b"key " + key if key else b"peer " + _subscriber(peer)
    return hashlib.sha256(b"front door client: " + whom).hexdigest()[:LABEL_CHARACTERS].encode()
