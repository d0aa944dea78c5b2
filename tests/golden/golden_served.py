"""The modes of the golden matrix over real processes: Dynamo's frontend, workers, and kills.

A client sees token ids in the log probabilities of a stream, as ``token_id:N``. `SERVED_MODES` is
the table.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from golden_cases import Case
from golden_matrix import say
from golden_modes import NUM_CHOICES, Choices, Mode, Request
from golden_workers import EXACT, NGRAMS, Bench, Failed, Refused, new_id

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "e2e")]
from e2e_stack import MODEL, STAND_IN, Worker, running_stack, wait_for
from front_door_process import Door

PREFIX = "token_id:"
READY = {"prompt": "ready?", "max_tokens": 1}

NUM_KILLS = 20
"""Workers that are killed at least."""


class Served:
    """Every request goes through Dynamo's frontend to worker processes.

    Args:
        name: Column of the matrix.
        workers: Options of each worker.
        at_once: Requests in flight at a time.
        frontend: Options of the frontend.

    Attributes:
        client: Asks; while the mode is running.
        drafts: Settings of ``--speculative-config`` beside the draft model.
    """

    drafts: Mapping[str, Any] = {}

    def __init__(self, name: str, *workers: Sequence[str], at_once: int = 1, frontend: Sequence[str] = ()) -> None:
        self.name = name
        self.at_once = at_once
        self._workers = workers
        self._frontend = frontend

    @asynccontextmanager
    async def running(self, bench: Bench) -> AsyncIterator[None]:
        self._bench = bench
        directory = bench.directory / self.name.replace(" ", "-")
        async with httpx.AsyncClient(timeout=120) as self.client:
            with running_stack(directory, bench.model) as self._stack:
                await asyncio.to_thread(self._start)
                yield
                self._check()

    def _check(self) -> None:
        """Raises `AssertionError` if what the mode is about did not happen."""

    async def requests(self, case: Case, alone: Sequence[int]) -> Sequence[Request]:
        return (Request(case, tuple(alone)),)

    async def tokens(self, request: Request) -> list[int]:
        return [token_id async for token_id in self._stream(request.case)]

    def _start(self) -> None:
        self._stack.start_frontend(*self._frontend)
        for argv in self._workers:
            self._start_worker(*argv)
        for worker in self._stack.workers:
            self._stack.wait_registered(worker)
        wait_for(lambda: self._stack.post("completions", **READY)[0] == 200, "an answer")

    def _start_worker(self, *argv: str) -> Worker:
        """Start a worker and wait until it is found; a pair must be found one after the other."""
        engine = [] if "trtllm" in argv else ["--device", "cpu", *EXACT, *self._bench.drafting(**self.drafts)]
        environ = STAND_IN if "trtllm" in argv else self._stack.environ
        worker = self._stack.start_worker(*self._bench.argv, *engine, *argv, wait=False, **_with_processors(environ))  # type: ignore[arg-type]
        self._stack.wait_endpoint(worker)
        return worker

    def start_front_door(self) -> str:
        """Put a front door before the frontend; its URL."""
        return Door(self._stack, "--", *self._bench.argv, **_with_processors(self._stack.environ)).url  # type: ignore[arg-type]

    async def _stream(self, case: Case) -> AsyncIterator[int]:
        """The token ids of an answer, as they come.

        Raises:
            Refused: a worker refuses the request before the first one.
            Failed: anything else, an error of the frontend's own before the first one too.
        """
        started, request_id = False, str(uuid.uuid4())
        url, body = f"{self._stack.url}/v1/chat/completions", body_of(case, stream=True)
        async with self.client.stream("POST", url, json=body, headers={"x-dynamo-request-id": request_id}) as answer:
            if answer.status_code != 200:
                raise self._error(request_id, answer.status_code, json.loads(await answer.aread()))
            async for line in answer.aiter_lines():
                event = _event(line)
                if event is None:
                    continue
                if not event.get("choices") and "usage" not in event:
                    error = self._error(request_id, 0, event)
                    raise Failed(f"{error} (after its first token)") if started else error
                for token_id in _token_ids(event):
                    started = True
                    yield token_id

    def _error(self, request_id: str, status: int, event: Mapping[str, Any]) -> Refused | Failed:
        """What became of a request without an answer; ``status`` is 0 in a stream, whose client
        1.4.2's frontend does not tell why a worker refused it.
        """
        logs = "\n".join(worker.log for worker in self._stack.workers)
        found = re.search(rf"request {request_id} refused: (?!prefill_result)(.+)", logs)
        return Refused(found[1]) if found else error_of(status, event)


class Crowded(Served):
    """Requests that grow beyond the pages of the KV cache, so that some are preempted."""

    def _check(self) -> None:
        logs = "".join(worker.log for worker in self._stack.workers)
        num_preemptions = sum(int(number) for number in re.findall(r'"preemptions": (\d+)', logs))
        say(f"{self.name}: {num_preemptions} preemptions")
        assert num_preemptions, "nothing was preempted"


class ServedSpeculated(Served):
    """Tokens are drafted by n-grams too."""

    drafts = NGRAMS

    def _check(self) -> None:
        (worker,) = self._stack.workers
        assert worker.metric("dlw_speculation_accepted_tokens_total", proposer="ngram"), "no drafted token was accepted"


class ServedNthChoice(Choices):
    """A request with n > 1 through the front door; a seeded one is streamed."""

    at_once = 8 * NUM_CHOICES

    @asynccontextmanager
    async def running(self, bench: Bench) -> AsyncIterator[None]:
        self._served = Served(self.name, ())
        async with super().running(bench), self._served.running(bench):
            self._url = await asyncio.to_thread(self._served.start_front_door)
            yield

    async def answers(self, case: Case) -> list[list[int]]:
        body = body_of(case, n=NUM_CHOICES, stream=case.sampling == "seeded")
        answer = await self._served.client.post(f"{self._url}/v1/chat/completions", json=body)
        if answer.status_code != 200:
            raise error_of(answer.status_code, answer.json())
        found: list[list[int]] = [[] for _ in range(NUM_CHOICES)]
        events = map(_event, answer.text.splitlines()) if body["stream"] else [answer.json()]
        for event in filter(None, events):
            if not event.get("choices") and "usage" not in event:
                raise Failed(_message(event))
            for choice in event["choices"]:
                found[choice["index"]] += _token_ids({"choices": [choice]})
        return found


class Killed(Served):
    """Workers are killed (-9) while they answer, and the frontend migrates what they served.

    Requests come in rounds. In each, one worker dies when the longest answer has come to a random
    token and every other one has begun, with everything that it serves; the next round has a new
    worker in its place. A frontend of 1.4.2 answers a request with a 500 that it sends to a worker
    in the milliseconds after its death (docs/reliability.md): so none is sent then.

    Args:
        name: Column of the matrix.
        argv: Options of the workers that are killed.
        num_workers: How many of them there are.
        at_once: Requests of a round.
        beside: Options of a worker that is started before them, and stays.
    """

    def __init__(
        self, name: str, argv: Sequence[str], *, num_workers: int, at_once: int, beside: Sequence[str] | None = None
    ) -> None:
        others = [] if beside is None else [beside]
        migrating = ("--migration-limit", "3")
        super().__init__(name, *others, *[argv] * num_workers, at_once=at_once, frontend=migrating)
        self._num_workers = num_workers
        self._rounds = Rounds(at_once, self._replace)
        self._source = random.Random(20_261_122)
        self._alive: list[Worker] = []
        self.num_kills = 0
        self.num_continued = 0

    @asynccontextmanager
    async def running(self, bench: Bench) -> AsyncIterator[None]:
        store = f"file:{bench.directory / 'boundaries'}"
        self._workers = tuple((*argv, "--migration", "on", "--boundary-store", store) for argv in self._workers)
        async with super().running(bench):
            self._alive = self._stack.workers[-self._num_workers :]
            yield
            self.num_continued += sum(_num_continued(worker) for worker in self._alive)
        say(f"{self.name}: {self.num_kills} workers killed, {self.num_continued} answers went on in another one")
        assert self.num_kills >= NUM_KILLS, f"{self.num_kills} workers were killed, {NUM_KILLS} wanted"
        assert self.num_continued >= NUM_KILLS, f"{self.num_continued} answers went on in another worker"

    async def requests(self, case: Case, alone: Sequence[int]) -> Sequence[Request]:
        self._rounds.expect()
        return await super().requests(case, alone)

    async def tokens(self, request: Request) -> list[int]:
        tokens: list[int] = []
        async with self._rounds.member(len(request.expected)) as member:
            longest = await member.is_longest()
            cut = self._source.randrange(1, max(2, len(request.expected) * 3 // 4)) if longest else 0
            async for token_id in self._stream(request.case):
                tokens.append(token_id)
                await member.begin()
                if len(tokens) == cut:
                    await member.all_have_begun()
                    await asyncio.to_thread(self._kill)
        return tokens

    def _kill(self) -> None:
        """Kill a worker that answers; nothing if none does any more."""
        busy = [worker for worker in self._alive if worker.metric("dlw_in_flight_requests")]
        if busy:
            worker = self._source.choice(busy)
            self.num_continued += _num_continued(worker)
            worker.end()
            self._alive.remove(worker)
            self.num_kills += 1

    async def _replace(self) -> None:
        """Start a worker in the place of one that died, once discovery has forgotten that.

        Until then a frontend of 1.4.2 may send requests to the dead one: when instances change, and
        where it died without an answer under way (docs/reliability.md).
        """
        if len(self._alive) == self._num_workers:
            return
        stays = len(self._workers) - self._num_workers
        await asyncio.to_thread(
            wait_for, lambda: len(self._stack.registered()) == len(self._alive) + stays, "discovery forgets the dead"
        )
        while len(self._alive) < self._num_workers:
            worker = await asyncio.to_thread(self._start_worker, *self._workers[-1])
            await asyncio.to_thread(self._stack.wait_registered, worker)
            self._alive.append(worker)


class Rounds:
    """Lets some members in at a time; the next ones wait until all of them have left.

    Args:
        size: Of a round; the last one has what is left.
        between: Awaited when a round has ended.
    """

    def __init__(self, size: int, between: Callable[[], Awaitable[None]]) -> None:
        self._most = size
        self._between = between
        self.changed = asyncio.Condition()
        self.members: list[Member] = []
        self._num_expected = 0
        self._num_left = 0

    def expect(self) -> None:
        """One more member will come. Before the first one comes, all are expected."""
        self._num_expected += 1

    @asynccontextmanager
    async def member(self, length: int) -> AsyncIterator[Member]:
        """One member; it has ``length`` to be compared with that of others."""
        member = Member(self, length)
        async with self.changed:
            await self.changed.wait_for(lambda: not self.is_full)
            self.members.append(member)
            self.changed.notify_all()
        try:
            yield member
        finally:
            await member.begin()
            async with self.changed:
                self._num_left += 1
                if self.is_full and self._num_left == len(self.members):
                    await self._between()
                    self._num_expected -= self._num_left
                    self.members, self._num_left = [], 0
                self.changed.notify_all()

    @property
    def is_full(self) -> bool:
        """Whether all members of the round have come."""
        return len(self.members) == min(self._most, self._num_expected)


class Member:
    """One member of a round."""

    def __init__(self, rounds: Rounds, length: int) -> None:
        self._rounds = rounds
        self._length = length
        self._has_begun = False

    async def is_longest(self) -> bool:
        """Whether no earlier member of the full round is as long, and no later one longer."""
        async with self._rounds.changed:
            await self._rounds.changed.wait_for(lambda: self._rounds.is_full)
            return max(self._rounds.members, key=lambda member: member._length) is self

    async def begin(self) -> None:
        """Tell the others; one that leaves has begun too."""
        if not self._has_begun:
            async with self._rounds.changed:
                self._has_begun = True
                self._rounds.changed.notify_all()

    async def all_have_begun(self) -> None:
        """Wait for every member of the full round."""
        async with self._rounds.changed:
            await self._rounds.changed.wait_for(
                lambda: self._rounds.is_full and all(member._has_begun for member in self._rounds.members)
            )


def _with_processors(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable with which a process finds this folder's processors too."""
    return {"PYTHONPATH": f"{environ['PYTHONPATH']}:{Path(__file__).parent}"}


def body_of(case: Case, **fields: Any) -> dict[str, Any]:
    """The case as an OpenAI request whose prompt is given as token ids."""
    raw = case.raw()
    nvext = {"annotations": raw["annotations"], "token_data": raw["token_ids"], "cache_salt": new_id()}
    wanted = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    prompt = {"model": MODEL, "messages": [{"role": "user", "content": "token_data takes the place of this"}]}
    return {**prompt, **raw["sampling_options"], **raw["stop_conditions"], **wanted, "nvext": nvext, **fields}


def _event(line: str) -> dict[str, Any] | None:
    """What a line of a stream says, None if nothing."""
    return json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else None


def _token_ids(event: Mapping[str, Any]) -> list[int]:
    entries = [entry for choice in event["choices"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
    return [int(entry["token"].removeprefix(PREFIX)) for entry in entries]


def _num_continued(worker: Worker) -> int:
    """Answers that went on in it after another worker."""
    return int(worker.metric("dlw_continued_requests_total"))


def error_of(status: int, event: Mapping[str, Any]) -> Refused | Failed:
    """The client's fault is a refusal; everything else is a failure, though no token had come."""
    return (Refused if 400 <= status < 500 else Failed)(_message(event))


def _message(event: Mapping[str, Any]) -> str:
    error = event.get("error", event)
    return str(error.get("message", error) if isinstance(error, dict) else error)


SMALL = ("--context-length", "320", "--kv-blocks", "112", "--max-num-seqs", "8", "--log-requests")
"""Pages for seven of eight requests, and fewer of those that have grown beyond one page."""

PREFILL, DECODE = (("--disaggregation-mode", role) for role in ("prefill", "decode"))

SERVED_MODES: tuple[Mode, ...] = (
    Served("aggregated", ()),
    Served("disaggregated", PREFILL, DECODE, at_once=16),
    Killed("migrated", (), num_workers=3, at_once=3),
    Killed("migrated, disaggregated", DECODE, num_workers=3, at_once=3, beside=PREFILL),
    Crowded("preempted", SMALL, at_once=8),
    Served("chunked prefill", ("--max-num-batched-tokens", "8", "--max-num-seqs", "4"), at_once=4),
    Served("batched", (), at_once=64),
    ServedSpeculated("speculated", (), at_once=16),
    ServedNthChoice(),
    Served("TensorRT-LLM stand-in", ("--engine", "trtllm", "--max-num-batched-tokens", "64"), at_once=16),
)
