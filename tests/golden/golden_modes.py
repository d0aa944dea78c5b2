"""The modes of the golden matrix: each answers a request on a way of its own.

`MODES` is the table. A mode that is one worker with other options is one line of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from golden_cases import Case
from golden_workers import Bench, LocalWorker, PreemptedEngine, Refused, cold

from adapters.catalog import Catalog
from worker.build import embedded_config
from worker.engines.embedded import Engine
from worker.errors import InvalidRequest
from worker.requests.request import RequestLimits, parse_request
from worker.sampling import SamplingParams

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tensorrt")]
from stand_in import stand_in

NUM_CHOICES = 3


@dataclass(frozen=True, eq=False)
class Request:
    """One text that a mode has to produce.

    Attributes:
        case: What is asked for.
        expected: The text, from a worker that had nothing else to do.
        choice: Which of the choices of n > 1.
        num_sent: How many of its tokens another worker has sent before it died.
    """

    case: Case
    expected: tuple[int, ...]
    choice: int = 0
    num_sent: int = 0

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


class OneText:
    """Base of modes with one text per case."""

    async def requests(self, case: Case, alone: Sequence[int]) -> Sequence[Request]:
        return (Request(case, tuple(alone)),)


class OneWorker(OneText):
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
        self._argv = argv
        self._is_warm = is_warm

    @asynccontextmanager
    async def running(self, bench: Bench) -> AsyncIterator[None]:
        self._worker = await self._start(bench)
        try:
            yield
            self._check(self._worker)
        finally:
            await self._worker.stop()

    async def tokens(self, request: Request) -> list[int]:
        return await self._worker.tokens(request.case.raw() if self._is_warm else cold(request.case))

    async def _start(self, bench: Bench) -> LocalWorker:
        return await bench.worker(*self._argv)

    def _check(self, worker: LocalWorker) -> None:
        """Raises `AssertionError` if what the mode is about did not happen."""


class Preempted(OneWorker):
    """Preempted at every token, with and without a prefix hit when it goes on."""

    async def _start(self, bench: Bench) -> LocalWorker:
        engine = PreemptedEngine(embedded_config(bench.arguments(*self._argv)))
        return await bench.worker(*self._argv, engine=engine)

    def _check(self, worker: LocalWorker) -> None:
        assert worker.engine.num_preemptions > 0, "nothing was preempted"


class StandIn(OneWorker):
    """TensorRT-LLM's contract, enforced by a stand-in on a CPU."""

    @asynccontextmanager
    async def running(self, bench: Bench) -> AsyncIterator[None]:
        with stand_in():
            async with super().running(bench):
                yield


class Disaggregated(OneText):
    """A prefill worker computes the prompt, a decode worker reads its KV over NIXL and answers."""

    name = "disaggregated"
    at_once = 16

    @asynccontextmanager
    async def running(self, bench: Bench) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            self._prefill = await bench.worker("--disaggregation-mode", "prefill")
            stack.push_async_callback(self._prefill.stop)
            self._decode = await bench.worker("--disaggregation-mode", "decode")
            stack.push_async_callback(self._decode.stop)
            self._num_prefills = 0
            yield
            received = self._decode.engine.transfers().get("received", 0)
            assert received == self._num_prefills, f"{received} KV transfers for {self._num_prefills} prompts"

    async def tokens(self, request: Request) -> list[int]:
        raw = cold(request.case)
        one_token = {**raw, "stop_conditions": {"max_tokens": 1}}  # as the frontend's prefill router asks
        (chunk,) = await self._prefill.chunks(one_token)
        self._num_prefills += 1
        result = {"disaggregated_params": chunk["disaggregated_params"]}
        return await self._decode.tokens({**raw, "prefill_result": result})


class NthChoice:
    """One request with n > 1, offline, since served requests have one choice.

    Choice 0 must be the text of a request with one choice; another one draws its own random numbers
    and must be what it is when none of the others is computed.
    """

    name = "n-th choice"
    at_once = 1

    @asynccontextmanager
    async def running(self, bench: Bench) -> AsyncIterator[None]:
        catalog = Catalog.load(options=bench.arguments().logits_processor)
        settings = {"device": "cpu", "dtype": bench.dtype, "numerics": "exact"}
        self._engine = await asyncio.to_thread(Engine, bench.model, catalog=catalog, **settings)
        self._together: tuple[Case, list[list[int]]] | None = None
        yield

    async def requests(self, case: Case, alone: Sequence[int]) -> Sequence[Request]:
        found = [Request(case, tuple(alone))]
        for choice in range(1, NUM_CHOICES):
            (text,) = await self._answer(case, choice)
            found.append(Request(case, tuple(text), choice))
        return found

    async def tokens(self, request: Request) -> list[int]:
        if self._together is None or self._together[0] is not request.case:
            self._together = request.case, await self._answer(request.case)
        return self._together[1][request.choice]

    async def _answer(self, case: Case, only: int | None = None) -> list[list[int]]:
        """The texts of all choices, or of one that is computed without the others."""
        try:
            return await asyncio.to_thread(self._generate, case, only)
        except (InvalidRequest, ValueError) as error:
            raise Refused(str(error)) from error

    def _generate(self, case: Case, only: int | None) -> list[list[int]]:
        session = self._engine.session
        params = replace(self._params(case), n=NUM_CHOICES, best_of=NUM_CHOICES)
        (group,) = session.prepare([list(case.prompt)], [params], [case.processors])
        if only is not None:
            group.answers = [group.answers[only]]
        session.add(group)
        while not group.is_done:
            session.step()
        for answer in group.answers:
            assert answer.error is None, f"{case}: {answer.error}"
        return [answer.token_ids for answer in group.answers]

    def _params(self, case: Case) -> SamplingParams:
        info = self._engine.info
        return parse_request(case.raw(), RequestLimits(info.context_length, info.vocab_size, info.eos_token_ids)).params


def aggregated() -> Mode:
    """The mode that the others are compared with."""
    return OneWorker("aggregated")


MODES: tuple[Mode, ...] = (
    Disaggregated(),
    Preempted("preempted", at_once=8),
    OneWorker("chunked prefill", "--max-num-batched-tokens", "8", "--max-num-seqs", "4", at_once=4),
    OneWorker("batched", at_once=64, is_warm=True),
    NthChoice(),
    StandIn("TensorRT-LLM stand-in", "--engine", "trtllm", "--max-num-batched-tokens", "64", at_once=16),
)
