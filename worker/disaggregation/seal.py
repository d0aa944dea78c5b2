"""Sealed parameters of KV transfers: a decode worker connects only where its own pool tells it to.

They travel through the frontend, and say to which address a decode worker connects and what it
reads there. So whoever reaches the decode worker's port could send it anywhere, if they were not
signed by a prefill worker that shares the pool's secret:

==============  ========================================================================
``format``      ``dynamo-logits-worker/sealed``
``version``     1
``expires``     seconds since 1970, when the lease on the KV times out
``body``        the parameters, as JSON text: what was signed is what is read, byte for byte
``mac``         HMAC-SHA256 over format, version, ``expires`` and ``body``, as hexadecimal digits
==============  ========================================================================

The body names the prompt and the processors that it was made for, so that a seal is worth nothing
with another request.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.errors import KV_TRANSFER_FIELD, ConfigurationError, InvalidRequest, shown

FORMAT = "dynamo-logits-worker/sealed"
VERSION = 1

SECRET = "DLW_POOL_SECRET"
SECRET_FILE = "DLW_POOL_SECRET_FILE"
MIN_SECRET = 32
"""Characters of a pool secret at least: 128 bits as hexadecimal digits."""

MAX_BODY = 2**24
"""Characters of the parameters at most; the longest prompts and NIXL's metadata take a few percent
of it.
"""

CLOCK_SKEW_S = 60.0
"""Largest difference between the clocks of two workers, seconds. A reader that is late by less
learns of it from the fencing token.
"""

_NAMES = ("format", "version", "expires", "body", "mac")


@dataclass(frozen=True, slots=True)
class Opened:
    """Parameters of a KV transfer whose seal is genuine.

    Attributes:
        body: Parameters that a prefill worker of this pool has sealed.
        is_late: Whether its lease has timed out by now.
    """

    body: Mapping[str, Any]
    is_late: bool


class Seal:
    """Signs and checks the parameters of KV transfers with a pool's secret.

    Args:
        secret: Shared by the prefill and decode workers of a pool, at least `MIN_SECRET`
            characters.
        clock: Seconds since 1970.
    """

    def __init__(self, secret: str, clock: Callable[[], float] = time.time) -> None:
        assert len(secret) >= MIN_SECRET
        self._key = secret.encode("utf-8", "surrogateescape")
        self._clock = clock

    def __repr__(self) -> str:
        return "Seal(...)"

    def close(self, body: Mapping[str, Any], lifetime_s: float) -> dict[str, Any]:
        """Sign parameters.

        Args:
            body: JSON data.
            lifetime_s: Seconds after which the lease on the KV times out.
        """
        text = json.dumps(body, separators=(",", ":"))
        expires = math.ceil(self._clock() + lifetime_s)
        mac = self._mac(expires, text)
        return {"format": FORMAT, "version": VERSION, "expires": expires, "body": text, "mac": mac}

    def open(self, data: object) -> Opened:
        """Check parameters that came with a request; nothing in them is read before the seal is.

        Raises:
            InvalidRequest: it is not sealed, or not with this secret.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else data
            raise InvalidRequest(KV_TRANSFER_FIELD, f"must be of format {FORMAT}, got {shown(found)}")
        if data.get("version") != VERSION:
            raise InvalidRequest(f"{KV_TRANSFER_FIELD}.version", f"must be {VERSION}, got {shown(data.get('version'))}")
        for unknown in sorted(map(str, set(data) - set(_NAMES))):
            raise InvalidRequest(f"{KV_TRANSFER_FIELD}.{shown(unknown)}", "unknown field")
        expires, text, mac = data.get("expires"), data.get("body"), data.get("mac")
        if type(expires) is not int or not 0 <= expires < 2**53:
            raise InvalidRequest(f"{KV_TRANSFER_FIELD}.expires", f"must be seconds since 1970, got {shown(expires)}")
        if not isinstance(text, str) or len(text) > MAX_BODY:
            raise InvalidRequest(f"{KV_TRANSFER_FIELD}.body", f"must be a text of up to {MAX_BODY} characters")
        if not isinstance(mac, str) or not hmac.compare_digest(_bytes(mac), _bytes(self._mac(expires, text))):
            raise InvalidRequest(
                f"{KV_TRANSFER_FIELD}.mac",
                f"is not of this pool: the prefill worker has another {SECRET}, or no prefill worker made it",
            )
        return Opened(json.loads(text), self._clock() > expires + CLOCK_SKEW_S)

    def _mac(self, expires: int, text: str) -> str:
        signed = f"{FORMAT}\n{VERSION}\n{expires}\n{text}"
        return hmac.new(self._key, _bytes(signed), hashlib.sha256).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def take_seal(role: str, environ: MutableMapping[str, str]) -> Seal | None:
    """The seal of a worker; None for an aggregated one, which transfers no KV.

    The secret is taken out of `environ`, so that no child process inherits it.

    Raises:
        ConfigurationError: a prefill or decode worker has no secret, or one that cannot be used.
    """
    secret, path = environ.pop(SECRET, None) or None, environ.pop(SECRET_FILE, None) or None
    if role == "aggregated":
        return None
    if secret is not None and path is not None:
        raise ConfigurationError(f"{SECRET} and {SECRET_FILE} are both set; give the secret in one place")
    if secret is None and path is None:
        raise ConfigurationError(
            f"--disaggregation-mode {role} needs {SECRET} or {SECRET_FILE}: a secret that prefill and decode workers "
            f"share, {MIN_SECRET} characters at least, to sign KV transfers with"
        )
    name = SECRET
    if path is not None:
        name = f"{SECRET_FILE} {path}"
        try:
            secret = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is no text"
            raise ConfigurationError(f"{name}: {reason}") from None
    assert secret is not None
    if len(secret) < MIN_SECRET:
        raise ConfigurationError(f"{name} must be at least {MIN_SECRET} characters, got {len(secret)}")
    return Seal(secret)
