"""Who compiles next: lanes of growing patience, and fair turns of the clients in each.

Pure decisions, one thread, no clock: `adapters.grammars.sandbox` does what they say.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(frozen=True, slots=True)
class Lane:
    """One level of the queue: processor time until a grammar moves to the next, and its slots.

    Attributes:
        cpu_s: Processor time, seconds.
        slots: Grammars that compile at the same time.
        nice: Added to the niceness of the sandbox.
    """

    cpu_s: float
    slots: int
    nice: int


def lanes_up_to(timeout_s: float) -> tuple[Lane, ...]:
    """The lanes where a grammar may take ``timeout_s`` of processor time in the end.

    Grammars in use compile within milliseconds, so those that do never wait for one that takes
    seconds: it was stopped after 25 ms, and begins anew among its own kind. What it computes twice
    is a tenth of what it may take.
    """
    quick = (Lane(0.025, 2, 0), Lane(0.25, 1, 5))
    return (*(lane for lane in quick if lane.cpu_s < timeout_s), Lane(timeout_s, 2, 9))


@dataclass(eq=False, slots=True)
class QueueEntry:
    """One grammar's place in the lanes.

    Attributes:
        client: Whose it is; each client has its turn.
        lane: Index of the lane that it waits or runs in.
        is_running: Whether it has a slot.
    """

    client: Hashable
    lane: int = 0
    is_running: bool = False


T = TypeVar("T", bound=QueueEntry)


class Lanes(Generic[T]):
    """Turns that wait and run.

    Args:
        lanes: In the order of growing patience.
        max_waiting: Most turns that wait, over all lanes.
    """

    def __init__(self, lanes: tuple[Lane, ...], max_waiting: int) -> None:
        self.lanes = lanes
        self._max_waiting = max_waiting
        self._waiting: list[OrderedDict[Hashable, deque[T]]] = [OrderedDict() for _ in lanes]
        self._running: list[list[T]] = [[] for _ in lanes]

    def __repr__(self) -> str:
        lanes = ", ".join(
            f"{lane.cpu_s:g} s: {len(running)}/{lane.slots} running, {sum(map(len, waiting.values()))} waiting"
            for lane, running, waiting in zip(self.lanes, self._running, self._waiting, strict=True)
        )
        return f"Lanes({lanes})"

    @property
    def num_waiting(self) -> int:
        """Turns without a slot."""
        return sum(len(turns) for waiting in self._waiting for turns in waiting.values())

    @property
    def num_running(self) -> int:
        """Turns with a slot."""
        return sum(map(len, self._running))

    def __iter__(self) -> Iterator[T]:
        for running, waiting in zip(self._running, self._waiting, strict=True):
            yield from list(running)
            for turns in list(waiting.values()):
                yield from list(turns)

    def add(self, turn: T) -> T | None:
        """Queue ``entry`` in the first lane; where the queue is full, returns the entry to evict.

        That is the last turn of whoever waits with most, if that is more than the newcomer's own;
        else ``turn``.
        """
        gone = None
        if self.num_waiting >= self._max_waiting:
            counts: dict[Hashable, int] = {}
            for waiting in self._waiting:
                for client, turns in waiting.items():
                    counts[client] = counts.get(client, 0) + len(turns)
            greediest = max(counts, key=lambda client: counts[client], default=None)
            if greediest is None or counts[greediest] <= counts.get(turn.client, 0) + 1:
                return turn
            gone = next(w[greediest][-1] for w in reversed(self._waiting) if greediest in w)
            self.remove(gone)
        self._wait(turn)
        return gone

    def _wait(self, turn: T) -> None:
        turn.is_running = False
        self._waiting[turn.lane].setdefault(turn.client, deque()).append(turn)

    def take(self) -> T | None:
        """The next turn to run, now in its slot; None if nobody waits or every slot is taken."""
        for lane, waiting, running in zip(self.lanes, self._waiting, self._running, strict=True):
            if len(running) >= lane.slots:
                continue
            client = next((one for one in waiting if self._may_run(one, lane, running)), None)
            if client is None:
                continue
            turns = waiting.pop(client)
            turn = turns.popleft()
            if turns:
                waiting[client] = turns  # behind the other clients
            turn.is_running = True
            running.append(turn)
            return turn
        return None

    def _may_run(self, client: Hashable, lane: Lane, running: list[T]) -> bool:
        """One slot of several is always left to other clients."""
        return sum(turn.client == client for turn in running) < max(1, lane.slots - 1)

    def promote(self, turn: T) -> bool:
        """Move an entry that used up its lane's time to the next lane; False if there is none."""
        self.remove(turn)
        if turn.lane + 1 >= len(self.lanes):
            return False
        turn.lane += 1
        self._wait(turn)
        return True

    def put_back(self, turn: T) -> None:
        """Requeue an entry that lost its slot through no fault of its own, first of its client."""
        self.remove(turn)
        turn.is_running = False
        self._waiting[turn.lane].setdefault(turn.client, deque()).appendleft(turn)

    def remove(self, turn: T) -> None:
        """Free the place or slot of ``turn``, if it still has one."""
        if turn.is_running:
            self._running[turn.lane] = [one for one in self._running[turn.lane] if one is not turn]
            return
        turns = self._waiting[turn.lane].get(turn.client)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[turn.lane][turn.client]
