"""The engine's parts by themselves: probes, deltas, reports, health."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pickle
import threading
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.trtllm import ChainAdapter, Step
from adapters.trtllm.native_controls import ThirdPartyCallable
from adapters.vocabulary import Vocabulary
from worker.engines import LEAST_LOGPROB, EngineRequest, RequestHints, TokenDelta
from worker.engines.forward_pass import ForwardPass
from worker.engines.trtllm import reports, verify
from worker.engines.trtllm.cache_reports import EventRelay, forward_pass, kv_blocks
from worker.engines.trtllm.capabilities import Package, read_package
from worker.engines.trtllm.deltas import Cursor, entries_of
from worker.engines.trtllm.health import Watch, described, own_check, submission_error
from worker.engines.trtllm.probes import NUM_TOKENS, Calls, ProbeRefused, find_honoured, judge_calls
from worker.engines.trtllm.reported_chain import ReportedChain
from worker.engines.trtllm.submission import own_arguments
from worker.errors import InvalidRequest, RequestFailed, StartupError
from worker.sampling import SamplingParams


def test_a_package_that_cannot_be_imported() -> None:
    with pytest.raises(StartupError, match="--engine trtllm: tensorrt_llm cannot be used: ModuleNotFoundError"):
        read_package()


# Probes

PROMPT = [5, 6]
WIDTH = 40
CONTROLS = frozenset({"presence_penalty", "frequency_penalty", "repetition_penalty", "bad_token_ids", "min_p"})
ALL = CONTROLS | {"embedding_bias", "logprobs_of_sampled"}


class Small:
    """An engine in a few lines, which ignores or refuses some controls."""

    def __init__(self, ignores: frozenset[str] = frozenset(), refuses: frozenset[str] = frozenset()) -> None:
        self.ignores, self.refuses = ignores, refuses
        self.table = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)) * 3
        self.coin = torch.Generator().manual_seed(1)

    async def __call__(self, **fields: Any) -> Any:
        if self.refuses & set(fields):
            raise ProbeRefused("no")
        used = {name: value for name, value in fields.items() if name not in self.ignores}
        tokens = list(PROMPT)
        for _ in range(NUM_TOKENS):
            tokens.append(self.choose(tokens, used))
        new = tokens[len(PROMPT) :]
        logprobs = new if "logprobs_of_sampled" not in self.ignores and "logprobs" in fields else []
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=new, logprobs=logprobs)])

    def choose(self, tokens: list[int], used: dict[str, Any]) -> int:
        row = self.table[tokens[-1]].clone()
        for name in ("presence_penalty", "frequency_penalty"):
            for token in set(tokens[used.get("prompt_ignore_length", 0) :]):
                row[token] -= used.get(name, 0.0)
        scale = used.get("repetition_penalty", 1.0)
        for token in set(tokens):
            row[token] = row[token] / scale if row[token] > 0 else row[token] * scale
        for token in used.get("bad_token_ids", ()):
            row[token] = -torch.inf
        if "embedding_bias" in used:
            row += used["embedding_bias"]
        if "temperature" not in used:
            return int(row.argmax())
        weights = (row / used["temperature"]).softmax(-1)
        weights[weights < used.get("min_p", 0.0) * weights.max()] = 0
        return int(torch.multinomial(weights, 1, generator=self.coin))


def package(**changes: Any) -> Package:
    fields = frozenset({"prompt_ignore_length"})
    made = Package("x", None, None, None, _RequestError, fields, frozenset(), frozenset())
    return dataclasses.replace(made, **changes)


class _RequestError(RuntimeError):
    pass


async def test_every_control_is_found_honoured() -> None:
    assert await find_honoured(Small(), package(), PROMPT, WIDTH) == ALL


@pytest.mark.parametrize("name", sorted(ALL))
async def test_every_control_is_found_ignored(name: str) -> None:
    assert await find_honoured(Small(ignores=frozenset({name})), package(), PROMPT, WIDTH) == ALL - {name}


@pytest.mark.parametrize("name", sorted(CONTROLS | {"embedding_bias"}))
async def test_a_control_that_is_refused_is_not_honoured(name: str) -> None:
    assert await find_honoured(Small(refuses=frozenset({name})), package(), PROMPT, WIDTH) == ALL - {name}


async def test_penalties_that_count_the_prompt_are_not_ours() -> None:
    old = package(sampling_fields=frozenset())
    assert await find_honoured(Small(), old, PROMPT, WIDTH) == ALL - {"presence_penalty", "frequency_penalty"}


def called(*positions: int) -> list[Step]:
    return [Step(position, ((1024, "float32", 1),)) for position in positions]


def test_how_processors_are_called() -> None:
    assert judge_calls(called(2, 3, 4), [7, 7, 7], 7, 2) == Calls(1024, lags=False)
    assert judge_calls(called(2, 2, 3, 4), [7, 7, 7], 7, 2) == Calls(1024, lags=False)  # a prompt of two chunks
    assert judge_calls(called(2, 2, 3), [7, 7, 7], 7, 2) == Calls(1024, lags=True)
    for steps, tokens, problem in (
        ([], [7, 7], "not called"),
        (called(2, 3), [7, 8], "do not reach"),
        (called(2, 2, 2), [7, 7, 7, 7], "at positions"),
    ):
        with pytest.raises(StartupError, match=problem):
            judge_calls(steps, tokens, 7, 2)


# Deltas


def output(tokens: Sequence[int], finish: str | None = None, stop: Any = None, logprobs: Any = None) -> Any:
    return SimpleNamespace(token_ids=list(tokens), finish_reason=finish, stop_reason=stop, logprobs=logprobs)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.lists(st.integers(1, 5), max_size=30))
def test_cumulative_outputs_are_cut_without_loss(tokens: list[int], sizes: list[int]) -> None:
    cursor, told, sent = Cursor(0, frozenset()), [], 0
    for size in sizes:
        sent = min(sent + size, len(tokens))
        delta = cursor.advance(output(tokens[:sent]))
        told += delta.token_ids if delta is not None else []
    last = cursor.advance(output(tokens, "length"))
    assert last is not None
    assert told + last.token_ids == tokens
    assert cursor.advance(output(tokens, "length")) is None


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize(
    ("tokens", "finish", "stop"),
    [
        ([5, 6, 4], "stop", None),  # the end token is among the ids
        ([5, 6], "stop", None),  # it is not: end_id
        ([5, 6], "stop", 4),  # nor is a stop token
        ([5, 6, 4], "stop", 4),
        ([5, 6, 4], "length", None),  # it was the last of max_tokens
        ([5, 6, 4, 9, 9], None, None),  # the version does not stop there
    ],
)
def test_the_token_that_ends_is_shown_if_asked_for(shown: bool, tokens: list[int], finish: Any, stop: Any) -> None:
    cursor = Cursor(0, frozenset({4}), 4, shown)
    delta = cursor.advance(output(tokens, finish, stop))
    assert delta is not None
    assert (delta.token_ids, delta.finish_reason, delta.stop_reason) == ([5, 6, 4] if shown else [5, 6], "stop", 4)


@pytest.mark.parametrize("tokens", [[5, 4], [5]], ids=["among the ids", "removed as a stop word"])
def test_a_hidden_end_keeps_its_log_probabilities(tokens: list[int]) -> None:
    """TensorRT-LLM removes the ids of a stop word, and leaves their log probabilities."""
    scores = [{5: logprob(-0.5, 1)}, {4: logprob(-2.0, 2), 5: logprob(-0.25, 1)}]
    delta = Cursor(0, frozenset({4}), 4, num_logprobs=1).advance(output(tokens, "stop", 4, logprobs=scores))
    assert delta is not None
    assert delta.logprobs is not None
    assert (delta.token_ids, len(delta.logprobs)) == ([5], 1)
    assert [(each.token_id, each.rank) for each in delta.end_logprobs or ()] == [(4, 2), (5, 1)]


def test_ids_that_shrink_at_the_end() -> None:
    cursor = Cursor(0, frozenset())
    first, last = cursor.advance(output([1, 2, 3])), cursor.advance(output([1, 2], "stop", "a string"))
    assert first is not None
    assert last is not None
    assert (first.token_ids, last.token_ids, last.finish_reason, last.stop_reason) == ([1, 2, 3], [], "stop", None)


@pytest.mark.parametrize("finish", [None, "length", "cancelled", "timeout"])
def test_the_length_limit_holds_whatever_is_generated(finish: str | None) -> None:
    """TensorRT-LLM may not count the token that a prefill worker handed over (its pull request
    16691).
    """
    cursor = Cursor(0, frozenset({4}), 4, max_tokens=3)
    first, last = cursor.advance(output([5, 6])), cursor.advance(output([5, 6, 7, 8], finish))
    assert first is not None
    assert last is not None
    assert (first.token_ids, first.finish_reason) == ([5, 6], None)
    assert (last.token_ids, last.finish_reason, last.error) == ([7], "length", None)
    assert cursor.advance(output([5, 6, 7, 8, 9], finish)) is None


def test_an_end_token_counts_at_the_limit_but_not_behind_it() -> None:
    at = Cursor(0, frozenset({4}), 4, max_tokens=2).advance(output([5, 4]))
    behind = Cursor(0, frozenset({4}), 4, max_tokens=2).advance(output([5, 6, 4], "stop"))
    assert at is not None
    assert behind is not None
    assert (at.token_ids, at.finish_reason, at.stop_reason) == ([5], "stop", 4)
    assert (behind.token_ids, behind.finish_reason, behind.stop_reason) == ([5, 6], "length", None)


@pytest.mark.parametrize(
    ("default_end", "finish", "stop"), [(4, "stop", 4), (None, "error", None)], ids=["end hidden", "no end"]
)
def test_a_sequence_that_is_told_no_reason(default_end: int | None, finish: str, stop: int | None) -> None:
    cursor = Cursor(0, frozenset(), default_end, max_tokens=9)
    assert cursor.advance(output([5, 6])) is not None
    last = cursor.advance(output([5, 6]), is_last=True)
    assert last is not None
    assert (last.token_ids, last.finish_reason, last.stop_reason) == ([], finish, stop)


def test_an_end_that_is_no_end_is_an_error() -> None:
    delta = Cursor(0, frozenset()).advance(output([1], "timeout"))
    assert delta is not None
    assert (delta.finish_reason, delta.error) == ("error", "TensorRT-LLM ended the request: timeout")


def test_the_sampled_token_comes_first_whatever_the_order() -> None:
    at = [{8: SimpleNamespace(logprob=-0.1, rank=1), 3: SimpleNamespace(logprob=-2.0, rank=7)}]
    delta = Cursor(0, frozenset(), num_logprobs=1).advance(output([3], logprobs=at))
    assert delta is not None
    assert delta.logprobs is not None
    assert [(entry.token_id, entry.rank) for entry in delta.logprobs[0]] == [(3, 7), (8, 1)]


def logprob(value: float, rank: int) -> Any:
    return SimpleNamespace(logprob=value, rank=rank)


@pytest.mark.parametrize("nothing", [-math.inf, LEAST_LOGPROB, math.nan])
def test_tokens_without_a_probability_are_not_reported(nothing: float) -> None:
    """TensorRT-LLM fills the top n with them where truncation leaves fewer tokens."""
    at = [{7: logprob(-0.5, 1), 3: logprob(nothing, 2), 8: logprob(nothing, 3)}]
    delta = Cursor(0, frozenset(), num_logprobs=3).advance(output([7], logprobs=at))
    assert delta is not None
    assert delta.logprobs is not None
    assert [(entry.token_id, entry.logprob) for entry in delta.logprobs[0]] == [(7, -0.5), (7, -0.5)]


@pytest.mark.parametrize("nothing", [-math.inf, math.nan])
def test_the_sampled_tokens_log_probability_is_a_number(nothing: float) -> None:
    delta = Cursor(0, frozenset(), num_logprobs=0).advance(output([3], logprobs=[{3: logprob(nothing, 9)}]))
    assert delta is not None
    assert delta.logprobs is not None
    assert [entry.logprob for entry in delta.logprobs[0]] == [LEAST_LOGPROB]
    assert [entry.logprob for entry in entries_of([(3, nothing, 9)])] == [LEAST_LOGPROB]


# Reports


def test_reports_of_other_ranks_are_not_kept() -> None:
    """Each rank reports each step, and those of the others may come after its token."""
    context = Context(Vocabulary(8), frozenset())
    chain = ProcessorChain([], context)
    chain.start([5])
    followed = ReportedChain(chain, 1)
    for token_id in (6, 7):
        position = chain.position
        followed.note_step(Step(position))
        assert followed.confirm(TokenDelta([token_id])) is None
        followed.note_step(Step(position))
    assert chain.tokens == [5, 6, 7]
    assert not followed._steps


def nothing(*call: Any) -> None:
    """A third-party callable without an effect."""


def test_a_step_is_charged_with_its_own_time() -> None:
    """Ranks differ in speed, so their totals drift apart, and either's report may count."""
    context = Context(Vocabulary(8), frozenset())
    chain = ProcessorChain([ThirdPartyCallable(nothing, 0)], context, step_budget_s=math.inf)
    chain.start([5])
    ranks = {speed: pickle.loads(pickle.dumps(ChainAdapter(chain))) for speed in (0.01, 0.05)}
    followed = ReportedChain(chain, 1, step_budget_s=0.1)
    tokens, told = [5], list[Step]()
    for number in range(20):
        for speed, rank in ranks.items():
            rank.watch = told.append
            rank.chain.members[0].record.seconds += speed
            rank(1, torch.zeros(1, 1, 8), [tokens])
        followed.note_step(told[-1 - number % 2])
        tokens.append(6)
        assert followed.confirm(TokenDelta([6])) is None
    assert 0.5 <= chain.members[0].record.seconds < 1.5


class Sink:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def stored(self, *arguments: Any) -> None:
        *told, adapter = arguments
        assert adapter is None
        self.calls.append(("stored", *told))

    def removed(self, block_hashes: Sequence[int]) -> None:
        self.calls.append(("removed", block_hashes))


def block(block_hash: int | str, tokens: Sequence[int]) -> dict[str, Any]:
    return {"block_hash": block_hash, "tokens": [{"token_id": token, "token_extra_id": 0} for token in tokens]}


def test_kv_events() -> None:
    sink = Sink()
    relay = EventRelay(sink, 2)
    high = 2**64 - 3
    relay.take({"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [9]}})
    blocks = [block(high, [1, 2]), block(5, [3, 4]), block(6, [5]), block(7, [6, 7])]
    relay.take({"event_id": 1, "data": {"type": "stored", "parent_hash": 2**63, "blocks": blocks}})
    relay.take({"event_id": 2, "data": {"type": "removed", "block_hashes": [6]}})
    relay.take({"event_id": 4, "data": {"type": "removed", "block_hashes": [high, 6]}})
    relay.take({"event_id": 5, "data": {"type": "updated", "block_hash": 5}})
    assert sink.calls == [
        ("stored", 2**63, [high, 5], [1, 2, 3, 4], None),
        ("removed", [high, 6]),
    ]
    assert relay.num_gaps == 1


def stored(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": None, "blocks": list(blocks)}


def test_kv_events_of_smaller_attention_windows_are_left_out() -> None:
    sink = Sink()
    relay = EventRelay(sink, 2)
    events = [
        (128, {"type": "created"}),
        (4096, {"type": "created"}),
        (128, stored(block(1, [1, 2]))),
        (4096, stored(block(2, [1, 2]))),
        (128, {"type": "removed", "block_hashes": [1]}),
        (4096, {"type": "removed", "block_hashes": [2]}),
    ]
    for number, (window, data) in enumerate(events):
        relay.take({"event_id": number, "data": data, "window_size": window})
    assert sink.calls == [("stored", None, [2], [1, 2], None), ("removed", [2])]
    assert relay.num_gaps == 0


def test_hashes_of_kv_cache_manager_v2() -> None:
    """It says them as hexadecimal text where the operator chose ``v2_sha256``."""
    sink = Sink()
    relay = EventRelay(sink, 2)
    first, second, partial, third = ("ab" * 32, "0" * 64, "f" * 64, "1f" * 32)
    blocks = [block(first, [1, 2]), block(second, [3, 4]), block(partial, [5])]
    relay.take({"data": {**stored(*blocks), "parent_hash": None}, "hash_algo": "v2_sha256", "layer_group_id": 0})
    relay.take({"data": {**stored(block(third, [5, 6])), "parent_hash": second}})
    relay.take({"data": {"type": "removed", "block_hashes": [second, partial, third]}})
    (_, _, hashes, _, _), (_, parent, more, _, _), removed = sink.calls
    assert all(type(each) is int and 0 <= each < 2**64 for each in [*hashes, *more])
    assert len({*hashes, *more}) == 3
    assert parent == hashes[1]
    assert removed == ("removed", [hashes[1], *more])


def test_kv_events_of_other_groups_of_layers_are_left_out() -> None:
    sink = Sink()
    relay = EventRelay(sink, 2)
    events = [
        (4096, 1, {"type": "created"}),
        (4096, 0, {"type": "created"}),
        (128, 2, {"type": "created"}),
        (4096, 0, stored(block(1, [1, 2]))),
        (4096, 1, stored(block(1, [1, 2]))),
        (4096, 1, {"type": "removed", "block_hashes": [1]}),
        (128, 2, stored(block(3, [1, 2]))),
        (4096, 0, {"type": "removed", "block_hashes": [1]}),
    ]
    for number, (window, group, data) in enumerate(events):
        relay.take({"event_id": number, "data": data, "window_size": window, "layer_group_id": group})
    assert sink.calls == [("stored", None, [1], [1, 2], None), ("removed", [1])]


def test_salts_of_kv_events() -> None:
    sink = Sink()
    relay = EventRelay(sink, 2)
    tenant = [{**block(number, [number, 2]), "cache_salt": "tenant"} for number in (1, 3)]
    relay.take({"data": stored(*tenant)})
    with pytest.raises(ValueError, match="several salts"):
        relay.take({"data": stored(tenant[0], {**block(5, [5, 6]), "cache_salt": "other"})})
    assert sink.calls == [("stored", None, [1, 3], [1, 2, 3, 2], "tenant")]


class Reporting:
    """An ``LLM`` whose questions are answered by a list: records, or an exception."""

    def __init__(self, *answers: list[Any] | Exception) -> None:
        self.answers = list(answers)
        self.exhausted = asyncio.Event()

    async def get_kv_cache_events_async(self, timeout: float) -> AsyncIterator[Any]:
        if not self.answers:
            self.exhausted.set()
            return
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        for record in answer:
            yield record

    get_stats_async = get_kv_cache_events_async


async def poll(monkeypatch: pytest.MonkeyPatch, start: str, *answers: list[Any] | Exception) -> list[Any]:
    """What reaches the runtime of what the executor answers."""
    monkeypatch.setattr(reports, "PAUSE_S", 0.0)
    llm, sink = Reporting(*answers), Sink()
    polled = reports.ExecutorReports(llm)
    polled.on_load = lambda *load: sink.calls.append(load)
    relay = EventRelay(sink, 2)
    task = asyncio.create_task(polled.poll_events([relay]) if start == "relay" else polled.poll_load())
    await asyncio.wait_for(llm.exhausted.wait(), 30)
    assert not task.done()
    task.cancel()
    return sink.calls


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("x"), AssertionError("not yet"), RuntimeError("x")])
async def test_kv_events_go_on_after_an_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = {"event_id": 0, "data": stored(block(1, [1, 2]))}
    malformed = {"event_id": 1, "data": stored({"block_hash": 2})}
    two = {"event_id": 2, "data": stored(block(3, [3, 4]))}
    calls = await poll(monkeypatch, "relay", [one], error, error, [malformed, two])
    assert [hashes for _, _, hashes, _, _ in calls] == [[1], [3]]
    told = [record.getMessage() for record in caplog.records]
    assert sum(f"KV events: {type(error).__name__}: " in line for line in told) == 1
    assert sum("a record was skipped: KeyError: 'tokens'" in line for line in told) == 1


async def test_statistics_go_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"kvCacheStats": {"usedNumBlocks": 3, "maxNumBlocks": 9}}
    assert await poll(monkeypatch, "load", [None], AssertionError("off"), [record]) == [(3, 9, 0)]


def test_statistics() -> None:
    assert kv_blocks({"kvCacheStats": {"usedNumBlocks": 3, "maxNumBlocks": 9}}) == (3, 9)
    assert kv_blocks({"kvCacheStats": {}}) is None
    assert kv_blocks({}) is None


def test_forward_passes() -> None:
    names = [
        *("numContextRequests", "numCtxTokens", "numCtxKvTokens", "numGenRequests", "numGenKvTokens"),
        *("numQueuedContextRequests", "numQueuedCtxTokens", "numQueuedGenRequests", "numQueuedGenKvTokens"),
        *("numPausedRequests", "numPausedKvTokens"),
    ]
    counts = dict(zip(names, range(1, 12), strict=True))
    record = {"inflightBatchingStats": counts, "iterLatencyMS": 250.0}
    assert forward_pass(record) == ForwardPass(1, 2, 3, 4, 5, 6, 7, 18, 20, 0.25)
    for key in counts:
        fewer = {name: count for name, count in counts.items() if name != key}
        with pytest.raises(LookupError, match=f"need a newer version: inflightBatchingStats has no {key}$"):
            forward_pass({"inflightBatchingStats": fewer})


# Hints


def hinted(hints: RequestHints) -> EngineRequest:
    return EngineRequest("", [5], SamplingParams(), hints=hints)


@pytest.mark.parametrize(
    ("priority", "expected"), [(0, None), (1, 0.75), (-1, 0.25), (10**400, 1.0), (-(10**400), 0.0)], ids=str
)
def test_priorities_lie_between_0_and_1(priority: int, expected: float | None) -> None:
    taken = package(generate_arguments=frozenset({"priority"}))
    assert own_arguments(hinted(RequestHints({}, priority)), taken).get("priority") == expected
    assert own_arguments(hinted(RequestHints({"traceparent": "x"}, priority)), package()) == {}  # of an older version


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=6))
def test_more_urgent_is_not_later(priorities: list[int]) -> None:
    taken = package(generate_arguments=frozenset({"priority"}))
    given_ = [own_arguments(hinted(RequestHints({}, each)), taken).get("priority", 0.5) for each in sorted(priorities)]
    assert given_ == sorted(given_)
    assert all(0 <= each <= 1 for each in given_)


# Health


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (_RequestError("too long"), "request"),
        (ValueError("bad"), "request"),
        (ValueError("logprobs (25) exceeds 20"), "sampling_params.logprobs"),
        (ValueError("best_of (1) cannot be less than n (2)"), "sampling_params.best_of"),
        (AssertionError("no transceiver"), "request"),
        (AttributeError("Can't pickle local object"), "sampling_params.logits_processor"),
    ],
)
def test_what_is_refused_at_submission(error: Exception, field: str) -> None:
    refusal = submission_error(error, package(), ["n", "best_of", "logprobs"])
    assert isinstance(refusal, InvalidRequest)
    assert refusal.field == field


def test_what_is_no_refusal() -> None:
    assert submission_error(RuntimeError("LLM is shutting down"), package()) is None
    assert described(RuntimeError("CUDA\nerror")) == "TensorRT-LLM: RuntimeError: CUDA error"


class Executor:
    """What a `Watch` looks at."""

    def __init__(self, answer: Exception | str | None = None, *, healthy: bool = True) -> None:
        self.answer, self.is_healthy = answer, healthy
        self.until = threading.Event()
        self.has_begun = self.has_returned = False
        self.num_canaries = 0
        self.reasons: list[str] = []

    async def canary(self) -> None:
        self.num_canaries += 1
        if self.answer == "hangs":
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer

    def check(self) -> bool:
        if self.answer == "check raises":
            raise RuntimeError("gone")
        if self.answer == "check hangs":
            self.has_begun = True
            self.until.wait(10)
            self.has_returned = True
        return self.is_healthy

    def watch(self, *, has_check: bool = True, interval_s: float = 0.001, timeout_s: float = 0.05) -> Watch:
        check = self.check if has_check else None
        return Watch(check, self.canary, package(), interval_s, timeout_s, self.reasons.append)


@pytest.mark.parametrize(
    ("executor", "reason"),
    [
        (Executor(healthy=False), "health check fails"),
        (Executor("check raises"), "health check fails"),
        (Executor("hangs"), "did not answer a canary"),
        (Executor("check hangs"), "health check did not return within 0.05 s"),
        (Executor(RuntimeError("CUDA error")), "CUDA error"),
    ],
)
async def test_a_dead_executor_is_noticed(executor: Executor, reason: str) -> None:
    await asyncio.wait_for(executor.watch().run(), 10)
    executor.until.set()
    assert len(executor.reasons) == 1
    assert reason in executor.reasons[0]


async def test_a_health_check_that_blocks_does_not_hold_the_event_loop() -> None:
    executor = Executor("check hangs")
    task = asyncio.create_task(executor.watch(timeout_s=1000).run())
    while not executor.has_begun:
        await asyncio.sleep(0.001)
    assert not executor.has_returned  # the loop goes on beside it
    executor.until.set()
    task.cancel()
    assert executor.reasons == []


async def test_a_watch_ends_that_is_cancelled_as_it_wakes_up() -> None:
    watch = Executor("fine").watch(interval_s=1000)
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0.01)  # it waits
    watch.suspect()
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=10)
    assert done


def test_whose_health_check_it_is() -> None:
    def yes() -> bool:
        return True

    def no() -> bool:
        return False

    executor = SimpleNamespace(check_health=no)
    assert own_check(SimpleNamespace(_check_health=yes, _executor=executor)) is yes
    assert own_check(SimpleNamespace(_executor=executor)) is no
    assert own_check(SimpleNamespace(_executor=None)) is None
    assert own_check(SimpleNamespace()) is None


@pytest.mark.parametrize("answer", [None, _RequestError("no")])
@pytest.mark.parametrize("has_check", [True, False])
async def test_a_live_executor_stays(answer: Exception | None, has_check: bool) -> None:
    executor = Executor(answer)
    task = asyncio.create_task(executor.watch(has_check=has_check).run())
    while executor.num_canaries < 3:
        await asyncio.sleep(0.001)
    task.cancel()
    assert executor.reasons == []


async def test_a_failed_request_is_a_reason_to_look_and_no_more() -> None:
    executor = Executor()
    watch = executor.watch(interval_s=1000)
    task = asyncio.create_task(watch.run())
    watch.heard()
    watch.suspect()
    while not executor.num_canaries:
        await asyncio.sleep(0)
    task.cancel()
    assert executor.reasons == []


async def test_a_verdict_is_asked_for_once_by_all() -> None:
    executor = Executor()
    watch = executor.watch(interval_s=1000, timeout_s=1000)
    task = asyncio.create_task(watch.run())
    watch.heard()
    assert await asyncio.gather(*(watch.verdict() for _ in range(5))) == [None] * 5
    assert executor.num_canaries == 1
    executor.answer = RuntimeError("CUDA error")
    asked = [watch.verdict() for _ in range(3)]
    problems = await asyncio.gather(*asked, watch.verdict())
    assert problems == ["TensorRT-LLM: RuntimeError: CUDA error"] * 4
    assert await watch.verdict() == problems[0]
    await task
    assert executor.reasons == problems[:1]


async def test_a_verdict_does_not_outlive_the_watch() -> None:
    executor = Executor("hangs")
    watch = executor.watch(interval_s=1000, timeout_s=1000)
    task = asyncio.create_task(watch.run())
    asking = [asyncio.create_task(watch.verdict()) for _ in range(2)]
    while not executor.num_canaries:
        await asyncio.sleep(0)
    asking.append(asyncio.create_task(watch.verdict()))
    await asyncio.sleep(0)
    task.cancel()
    assert await asyncio.gather(*asking) == ["TensorRT-LLM is no longer monitored"] * 3
    assert executor.reasons == []


# The checklist


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), IndexError("x"), RequestFailed("x")])
async def test_a_check_that_raises_has_failed_and_the_report_goes_on(error: Exception) -> None:
    async def broken() -> verify.Finding:
        raise error

    unused: Any = None
    found = await verify.Checklist(unused, unused)._guarded(broken)
    assert (found.name, found.ok) == ("broken", False)
    assert type(error).__name__ in found.found


@pytest.mark.parametrize(
    ("argv", "problem"),
    [([], "must be a file"), (["--model-path"], "must be a file"), (["/no/r.md"], "can be written")],
)
def test_an_unwritable_report_is_refused_before_the_model_loads(
    argv: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["verify", *argv])
    assert verify.main() == 2
    assert problem in capsys.readouterr().err
