"""Responses while they are generated: the chunks of the chat behind them, as events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from worker.frontdoor.asking import Caller
from worker.frontdoor.chat_stream import chat
from worker.frontdoor.errors import Refused
from worker.frontdoor.exchange import server_sent
from worker.frontdoor.field_checks import Body
from worker.frontdoor.responses.answer import Answer
from worker.frontdoor.responses.outputs import Event
from worker.frontdoor.responses.store import ResponseStore, StoredItem
from worker.frontdoor.responses.translation import ChatRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Generation:
    """One response that is to be generated.

    Attributes:
        caller: Requester on whose behalf the frontend is asked.
        owner: Label of the client.
        request: The chat.
        answer: The response.
        context: Items before the output.
        store: Store of the finished response, None if it is not stored.
    """

    caller: Caller
    owner: str
    request: ChatRequest
    answer: Answer
    context: Sequence[StoredItem]
    store: ResponseStore | None

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """All events but those of `Answer.created`, together as they come. The caller keeps the
        response once its answer is over.

        Raises:
            Refused: nothing has been generated.
        """
        answer = self.answer
        begun = False
        try:
            async with aclosing(chat(self.caller, self._fields())) as chunks:
                async for chunk in chunks:
                    first = [] if begun else [*answer.begun()]
                    begun = True
                    yield [*first, *answer.events(chunk)]
        except Refused as error:
            refused = self.request.origins.of_client(error)
            if not begun:
                raise refused from None
            last = [*answer.failed(refused)]
        else:
            last = [*([] if begun else answer.begun()), *answer.completed()]
        yield last

    def _fields(self) -> Body:
        """The chat; where models think, its chunks say how many tokens there are so far."""
        if self.caller.door.options.dyn_reasoning_parser is None:
            return self.request.fields
        return {**self.request.fields, "stream_options": {"continuous_usage_stats": True}}

    def keep(self, last: Sequence[Event], events: Sequence[bytes] = ()) -> bool:
        """Store the finished response.

        Args:
            last: Events of the end.
            events: All events, as they were sent, if the response is to be streamed again.

        Returns:
            False if there is no room for the response, which it and its last events then say.
        """
        if self.store is None or self.store.put(self.owner, self.answer.response, self.context, events):
            return True
        logger.warning("a response is larger than the store of responses, and has not been stored")
        self.answer.is_not_stored(last)
        return False


def as_sent(event: Event) -> bytes:
    """An event as a server-sent event."""
    return server_sent(event, event["type"])
