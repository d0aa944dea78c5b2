"""A worker is killed; its requests go on in another one, and nobody sees it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from e2e_stack import MODEL, Stack, Worker, running_stack, wait_for
from front_door_process import Door
from scored_completions import PROMPTS, Scored, computed, scored
from servers import EtcdServer, NatsServer

from adapters.client import processor, selection
from worker.engines.embedded.offline import Engine

pytestmark = pytest.mark.timeout(300)  # two rounds of many streams

EXACT = ["--device", "cpu", "--dtype", "float32", "--numerics", "exact", "--context-length", "1024"]
NUM_TOKENS = 160
SCHEMA = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 30}
KINDS: dict[str, dict[str, Any]] = {
    "frequency_penalty": {"frequency_penalty": 0.7, "ignore_eos": True},
    "drawn": {"temperature": 1.0, "seed": 7, "top_p": 0.95},
    "json_schema": {"temperature": 0.8, "seed": 3, "processors": [processor("json_schema", schema=SCHEMA)]},
    "trigger_phrase": {
        "ignore_eos": True,
        "processors": [processor("trigger_phrase", text=" I mean", after_tokens=11, times=20)],
    },
    "mirostat": {"temperature": 1.0, "seed": 1, "processors": [processor("mirostat", tau=4.0)]},
    "stop": {"temperature": 1.0, "seed": 11, "stop": ["zqzqzqzq", "th"]},
}


@dataclass
class Reply:
    text: str = ""
    finish_reason: str | None = None
    usage: Any = None
    receipt: dict[str, Any] = field(default_factory=dict)

    def same(self) -> tuple[object, ...]:
        """What must not depend on a migration."""
        used = None if self.usage is None else (self.usage.prompt_tokens, self.usage.completion_tokens)
        return self.text, self.finish_reason, used, self.receipt.get("answer_digest")


@pytest.fixture
def pool(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    """A frontend that migrates; of its own for each test, because one of 1.4.2 that hears of a new
    worker tries those again that were killed before.
    """
    with running_stack(tmp_path_factory.mktemp("pool"), tiny_model) as stack:
        stack.start_frontend("--migration-limit", "3")
        yield stack


def two_workers(stack: Stack, *arguments: str, store: str | None = None) -> tuple[Worker, Worker]:
    """Two that go on exactly, by default with a boundary store of files."""
    migration = ["--migration", "on", "--boundary-store", store or f"file:{stack.directory / 'boundaries'}"]
    first, second = (stack.start_worker(*EXACT, *migration, *arguments) for _ in range(2))
    return first, second


async def ask(client: openai.AsyncOpenAI, number: int, begun: asyncio.Event, **given: Any) -> Reply:
    """One streamed completion; ``begun`` is set at its third event."""
    try:
        return await _ask(client, number, begun, **given)
    finally:
        begun.set()


async def _ask(client: openai.AsyncOpenAI, number: int, begun: asyncio.Event, **given: Any) -> Reply:
    body = {**given}
    annotation = "logits_processors:" + selection(*body.pop("processors", ()), receipt=True)
    reply = Reply()
    extra: dict[str, Any] = {"nvext": {"annotations": [annotation], "extra_fields": ["engine_data"]}}
    extra["ignore_eos"] = body.pop("ignore_eos", False)
    stream = await client.completions.create(
        model=MODEL,
        prompt=f"Once upon a time number {number} of all",
        max_tokens=NUM_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
        **body,
    )
    num_events = 0
    async for chunk in stream:
        num_events += 1
        if num_events == 3:
            begun.set()
        reply.usage = chunk.usage or reply.usage
        data = (getattr(chunk, "nvext", None) or {}).get("engine_data")
        reply.receipt = data["logits_processors"] if data else reply.receipt
        for choice in chunk.choices:
            reply.text += choice.text or ""
            reply.finish_reason = choice.finish_reason or reply.finish_reason
    return reply


async def ask_all(stack: Stack, kills: Worker | None = None) -> dict[str, Reply]:
    """Three of each kind at once; ``kills`` dies once all have begun."""
    async with stack.async_client() as client:
        begun = {f"{kind} {number}": asyncio.Event() for kind in KINDS for number in range(3)}
        asking = {
            name: asyncio.create_task(ask(client, number, begun[name], **KINDS[name.rpartition(" ")[0]]))
            for number, name in enumerate(begun)
        }
        await asyncio.gather(*(event.wait() for event in begun.values()))
        if kills is not None:
            kills.signal(signal.SIGKILL)
        replies = await asyncio.gather(*asking.values())
    return dict(zip(asking, replies, strict=True))


@pytest.fixture(params=["file", "nats", "etcd"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A boundary store, as ``--boundary-store`` takes it."""
    if request.param == "file":
        yield f"file:{tmp_path / 'boundaries'}"
        return
    server = NatsServer(tmp_path / "server") if request.param == "nats" else EtcdServer(tmp_path / "server")
    server.start()
    yield f"{request.param}:{server.url}"
    server.kill()


@pytest.mark.campaign
async def test_a_killed_workers_answers_are_unchanged(pool: Stack, store: str) -> None:
    first, second = await asyncio.to_thread(two_workers, pool, store=store)
    expected = await ask_all(pool)
    found = await ask_all(pool, kills=first)
    wrong = [name for name in expected if found[name].same() != expected[name].same()]
    assert not wrong, [(found[name], expected[name]) for name in wrong[:2]]
    moved = [name for name, reply in found.items() if reply.receipt["replayed_tokens"]]
    assert len(moved) == second.metric("dlw_continued_requests_total") > 0
    assert len({name.rpartition(" ")[0] for name in moved}) >= 3  # short answers may have ended before the kill
    for name in moved:
        replayed = found[name].receipt["replayed_tokens"]
        assert found[name].receipt["mode"] == f"migrated at {replayed}"
    assert second.running


@pytest.mark.campaign
async def test_a_killed_decode_workers_answers_are_unchanged(stack: Stack) -> None:
    """The survivor gets the KV of prompt and answer from a prefill worker."""
    stack.start_frontend("--migration-limit", "3")
    migration = ["--migration", "on", "--boundary-store", f"file:{stack.directory / 'boundaries'}"]

    def start(role: str) -> Worker:
        worker = stack.start_worker(*EXACT, *migration, "--disaggregation-mode", role, wait=False)
        stack.wait_for_frontend()
        stack.wait_endpoint(worker)
        return worker

    _, victim, survivor = [await asyncio.to_thread(start, role) for role in ("prefill", "decode", "decode")]
    await asyncio.to_thread(wait_for, lambda: stack.post("completions", prompt="a", max_tokens=1)[0] == 200, "answer")
    expected = await ask_all(stack)
    found = await ask_all(stack, kills=victim)
    assert {name: reply.same() for name, reply in found.items()} == {
        name: reply.same() for name, reply in expected.items()
    }
    moved = [reply for reply in found.values() if reply.receipt["replayed_tokens"]]
    assert len(moved) == survivor.metric("dlw_continued_requests_total") > 0


async def chat(client: openai.AsyncOpenAI, number: int, begun: asyncio.Event) -> str:
    """The text of a chat in JSON; ``begun`` is set at its third event."""
    try:
        return await _chat(client, number, begun)
    finally:
        begun.set()


async def _chat(client: openai.AsyncOpenAI, number: int, begun: asyncio.Event) -> str:
    schema = {"type": "json_schema", "json_schema": {"name": "lists", "schema": {**SCHEMA, "minItems": 400}}}
    stream = await client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL,
        messages=[{"role": "user", "content": f"List {number}"}],
        max_tokens=5 * NUM_TOKENS,  # nobody is done before everybody has begun
        temperature=0.8,
        seed=number,
        response_format=schema,
        stream=True,
    )
    text, num_events = "", 0
    async for chunk in stream:
        num_events += 1
        if num_events == 3:
            begun.set()
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    return text


async def test_guides_migrate_through_the_front_door_alone(pool: Stack) -> None:
    """The frontend migrates no guide, so the front door sends grammars as processors."""
    victim, _ = await asyncio.to_thread(two_workers, pool)
    door = await asyncio.to_thread(Door, pool, "--", "--migration", "on")

    async def ask_both(kills: Worker | None) -> tuple[list[str | BaseException], list[str | BaseException]]:
        async with door.async_client() as through, pool.async_client() as direct:
            begun = [asyncio.Event() for _ in range(12)]
            asking = [
                asyncio.create_task(chat(through if number < 6 else direct, number % 6, event))
                for number, event in enumerate(begun)
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            if kills is not None:
                kills.signal(signal.SIGKILL)
            replies = await asyncio.gather(*asking, return_exceptions=True)
        return replies[:6], replies[6:]

    by_door, by_frontend = await ask_both(None)
    assert by_door == by_frontend
    assert all(isinstance(text, str) and text.startswith("[") for text in by_door)
    after, lost = await ask_both(victim)
    assert after == by_door
    assert any(isinstance(text, openai.APIError) for text in lost)
    assert all(isinstance(text, openai.APIError) or text == by_door[number] for number, text in enumerate(lost))


async def test_scores_survive_preemption_and_a_migration(pool: Stack, tiny_model: Path) -> None:
    """Clients whose KV does not fit, then without half of their workers."""
    prompts = PROMPTS[:12]
    engine = Engine(tiny_model, device="cpu", dtype="float32", numerics="exact")
    expected = computed(engine, prompts, 80)
    victim, survivor = await asyncio.to_thread(two_workers, pool, "--kv-blocks", "64")
    door = await asyncio.to_thread(Door, pool, "--", "--migration", "on")

    async def ask_scored(kills: Worker | None) -> list[list[Scored]]:
        """Clients ask once; or until a worker is killed amid an answer, and once more."""
        under_way: dict[int, asyncio.Event] = {}  # by client: whether the answer has begun
        killed = asyncio.Event()
        if kills is None:
            killed.set()
        async with door.async_client() as client:

            async def ask(number: int) -> list[Scored]:
                answers = [await scored(client, prompts[number], 80)]
                while not killed.is_set():
                    begun = under_way[number] = asyncio.Event()
                    answers.append(await scored(client, prompts[number], 80, begun))
                    del under_way[number]
                return answers

            asking = [asyncio.create_task(ask(number)) for number in range(len(prompts))]
            while kills is not None and not killed.is_set():
                await asyncio.sleep(0.05)
                kills.signal(signal.SIGSTOP)
                await asyncio.sleep(1)
                begun = [(number, event) for number, event in under_way.items() if event.is_set()]
                await asyncio.sleep(1)
                if any(under_way.get(number) is event for number, event in begun):  # by the one that is stopped
                    kills.signal(signal.SIGKILL)
                    killed.set()
                else:
                    kills.signal(signal.SIGCONT)
            return await asyncio.gather(*asking)

    crowded = [one for (one,) in await ask_scored(None)]
    assert [(one.token_logprobs, one.prompt_logprobs) for one in crowded] == expected
    assert victim.metric("dlw_preemptions_total") > 0
    assert survivor.metric("dlw_preemptions_total") > 0
    for answers, one in zip(await ask_scored(victim), crowded, strict=True):
        assert answers == [one] * len(answers)
    assert survivor.metric("dlw_continued_requests_total") > 0
