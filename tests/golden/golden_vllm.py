"""The golden matrix inside vLLM: every token is compared with what the model's own logits give.

Whether vLLM's logits have the same bits in another batch is vLLM's affair. So its texts are not
compared with those of another worker: the engine's process writes down each row of logits, and a
fresh chain and sampler, alone, must choose from it the token that vLLM took.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden_cases import NO_PROCESSOR, SEED, SHORT_TEXT, Case, Cases
from golden_matrix import Matrix, compare_all, say
from golden_modes import Migrated, Mode, OneWorker, Request
from golden_workers import Bench, LocalWorker

from adapters.chain import ProcessorChain, apply_chain
from worker.engines import EngineRequest
from worker.engines.vllm import VllmEngine, config_from
from worker.engines.vllm.package import Package, read_package
from worker.replay.decisions import whole_chain
from worker.requests.request import parse_request
from worker.sampling.field_processors import for_engine

sys.path.append(str(Path(__file__).resolve().parents[1] / "vllm"))  # the engine's process imports `golden_recorder`

COLUMN = "vLLM (CPU)"
MIGRATED = "migrated, vLLM (CPU)"

DIRECTORY = "GOLDEN_LOGITS"
"""Environment variable: directory in which the engine's process writes rows of logits."""

NAME = "golden"
"""Key in ``extra_args`` of the request's folder there."""

RESUMED = "resumed"

AT_ONCE = 16

ROOMY = ("--max-num-seqs", str(AT_ONCE), "--context-length", "512")
"""Options of a worker that has KV for all of its requests."""

SMALL = (
    *("--max-num-seqs", str(AT_ONCE), "--context-length", "192", "--kv-block-size", "32", "--kv-blocks", "9"),
    *("--max-num-batched-tokens", "32"),
)
"""Options of one that computes prompts in chunks, and has KV for some of its requests only."""

PREEMPTED_AFTER = 24
"""Outputs between preemptions of all running requests."""


class InVllm(OneWorker):
    """A worker with vLLM, whose process writes down the model's logits.

    Args:
        name: Column of the matrix.
        argv: Options of the worker.
        at_once: Requests in flight at a time.
    """

    def __init__(self, name: str, *argv: str, at_once: int = 1) -> None:
        super().__init__(name, "--engine", "vllm", "--engine-args", '{"enforce_eager": true}', *argv, at_once=at_once)

    async def _start(self, bench: Bench, *argv: str) -> LocalWorker:
        logits = bench.directory / "logits"
        logits.mkdir(exist_ok=True)
        os.environ[DIRECTORY] = str(logits)
        return await bench.worker(*argv, engine=VllmEngine(config_from(bench.arguments(*argv)), read=_recording))


class Preempted(InVllm):
    """Preempted where the KV cache is full, and again and again all of them at once."""

    @asynccontextmanager
    async def running(self, bench: Bench, *more: str) -> AsyncIterator[None]:
        async with super().running(bench, *more):
            preempting = asyncio.create_task(self._preempt())
            try:
                yield
            finally:
                preempting.cancel()

    async def _preempt(self) -> None:
        llm, seen = self._worker.engine._llm, 0
        while True:
            await asyncio.sleep(0.01)
            if llm.num_outputs >= seen + PREEMPTED_AFTER:
                seen = llm.num_outputs
                await llm.reset_prefix_cache(reset_running_requests=True)


def _recording() -> Package:
    """vLLM with `golden_recorder.Recorder`, and requests that have the names of their folders."""
    package = read_package()

    class Named(package.async_llm):  # type: ignore[misc, name-defined]
        num_outputs = 0

        async def generate(self, prompt: Any, params: Any, request_id: str, **more: Any) -> AsyncIterator[Any]:
            params.extra_args = {**(params.extra_args or {}), NAME: request_id.rpartition("-")[0]}
            async with aclosing(super().generate(prompt, params, request_id, **more)) as outputs:
                async for output in outputs:
                    self.num_outputs += 1
                    yield output

    def with_recorder(**arguments: Any) -> Any:
        return package.engine_args(**arguments | {"logits_processors": ["golden_recorder:Recorder"]})

    return replace(package, async_llm=Named, engine_args=with_recorder)


class Replays:
    """Chooses tokens from recorded logits, with chains and samplers of its own.

    Args:
        bench: Has the chain builder of the workers, one of which has been started.
        matrix: Notes which processors act.

    Attributes:
        num_resumed: Requests that went on after a preemption.
        texts: The newest answer to each case.
    """

    def __init__(self, bench: Bench, matrix: Matrix) -> None:
        self._bench = bench
        self._matrix = matrix
        self.num_resumed = 0
        self.texts: dict[Case, list[int]] = {}

    async def judge(self, request: Request, tokens: Sequence[int]) -> list[int]:
        """What a fresh chain and sampler choose, one token after the other, after vLLM's own.

        Raises:
            AssertionError: the answer ended early without an end token.
        """
        case, folder = request.case, self._bench.directory / "logits" / request.id
        self.texts[case] = list(tokens)
        sent, answer = list(tokens[: request.num_sent]), list(tokens[request.num_sent :])
        self.num_resumed += (folder / RESUMED).exists()
        rows = {int(path.name): np.fromfile(path, np.float32) for path in folder.iterdir() if path.name != RESUMED}
        shutil.rmtree(folder)
        chosen = await self._chosen(case.reference, sent, answer, rows)
        acts = case.row in {*self._matrix.acting, NO_PROCESSOR}
        if acts or chosen != await self._chosen(case.plain, sent, answer, rows):
            self._matrix.acting.add(case.row)
        num_hidden = len(chosen) - len(answer)
        assert num_hidden == 0 or chosen[-1] in self._bench.limits.eos_token_ids, f"{chosen[-1]} is no end token"
        assert num_hidden == (len(tokens) < case.max_tokens), f"{len(tokens)} tokens, and no end token"
        return sent + chosen[: len(answer)]

    async def _chosen(
        self, case: Case, sent: Sequence[int], answer: Sequence[int], rows: dict[int, np.ndarray[Any, Any]]
    ) -> list[int]:
        """The choice at each position, and the one after the answer if there are logits of it."""
        chain = await self._chain(case)
        for token_id in sent:
            chain.accept(token_id, chain.position)
        found = []
        for taken in [*answer, None]:
            if chain.position not in rows:
                break
            row = torch.from_numpy(rows[chain.position].copy())
            apply_chain(chain, row)
            found.append(int(row.argmax()))
            if taken is not None:
                chain.accept(taken, chain.position)
        return found

    async def _chain(self, case: Case) -> ProcessorChain:
        """The chain with all fields in it, and with the draw of a request that is sampled."""
        chains = self._bench.chains
        assert chains is not None
        request = parse_request(case.raw(), self._bench.limits)
        selection = chains.select(request, {})
        params = for_engine(request.params, seed=SEED)
        asked = EngineRequest("", case.prompt, params, seed=SEED)
        asked = await chains.prepare(asked, selection, params.max_tokens)
        return whole_chain(asked, chains.vocabulary, self._bench.limits.eos_token_ids)


async def run_in_vllm(
    bench: Bench,
    name: str,
    max_tokens: int,
    *,
    is_short: bool = False,
    save: Callable[[Matrix], None] = lambda matrix: None,
) -> Matrix:
    """Every processor alone, in batches, preempted with prompts in chunks, and migrated.

    Args:
        bench: Starts the workers.
        name: Name of the model.
        max_tokens: Tokens of each text at most.
        is_short: In batches and migrated only.
        save: Called with what there is after each mode.
    """
    matrix = Matrix(name)
    replays = Replays(bench, matrix)
    one = InVllm(COLUMN, *ROOMY, at_once=AT_ONCE)
    migrated = Migrated(MIGRATED, to=one)

    async def compare(mode: Mode, what: str) -> None:
        before = matrix.num_equal(mode.name)
        await compare_all(mode, texts, matrix, replays.judge)
        say(f"{name}: {what}: {matrix.num_equal(mode.name) - before} texts are equal")
        save(matrix)

    async with migrated.running(bench):
        matrix.computed_by = one.info.computed_by.replace("vLLM", f"vLLM {one.info.version}")
        assert bench.chains is not None
        maker = Cases(bench.chains.vocabulary, max_tokens, text=SHORT_TEXT, is_short=True)
        plain = await one.tokens(Request(maker.plain(), ()))
        texts: list[tuple[Case, list[int]]] = [(case, plain) for case in maker.all(plain)]
        if not is_short:
            one.at_once = 1
            await compare(one, "alone")
            one.at_once = AT_ONCE
        await compare(one, f"{AT_ONCE} at once")
        matrix.acting |= {case.row for case, _ in texts if case not in replays.texts}  # what is refused need not act
        texts = [(case, replays.texts.get(case, plain)) for case, _ in texts]
        await compare(migrated, "migrated")
    if not is_short:
        preempted = Preempted(COLUMN, *SMALL, at_once=AT_ONCE)
        async with preempted.running(bench):
            await compare(preempted, "preempted")
        if replays.num_resumed < len(texts) / 4:
            matrix.not_happened.append(f"{COLUMN}: {replays.num_resumed} requests went on after a preemption")
    return matrix
