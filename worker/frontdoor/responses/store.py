"""Responses that can be fetched and continued later, in memory, up to a limit."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.responses.items import Item
from worker.frontdoor.responses.response import Response
from worker.frontdoor.values import printable

MAX_RESPONSES = 65536
_OVERHEAD = 512
"""Bytes that a response or an item takes beside its JSON, about."""
_REFERENCE = 8
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(slots=True, eq=False)
class StoredItem:
    """An item of one or several responses of one owner.

    Attributes:
        item_id: Id of the item.
        data: JSON of the item.
        uses: Number of times that stored responses have it.
    """

    item_id: str
    data: bytes
    uses: int = 0

    def read(self) -> Item:
        """The item."""
        item: Item = json.loads(self.data)
        return item


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and what it was made of.

    Attributes:
        data: JSON of the response, with an empty output.
        context: The items before its output, those of previous responses included.
        output: The items of its output.
        events: Events as they were sent, if the response can be streamed again.
    """

    data: bytes
    context: tuple[StoredItem, ...]
    output: tuple[StoredItem, ...]
    events: tuple[bytes, ...] = ()

    def read(self) -> Response:
        """The response."""
        response: Response = json.loads(self.data)
        return {**response, "output": [each.read() for each in self.output]}

    @property
    def num_bytes(self) -> int:
        """Bytes of what it has alone."""
        own = len(self.data) + sum(map(len, self.events)) + _OVERHEAD
        return own + _REFERENCE * (len(self.context) + len(self.output) + len(self.events))

    def items(self) -> Iterator[StoredItem]:
        """All items, in order."""
        yield from self.context
        yield from self.output


def stored_item(item: Item) -> StoredItem:
    """An item that no response has yet."""
    return StoredItem(item["id"], _ENCODER.encode(item).encode())


class ResponseStore:
    """The stored responses of all owners; the one that has not been used for longest is dropped.

    Items that several responses have, because one continues the other, are kept once. What one
    owner has stored does not exist for another.

    Args:
        max_bytes: Limit for all of them together; 0 stores nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._items: dict[tuple[str, str], StoredItem] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything is stored."""
        return self.max_bytes > 0

    def __len__(self) -> int:
        return len(self._responses)

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """A response of this owner's, which is thereby used; None if there is none."""
        found = self._responses.get((owner, response_id))
        if found is not None:
            self._responses.move_to_end((owner, response_id))
        return found

    def item(self, owner: str, item_id: str) -> StoredItem | None:
        """The item of this owner's responses with an id, the most recent one if clients gave it
        to several; None if there is none.
        """
        return self._items.get((owner, item_id))

    def put(
        self,
        owner: str,
        response: Response,
        context: Sequence[StoredItem],
        events: Sequence[bytes] = (),
    ) -> bool:
        """Store a response, in place of the one with its id.

        Returns:
            Whether it is stored: False if it is larger than the store.
        """
        output = tuple(stored_item(item) for item in response["output"])
        data = _ENCODER.encode({**response, "output": []}).encode()
        stored = StoredResponse(data, tuple(context), output, tuple(events))
        self.delete(owner, response["id"])
        self._responses[owner, response["id"]] = stored
        self.num_bytes += stored.num_bytes
        for item in stored.items():
            self._keep(owner, item)
        while self._responses and (self.num_bytes > self.max_bytes or len(self._responses) > MAX_RESPONSES):
            (oldest_owner, oldest_id) = next(iter(self._responses))
            self.delete(oldest_owner, oldest_id)
        return (owner, response["id"]) in self._responses

    def delete(self, owner: str, response_id: str) -> bool:
        """Drop a response; whether there was one."""
        stored = self._responses.pop((owner, response_id), None)
        if stored is None:
            return False
        self.num_bytes -= stored.num_bytes
        for item in stored.items():
            self._release(owner, item)
        return True

    def _keep(self, owner: str, item: StoredItem) -> None:
        if item.uses == 0:
            self.num_bytes += len(item.data) + _OVERHEAD
        item.uses += 1
        self._items[owner, item.item_id] = item

    def _release(self, owner: str, item: StoredItem) -> None:
        item.uses -= 1
        if item.uses == 0:
            self.num_bytes -= len(item.data) + _OVERHEAD
            if self._items.get((owner, item.item_id)) is item:
                del self._items[owner, item.item_id]


def is_stored(fields: Mapping[str, Any], store: ResponseStore) -> bool:
    """Whether the response to a request is to be stored.

    Raises:
        FieldRefused: it must be, and the store is off.
    """
    if store.is_on:
        return fields.get("store") is not False
    for name in ("store", "background", "previous_response_id"):
        if fields.get(name):
            raise FieldRefused(
                name,
                "needs the store of responses, which is off (--response-store-mib 0)",
                code="unsupported_parameter",
            )
    return False


def not_found(response_id: str, param: str = "response_id") -> Refused:
    """The refusal of an id that is not stored."""
    return Refused(
        404,
        f"{param}: no response has the id {printable(response_id)}: it was not stored, has been deleted or dropped for "
        "newer ones, or the front door has been restarted, which empties its store",
        param,
        code="response_not_found",
    )
