"""Turns between clients: in which order waiting requests are admitted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from worker.engines.embedded.plan import Request

SHARED_S = 30.0
"""Seconds after its last request that a second client counts as one that may come back."""

MAX_KNOWN = 1024
"""Clients whose turns are remembered, those whose requests were admitted last."""


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
        self._led: dict[str | None, int] = {}  # the step in which a client's prompt was last the first
        self._num_led = 0
        self._last: str | None = None  # the client whose request came last
        self._shared_until_s = float("-inf")

    def arrived(self, request: Request) -> None:
        """A request is in the queue. One without a label may be the runtime's probe, and is no sign
        of a second client.
        """
        if request.client is None:
            return
        if self._last is not None and self._last != request.client:
            self._shared_until_s = self._now() + SHARED_S
        self._last = request.client

    def is_shared(self, live: Iterable[Request]) -> bool:
        """Whether several clients' requests are in the queues, or were until a moment ago.

        Args:
            live: Requests in the queues.
        """
        if self._now() < self._shared_until_s:
            return True
        requests = iter(live)
        first = next(requests, None)
        return first is not None and any(request.client != first.client for request in requests)

    def order(self, waiting: Sequence[Request]) -> list[Request]:
        """The waiting requests, in order of arrival, in order of admission."""
        if len({request.client for request in waiting}) < 2:
            return list(waiting)
        ahead: Counter[str | None] = Counter()
        keys: dict[int, tuple[float, bool, int]] = {}
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
        turn = self._first(request.client)
        self._served = max(self._served, turn)
        self._next.pop(request.client, None)
        request.turn, self._next[request.client] = turn, turn + 1
        if len(self._next) > MAX_KNOWN:
            del self._next[next(iter(self._next))]

    def give_way(self, request: Request) -> None:
        """A running request goes back into the queue to make room: behind the next of each client,
        before the second ones.
        """
        request.turn = self._served + 1.5

    def prompts(self, requests: Sequence[Request]) -> list[Request]:
        """The requests whose prompts a step is to compute, in the order in which it does.

        One of each client comes before the second of any, and the client whose turn to be first was
        longest ago is the first.
        """
        rounds: Counter[str | None] = Counter()
        keys: list[tuple[int, int, int]] = []
        for index, request in enumerate(requests):
            keys.append((rounds[request.client], self._led.get(request.client, -1), index))
            rounds[request.client] += 1
        self._led = {client: step for client, step in self._led.items() if client in rounds}
        return [requests[index] for *_, index in sorted(keys)]

    def computed(self, first: Request) -> None:
        """The prompt of `first` is the first of a step."""
        self._num_led += 1
        self._led[first.client] = self._num_led

    def _first(self, client: str | None) -> int:
        return max(self._served, self._next.get(client, 0))


def counts_of(requests: Iterable[Request]) -> Counter[str | None]:
    """Requests of each client."""
    counts: Counter[str | None] = Counter()
    for request in requests:  # Counter(requests) asks first whether they are a mapping, which takes longer
        counts[request.client] += 1
    return counts


def last_of_largest_client(running: Sequence[Request]) -> Request:
    """The running request to preempt: the last one of the client that has most of them, so that the
    oldest of all keeps running.
    """
    counts = counts_of(running)
    return max(running, key=lambda request: (counts[request.client], request.arrival))
