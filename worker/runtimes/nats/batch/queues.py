"""The work queues of a model, one per priority, as its workers see them."""

from __future__ import annotations

import asyncio
import json
from itertools import count

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import NoRespondersError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StreamConfig
from nats.js.errors import BadRequestError, NotFoundError

from worker.errors import ConfigurationError
from worker.runtimes.nats.batch import layout
from worker.runtimes.nats.protocol import Subjects

ANSWER_S = 5.0
"""Seconds for the server's answer to a request for messages."""

ACKNOWLEDGED = "$JS.ACK."
"""Prefix of the reply subject of every message of a queue."""


async def ensure_queue(js: JetStreamContext, subjects: Subjects, priority: str) -> None:
    """The work queue of a priority exists; one that is there keeps the limits that it has.

    Raises:
        ConfigurationError: it is there, and no work queue of these requests.
    """
    name, subject = layout.stream_name(subjects, priority), layout.queue_subject(subjects, priority)
    wanted = StreamConfig(
        name=name,
        subjects=[subject],
        retention=RetentionPolicy.WORK_QUEUE,
        duplicate_window=layout.DUPLICATE_WINDOW_S,
    )
    try:
        found = (await js.stream_info(name)).config
    except NotFoundError:
        try:
            await js.add_stream(wanted)
            return
        except BadRequestError:  # made just now, with limits of its own
            found = (await js.stream_info(name)).config
    if found.retention != RetentionPolicy.WORK_QUEUE or subject not in (found.subjects or ()):
        raise ConfigurationError(f"the stream {name} must be a work queue of {subject}")


class WorkQueue:
    """The queue of one priority, and the consumer that all workers of the model share.

    Args:
        client: Connection to NATS with JetStream.
        subjects: Subjects of the model.
        priority: One of `PRIORITIES`.
        ack_wait_s: Seconds after which a message is delivered again.

    Attributes:
        ack_wait_s: The present value, which another worker may have changed.
    """

    def __init__(self, client: Client, subjects: Subjects, priority: str, ack_wait_s: float) -> None:
        self.priority = priority
        self.ack_wait_s = ack_wait_s
        self._client = client
        self._js = client.jetstream(timeout=5)
        self._subjects = subjects
        self._stream = layout.stream_name(subjects, priority)
        self._inbox = client.new_inbox()
        self._numbers = count()
        self._config = ConsumerConfig(
            name=layout.CONSUMER,
            durable_name=layout.CONSUMER,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ack_wait_s,
            max_deliver=-1,
            max_ack_pending=-1,
        )
        self._subscription: Subscription | None = None

    async def open(self) -> None:
        """Make stream and consumer; of a consumer that is there, set its limits.

        Raises:
            NatsError: the server has no JetStream.
            ConfigurationError: the stream is another one.
        """
        await self._make()
        self._subscription = await self._client.subscribe(f"{self._inbox}.*", pending_bytes_limit=0)

    async def renew(self) -> None:
        """Make again what an operator has deleted, and take over what another worker has set."""
        try:
            info = await self._js.consumer_info(self._stream, layout.CONSUMER)
        except NotFoundError:
            await self._make()
        else:
            assert info.config.ack_wait is not None, "the server says what it waits for"
            self.ack_wait_s = info.config.ack_wait

    async def _make(self) -> None:
        await ensure_queue(self._js, self._subjects, self.priority)
        await self._js.add_consumer(self._stream, config=self._config)
        assert self._config.ack_wait is not None
        self.ack_wait_s = self._config.ack_wait

    async def fetch(self, number: int) -> list[Msg]:
        """Up to ``number`` messages that are there now.

        A status of the server's is one by where it comes from, never by its headers, which whoever
        publishes a request chooses.

        Raises:
            NatsError: the consumer is not there; `renew` makes it.
            TimeoutError: the server has not answered.
        """
        assert self._subscription is not None, "open comes first"
        inbox = f"{self._inbox}.{next(self._numbers)}"
        wanted = json.dumps({"batch": number, "no_wait": True}).encode()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{layout.CONSUMER}"
        await self._client.publish(subject, wanted, inbox)
        found: list[Msg] = []
        try:
            async with asyncio.timeout(ANSWER_S):
                while len(found) < number:
                    message = await self._subscription.next_msg(timeout=None)
                    if message.reply.startswith(ACKNOWLEDGED):
                        found.append(message)
                    elif message.subject == inbox:
                        if (message.headers or {}).get("Status") == "503":
                            raise NoRespondersError
                        break
        except (TimeoutError, NoRespondersError):
            if not found:  # what has come is answered
                raise
        return found
