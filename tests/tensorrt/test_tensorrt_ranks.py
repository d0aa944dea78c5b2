"""Attention data parallelism: where a request runs, and what each rank reports."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from stand_in import collect, engine, running, stand_in

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors.forcing import ForcedPrefix
from adapters.vocabulary import Vocabulary
from worker.engines import RequestHints
from worker.engines.embedded import EmbeddedEngine
from worker.engines.trtllm import TrtllmEngine
from worker.engines.trtllm.placement import AFFINITY, placement
from worker.errors import ConfigurationError, InvalidRequest, StartupError
from worker.sampling import SamplingParams

NUM_RANKS = 2
ADP = ["--tensor-parallel-size", str(NUM_RANKS), "--override-engine-args", '{"enable_attention_dp": true}']
AFFINE = [*ADP, "--conversation-affinity"]
PROMPTS = itertools.count(100)


def prompt() -> list[int]:
    """A full block that no request has had."""
    return [next(PROMPTS), *range(40, 71)]


class Blocks:
    """Says which prompts a rank has cached."""

    def __init__(self) -> None:
        self.first_tokens: list[int] = []

    def stored(self, parent: int | None, hashes: list[int], ids: list[int], salt: Any, lora: Any) -> None:
        self.first_tokens.append(ids[0])

    def removed(self, hashes: list[int]) -> None:
        raise AssertionError


class Ranks:
    """An engine with attention data parallelism, and what its ranks have cached and computed."""

    def __init__(self, served: TrtllmEngine) -> None:
        self.served = served
        self.blocks = [Blocks() for _ in range(NUM_RANKS)]
        self.loads: set[int] = set()
        self.passes: set[int] = set()
        served.report_blocks_of_ranks(self.blocks)  # type: ignore[arg-type]
        served.tell_load(lambda used, total, dp_rank=0: self.loads.add(dp_rank))
        served.report_forward_passes(lambda computed: self.passes.add(computed.dp_rank))

    async def place(self, **hints: Any) -> int:
        """The rank that a request with these hints ran on."""
        tokens = prompt()
        await collect(self.served, tokens, SamplingParams(max_tokens=2, ignore_eos=True), hints=RequestHints(**hints))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = [rank for rank, blocks in enumerate(self.blocks) if tokens[0] in blocks.first_tokens]
            if found:
                (rank,) = found
                return rank
            await asyncio.sleep(0.01)
        raise AssertionError("no rank has the prompt's block")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranks(model: Path) -> AsyncIterator[Ranks]:
    async with running(model, *ADP) as started:
        yield Ranks(started)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_runs_on_the_rank_that_the_router_chose(ranks: Ranks) -> None:
    for rank in (1, 1, 0, 1):
        assert await ranks.place(dp_rank=rank, conversation="of no interest") == rank
    with pytest.raises(InvalidRequest, match=r"routing\.dp_rank: must be below 2"):
        await ranks.place(dp_rank=2)


@pytest.mark.asyncio(loop_scope="module")
async def test_ranks_report_blocks_and_load_of_their_own(ranks: Ranks) -> None:
    info = ranks.served._info
    assert info is not None
    assert (info.num_dp_ranks, info.num_slots) == (NUM_RANKS, NUM_RANKS * info.max_num_seqs)
    for rank in range(NUM_RANKS):
        await ranks.place(dp_rank=rank)
    deadline = time.monotonic() + 60
    while not len(ranks.loads) == len(ranks.passes) == NUM_RANKS and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert ranks.loads == ranks.passes == set(range(NUM_RANKS))


@pytest.mark.asyncio(loop_scope="module")
async def test_processors_run_on_every_rank(ranks: Ranks, reference: EmbeddedEngine) -> None:
    tokens, params = prompt(), SamplingParams(max_tokens=6, ignore_eos=True)

    def forced() -> ProcessorChain:
        context = Context(Vocabulary(1024), frozenset(), 0)
        return ProcessorChain([ForcedPrefix(ForcedPrefix.Args(token_ids=[40, 41]), context)], context)

    expected = await collect(reference, tokens, params, chain=forced())
    for rank in range(NUM_RANKS):
        found = await collect(ranks.served, tokens, params, chain=forced(), hints=RequestHints(dp_rank=rank))
        assert found.token_ids == expected.token_ids


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("length", [1, 2, 40])
async def test_a_prompt_of_dummy_requests_ends_no_rank(ranks: Ranks, reference: EmbeddedEngine, length: int) -> None:
    """Clients may send it, and the health probe does where it is the model's end token."""
    tokens, params = [1] * length, SamplingParams(max_tokens=3, ignore_eos=True)
    expected = await collect(reference, tokens, params)
    for salt in (None, "tenant"):
        for rank in range(NUM_RANKS):
            hints = RequestHints(dp_rank=rank)
            found = await collect(ranks.served, tokens, params, hints=hints, cache_salt=salt)
            assert (found.error, found.token_ids) == (None, expected.token_ids)


async def test_a_conversation_stays_on_its_rank(model: Path) -> None:
    async with running(model, *AFFINE) as started:
        placed = Ranks(started)
        first = [await placed.place(conversation=name) for name in "ab"]
        assert sorted(first) == [0, 1]
        for turn in range(3):  # whatever the router would say
            assert [await placed.place(conversation=name, dp_rank=turn % 2) for name in "ab"] == first


async def test_a_version_without_conversations_does_not_start(model: Path) -> None:
    with stand_in(version="1.2.0"):
        started = engine(model, *AFFINE)
        try:
            with pytest.raises(StartupError, match=AFFINITY):
                await started.start()
        finally:
            await started.stop()


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--conversation-affinity"], r"^--conversation-affinity: .*needs enable_attention_dp: true"),
        ([*ADP, "--conversation-affinity-dp-rank-source", "dynamo"], "TensorRT-LLM places a conversation's first"),
        ([*ADP, "--runtime", "openengine"], "enable_attention_dp needs --runtime dynamo or nats"),
    ],
)
def test_command_lines_without_a_use_for_ranks(model: Path, argv: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        engine(model, *argv)


@pytest.mark.parametrize("off", ["--no-conversation-affinity", "--conversation-affinity-dp-rank-source=engine"])
def test_a_flag_without_an_effect_gives_no_argument(model: Path, off: str) -> None:
    assert engine(model, *ADP, off).config.options.get("attention_dp_config") is None


CASES = st.tuples(
    st.none() | st.integers(0, 9), st.none() | st.text("ab", min_size=1), st.integers(1, 8), st.booleans()
)


def test_a_request_is_placed_once_or_refused() -> None:
    @given(CASES)
    def check(case: tuple[int | None, str | None, int, bool]) -> None:
        rank, name, size, keeps = case
        hints = RequestHints(dp_rank=rank, conversation=name)
        chosen = size > 1 and not keeps and rank is not None
        if chosen and rank is not None and rank >= size:
            with pytest.raises(InvalidRequest, match=r"routing\.dp_rank"):
                placement(hints, size, keeps_conversations=keeps)
            return
        found = placement(hints, size, keeps_conversations=keeps)
        kept = size > 1 and keeps and name is not None
        assert list(found) == ["conversation_params"] * kept + ["scheduling_params"] * chosen
        if chosen:
            assert found["scheduling_params"].attention_dp_rank == rank

    with stand_in():
        check()
