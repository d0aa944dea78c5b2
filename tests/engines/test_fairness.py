"""First come, first served, in every role: whoever waits is not passed by those who came later,
whatever they bring.

The connector, the scheduler and the cache are real, and the model checks every KV that it reads;
only the wire between two workers is a double, so that what arrives when is part of the example.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest
from connector_doubles import BLOCK, CONTEXT, TensorRecallModel
from effort import examples
from engine_doubles import EveryToken
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_doubles import WIDTH, answer, mix, recall_request

from worker.engines.embedded import Request
from worker.engines.embedded.kv_cache.cache import KvCache
from worker.engines.embedded.scheduler import Scheduler
from worker.engines.embedded.step import Stepper
from worker.engines.embedded.transfer.connector import KvConnector
from worker.engines.embedded.transfer.handle import KvHandle
from worker.engines.embedded.transfer.layout import KvLayout

ROLES = ("aggregated", "prefill", "decode")
MAX_NUM_SEQS = 4
PAGE = 8
LONGEST = 60
"""Tokens of a prompt at most, and of an answer."""


class Wire:
    """In place of `KvTransport`. The token of a handle is the number of its prompt in `prompts`."""

    is_releasing = False

    def __init__(self, model: TensorRecallModel, prompts: Sequence[Sequence[int]], chance: random.Random) -> None:
        self.tensors = model.kv_store.tensors
        self.layout = KvLayout("recall", "int64", 1, 1, 1, BLOCK, model.size)
        self.chance = chance
        self.prompts = prompts
        self._leased: deque[int] = deque()
        self._next_token = 0

    def grant(self, pages: Sequence[int]) -> KvHandle:
        self._next_token += 1
        self._leased.append(self._next_token)
        return self.handle(self._next_token)

    def handle(self, token: int) -> KvHandle:
        return KvHandle("prefill", b"", "DRAM", 0, (0, 0), self.layout, (), 0, token)

    def revoke(self, handle: KvHandle) -> None:
        """Nobody reads from here."""

    def poll(self) -> list[int]:
        """Readers come for what is leased in any order, some of them late."""
        if not self._leased or self.chance.random() < 0.7:
            return []
        self._leased.rotate(self.chance.randrange(len(self._leased)))
        return [self._leased.popleft()]

    def read(self, handle: KvHandle, pages: Sequence[int], start: int, stop: int) -> Reading:
        return Reading(self, handle.token, pages, start, stop)

    def release(self, handle: KvHandle) -> None:
        """Nobody has leased anything here."""


class Reading:
    """In place of `KvRead`: after a few looks the KV is there, or lost."""

    num_bytes = 0
    seconds = 0.0

    def __init__(self, wire: Wire, prompt: int, pages: Sequence[int], start: int, stop: int) -> None:
        self._wire, self._pages, self._span = wire, pages, (start, stop)
        self._prompt = wire.prompts[prompt]
        self._looks = wire.chance.randrange(4)

    def poll(self, budget_s: float) -> str:
        self._looks -= 1
        if self._looks >= 0:
            return "busy"
        if self._wire.chance.random() < 0.05:
            return "lost"
        kv, size = 1, self._wire.layout.page_size
        for position, token in enumerate(self._prompt[: self._span[1]]):
            kv = mix(kv, token)
            if position >= self._span[0]:
                for tensor in self._wire.tensors:
                    tensor[self._pages[position // size], 0, position % size, 0] = kv
        return "done"

    def release(self) -> bool:
        return True


class Station:
    """One worker under a load, and who was passed by whom."""

    def __init__(self, role: str, seed: int, num_pages: int, local: float) -> None:
        self.role = role
        self.chance = random.Random(seed)
        self.local = local
        self.model = TensorRecallModel(CONTEXT)
        self.model.allocate_kv(num_pages, PAGE)
        cache = KvCache(num_pages, PAGE, BLOCK, is_dense=True)
        self.stepper = Stepper(self.model, Scheduler(cache, MAX_NUM_SEQS, max_num_batched_tokens=48, mixed=8))  # type: ignore[arg-type]
        self.prompts: list[list[int]] = []
        self.requests: dict[str, Request] = {}  # by order of arrival
        self.served: set[str] = set()  # who has had pages
        self.passed: Counter[str] = Counter()  # how many younger ones got pages while it had none
        self.said: dict[str, list[int]] = {}
        self.num_finished = 0
        if role != "aggregated":
            self.wire = Wire(self.model, self.prompts, self.chance)
            lease_s = 60.0 if role == "prefill" else None
            transport: Any = self.wire
            self.stepper.connector = KvConnector(
                transport, self.model.kv_store, self.stepper.scheduler.transfers, lease_s
            )

    def arrive(self) -> None:
        """A request; on a decode worker some come without a KV transfer."""
        prompt = self.chance.choices(range(6, WIDTH), k=self.chance.randrange(1, LONGEST))
        self.prompts.append(prompt)
        name = str(len(self.prompts))
        count = 1 if self.role == "prefill" else self.chance.randrange(1, LONGEST)
        request = self.requests[name] = recall_request(self.model, name, prompt, count)
        self.said[name] = []
        if self.role == "prefill":
            request.keeps_kv, request.end_ids = True, frozenset()
        if self.role == "decode" and self.chance.random() >= self.local:
            self.stepper.add(request, self.wire.handle(len(self.prompts) - 1))
        else:
            self.stepper.add(request)

    def step(self) -> None:
        outputs = self.stepper.step()
        self.stepper.scheduler.check_integrity()
        for output in outputs:
            token = output.token_id if output.stop_reason is None else output.stop_reason
            if token is not None:
                self.said[output.request_id].append(token)
            if output.finish_reason is not None:
                self.finish(self.requests.pop(output.request_id))
        self.watch({output.request_id for output in outputs})

    def finish(self, request: Request) -> None:
        self.num_finished += 1
        if self.role != "prefill":
            prompt = request.tokens[: request.prompt_length]
            limit = request.limit - request.prompt_length
            assert self.said.pop(request.id) == answer(prompt, limit)

    def watch(self, answered: set[str]) -> None:
        has_kv = {name for name, request in self.requests.items() if request.pages} | answered
        new = sorted(map(int, has_kv - self.served))
        self.served |= has_kv
        for name in self.requests.keys() - has_kv:
            self.passed[name] += sum(number > int(name) for number in new)

    def run(self, num_steps: int, per_step: float) -> None:
        """A load of `per_step` requests per step, then everybody gets an answer."""
        for _ in range(num_steps):
            if self.chance.random() < per_step:
                self.arrive()
            self.step()
        for _ in range(60 * len(self.prompts) + 1000):
            if not self.requests:
                return
            self.step()
        raise AssertionError(f"{len(self.requests)} of {len(self.prompts)} starve: {self.stepper.scheduler!r}")


@pytest.mark.parametrize("role", ROLES)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(2 * LONGEST // PAGE, 5 * LONGEST // PAGE),
    local=st.sampled_from([0.0, 0.1, 0.5]),
    per_step=st.sampled_from([0.03, 0.1, 0.3]),
)
@settings(max_examples=examples(8), deadline=None)
def test_nobody_is_passed_by_more_than_two_batches(
    role: str, seed: int, num_pages: int, local: float, per_step: float
) -> None:
    """One that is running, and on a decode worker one whose KV was on its way when it came."""
    station = Station(role, seed, num_pages, local)
    station.run(250, per_step)
    assert station.num_finished == len(station.prompts)
    batches = 2 if role == "decode" else 1
    assert max(station.passed.values(), default=0) <= batches * MAX_NUM_SEQS


def test_the_preempted_do_not_starve_behind_kv_transfers() -> None:
    """A steady load, somewhat more than a decode worker with little memory can serve."""
    station = Station("decode", seed=5, num_pages=2 * LONGEST // PAGE, local=0.0)
    station.run(1500, per_step=0.15)
    assert station.stepper.scheduler.queues.num_preemptions > 20
    assert max(station.passed.values()) <= MAX_NUM_SEQS


@pytest.mark.parametrize("num_whole", [0, 2])
def test_the_page_in_which_a_read_ends_is_prepared(num_whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the prompt of a migrated answer whose chain wants its logits: that page may hold what
    another request left there, and the last one of the answer was prepared in its place.
    """
    station, end = Station("decode", seed=0, num_pages=20, local=0.0), num_whole * PAGE + 5
    station.prompts.append(list(range(6, 6 + 5 * PAGE)))
    one = recall_request(station.model, "one", station.prompts[0], 8)
    one.tap = EveryToken()
    monkeypatch.setattr(EveryToken, "first_wanted", end)
    monkeypatch.setattr(Reading, "poll", lambda *_: "busy")
    for tensor in station.model.kv_store.tensors:
        tensor.fill_(99)
    station.stepper.add(one, station.wire.handle(0))
    station.stepper.step()
    for tensor in station.model.kv_store.tensors:
        assert not tensor[one.pages[end // PAGE], :, end % PAGE :].any()
