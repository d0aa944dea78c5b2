"""Turns between clients: in which order waiting requests are admitted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from worker.engines.embedded.plan import Request

SHARED_S = 30.0
"""Seconds after its last request that a second client counts as one that may come back."""

MAX_KNOWN = 1024
"""Clients whose turns are remembered before those that have lost their meaning are dropped."""


class Turns:
    """Start-time fair queueing (Goyal, Vin and Cheng 1996) with requests of equal cost.

    Each client's requests have turns of their own, one after the other, and the lowest turn is
    admitted first. A client that comes anew, or back, begins at the turn that is being served. So
    for each turn that it waits every other client is admitted at most once, and the number of
    requests that another client has sent does not matter. Requests of one client keep their order.

    Args:
        now: The clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._served = 0  # the turn that is being served
        self._next: dict[str | None, int] = {}  # of each client, behind its last turn
        self._last: tuple[str | None] | None = None  # the client whose request came last
        self._shared_until_s = float("-inf")

    def arrived(self, request: Request) -> None:
        """A request is in the queue."""
        if self._last is not None and self._last[0] != request.client:
            self._shared_until_s = self._now() + SHARED_S
        self._last = (request.client,)

    @property
    def is_shared(self) -> bool:
        """Whether several clients' requests have come of late."""
        return self._now() < self._shared_until_s

    def order(self, waiting: Sequence[Request]) -> list[Request]:
        """The waiting requests, in order of arrival, in order of admission."""
        if len({request.client for request in waiting}) < 2:
            return list(waiting)
        ahead: Counter[str | None] = Counter()
        keys: dict[int, tuple[int, bool, int]] = {}
        for request in waiting:
            is_new = request.turn < 0
            turn = self._first(request.client) + ahead[request.client] if is_new else request.turn
            ahead[request.client] += is_new
            keys[id(request)] = (turn, is_new, request.arrival)
        return sorted(waiting, key=lambda request: keys[id(request)])

    def admit(self, request: Request) -> None:
        """A request leaves the queue. One that comes back into it keeps its turn."""
        if request.turn >= 0:
            return
        request.turn = self._first(request.client)
        self._served = max(self._served, request.turn)
        self._next[request.client] = request.turn + 1
        if len(self._next) > MAX_KNOWN:
            self._next = {client: turn for client, turn in self._next.items() if turn > self._served}

    def give_way(self, request: Request) -> None:
        """A running request goes back into the queue to make room: behind those who wait now."""
        request.turn = self._served + 1

    def _first(self, client: str | None) -> int:
        return max(self._served, self._next.get(client, 0))


def counts_of(requests: Iterable[Request]) -> Counter[str | None]:
    """Requests of each client."""
    return Counter(request.client for request in requests)


def in_rounds(requests: Sequence[Request]) -> list[Request]:
    """The first request of each client, then the second ones, and so on, each round in order."""
    rounds: Counter[str | None] = Counter()
    ranked: list[tuple[int, int]] = []
    for index, request in enumerate(requests):
        ranked.append((rounds[request.client], index))
        rounds[request.client] += 1
    return [requests[index] for _, index in sorted(ranked)]
