"""nats-py's client made safe against messages that it cannot read.

Whoever may publish one message to a subject that we subscribe to chooses its bytes. nats-py ends
its read loop, and is deaf until a ping goes unanswered, when a subject, a reply subject or the
status line of the headers is not UTF-8 or too short; and it separates the fields of a message's
line at characters that NATS allows in a subject, so that a part of a subject is taken for the
number of another subscription.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from nats.aio.client import Client
from nats.errors import MaxPayloadError
from nats.protocol import parser

logger = logging.getLogger(__name__)

_FIELD, _GAP = rb"([^ \t\r\n]+)", rb"[ \t]+"
_REPLY = rb"(([^ \t\r\n]+)[ \t]+)?"

# As nats-server separates fields: at spaces and tabs, not at form feeds and vertical tabs.
parser.MSG_RE = re.compile(rb"\AMSG" + _GAP + _FIELD + _GAP + _FIELD + _GAP + _REPLY + rb"(\d+)\r\n")
parser.HMSG_RE = re.compile(rb"\AHMSG" + _GAP + _FIELD + _GAP + _FIELD + _GAP + _REPLY + rb"(\d+)[ \t]+(\d+)\r\n")


class TolerantClient(Client):
    """A client that hands on every message: what cannot be read of it is left out. It sends none
    that the server would close the connection for.
    """

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Same as nats-py's, which does not count the headers, as the server does: one message that
        is too large with them would end the connection for good.

        Raises:
            MaxPayloadError: the message is larger than the server takes.
        """
        if headers and len(payload) + _size(headers) > self.max_payload:
            raise MaxPayloadError
        await super().publish(subject, payload, reply, headers)

    async def _process_headers(self, headers: Any) -> dict[str, str] | None:
        """The headers, None if they are none."""
        try:
            return await super()._process_headers(headers)
        except (ValueError, IndexError) as error:
            logger.debug("NATS: headers that cannot be read: %s", error)
            return None

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Any:
        """The message; a byte of a subject that is not UTF-8 becomes U+FFFD."""
        subject, reply = (text.decode(errors="replace").encode() for text in (subject, reply))
        return super()._build_message(sid, subject, reply, data, headers)


def _size(headers: Mapping[str, str]) -> int:
    """Bytes of headers in a message, at most: nats-py strips keys and values."""
    lines = sum(len(f"{key}: {value}\r\n".encode()) for key, value in headers.items())
    return len(b"NATS/1.0\r\n\r\n") + lines
