"""The responses of one front door: those that are stored, and those that run in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.field_checks import Body
from worker.frontdoor.responses.background import BackgroundRun
from worker.frontdoor.responses.generation import Generation
from worker.frontdoor.responses.items import Item, PlacedItem, input_items
from worker.frontdoor.responses.response import Response
from worker.frontdoor.responses.store import ResponseStore, StoredItem, StoredResponse, not_found, stored_item
from worker.frontdoor.responses.translation import PREVIOUS, ChatRequest, as_chat
from worker.frontdoor.server import FrontDoor
from worker.frontdoor.values import printable

MAX_RUNNING = 256
"""Background responses at a time; and as many more, each of a client that has no other."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be answered.

    Attributes:
        request: The chat.
        context: The items before the output.
    """

    request: ChatRequest
    context: Sequence[StoredItem]


class Responses:
    """The responses of one front door.

    Args:
        store: Responses that have ended.
        max_referenced: Bytes of the items together that one request refers to.
    """

    def __init__(self, store: ResponseStore, max_referenced: int) -> None:
        self.store = store
        self._max_referenced = max_referenced
        self._running: dict[tuple[str, str], BackgroundRun] = {}

    def prepared(self, owner: str, fields: Body, earlier: Sequence[StoredItem]) -> Prepared:
        """A checked request as a chat, with the items that it has and refers to.

        It may run in a thread beside the event loop.

        Args:
            owner: Label of the client.
            fields: The request.
            earlier: The items of the previous response.

        Raises:
            FieldRefused: naming the field.
            Refused: 413, the items that it refers to are larger together than a body may be.
        """
        left = self._max_referenced

        def found(item_id: str) -> Item | None:
            nonlocal left
            stored = self.store.item(owner, item_id)
            if stored is None:
                return None
            left -= len(stored.data)
            if left < 0:  # before it is read: a reference takes a few bytes, and may come a thousand times
                problem = f"input: refers to items of more than {self._max_referenced} bytes together"
                raise Refused(413, problem, "input")
            return stored.read()

        given = input_items([] if fields.get("input") is None else fields["input"], found)
        placed = [PlacedItem(PREVIOUS, each.read()) for each in earlier]
        request = as_chat(fields, placed, given)
        return Prepared(request, [*earlier, *(stored_item(each.item) for each in given)])

    def previous(self, owner: str, response_id: str | None) -> Sequence[StoredItem]:
        """The items of a response that another one continues; none for None.

        Raises:
            Refused: 404, it is not stored; 400, it has not ended.
        """
        if response_id is None:
            return ()
        if (owner, response_id) in self._running:
            raise FieldRefused(PREVIOUS, f"{printable(response_id)} is still in progress")
        stored = self.store.get(owner, response_id)
        if stored is None:
            raise not_found(response_id, PREVIOUS)
        return (*stored.context, *stored.output)

    def run(
        self, generation: Generation, take_room: Callable[[], Callable[[], None]], *, keeps_events: bool
    ) -> BackgroundRun:
        """Generate a response in the background.

        Args:
            generation: The response.
            take_room: See `Exchange.take_room`.
            keeps_events: Whether it can be streamed again later.

        Raises:
            Refused: 429, too many are generated.
        """
        is_first = all(owner != generation.owner for owner, _ in self._running)
        if len(self._running) >= (2 if is_first else 1) * MAX_RUNNING:
            problem = f"{len(self._running)} background responses are being generated; try again later"
            raise Refused(429, problem, "background", kind="rate_limit_error", code="rate_limit_exceeded")
        key = (generation.owner, generation.answer.response["id"])
        free = take_room()

        def ended() -> None:
            self._running.pop(key, None)
            free()

        self._running[key] = BackgroundRun(generation, keeps_events=keeps_events, ended=ended)
        return self._running[key]

    def running(self, owner: str, response_id: str) -> BackgroundRun | None:
        """A background response that is being generated, None if there is none with this id."""
        return self._running.get((owner, response_id))

    def response(self, owner: str, response_id: str) -> Response:
        """A response, as far as it has been generated. Raises `Refused`: 404."""
        found = self._found(owner, response_id)
        return found.response if isinstance(found, BackgroundRun) else found.read()

    def context(self, owner: str, response_id: str) -> Sequence[StoredItem]:
        """The items before the output of a response. Raises `Refused`: 404."""
        return self._found(owner, response_id).context

    def _found(self, owner: str, response_id: str) -> BackgroundRun | StoredResponse:
        found = self.running(owner, response_id) or self.store.get(owner, response_id)
        if found is None:
            raise not_found(response_id)
        return found

    async def delete(self, owner: str, response_id: str) -> None:
        """Drop a response, whether it has ended or not. Raises `Refused`: 404."""
        run = self.running(owner, response_id)
        if run is not None:
            await run.cancel()
        if not self.store.delete(owner, response_id) and run is None:
            raise not_found(response_id)


_OF_DOORS: WeakKeyDictionary[FrontDoor, Responses] = WeakKeyDictionary()


def responses_of(door: FrontDoor) -> Responses:
    """The responses of a front door."""
    found = _OF_DOORS.get(door)
    if found is None:
        found = _OF_DOORS[door] = Responses(ResponseStore(door.options.response_store_mib * 2**20), door.max_body)
    return found
