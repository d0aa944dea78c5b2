"""Order of grammars: a multi-level feedback queue, round robin over clients per level.

Pure decisions, single-threaded, no clock; `adapters.grammars.sandbox.jobs` carries them out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the queue: processor time until a grammar moves to the next, and its slots.

    Attributes:
        cpu_s: Processor time, seconds.
        slots: Grammars that compile at the same time.
        nice: Niceness, added to that of the sandbox.
    """

    cpu_s: float
    slots: int
    nice: int


def levels_up_to(timeout_s: float, num_cpus: int) -> tuple[Level, ...]:
    """The levels for a limit of ``timeout_s`` of processor time.

    Typical grammars compile within milliseconds and never wait for one that takes seconds: that one
    is stopped after 25 ms and starts over on the next level. The repeated work is a tenth of the
    limit. On few cores (`num_cpus`) one slow grammar compiles at a time: two would leave no core to
    an engine whose threads wait for each other.
    """
    quick = (Level(0.025, 2, 0), Level(0.25, 1, 2))
    # Niceness 12 in all is a sixteenth of a busy core: at 19, 2 s of processor time take minutes.
    slow = Level(timeout_s, 2 if num_cpus > 2 else 1, 2)
    return (*(level for level in quick if level.cpu_s < timeout_s), slow)


@dataclass(eq=False, slots=True)
class QueueEntry:
    """One grammar in the queue.

    Attributes:
        client: Client that sent it; clients are served round robin.
        level: Index of the level that it waits or runs in.
        is_running: Whether it has a slot.
    """

    client: Hashable
    level: int = 0
    is_running: bool = False


T = TypeVar("T", bound=QueueEntry)


class FeedbackQueue(Generic[T]):
    """Waiting and running entries of type T.

    Args:
        levels: Levels, by rising processor time.
        max_waiting: Most waiting entries, over all levels.
    """

    def __init__(self, levels: tuple[Level, ...], max_waiting: int) -> None:
        self.levels = levels
        self._max_waiting = max_waiting
        self._waiting: list[OrderedDict[Hashable, deque[T]]] = [OrderedDict() for _ in levels]
        self._running: list[list[T]] = [[] for _ in levels]

    def __repr__(self) -> str:
        levels = ", ".join(
            f"{level.cpu_s:g} s: {len(running)}/{level.slots} running, {sum(map(len, waiting.values()))} waiting"
            for level, running, waiting in zip(self.levels, self._running, self._waiting, strict=True)
        )
        return f"FeedbackQueue({levels})"

    @property
    def num_waiting(self) -> int:
        """Entries without a slot."""
        return sum(len(entries) for waiting in self._waiting for entries in waiting.values())

    @property
    def num_running(self) -> int:
        """Entries with a slot."""
        return sum(map(len, self._running))

    def __iter__(self) -> Iterator[T]:
        for running, waiting in zip(self._running, self._waiting, strict=True):
            yield from list(running)
            for entries in list(waiting.values()):
                yield from list(entries)

    def add(self, entry: T) -> T | None:
        """Queue ``entry`` in the first level; where the queue is full, returns the entry to evict.

        That is the last entry of the client with the most waiting ones, if it has more than the
        client of ``entry``, else ``entry`` itself.
        """
        gone = None
        if self.num_waiting >= self._max_waiting:
            counts: dict[Hashable, int] = {}
            for waiting in self._waiting:
                for client, entries in waiting.items():
                    counts[client] = counts.get(client, 0) + len(entries)
            greediest = max(counts, key=lambda client: counts[client], default=None)
            if greediest is None or counts[greediest] <= counts.get(entry.client, 0) + 1:
                return entry
            gone = next(w[greediest][-1] for w in reversed(self._waiting) if greediest in w)
            self.remove(gone)
        self._wait(entry)
        return gone

    def _wait(self, entry: T) -> None:
        entry.is_running = False
        self._waiting[entry.level].setdefault(entry.client, deque()).append(entry)

    def take(self) -> T | None:
        """Start the next entry; None if none waits or every slot is taken."""
        for level, waiting, running in zip(self.levels, self._waiting, self._running, strict=True):
            if len(running) >= level.slots:
                continue
            client = next((one for one in waiting if self._may_run(one, level, running)), None)
            if client is None:
                continue
            entries = waiting.pop(client)
            entry = entries.popleft()
            if entries:
                waiting[client] = entries  # after the other clients
            entry.is_running = True
            running.append(entry)
            return entry
        return None

    def _may_run(self, client: Hashable, level: Level, running: list[T]) -> bool:
        """Whether ``client`` leaves a slot to other clients, if the level has several."""
        return sum(entry.client == client for entry in running) < max(1, level.slots - 1)

    def promote(self, entry: T) -> bool:
        """Move an entry that used up its level's time to the next level; False if there is none."""
        self.remove(entry)
        if entry.level + 1 >= len(self.levels):
            return False
        entry.level += 1
        self._wait(entry)
        return True

    def put_back(self, entry: T) -> None:
        """Requeue an entry that lost its slot through no fault of its own, first of its client."""
        self.remove(entry)
        entry.is_running = False
        self._waiting[entry.level].setdefault(entry.client, deque()).appendleft(entry)

    def remove(self, entry: T) -> None:
        """Remove ``entry`` from the queue or free its slot, if it still has one."""
        if entry.is_running:
            self._running[entry.level] = [one for one in self._running[entry.level] if one is not entry]
            return
        entries = self._waiting[entry.level].get(entry.client)
        if entries is not None and entry in entries:
            entries.remove(entry)
            if not entries:
                del self._waiting[entry.level][entry.client]
