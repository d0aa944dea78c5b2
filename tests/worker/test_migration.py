"""A migrated request goes on as if nothing had happened, wherever its answer was cut; and what is
done where that cannot be.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from dynamo.llm import exceptions
from transformers import AutoTokenizer

from adapters.client import processor, selection
from worker.arguments import parse_arguments
from worker.build import make_engine
from worker.engines.embedded import native
from worker.migration import boundary_record
from worker.migration.boundary import Boundary
from worker.migration.file_store import FileStore
from worker.runtimes.dynamo_engine import WorkerEngine
from worker.tiny_model import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [9, 30, 41, 77, 30, 41, 12, 9, 30, 500, 9, 30, 41, 77, 30, 41, 12, 9, 31]
LENGTH = 20
DRAWN = {"temperature": 0.9, "seed": 5}


class Context:
    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self.metadata: dict[str, str] = {}

    def id(self) -> str:
        return self._id

    def trace_headers(self) -> None:
        return None


@dataclass
class Answer:
    token_ids: list[int]
    finish_reason: str
    usage: dict[str, Any]
    receipt: dict[str, Any]


class Pool:
    """A worker, and the store that it shares with workers that die."""

    def __init__(self, worker: WorkerEngine, store: FileStore) -> None:
        self.worker = worker
        self.store = store

    def key(self, request_id: str) -> str:
        assert self.worker.server._boundaries is not None
        return self.worker.server._boundaries.key_of(request_id)

    async def ask(self, request_id: str, raw: dict[str, Any]) -> tuple[Answer, bytes]:
        """The answer, and the record that was in the store when its first token was sent."""
        chunks: list[Any] = []
        record = b""
        async for chunk in self.worker.generate(raw, Context(request_id)):
            if not chunks:
                record = await self.store.get(self.key(request_id)) or b""
            chunks.append(chunk)
        token_ids = [token_id for chunk in chunks for token_id in chunk["token_ids"]]
        receipt = chunks[-1].get("engine_data", {}).get("logits_processors", {})
        return Answer(token_ids, chunks[-1]["finish_reason"], chunks[-1]["completion_usage"], receipt), record

    async def record_of_answered(self, request_id: str) -> bytes:
        """The record of a request whose answer has ended, which is about to be written."""
        async with asyncio.timeout(30):
            while not Boundary.decode(record := await self.store.get(self.key(request_id)) or b"").is_answered:
                await asyncio.sleep(0.01)
        return record

    async def take_over(self, request_id: str, raw: dict[str, Any], record: bytes, answer: Sequence[int]) -> Answer:
        """The rest of the answer of a worker that died after these tokens of it.

        The frontend appends them to the prompt and takes them off ``max_tokens``.
        """
        await self.store.put(self.key(request_id), record)
        stops = dict(raw.get("stop_conditions", {}))
        if "max_tokens" in stops:
            stops["max_tokens"] -= len(answer)
        moved = {**raw, "token_ids": [*raw["token_ids"], *answer], "stop_conditions": stops}
        return (await self.ask(request_id, moved))[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def make_worker(model: Path, store: Path, *argv: str, smoke: bool = False) -> WorkerEngine:
    migration = ["--migration", "on", "--boundary-store", f"file:{store}"]
    options = ["--device", "cpu", "--dtype", "float32", "--numerics", "exact", "--drain-timeout-s", "0"]
    third = ["--logits-processor", "acme/drifts=drifting_processor:Drifts"]
    arguments = parse_arguments(["--model-path", str(model), *options, *migration, *third, *argv], {})
    return WorkerEngine(make_engine(arguments), arguments, smoke=smoke, shut_down=lambda: None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    directory = tmp_path_factory.mktemp("store")
    amateur = ["--speculative-config", json.dumps({"model": str(model)})]
    worker = make_worker(model, directory, "--max-num-batched-tokens", "64", "--context-length", "96", *amateur)
    await worker.start(1)
    yield Pool(worker, FileStore(str(directory)))
    await worker.cleanup()


SCHEMA = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 30}
PHRASES = processor("phrase_ban", phrases=["e", "TH", "a ", "st"])
CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "plain": ([], {}),
    "seeded": ([], DRAWN),
    "drawn seed": ([], {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01}),
    "frequency_penalty": ([], {"frequency_penalty": 1.5}),
    "repetition_penalty": ([], {"repetition_penalty": 1.5}),
    "json_schema": ([processor("json_schema", schema=SCHEMA)], DRAWN),
    "trigger_phrase": ([processor("trigger_phrase", text=" and so on", after_tokens=5, times=3)], {}),
    "no_repeat_ngram": ([processor("no_repeat_ngram", n=2)], {}),
    "thinking_budget": ([processor("thinking_budget", tokens=6)], DRAWN),
    "mirostat": ([processor("mirostat", tau=3.1)], DRAWN),
    "xtc": ([processor("xtc", probability=0.5)], DRAWN),
    "phrase_ban": ([PHRASES], DRAWN),
    "phrase_ban beside mirostat": ([PHRASES, processor("mirostat", tau=3.0, eta=0.5)], DRAWN),
    "phrase_ban beside a third party": ([PHRASES, processor("acme/drifts")], DRAWN),
    "cfg": ([processor("cfg", scale=2.0, negative_token_ids=[7, 8, 9, 40])], DRAWN),
    "phrase_ban beside cfg": ([processor("cfg", scale=3.0), PHRASES], DRAWN),
    "contrastive": ([processor("contrastive", beta=1.5, amateur_temperature=2.0)], DRAWN),
    "phrase_ban beside contrastive": ([processor("contrastive", alpha=0.02), PHRASES], DRAWN),
    "third party": ([processor("acme/drifts")], {}),
    "third party, drawn": ([processor("acme/drifts"), processor("no_repeat_ngram", n=3)], DRAWN),
}


def request_of(name: str) -> dict[str, Any]:
    processors, sampling = CASES[name]
    annotation = "logits_processors:" + selection(*processors, receipt=True)
    stops = {"max_tokens": LENGTH, "min_tokens": 8}
    return {"token_ids": PROMPT, "annotations": [annotation], "sampling_options": sampling, "stop_conditions": stops}


async def test_an_ended_answer_continues_if_not_all_of_it_arrived(pool: Pool) -> None:
    """Its worker died a moment after the end of the answer, which was still on its way."""
    raw = request_of("drawn seed")
    whole, _ = await pool.ask("ended", raw)
    record = await pool.record_of_answered("ended")
    rest = await pool.take_over("ended", raw, record, whole.token_ids[:7])
    assert [*whole.token_ids[:7], *rest.token_ids] == whole.token_ids
    assert rest.receipt["mode"] == "migrated at 7"


@pytest.mark.skipif(native.unavailable(torch.float32) is not None, reason="there are no native kernels")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--kernels", "native", "--kv-block-size", "24"), None),
        (("--kernels", "native", "--kv-block-size", "7"), None),
        (("--kernels", "native", "--kv-cache-dtype", "int8"), "numerics is 'exact, native kernels'"),
        (("--kernels", "torch"), "numerics is 'exact, native kernels'"),
    ],
)
async def test_an_answer_goes_on_only_where_its_bits_do(
    model: Path, tmp_path: Path, options: tuple[str, ...], reason: str | None
) -> None:
    prompt = [3 + (7 * i) % 400 for i in range(150)]  # more than one block of keys
    raw = {**request_of("mirostat"), "token_ids": prompt}
    workers = [make_worker(model, tmp_path, "--kernels", "native"), make_worker(model, tmp_path, *options)]
    pools = [Pool(worker, FileStore(str(tmp_path))) for worker in workers]
    try:
        for number, worker in enumerate(workers):
            await worker.start(number)
        whole, record = await pools[0].ask("one", raw)
        await pools[0].record_of_answered("one")
        if reason is not None:
            with pytest.raises(exceptions.InvalidArgument, match=f"its answer cannot go on here: {reason}"):
                await pools[1].take_over("one", raw, record, whole.token_ids[:9])
            return
        rest = await pools[1].take_over("one", raw, record, whole.token_ids[:9])
        assert whole.token_ids[:9] + rest.token_ids == whole.token_ids
    finally:
        for worker in workers:
            await worker.cleanup()


@pytest.mark.parametrize("name", CASES)
async def test_an_answer_cut_anywhere_goes_on_as_it_would_have(pool: Pool, name: str) -> None:
    raw = request_of(name)
    whole, record = await pool.ask(name, raw)
    cuts = range(1, len(whole.token_ids))
    moved = await asyncio.gather(*(pool.take_over(f"{name} {k}", raw, record, whole.token_ids[:k]) for k in cuts))
    for k, answer in zip(cuts, moved, strict=True):
        assert whole.token_ids[:k] + answer.token_ids == whole.token_ids, f"cut after {k}"
        assert answer.finish_reason == whole.finish_reason
        for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert answer.usage[field] == whole.usage[field]
        assert (answer.receipt["mode"], answer.receipt["replayed_tokens"]) == (f"migrated at {k}", k)
        for field in ("seed", "request", "prompt_length", "prompt_digest", "answer_digest", "generated_tokens"):
            assert answer.receipt[field] == whole.receipt[field], field


async def test_contrast_goes_on_with_its_own_draft_model_alone(pool: Pool, model: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", seed=1)
    amateur = ["--speculative-config", json.dumps({"model": str(other)})]
    worker = make_worker(model, tmp_path / "store", "--context-length", "96", *amateur)
    await worker.start(1)
    elsewhere = Pool(worker, FileStore(str(tmp_path / "store")))
    try:
        for name in ("contrastive", "seeded"):
            raw = request_of(name)
            whole, record = await pool.ask(f"draft {name}", raw)
            if name == "contrastive":
                with pytest.raises(exceptions.InvalidArgument, match=r"adapter is 'draft model .* on this one"):
                    await elsewhere.take_over("draft", raw, record, whole.token_ids[:5])
            else:
                rest = await elsewhere.take_over("draft", raw, record, whole.token_ids[:5])
                assert whole.token_ids[:5] + rest.token_ids == whole.token_ids
    finally:
        await worker.cleanup()


async def test_an_answer_does_not_go_on_with_another_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """A worker may have been started again under the same name, with other weights."""
    worker = make_worker(write_tiny_model(tmp_path / "model", seed=1), tmp_path / "store", "--context-length", "96")
    await worker.start(1)
    try:
        raw = request_of("seeded")
        whole, record = await pool.ask("other checkpoint", raw)
        elsewhere = Pool(worker, FileStore(str(tmp_path / "store")))
        with pytest.raises(
            exceptions.InvalidArgument, match=r"cannot go on here: model is '\w{32}' on the worker that"
        ):
            await elsewhere.take_over("moved", raw, record, whole.token_ids[:5])
    finally:
        await worker.cleanup()


async def test_the_smoke_test_goes_on(model: Path, tmp_path: Path) -> None:
    worker = make_worker(model, tmp_path, smoke=True)
    await worker.start(1)
    pool = Pool(worker, FileStore(str(tmp_path)))
    try:
        raw = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": LENGTH}}
        whole, record = await pool.ask("hello", raw)
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        assert tokenizer.decode(whole.token_ids) == "Hello world!"
        for k in range(1, len(whole.token_ids) + 1):
            answer = await pool.take_over(f"hello {k}", raw, record, whole.token_ids[:k])
            assert whole.token_ids[:k] + answer.token_ids == whole.token_ids
    finally:
        await worker.cleanup()


async def test_what_1_6_1_leaves_of_min_tokens(pool: Pool) -> None:
    raw = request_of("plain")
    raw["sampling_options"] = {"frequency_penalty": 2.0}
    raw["stop_conditions"] = {"max_tokens": LENGTH, "min_tokens": 15}
    whole, record = await pool.ask("min", raw)
    reduced = {**raw, "stop_conditions": {"max_tokens": LENGTH, "min_tokens": 5}}
    assert whole.token_ids[:10] + (await pool.take_over("min 10", reduced, record, whole.token_ids[:10])).token_ids == (
        whole.token_ids
    )


async def test_without_max_tokens_the_answer_ends_at_the_context_limit(pool: Pool) -> None:
    raw = {"token_ids": PROMPT, "stop_conditions": {"ignore_eos": True}}
    whole, record = await pool.ask("endless", raw)
    assert len(PROMPT) + len(whole.token_ids) == 96
    answer = await pool.take_over("endless 30", raw, record, whole.token_ids[:30])
    assert whole.token_ids[:30] + answer.token_ids == whole.token_ids


@pytest.mark.parametrize("withheld", ["half of a character", "a begun stop string"])
async def test_tokens_held_back_are_sent_before_an_error(pool: Pool, model: Path, withheld: str) -> None:
    """No worker takes over what has failed: what was held back for that is the answer's."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    half = tokenizer.convert_tokens_to_ids(["\u00e6"])  # the byte 0xE6, with which \u65e5 begins
    sent = [40, *(half if withheld.startswith("half") else tokenizer.encode("<<"))]
    fails = [processor("forced_prefix", token_ids=[*sent, 41]), processor("banned_tokens", token_ids=[41])]
    raw = {
        "token_ids": PROMPT,
        "annotations": ["logits_processors:" + selection(*fails)],
        "stop_conditions": {"max_tokens": LENGTH, "stop": ["<<<"]},
    }
    chunks: list[Any] = []

    async def read() -> None:
        async for chunk in pool.worker.generate(raw, Context(f"fails at {withheld}")):
            chunks.append(chunk)

    with pytest.raises(exceptions.InvalidArgument, match="forces token 41, which another processor forbids"):
        await read()
    assert [token_id for chunk in chunks for token_id in chunk["token_ids"]] == sent


async def test_a_second_migration(pool: Pool) -> None:
    """The record of the second worker is that of the first, but for its owner and its count."""
    raw = request_of("frequency_penalty")
    whole, record = await pool.ask("twice", raw)
    await pool.store.put(pool.key("twice again"), record)
    moved = {**raw, "token_ids": PROMPT + whole.token_ids[:4], "stop_conditions": {"max_tokens": LENGTH - 4}}
    _, second = await pool.ask("twice again", moved)
    first, again = Boundary.decode(record), Boundary.decode(second)
    assert (first.attempts, again.attempts) == (1, 2)
    assert first.owner != again.owner
    fields = ("prompt_length", "prompt_digest", "max_tokens", "min_tokens", "seed")
    assert [getattr(first, field) for field in fields] == [getattr(again, field) for field in fields]


async def test_a_request_that_two_workers_died_with_is_refused(pool: Pool) -> None:
    raw = request_of("plain")
    whole, record = await pool.ask("poison", raw)
    twice = replace(Boundary.decode(record), attempts=2).encode()
    with pytest.raises(exceptions.InvalidArgument, match="in flight in 2 workers that died"):
        await pool.take_over("poison 5", raw, twice, whole.token_ids[:5])
    with pytest.raises(exceptions.InvalidArgument, match="in flight in 2 workers that died"):
        await pool.take_over("poison 0", raw, twice, [])
    outcomes = pool.worker.server.metrics.registry
    assert outcomes.get_sample_value("dlw_requests_total", {"outcome": "poison"}) == 2
    again, _ = await pool.ask("no poison", raw)
    assert again.token_ids == whole.token_ids


@pytest.mark.parametrize("waits", [False, True])
async def test_the_record_of_a_request_that_has_ended_goes_away(
    pool: Pool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary_record, "EXPIRY_S", 0.02 if waits else 30.0)
    for _ in range(5):  # the same id and prompt, again and again: not one worker died
        await pool.ask(f"again {waits}", request_of("plain"))
        while (record := await pool.store.get(pool.key(f"again {waits}"))) is not None:
            if not waits and Boundary.decode(record).is_answered:
                break
            await asyncio.sleep(0.001)


async def test_a_drained_request_does_not_count_as_a_crash(model: Path, tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    worker = make_worker(model, tmp_path)
    await worker.start(1)
    pool = Pool(worker, store)
    stream = worker.generate({"token_ids": PROMPT, "stop_conditions": {"ignore_eos": True}}, Context("drained"))
    await anext(stream)
    during = await store.get(pool.key("drained"))
    key = pool.key("drained")
    cleanup = asyncio.create_task(worker.cleanup())
    with pytest.raises(exceptions.EngineShutdown):
        async for _ in stream:
            pass
    await cleanup
    after = await store.get(key)
    assert during is not None
    assert after is not None
    assert (Boundary.decode(during).attempts, Boundary.decode(after).attempts) == (1, 0)


async def test_a_worker_accepts_nothing_until_its_store_is_back(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "store"
    worker = make_worker(model, directory)
    await worker.start(1)
    pool = Pool(worker, FileStore(str(directory)))
    try:
        stream = worker.generate({"token_ids": PROMPT, "stop_conditions": {"max_tokens": 8}}, Context("under way"))
        chunks = [await anext(stream)]
        directory.rename(tmp_path / "gone")
        with pytest.raises(exceptions.HttpError, match="boundary store file:"):
            await pool.ask("new", request_of("plain"))
        chunks += [chunk async for chunk in stream]
        assert chunks[-1]["finish_reason"] == "length"
        (tmp_path / "gone").rename(directory)
        answer, _ = await pool.ask("new", request_of("plain"))
        assert len(answer.token_ids) == LENGTH
    finally:
        await worker.cleanup()


async def test_no_token_leaves_before_its_record_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker would take what comes after it for a new prompt."""
    put, written = FileStore.put, asyncio.Event()

    async def late(store: FileStore, key: str, value: bytes) -> None:
        await written.wait()
        await put(store, key, value)

    monkeypatch.setattr(FileStore, "put", late)
    worker = make_worker(model, tmp_path)
    await worker.start(1)
    try:
        stream = worker.generate({"token_ids": PROMPT, "stop_conditions": {"max_tokens": 8}}, Context("held"))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.wait([first], timeout=0.5)
        assert not first.done()
        written.set()
        chunks = [await first, *[chunk async for chunk in stream]]
        assert chunks[-1]["finish_reason"] == "length"
    finally:
        written.set()
        await worker.cleanup()
