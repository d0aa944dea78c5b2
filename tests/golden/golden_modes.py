"""The modes of the golden matrix: each answers a request on a way of its own.

`MODES` is the table. A mode that is one worker with other options is one line of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from golden_cases import Case
from golden_workers import DTYPE, NGRAMS, Bench, DraftingEngine, LocalWorker, PreemptedEngine, Refused, cold, new_id

from adapters.catalog import Catalog
from worker.build import embedded_config
from worker.engines import EngineInfo
from worker.engines.embedded import EmbeddedEngine, Engine
from worker.errors import InvalidRequest
from worker.migration.records import records_of
from worker.requests.request import GenerationRequest, parse_request

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tensorrt")]
from stand_in import stand_in

NUM_CHOICES = 3

Raw = Mapping[str, Any]
"""A request as Dynamo's frontend delivers it."""


@dataclass(frozen=True, eq=False)
class Request:
    """One text that a mode has to produce.

    Attributes:
        case: What is asked for.
        expected: The text, from a worker that had nothing else to do.
        choice: Which of the choices of n > 1.
        num_sent: How many of its tokens another worker has sent before it died.
        id: Name of the request in a worker that answers it by itself.
    """

    case: Case
    expected: tuple[int, ...]
    choice: int = 0
    num_sent: int = 0
    id: str = field(default_factory=new_id)

    def __str__(self) -> str:
        place = f", choice {self.choice}" if self.choice else f", after {self.num_sent} tokens" if self.num_sent else ""
        return f"{self.case}{place}"


class Mode(Protocol):
    """A way to answer requests.

    Attributes:
        name: Column of the matrix.
        at_once: Requests in flight at a time at most.
    """

    name: str
    at_once: int

    def running(self, bench: Bench) -> AbstractAsyncContextManager[None]:
        """Start what it needs, and stop it. Raises `AssertionError` if the mode did not happen."""

    async def requests(self, case: Case, alone: Sequence[int]) -> Sequence[Request]:
        """The texts of one case; ``alone`` is that of an aggregated worker without other requests.

        Raises:
            Refused: the mode refuses the case.
        """

    async def tokens(self, request: Request) -> list[int]:
        """The token ids of a text.

        Raises:
            Refused: the mode refuses it before the first token.
        """


class Answering:
    """Base of modes whose workers answer a request as the frontend delivers it."""

    name: str
    at_once: int
    is_warm = False

    def running(self, bench: Bench, *argv: str) -> AbstractAsyncContextManager[None]:
        """As `Mode.running`; ``argv`` are further options of its workers."""
        raise NotImplementedError

    async def requests(self, case: Case, alone: Sequence[int]) -> Sequence[Request]:
        return (Request(case, tuple(alone)),)

    async def tokens(self, request: Request) -> list[int]:
        raw = request.case.raw() if self.is_warm else cold(request.case)
        return await self.answer(raw, request.id)

    async def answer(self, raw: Raw, request_id: str | None = None) -> list[int]:
        """The token ids of an answer. Raises `Refused`."""
        raise NotImplementedError

    def parsed(self, raw: Raw) -> GenerationRequest:
        """A request as the worker that answers takes it; while the mode is running."""
        raise NotImplementedError

    @property
    def info(self) -> EngineInfo:
        """What the engine is that answers; while the mode is running."""
        raise NotImplementedError

    @property
    def num_continued(self) -> int:
        """Requests that went on after another worker; while the mode is running."""
        raise NotImplementedError


class OneWorker(Answering):
    """Every request goes to one worker.

    Args:
        name: Column of the matrix.
        argv: Options of the worker.
        at_once: Requests in flight at a time.
        is_warm: Requests share the KV of equal beginnings; else they are computed from the start.
    """

    def __init__(self, name: str, *argv: str, at_once: int = 1, is_warm: bool = False) -> None:
        self.name = name
        self.at_once = at_once
        self.is_warm = is_warm
        self._argv = argv

    @asynccontextmanager
    async def running(self, bench: Bench, *more: str) -> AsyncIterator[None]:
        self._worker = await self._start(bench, *self._argv, *more)
        try:
            yield
            self._check(self._worker)
        finally:
            await self._worker.stop()

    async def answer(self, raw: Raw, request_id: str | None = None) -> list[int]:
        return await self._worker.tokens(raw, request_id)

    def parsed(self, raw: Raw) -> GenerationRequest:
        return self._worker.parsed(raw)

    @property
    def info(self) -> EngineInfo:
        return self._worker.info

    @property
    def num_continued(self) -> int:
        return self._worker.num_continued

    async def _start(self, bench: Bench, *argv: str) -> LocalWorker:
        return await bench.worker(*argv)

    def _check(self, worker: LocalWorker) -> None:
        """Raises `AssertionError` if what the mode is about did not happen, or another mode is."""
        drafted = worker.engine.load().drafted if isinstance(worker.engine, EmbeddedEngine) else ()
        assert "ngram" not in drafted, f"{self.name}: n-grams were drafted"


class Preempted(OneWorker):
    """Preempted at every token, with and without a prefix hit when it goes on."""

    async def _start(self, bench: Bench, *argv: str) -> LocalWorker:
        return await bench.worker(*argv, engine=PreemptedEngine(embedded_config(bench.arguments(*argv))))

    def _check(self, worker: LocalWorker) -> None:
        assert worker.engine.num_preemptions > 0, "nothing was preempted"


class Speculated(OneWorker):
    """Tokens are drafted by n-grams too, not by chains alone, as in every mode."""

    longest = 0
    is_large = False
    has_companions = False

    async def _start(self, bench: Bench, *argv: str) -> LocalWorker:
        self.is_large = bench.is_large
        argv = (*argv, *bench.drafting(**NGRAMS))
        return await bench.worker(*argv, engine=DraftingEngine(embedded_config(bench.arguments(*argv))))

    async def requests(self, case: Case, alone: Sequence[int]) -> Sequence[Request]:
        self.longest = max(self.longest, len(alone))
        self.has_companions |= bool({"cfg", "contrastive"} & {one["name"] for one in case.processors})
        return await super().requests(case, alone)

    def _check(self, worker: LocalWorker) -> None:
        if self.longest < 16 and not self.is_large:
            return  # there may be nothing to look up in texts so short; those of a large model repeat its prompt
        proposed, accepted = worker.engine.load().drafted["ngram"]
        assert accepted, f"none of {proposed} drafted tokens were accepted"
        assert not self.has_companions or worker.engine.num_accompanied, "nothing was drafted for two sequences"


class StandIn(OneWorker):
    """TensorRT-LLM's contract, enforced by a stand-in on a CPU."""

    @asynccontextmanager
    async def running(self, bench: Bench, *more: str) -> AsyncIterator[None]:
        with stand_in():
            async with super().running(bench, *more):
                yield


class Disaggregated(Answering):
    """A prefill worker computes the prompt, a decode worker gets its KV and answers.

    Args:
        name: Column of the matrix.
        argv: Options of both workers.
        at_once: Requests in flight at a time.
    """

    def __init__(self, name: str, *argv: str, at_once: int = 16) -> None:
        self.name = name
        self.at_once = at_once
        self._argv = argv

    @asynccontextmanager
    async def running(self, bench: Bench, *more: str) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            self._prefill = await bench.worker("--disaggregation-mode", "prefill", *self._argv, *more)
            stack.push_async_callback(self._prefill.stop)
            self._decode = await bench.worker("--disaggregation-mode", "decode", *self._argv, *more)
            stack.push_async_callback(self._decode.stop)
            self._num_prefills = 0
            yield
            self._check()

    async def answer(self, raw: Raw, request_id: str | None = None) -> list[int]:
        one_token = {
            **raw,
            "stop_conditions": {**raw["stop_conditions"], "max_tokens": 1},
        }  # as the frontend's prefill router asks
        (chunk,) = await self._prefill.chunks(one_token, request_id)
        self._num_prefills += 1
        result = {"disaggregated_params": chunk["disaggregated_params"]}
        return await self._decode.tokens({**raw, "prefill_result": result}, request_id)

    def _check(self) -> None:
        received = self._decode.engine.transfers().get("received", 0)
        assert received == self._num_prefills, f"{received} KV transfers for {self._num_prefills} prompts"

    def parsed(self, raw: Raw) -> GenerationRequest:
        return self._decode.parsed(raw)

    @property
    def info(self) -> EngineInfo:
        return self._decode.info

    @property
    def num_continued(self) -> int:
        return self._decode.num_continued


class Migrated:
    """A worker has died, and another one is sent prompt and answer so far, cut after some token.

    What the dead worker leaves is its record in the boundary store. The rest is what the frontend
    does: it appends the tokens that it has received to the prompt, and subtracts their number.

    Args:
        name: Column of the matrix.
        to: The mode in which the answer goes on.
        at_every_token: Whether the answer is cut after each of its tokens; else after the first,
            one in the middle and the last.
    """

    def __init__(self, name: str, to: Answering, *, at_every_token: bool = False) -> None:
        self.name = name
        self.at_once = to.at_once
        self._to = to
        self._at_every_token = at_every_token

    @asynccontextmanager
    async def running(self, bench: Bench) -> AsyncIterator[None]:
        argv = ["--migration", "on", "--boundary-store", f"file:{bench.directory / 'boundaries'}"]
        records = records_of(bench.arguments(*argv))
        assert records is not None
        self._records = records
        await records.open()
        self._num_moved = 0
        self._cuts_everywhere = self._at_every_token and not bench.is_large
        async with self._to.running(bench, *argv):
            records.computes(self._to.info)  # the worker that died was one like it
            yield
            found, moved = self._to.num_continued, self._num_moved
            assert found == moved, f"{found} of {moved} requests were taken for continuations"
        await records.close()

    async def requests(self, case: Case, alone: Sequence[int]) -> Sequence[Request]:
        last = len(alone) - (len(alone) == case.max_tokens)  # where it is full there is nothing to go on with
        cuts: Sequence[int] = range(1, last + 1)
        if not self._cuts_everywhere:
            cuts = [number for number in cuts if number in (1, (1 + last) // 2, last)]
        return [Request(case, tuple(alone), num_sent=number) for number in cuts]

    async def tokens(self, request: Request) -> list[int]:
        raw = cold(request.case)
        record = await self._records.begin(request.id, self._to.parsed(raw))
        record.write(raw["sampling_options"]["seed"])
        await record.wait_written()
        record.drop()  # as a worker that is killed
        sent = list(request.expected[: request.num_sent])
        left = request.case.max_tokens - len(sent)
        ends = {**raw["stop_conditions"], "max_tokens": left}  # as 1.4.2 does, which leaves min_tokens as it is
        moved = {**raw, "token_ids": raw["token_ids"] + sent, "stop_conditions": ends}
        self._num_moved += 1
        return sent + await self._to.answer(moved, request.id)


class Choices:
    """Base of modes that answer a request with n > 1.

    Choice 0 must be the text of a request with one choice; another one draws its own random numbers
    and must be what an aggregated worker answers that is asked for it alone.
    """

    name = "n-th choice"
    at_once = 12

    @asynccontextmanager
    async def running(self, bench: Bench) -> AsyncIterator[None]:
        self._asked: dict[Case, asyncio.Task[list[list[int]]]] = {}
        self._others_differ = False
        self._idle = aggregated()
        async with self._idle.running(bench):
            yield
        assert self._others_differ, "every choice has the text of the first one"

    async def requests(self, case: Case, alone: Sequence[int]) -> Sequence[Request]:
        found = [Request(case, tuple(alone))]
        for choice in range(1, NUM_CHOICES):
            text = tuple(await self._idle.answer(case.raw(new_id(), choice)))
            self._others_differ |= text != found[0].expected
            found.append(Request(case, text, choice))
        return found

    async def tokens(self, request: Request) -> list[int]:
        case = request.case
        if case not in self._asked:
            self._asked[case] = asyncio.create_task(self.answers(case))
        return (await self._asked[case])[request.choice]

    async def answers(self, case: Case) -> list[list[int]]:
        """The token ids of all choices of one request. Raises `Refused`."""
        raise NotImplementedError


class NthChoice(Choices):
    """What the front door makes of n > 1: a request per choice, at once; they share the prompt."""

    @asynccontextmanager
    async def running(self, bench: Bench) -> AsyncIterator[None]:
        together = OneWorker("")
        async with super().running(bench), together.running(bench):
            self._together = together
            yield

    async def answers(self, case: Case) -> list[list[int]]:
        salt = new_id()
        asked = [self._together.answer(case.raw(salt, choice)) for choice in range(NUM_CHOICES)]
        return await asyncio.gather(*asked)


class OfflineChoices(Choices):
    """n > 1 of the offline engine, which has neither a front door nor an operator."""

    name = "n-th choice, offline"
    at_once = 1

    @asynccontextmanager
    async def running(self, bench: Bench) -> AsyncIterator[None]:
        catalog = Catalog.load(options=bench.arguments().logits_processor)
        settings = {"device": bench.device, "dtype": DTYPE, "numerics": "exact", "kv_cache_dtype": bench.kv_cache_dtype}
        drafts = {"model": str(bench.model), "method": "none"}
        self._engine = await asyncio.to_thread(
            Engine,
            bench.model,
            catalog=catalog,
            speculative_config=drafts,
            **settings,  # type: ignore[arg-type]
        )
        self._limits = bench.limits
        async with super().running(bench):
            yield

    async def answers(self, case: Case) -> list[list[int]]:
        try:
            return await asyncio.to_thread(self._generate, case)
        except (InvalidRequest, ValueError) as error:
            raise Refused(str(error)) from error

    def _generate(self, case: Case) -> list[list[int]]:
        session = self._engine.session
        params = replace(parse_request(case.raw(), self._limits).params, n=NUM_CHOICES, best_of=NUM_CHOICES)
        (group,) = session.prepare([list(case.prompt)], [params], [case.processors])
        session.add(group)
        while not session.is_idle:
            session.step()
        for answer in group.answers:
            assert answer.error is None, f"{case}: {answer.error}"
        return [answer.token_ids for answer in group.answers]


def aggregated() -> Answering:
    """The mode that the others are compared with."""
    return OneWorker("aggregated")


def stand_in_mode(name: str) -> StandIn:
    """TensorRT-LLM's stand-in; it calls the processors several times for the first token."""
    return StandIn(name, "--engine", "trtllm", "--max-num-batched-tokens", "64", at_once=16)


MODES: tuple[Mode, ...] = (
    Disaggregated("disaggregated"),
    Migrated("migrated", to=OneWorker("", at_once=64), at_every_token=True),
    Migrated("migrated, disaggregated", to=Disaggregated("")),
    Preempted("preempted", at_once=8),
    OneWorker("chunked prefill", "--max-num-batched-tokens", "8", "--max-num-seqs", "4", at_once=4),
    OneWorker("batched", at_once=64, is_warm=True),
    Speculated("speculated", at_once=16),
    NthChoice(),
    OfflineChoices(),
    stand_in_mode("TensorRT-LLM stand-in"),
    Migrated("migrated, stand-in", to=stand_in_mode("")),
)
