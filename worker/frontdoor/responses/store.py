"""Responses that can be fetched and continued later, in memory, up to a limit."""

from __future__ import annotations

import contextlib
import heapq
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.frontdoor.encoding import encoded
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.responses.items import Item
from worker.frontdoor.responses.response import Response
from worker.frontdoor.values import printable

MAX_RESPONSES = 65536
_OVERHEAD = 512
"""Bytes that a response or an item takes beside its JSON, about."""
_REFERENCE = 8
_SPARE_ENTRIES = 64
"""Entries out of date that the heap of owners may have beside as many as there are owners."""


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

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return len(self.data) + _OVERHEAD


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
    return StoredItem(item["id"], encoded(item))


class _Owned:
    """The stored responses of one owner.

    Attributes:
        responses: Responses by id, the one that has not been used for longest first.
        items: Items by the id that clients may give to several, the most recent one last.
        num_bytes: Bytes of all of them, with their items once each.
        number: Number of the owner, in the order in which they came.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.items: dict[str, dict[StoredItem, None]] = {}
        self.num_bytes = 0

    def add(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response that is not there."""
        self.responses[response_id] = stored
        self.num_bytes += stored.num_bytes
        for item in stored.items():
            if item.uses == 0:
                self.num_bytes += item.num_bytes
            item.uses += 1
            of_id = self.items.setdefault(item.item_id, {})
            of_id.pop(item, None)
            of_id[item] = None

    def remove(self, response_id: str) -> bool:
        """Drop a response; whether there was one."""
        stored = self.responses.pop(response_id, None)
        if stored is None:
            return False
        self.num_bytes -= stored.num_bytes
        for item in stored.items():
            item.uses -= 1
            if item.uses == 0:
                self.num_bytes -= item.num_bytes
                of_id = self.items[item.item_id]
                del of_id[item]
                if not of_id:
                    del self.items[item.item_id]
        return True


class ResponseStore:
    """The stored responses of all owners. Where room is short, the owner with the most bytes loses
    the response that has not been used for longest.

    Items that several responses have, because one continues the other, are kept once. What one
    owner has stored does not exist for another.

    Args:
        max_bytes: Limit for all of them together; 0 stores nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._owners: dict[str, _Owned] = {}
        self._num_owners = 0  # that ever came
        # A heap of the owners by their bytes, the most first. One whose bytes have changed has
        # another entry.
        self._largest: list[tuple[int, int, str]] = []
        self.num_bytes = 0
        self._num_responses = 0

    @property
    def is_on(self) -> bool:
        """Whether anything is stored."""
        return self.max_bytes > 0

    def __len__(self) -> int:
        return self._num_responses

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """A response of this owner's, which is thereby used; None if there is none."""
        owned = self._owners.get(owner)
        found = None if owned is None else owned.responses.get(response_id)
        if owned is not None and found is not None:
            owned.responses.move_to_end(response_id)
        return found

    def item(self, owner: str, item_id: str) -> StoredItem | None:
        """The item of this owner's responses with an id, the most recent one if clients gave it
        to several; None if there is none.

        It may run in a thread, while the event loop stores and drops others.
        """
        owned = self._owners.get(owner)
        found = None if owned is None else owned.items.get(item_id)
        return next(reversed(tuple(found or ())), None)

    def put(
        self,
        owner: str,
        response: Response,
        context: Sequence[StoredItem],
        events: Sequence[bytes] = (),
    ) -> bool:
        """Store a response, in place of the one with its id.

        Returns:
            Whether it is stored: False if it is larger than the store, which drops no other.
        """
        output = tuple(stored_item(item) for item in response["output"])
        data = encoded({**response, "output": []})
        stored = StoredResponse(data, tuple(context), output, tuple(events))
        self.delete(owner, response["id"])
        if stored.num_bytes + sum(item.num_bytes for item in set(stored.items())) > self.max_bytes:
            return False
        with self._changed(owner) as owned:
            owned.add(response["id"], stored)
        while self.num_bytes > self.max_bytes or self._num_responses > MAX_RESPONSES:
            self._make_room(owner)
        return True

    def _make_room(self, owner: str) -> None:
        """Drop a response other than the last one of ``owner``, which has just come."""
        own: list[tuple[int, int, str]] = []
        while True:
            entry = heapq.heappop(self._largest)
            largest = entry[-1]
            owned = self._owners.get(largest)
            if owned is None or entry != _entry(largest, owned):
                continue
            if largest != owner or len(owned.responses) > 1:
                break
            own = [entry]
        for entry in own:
            heapq.heappush(self._largest, entry)
        self.delete(largest, next(iter(owned.responses)))

    def delete(self, owner: str, response_id: str) -> bool:
        """Drop a response; whether there was one."""
        with self._changed(owner) as owned:
            return owned.remove(response_id)

    @contextlib.contextmanager
    def _changed(self, owner: str) -> Iterator[_Owned]:
        """An owner's responses, which are counted again afterwards."""
        owned = self._owners.get(owner)
        if owned is None:
            owned = self._owners[owner] = _Owned(self._num_owners)
            self._num_owners += 1
        before = (owned.num_bytes, len(owned.responses))
        yield owned
        self.num_bytes += owned.num_bytes - before[0]
        self._num_responses += len(owned.responses) - before[1]
        if not owned.responses:
            del self._owners[owner]
        elif owned.num_bytes != before[0]:
            heapq.heappush(self._largest, _entry(owner, owned))
        if len(self._largest) > 2 * len(self._owners) + _SPARE_ENTRIES:
            self._largest = [_entry(name, each) for name, each in self._owners.items()]
            heapq.heapify(self._largest)


def _entry(owner: str, owned: _Owned) -> tuple[int, int, str]:
    """The entry of an owner in the heap of them."""
    return -owned.num_bytes, owned.number, owner


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
