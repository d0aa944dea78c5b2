"""What goes wrong between prefill and decode: the answer is the same, or an error comes; nothing
stays held.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from e2e_stack import MODEL, Stack, Worker, running_stack, wait_for
from processor_requests import Reply, send
from stopped_processes import stopped, unread

from worker.engines.embedded import Engine
from worker.sampling import SamplingParams

COMMON = ("--device", "cpu", "--dtype", "float32", "--numerics", "exact", "--max-num-seqs", "16")
HOLD_S = 3
LONG_HOLD_S = 10
"""For tests that look at a prompt while it is held, on a busy machine too."""

NUM_TOKENS = 24
LONG_ANSWER = 1500
VOCABULARY = range(300, 900)


class Reference:
    """What a worker of its own answers."""

    def __init__(self, model_path: Path) -> None:
        self._engine = Engine(model_path, device="cpu", dtype="float32", numerics="exact", max_num_seqs=16)

    def answers(self, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        results = self._engine.generate(prompts, params, progress=False)
        return [list(result.outputs[0].token_ids) for result in results]

    def answer(self, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        return self.answers([prompt], num_tokens)[0]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


def prompt_of(number: int, length: int = 100) -> list[int]:
    return random.Random(number).choices(VOCABULARY, k=length)


def ask(stack: Stack, prompt: list[int], num_tokens: int = NUM_TOKENS) -> Reply:
    body = {"prompt": prompt, "max_tokens": num_tokens, "logprobs": 1, "return_tokens_as_token_ids": True}
    try:
        return send(stack, "completions", {**body, "ignore_eos": True, "temperature": 0}, timeout_s=60)
    except httpx.TimeoutException:
        raise AssertionError(f"not answered within 60 s\n{stack.evidence()}") from None


class Asking:
    """A request in a thread of its own."""

    def __init__(self, stack: Stack, prompt: list[int], num_tokens: int = NUM_TOKENS) -> None:
        self._reply: Reply | None = None
        self._failure: AssertionError | None = None
        self._thread = threading.Thread(target=self._ask, args=(stack, prompt, num_tokens))
        self._thread.start()

    def _ask(self, stack: Stack, prompt: list[int], num_tokens: int) -> None:
        try:
            self._reply = ask(stack, prompt, num_tokens)
        except AssertionError as failure:
            self._failure = failure

    def wait(self, timeout_s: float) -> None:
        """Until it is answered, at most so long."""
        self._thread.join(timeout_s)

    @property
    def is_answered(self) -> bool:
        return not self._thread.is_alive()

    def reply(self) -> Reply:
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._reply is not None
        return self._reply


def start(stack: Stack, role: str, hold_s: int = HOLD_S, **environ: str) -> Worker:
    hold = ("--kv-lease-s", str(hold_s)) if role == "prefill" else ()
    worker = stack.start_worker(*COMMON, *hold, "--disaggregation-mode", role, wait=False, **environ)  # type: ignore[arg-type]
    stack.wait_endpoint(worker)
    return worker


def await_ready(stack: Stack) -> None:
    for worker in stack.workers:
        if worker.running:
            stack.wait_registered(worker)
    wait_for(lambda: stack.post("completions", prompt="ready?", max_tokens=1)[0] == 200, "an answer")


def transferred(worker: Worker, outcome: str) -> float:
    """Prompts whose KV a worker gave or got, or did not, so far."""
    return worker.metric("dlw_kv_transfers_total", outcome=outcome)


def held(prefill: Worker) -> float:
    return prefill.metric("dlw_kv_leased_prompts")


def settled(stack: Stack) -> None:
    """Nobody is in flight, nothing is held and every block is free again, on every worker that
    runs.
    """
    for worker in stack.workers:
        if worker.running:
            wait_for(lambda worker=worker: worker.metric("dlw_in_flight_requests") == 0, "no request in flight")
            wait_for(lambda worker=worker: held(worker) == 0, "no prompt held")
            wait_for(lambda worker=worker: worker.metric("dlw_kv_used_blocks") == 0, "no block in use")
            assert worker.running, worker.log


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    """One prefill and one decode worker that survive their tests."""
    with running_stack(tmp_path_factory.mktemp("faults"), tiny_model) as stack:
        stack.start_frontend()
        start(stack, "prefill")
        start(stack, "decode")
        await_ready(stack)
        settled(stack)  # holds of the answers so far would count among those of the tests
        yield stack


def test_a_hold_ends_in_time_and_decode_computes(pair: Stack, reference: Reference) -> None:
    prefill, decode = pair.workers
    prompt = prompt_of(1)
    timed_out, expired = transferred(prefill, "timed_out"), transferred(decode, "expired")
    with stopped(decode):
        asking = Asking(pair, prompt)
        wait_for(lambda: transferred(prefill, "timed_out") == timed_out + 1, "the time-out of a held prompt")
        assert held(prefill) == 0
    reply = asking.reply()
    assert reply.token_ids == reference.answer(prompt), reply.text
    assert transferred(decode, "expired") == expired + 1
    settled(pair)


def test_disconnects_in_every_phase(pair: Stack, reference: Reference) -> None:
    """200 clients leave at random times; all that they held comes back, and the others' answers
    are their own.
    """
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
    assert transferred(prefill, "leased") >= 20
    for worker in (prefill, decode):
        assert worker.metric("dlw_requests_total", outcome="unknown_error") == 0, worker.log


class Mortals:
    """A stack of which a test kills a worker; the next test has another one. The workers talk
    over TCP alone.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.frontend = stack.start_frontend()
        self._workers: dict[str, Worker] = {}

    def pair(self) -> tuple[Worker, Worker]:
        """A prefill and a decode worker that know each other unless one is new; nobody else is
        registered.
        """
        for role in ("prefill", "decode"):
            if role not in self._workers or not self._workers[role].running:
                self._bury(role)
                self._workers[role] = start(self.stack, role, LONG_HOLD_S, UCX_TLS="tcp")
        for worker in self._workers.values():
            self.stack.wait_registered(worker)
        wait_for(lambda: len(self.stack.registered()) == 2, "that the dead are not registered any more")
        return self._workers["prefill"], self._workers["decode"]

    def _bury(self, role: str) -> None:
        """What the others do when a lease of 10 s has run out."""
        component = {"prefill": "prefill", "decode": "backend"}[role]
        for entry in (self.stack.directory / "discovery").glob(f"v1/*/*%2F{component}%2F*"):
            entry.unlink(missing_ok=True)

    def connected_pair(self, reference: Reference) -> tuple[Worker, Worker]:
        pair = self.pair()
        prompt = prompt_of(random.randrange(10**6))
        try:
            reply = wait_for(lambda: answered(self.stack, prompt), "an answer")
        except AssertionError:
            raise AssertionError(f"{ask(self.stack, prompt).text}\n{self.stack.evidence()}") from None
        assert reply.token_ids == reference.answer(prompt)
        settled(self.stack)  # a hold that ended only now would count among those of the test
        return pair


@pytest.fixture(scope="module")
def mortals(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Mortals]:
    with running_stack(tmp_path_factory.mktemp("mortals"), tiny_model) as stack:
        yield Mortals(stack)


def answered(stack: Stack, prompt: list[int]) -> Reply | None:
    reply = ask(stack, prompt)
    return reply if reply.status == 200 else None


@contextlib.contextmanager
def read_under_way(mortals: Mortals, prefill: Worker, decode: Worker, prompt: list[int]) -> Iterator[Asking]:
    """A request whose KV decode has asked for, and prefill, which is stopped, has not sent."""
    with stopped(decode):
        asking = Asking(mortals.stack, prompt)
        wait_for(lambda: held(prefill) == 1, "a held prompt")
        wait_for(lambda: unread(decode, mortals.frontend) > 0, "the request at decode")
        with stopped(prefill):
            decode.signal(signal.SIGCONT)
            wait_for(lambda: unread(prefill, decode) > 0, "the read at prefill")
            yield asking


def transfers(decode: Worker) -> tuple[float, float]:
    """Prompts whose KV a decode worker received, and those whose KV it lost, so far."""
    return transferred(decode, "received"), transferred(decode, "lost")


def answered_without_the_read(
    mortals: Mortals, asking: Asking, decode: Worker, before: tuple[float, float], expected: list[int]
) -> None:
    """The right answer comes all the same, the read counts as lost, and nothing is left of it."""
    reply = asking.reply()
    assert reply.token_ids == expected, reply.text
    received, lost = before
    assert transfers(decode) == (received, lost + 1)
    settled(mortals.stack)


@pytest.mark.parametrize("connected", [True, False])
def test_prefill_dies_before_it_is_read(mortals: Mortals, reference: Reference, connected: bool) -> None:
    prefill, decode = mortals.connected_pair(reference) if connected else mortals.pair()
    before = transfers(decode)
    prompt = prompt_of(60 + connected)
    with stopped(decode):
        asking = Asking(mortals.stack, prompt)
        wait_for(lambda: held(prefill) == 1, "a held prompt")
        wait_for(lambda: unread(decode, mortals.frontend) > 0, "the request at decode")
        prefill.end()
    answered_without_the_read(mortals, asking, decode, before, reference.answer(prompt))


def test_prefill_dies_while_it_is_read(mortals: Mortals, reference: Reference) -> None:
    prefill, decode = mortals.connected_pair(reference)
    before = transfers(decode)
    prompt = prompt_of(62)
    with read_under_way(mortals, prefill, decode, prompt) as asking:
        prefill.end()
    answered_without_the_read(mortals, asking, decode, before, reference.answer(prompt))


def test_prefill_dies_after_it_was_read(mortals: Mortals, reference: Reference) -> None:
    prefill, decode = mortals.connected_pair(reference)
    for number in count(200):  # where this process gets little time, an answer may come before it looks
        received, prompt = transferred(decode, "received"), prompt_of(number)
        asking = Asking(mortals.stack, prompt, LONG_ANSWER)
        wait_for(lambda received=received: transferred(decode, "received") > received, "the KV")
        with stopped(decode):
            asking.wait(0.5)
            if not asking.is_answered:
                prefill.end()
                break
    reply = asking.reply()
    assert reply.token_ids == reference.answer(prompt, LONG_ANSWER), reply.text
    settled(mortals.stack)


@pytest.mark.parametrize("reading", [False, True])
def test_decode_dies_before_or_while_it_reads(mortals: Mortals, reference: Reference, reading: bool) -> None:
    prefill, decode = mortals.connected_pair(reference)
    before = transferred(prefill, "timed_out")
    prompt = prompt_of(80 + reading)
    if reading:
        with read_under_way(mortals, prefill, decode, prompt) as asking, stopped(decode):
            prefill.signal(signal.SIGCONT)
            wait_for(lambda: unread(decode, prefill) > 0, "KV on its way")
            decode.end()
    else:
        with stopped(decode):
            asking = Asking(mortals.stack, prompt)
            wait_for(lambda: held(prefill) == 1, "a held prompt")
            decode.end()
    assert asking.reply().status != 200
    wait_for(lambda: held(prefill) == 0, "the time-out")
    assert transferred(prefill, "timed_out") == before + 1, prefill.log
    settled(mortals.stack)
    mortals.connected_pair(reference)
    settled(mortals.stack)


@pytest.mark.parametrize("migrates", [False, True])
def test_no_request_fails_after_a_prefill_worker_is_killed(stack: Stack, reference: Reference, migrates: bool) -> None:
    """It stays listed for a lease of 10 s; a frontend that is set as docs/disaggregation.md says
    leaves it alone.
    """
    stack.environ["DYN_RUNTIME_INHIBITED_DURATION_SECS"] = "600"
    frontend = stack.start_frontend(*(["--migration-limit", "3"] if migrates else []))
    for role in ("prefill", "decode", "prefill"):
        start(stack, role)
    await_ready(stack)
    victim, _, survivor = stack.workers
    prompts = iter(prompt_of(number) for number in range(3000, 4000))
    for worker in (victim, survivor):  # the frontend knows both
        wait_for(
            lambda worker=worker: ask(stack, next(prompts), 1) and transferred(worker, "leased") > 0, "a prompt of each"
        )
    in_flight: list[tuple[list[int], Asking]] = []
    with stopped(victim):
        while unread(victim, frontend) == 0:
            in_flight.append((prompt := next(prompts), Asking(stack, prompt)))
            in_flight[-1][1].wait(0.5)  # until it is answered, or at the worker that does not
        victim.end_unnoticed()
    failed = [asking.reply() for prompt, asking in in_flight if not is_right(asking.reply(), reference, prompt)]
    assert bool(failed) is not migrates, [reply.text for reply in failed]
    assert len(stack.registered()) == 3  # nobody knows yet
    num_asked = 0
    while len(stack.registered()) > 2:
        asked = [next(prompts) for _ in range(4)]
        replies = [asking.reply() for asking in [Asking(stack, prompt) for prompt in asked]]
        for prompt, reply in zip(asked, replies, strict=True):
            assert is_right(reply, reference, prompt), (num_asked, reply.text)
        num_asked += len(asked)
    assert num_asked >= 4
    settled(stack)


def is_right(reply: Reply, reference: Reference, prompt: list[int]) -> bool:
    """Whether a request was answered, and if so with the tokens of a worker of its own."""
    if reply.status != 200:
        return False
    assert reply.token_ids == reference.answer(prompt)
    return True


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    """Two prefill and two decode workers, in turn."""
    with running_stack(tmp_path_factory.mktemp("four"), tiny_model) as stack:
        stack.start_frontend()
        for role in ("prefill", "decode", "prefill", "decode"):
            start(stack, role, LONG_HOLD_S)
        await_ready(stack)
        yield stack


def test_two_of_each_under_64_streams(four: Stack, reference: Reference) -> None:
    stack = four

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

    found = asyncio.run(all_of_them())
    assert found == reference.answers([prompt_of(2000 + number) for number in range(64)])
    settled(stack)
    counts = [transferred(worker, "received") for worker in stack.workers]
    assert counts[0] == counts[2] == 0
    assert counts[1] > 0
    assert counts[3] > 0
    assert counts[1] + counts[3] >= 64


def test_a_prefill_worker_that_leaves_waits_for_its_readers(four: Stack, reference: Reference) -> None:
    prefill, decode = four.workers[::2], four.workers[1::2]  # with the last prefill worker the model would leave
    prompt = prompt_of(9)
    with stopped(decode[0]), stopped(decode[1]):
        asking = Asking(four, prompt)
        leaving = wait_for(lambda: next((one for one in prefill if held(one) == 1), None), "a held prompt")
        leaving.signal(signal.SIGTERM)
        wait_for(lambda: len(four.registered()) == 3, "that it is not registered any more")
    reply = asking.reply()
    assert reply.token_ids == reference.answer(prompt), reply.text
    assert leaving.wait() == 0
    for outcome in ("lost", "expired"):
        assert sum(transferred(worker, outcome) for worker in decode) == 0
