"""What goes wrong between prefill and decode: the answer is the same, or an error comes; nothing stays held."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from e2e_stack import MODEL, Stack, Worker, running_stack, wait_for
from processor_requests import Reply, send

from worker.engines.embedded import Engine
from worker.sampling import SamplingParams

COMMON = ("--device", "cpu", "--dtype", "float32", "--numerics", "exact", "--max-num-seqs", "16")
HOLD_S = 3
NUM_TOKENS = 24
VOCABULARY = range(300, 900)


class Reference:
    """What a worker of its own answers."""

    def __init__(self, model_path: Path) -> None:
        self._engine = Engine(model_path, device="cpu", dtype="float32", numerics="exact", max_num_seqs=16)

    def answer(self, prompt: list[int]) -> list[int]:
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        result = self._engine.generate([prompt], params, progress=False)[0]
        return list(result.outputs[0].token_ids)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


def prompt_of(number: int, length: int = 100) -> list[int]:
    return random.Random(number).choices(VOCABULARY, k=length)


def ask(stack: Stack, prompt: list[int]) -> Reply:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "logprobs": 1, "return_tokens_as_token_ids": True}
    return send(stack, "completions", {**body, "ignore_eos": True, "temperature": 0}, timeout_s=100)


class Asking:
    """A request in a thread of its own."""

    def __init__(self, stack: Stack, prompt: list[int]) -> None:
        self._reply: Reply | None = None
        self._thread = threading.Thread(target=self._ask, args=(stack, prompt))
        self._thread.start()

    def _ask(self, stack: Stack, prompt: list[int]) -> None:
        self._reply = ask(stack, prompt)

    def reply(self) -> Reply:
        self._thread.join()
        assert self._reply is not None
        return self._reply


def start(stack: Stack, role: str, **environ: str) -> Worker:
    hold = ("--kv-hold-s", str(HOLD_S)) if role == "prefill" else ()
    return stack.start_worker(*COMMON, *hold, "--disaggregation-mode", role, wait=False, **environ)


def await_ready(stack: Stack) -> None:
    for worker in stack.workers:
        if worker.running:
            stack.wait_registered(worker)
    wait_for(lambda: stack.post("completions", prompt="ready?", max_tokens=1)[0] == 200, "an answer")


def held(prefill: Worker) -> float:
    return prefill.metric("dlw_kv_held_prompts")


def settled(stack: Stack) -> None:
    """Nobody is in flight and nothing is held, on every worker that runs."""
    for worker in stack.workers:
        if worker.running:
            wait_for(lambda worker=worker: worker.metric("dlw_in_flight_requests") == 0, "no request in flight")
            wait_for(lambda worker=worker: held(worker) == 0, "no prompt held")
            assert worker.running


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    """One prefill and one decode worker that survive their tests."""
    with running_stack(tmp_path_factory.mktemp("faults"), tiny_model) as stack:
        stack.start_frontend()
        start(stack, "prefill")
        start(stack, "decode")
        await_ready(stack)
        yield stack


@contextlib.contextmanager
def stopped(worker: Worker) -> Iterator[None]:
    worker.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.signal(signal.SIGCONT)


def test_a_hold_ends_in_time_and_decode_computes(pair: Stack, reference: Reference) -> None:
    prefill, decode = pair.workers
    prompt = prompt_of(1)
    with stopped(decode):
        asking = Asking(pair, prompt)
        wait_for(lambda: held(prefill) == 1, "a held prompt")
        wait_for(lambda: prefill.metric("dlw_kv_handoffs_total", outcome="timed_out") == 1, "the time-out")
        assert held(prefill) == 0
    reply = asking.reply()
    assert reply.token_ids == reference.answer(prompt), reply.text
    assert decode.metric("dlw_kv_handoffs_total", outcome="expired") == 1
    settled(pair)


def test_disconnects_in_every_phase(pair: Stack, reference: Reference) -> None:
    """200 clients leave at random times; all that they held comes back, and the others' answers are their own."""
    chance = random.Random(3)

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        body = {"model": MODEL, "prompt": prompt_of(number % 20, 50 + number), "max_tokens": 200, "stream": True}
        with contextlib.suppress(httpx.HTTPError, asyncio.TimeoutError):
            request = client.post(f"{pair.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=60)
            await asyncio.wait_for(request, chance.choice((0.005, 0.02, 0.05, 0.1, 0.3)))

    async def stay(number: int) -> tuple[int, Reply]:
        return number, await asyncio.to_thread(ask, pair, prompt_of(number))

    async def all_of_them() -> list[tuple[int, Reply]]:
        async with httpx.AsyncClient() as client:
            waits = []
            for batch in range(20):
                leaving = [leave(client, batch * 10 + one) for one in range(10)]
                waits.append(asyncio.create_task(stay(1000 + batch)))
                await asyncio.gather(*leaving)
            return await asyncio.gather(*waits)

    for number, reply in asyncio.run(all_of_them()):
        assert reply.token_ids == reference.answer(prompt_of(number)), (reply.text, pair.workers[1].log)
    settled(pair)
    prefill, decode = pair.workers
    assert prefill.metric("dlw_kv_handoffs_total", outcome="held") >= 20
    for worker in (prefill, decode):
        assert worker.metric("dlw_requests_total", outcome="unknown_error") == 0, worker.log


@pytest.mark.parametrize("connected", [True, False])
def test_prefill_dies_with_what_it_holds(stack: Stack, reference: Reference, connected: bool) -> None:
    stack.start_frontend()
    prefill, decode = start(stack, "prefill"), start(stack, "decode")
    if connected:
        await_ready(stack)
        assert ask(stack, prompt_of(5)).token_ids == reference.answer(prompt_of(5))
    else:
        for worker in stack.workers:
            stack.wait_registered(worker)
    before = decode.metric("dlw_kv_handoffs_total", outcome="received")
    prompt = prompt_of(6)
    with stopped(decode):
        asking = Asking(stack, prompt)
        wait_for(lambda: held(prefill) == 1, "a held prompt")
        prefill.end()
    reply = asking.reply()
    assert reply.token_ids == reference.answer(prompt), reply.text
    assert decode.metric("dlw_kv_handoffs_total", outcome="received") == before
    assert decode.metric("dlw_kv_handoffs_total", outcome="lost") == 1
    replacement = start(stack, "prefill")
    stack.wait_registered(replacement)
    again = wait_for(lambda: answered(stack, prompt_of(7)), "an answer with the new prefill worker")
    assert again.token_ids == reference.answer(prompt_of(7))
    settled(stack)


def answered(stack: Stack, prompt: list[int]) -> Reply | None:
    reply = ask(stack, prompt)
    return reply if reply.status == 200 else None


def test_decode_dies_before_it_has_read(stack: Stack, reference: Reference) -> None:
    stack.start_frontend()
    prefill, decode = start(stack, "prefill"), start(stack, "decode")
    await_ready(stack)
    with stopped(decode):
        asking = Asking(stack, prompt_of(8))
        wait_for(lambda: held(prefill) == 1, "a held prompt")
        decode.signal(signal.SIGKILL)
    assert asking.reply().status != 200
    wait_for(lambda: prefill.metric("dlw_kv_handoffs_total", outcome="timed_out") == 1, "the time-out")
    stack.wait_registered(start(stack, "decode"))
    again = wait_for(lambda: answered(stack, prompt_of(8)), "an answer with the new decode worker")
    assert again.token_ids == reference.answer(prompt_of(8))
    settled(stack)


def test_two_of_each_under_64_streams(stack: Stack, reference: Reference) -> None:
    stack.start_frontend()
    for role in ("prefill", "decode", "prefill", "decode"):
        start(stack, role)
    await_ready(stack)

    async def stream(client: openai.AsyncOpenAI, number: int) -> list[int]:
        body: dict[str, Any] = {"return_tokens_as_token_ids": True, "ignore_eos": True}
        chunks = await client.completions.create(
            model=MODEL, prompt=prompt_of(number), max_tokens=NUM_TOKENS, logprobs=1, stream=True, extra_body=body
        )
        found: list[int] = []
        async for chunk in chunks:
            for choice in chunk.choices:
                if choice.logprobs is not None and choice.logprobs.tokens is not None:
                    found += [int(token.removeprefix("token_id:")) for token in choice.logprobs.tokens]
        return found

    async def all_of_them() -> list[list[int]]:
        async with stack.async_client() as client:
            return await asyncio.gather(*(stream(client, 2000 + number) for number in range(64)))

    for number, tokens in enumerate(asyncio.run(all_of_them())):
        assert tokens == reference.answer(prompt_of(2000 + number))
    settled(stack)
    counts = [worker.metric("dlw_kv_handoffs_total", outcome="received") for worker in stack.workers]
    assert counts[0] == counts[2] == 0
    assert counts[1] > 0
    assert counts[3] > 0
    assert counts[1] + counts[3] >= 64


def test_a_prefill_worker_that_leaves_waits_for_its_readers(stack: Stack, reference: Reference) -> None:
    stack.start_frontend()
    pair = [start(stack, "prefill"), start(stack, "prefill")]  # with the last one the model would leave
    decode = start(stack, "decode")
    await_ready(stack)
    prompt = prompt_of(9)
    with stopped(decode):
        asking = Asking(stack, prompt)
        leaving = wait_for(lambda: next((one for one in pair if held(one) == 1), None), "a held prompt")
        leaving.signal(signal.SIGTERM)
        wait_for(lambda: len(stack.registered()) == 2, "that it is not registered any more")
    reply = asking.reply()
    assert reply.token_ids == reference.answer(prompt), reply.text
    assert leaving.wait() == 0
    assert decode.metric("dlw_kv_handoffs_total", outcome="lost") == 0
    assert decode.metric("dlw_kv_handoffs_total", outcome="expired") == 0
