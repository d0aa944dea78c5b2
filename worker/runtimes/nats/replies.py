"""Guard of reply subjects: a worker answers to inboxes of clients alone.

A worker publishes with its own rights to the reply subject that a client chose. Without a limit a
client that may ask one model could delete streams, end requests of other models, or forge answers
of the server to the worker itself (decision 28).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from worker.arguments import SUBJECT_PART
from worker.migration.nats_store import INBOX

logger = logging.getLogger(__name__)

LOGGED_EVERY_S = 10.0

MAX_REPLY = 1024
"""Characters of a reply subject at most. The server takes 4096 for the subjects of a message, of
which an answer has one more than its request: it would close the connection of a worker for good.
"""

_SUBJECT = re.compile(rf"{SUBJECT_PART}(\.{SUBJECT_PART})*")


class ReplyGuard:
    """A connection whose subscribers get only messages that may be answered.

    Args:
        client: Connection to NATS.
        prefixes: Beginnings of clients' reply subjects, separated by commas, each ending with a
            dot.

    Attributes:
        num_refused: Messages that were dropped.
    """

    def __init__(self, client: Client, prefixes: str) -> None:
        self.num_refused = 0
        self._client = client
        self._prefixes = tuple(each.strip() for each in prefixes.split(","))
        self._logged_s = float("-inf")

    def allows(self, reply: str) -> bool:
        """Whether something may be published to `reply`."""
        is_subject = len(reply) <= MAX_REPLY and _SUBJECT.fullmatch(reply) is not None
        return is_subject and reply.startswith(self._prefixes) and not reply.startswith(f"{INBOX}.")

    async def subscribe(
        self, subject: str, queue: str = "", cb: Callable[[Msg], Awaitable[None]] | None = None
    ) -> Subscription:
        """Same as `Client.subscribe`; messages with another reply subject are dropped."""
        assert cb is not None, "messages are guarded on their way to a callback"

        async def guarded(message: Msg) -> None:
            if not message.reply or self.allows(message.reply):
                await cb(message)
            else:
                self.refuse(message)

        return await self._client.subscribe(subject, queue=queue, cb=guarded)

    def refuse(self, message: Msg) -> None:
        """Count a message that is dropped; the log says so every `LOGGED_EVERY_S` at most."""
        self.num_refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_s > LOGGED_EVERY_S:
            self._logged_s = now_s
            logger.warning(
                "dropped a message to %.80r with the reply subject %.80r, which is too long or begins with none of %s "
                "(--nats-reply-prefixes); %d so far",
                message.subject,
                message.reply,
                ", ".join(self._prefixes),
                self.num_refused,
            )

    def __getattr__(self, name: str) -> Any:
        """All else is the connection's."""
        return getattr(self._client, name)
