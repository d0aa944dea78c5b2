"""Scheduler and cache under random arrivals, aborts, ends and preemptions, with every read of KV
checked.
"""

from __future__ import annotations

import random

import pytest
from effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_doubles import END, RecallModel, answer, recall_request

from worker.engines.embedded.blocks import ROOT, hash_block
from worker.engines.embedded.kv_cache import BlocksStored
from worker.engines.embedded.kv_cache.cache import KvCache
from worker.engines.embedded.mixed_steps import MixedSteps
from worker.engines.embedded.plan import Output, Plan, Request
from worker.engines.embedded.scheduler import Scheduler

CONTEXT = 64
BLOCK = 4


class Measuring(MixedSteps):
    """Asks now and then for a step without prompts, to learn what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self._source = random.Random(0)

    def tokens(self, rows: int, share: float) -> int:
        return self._source.choice([0, 2, 8])


class House:
    """A scheduler, a cache, the model that checks them, and a router's view of what is cached."""

    def __init__(
        self,
        num_pages: int = 12,
        page_size: int = 8,
        budget: int = 24,
        mixed: MixedSteps | int | None = 3,
        routes: bool = True,
        clients: int = 1,
    ) -> None:
        self.routes = routes
        self.clients = clients
        self.model = RecallModel(CONTEXT)
        self.model.allocate_kv(num_pages, page_size)
        self.cache = KvCache(num_pages, page_size, BLOCK)
        if routes:
            self.cache.record_events()
        self.scheduler = Scheduler(self.cache, max_num_seqs=5, max_num_batched_tokens=budget, mixed=mixed)
        self.spoil = random.Random(budget)
        self.live: dict[str, Request] = {}
        self.known: set[int] = set()
        self.computed: dict[str, int] = {}
        self.num_arrived = 0
        self.num_aborted = 0
        self.num_sent_back = 0
        self.num_finished = 0

    @property
    def running(self) -> list[Request]:
        return [*self.scheduler.queues.decoding, *self.scheduler.queues.prefilling]

    def arrive(self, family: int, shared: int, own: int, max_tokens: int, copies: int = 1) -> None:
        """Requests whose first tokens are those of their family, and the rest like no other's."""
        source = random.Random(self.num_arrived)
        prompt = [3 + (family + position * position) % 80 for position in range(shared)]
        prompt += [source.randrange(3, 90) for _ in range(own)]
        for _ in range(copies):
            name = str(self.num_arrived)
            self.num_arrived += 1
            self.live[name] = recall_request(self.model, name, prompt, max_tokens)
            if self.clients > 1:
                self.live[name].client = source.choice("abcdefgh"[: self.clients])
            self.scheduler.add(self.live[name])

    def abort(self, name: str) -> None:
        output = self.scheduler.abort(name)
        assert output is not None
        assert (output.request_id, output.finish_reason) == (name, "cancelled")
        assert self.scheduler.abort(name) is None
        self.live.pop(name)
        self.computed.pop(name, None)
        self.num_aborted += 1

    def preempt(self, one: Request) -> None:
        self.computed.pop(one.id)
        self.num_sent_back += 1
        self.scheduler.queues.preempt(one)
        assert (one.pages, one.num_computed) == ([], 0)

    def step(self) -> None:
        before = self.running
        known = set(self.known)
        plan = self.scheduler.schedule(prompts_first=self.spoil.random() < 0.3)
        self.listen()
        self.check_victims(before)
        self.check_admissions(before, known)
        self.check_plan(plan)
        samples = self.model.choose(plan)
        samples.errors = {row: "spoilt" for row in range(len(plan.sampled)) if self.spoil.random() < 0.005}
        self.scheduler.settle(plan)
        outputs = self.scheduler.commit(plan, samples)
        assert [output.request_id for output in outputs] == [one.id for one in plan.sampled]
        for row, output in enumerate(outputs):
            self.check_output(output, row in samples.errors)

    def check_output(self, output: Output, spoilt: bool) -> None:
        one = self.live[output.request_id]
        prompt, generated = one.tokens[: one.prompt_length], one.tokens[one.prompt_length :]
        assert generated == answer(prompt, len(generated))
        if spoilt:
            assert (output.finish_reason, output.error, output.token_id) == ("error", "spoilt", None)
        elif generated[-1] == END:
            assert (output.finish_reason, output.stop_reason, output.token_id) == ("stop", END, None)
        else:
            assert output.finish_reason == ("length" if len(one.tokens) == one.limit else None)
            assert output.token_id == generated[-1]
        if output.finish_reason is not None:
            del self.live[one.id]
            self.num_finished += 1

    def check_victims(self, before: list[Request]) -> None:
        """Whoever was preempted arrived after all who run on; with several clients also where one
        client has no slot.
        """
        stay = [one.arrival for one in before if one.pages]
        gone = [one.arrival for one in before if not one.pages]
        assert not before or stay, "everybody was preempted"
        assert not gone or self.clients > 1 or min(gone) > max(stay)
        for one in before:
            if not one.pages:
                self.computed.pop(one.id)

    def check_admissions(self, before: list[Request], known: set[int]) -> None:
        """Who is admitted starts with all that is known, and passes only those who wait for a
        prompt like theirs.

        What was known before the step may have been evicted for those who were admitted first.
        """
        admitted = [one for one in self.running if all(one is not other for other in before)]
        assert len({one.id for one in admitted}) == len(admitted)
        for one in admitted:
            least = self.expected_match(one, known & self.known)
            assert not self.routes or least <= one.num_computed <= self.expected_match(one, known)
            assert one.num_cached_tokens is not None
            assert 0 <= one.num_cached_tokens < one.prompt_length
            self.computed[one.id] = one.num_computed
            for passed in self.scheduler.queues.waiting if self.routes and self.clients == 1 else ():
                if passed.arrival < one.arrival:
                    assert any(shared_tokens(passed, other) > len(passed.tokens) // 2 for other in self.running)

    def expected_match(self, one: Request, known: set[int]) -> int:
        """From the router's view: the known blocks that the tokens begin with, one token left
        over.
        """
        parent, matched = ROOT, 0
        while matched + BLOCK < len(one.tokens):
            parent = hash_block(parent, one.tokens[matched : matched + BLOCK])
            if parent not in known:
                break
            matched += BLOCK
        return matched

    def check_plan(self, plan: Plan) -> None:
        assert 0 < plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert plan.sampled == plan.decode + tuple(chunk.request for chunk in plan.chunks if chunk.is_last)
        assert len(set(map(id, plan.sampled))) == len(plan.sampled)
        assert len({id(chunk.request) for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            assert chunk.start == self.computed[chunk.request.id]
            assert chunk.start < chunk.stop
            self.computed[chunk.request.id] = chunk.stop
        for one in plan.decode:
            assert one.num_computed == len(one.tokens) - 1 == self.computed[one.id]
            self.computed[one.id] += 1

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.cache.check_blocks()
        assert self.scheduler.is_idle == (not self.live)
        self.listen()
        if not self.live:
            assert self.cache.num_available == self.cache.num_pages

    def listen(self) -> None:
        """Be the router."""
        for event in self.cache.drain_events():
            hashes = set(event.block_hashes)
            if isinstance(event, BlocksStored):
                assert len(event.token_ids) == BLOCK * len(event.block_hashes)
                assert event.parent_hash == ROOT or event.parent_hash in self.known
                assert not hashes & self.known
                self.known |= hashes
            else:
                assert hashes <= self.known
                self.known -= hashes

    def finish(self) -> None:
        """Everybody gets an answer."""
        for _ in range(20_000):
            if self.scheduler.is_idle:
                return
            self.step()
            self.check()
        raise AssertionError("requests starve")


def shared_tokens(one: Request, other: Request) -> int:
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next((position for position, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(other.tokens)))


class Requests(RuleBasedStateMachine):
    """Hypothesis chooses what happens, on a store that holds less than all slots could use."""

    def __init__(self) -> None:
        super().__init__()
        self.house = House()

    @rule(
        family=st.integers(0, 3),
        shared=st.integers(0, 40),
        own=st.integers(0, 12),
        max_tokens=st.integers(1, 40),
        copies=st.integers(1, 3),
    )
    def arrive(self, family: int, shared: int, own: int, max_tokens: int, copies: int) -> None:
        self.house.arrive(family, shared, max(own, 1 - shared), max_tokens, copies)

    @precondition(lambda self: self.house.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.house.abort(data.draw(st.sampled_from(sorted(self.house.live))))

    @precondition(lambda self: self.house.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.house.preempt(data.draw(st.sampled_from(self.house.running)))

    @rule()
    def forget(self) -> None:
        self.house.cache.clear()

    @precondition(lambda self: self.house.live)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps if not self.house.scheduler.is_idle else 0):
            if not self.house.scheduler.is_idle:
                self.house.step()
                self.house.check()

    @invariant()
    def whole(self) -> None:
        self.house.check()

    def teardown(self) -> None:
        self.house.finish()


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=examples(25), stateful_step_count=30, deadline=None)


class SharedRequests(Requests):
    """The same of several clients."""

    def __init__(self) -> None:
        super().__init__()
        self.house = House(clients=4)


TestSharedRequests = SharedRequests.TestCase
TestSharedRequests.settings = TestRequests.settings


@pytest.mark.campaign
class TestRequestsAtLength(Requests.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=examples(200), stateful_step_count=50, deadline=None)


WEIGHTS = {"arrive": 20.0, "abort": 2.0, "preempt": 3.0, "forget": 0.1, "step": 75.0}


def operate(house: House, source: random.Random, operations: int) -> None:
    """Random operations, all checked."""
    for kind in source.choices(list(WEIGHTS), list(WEIGHTS.values()), k=operations):
        if kind == "arrive" and len(house.live) < 12:
            shared, own = source.choice([0, 8, 17, 40]), source.randrange(1, 12)
            house.arrive(source.randrange(4), shared, own, source.randrange(1, 50), source.choice([1, 1, 3]))
        elif kind == "abort" and house.live:
            house.abort(source.choice(sorted(house.live)))
        elif kind == "preempt" and house.running:
            house.preempt(source.choice(house.running))
        elif kind == "forget":
            house.cache.clear()
        elif house.live:
            house.step()
        house.check()
    house.finish()


@pytest.mark.parametrize("seed", [6, 7])
def test_operations_among_steps_without_prompts(seed: int) -> None:
    """A step in which all that decode make room for another client's prompt has tokens."""
    operate(House(clients=4, mixed=Measuring()), random.Random(seed), 450)


@pytest.mark.parametrize(("clients", "least"), [(1, 500), (4, 250)])
def test_ten_thousand_operations(clients: int, least: int) -> None:
    """Several clients have shorter steps."""
    house = House(clients=clients)
    operate(house, random.Random(1), 10_000)
    assert house.num_finished > least
    assert house.num_aborted > 100
    assert house.num_sent_back > 100
    assert house.scheduler.queues.num_preemptions - house.num_sent_back > 100


@pytest.mark.campaign
@pytest.mark.parametrize("pages", [8, 9, 12, 20, 40])
@pytest.mark.parametrize(("budget", "mixed"), [(5, None), (24, 3), (100, None), (100, 20)])
def test_ten_thousand_operations_in_stores_of_all_sizes(pages: int, budget: int, mixed: int | None) -> None:
    house = House(num_pages=pages, budget=budget, mixed=mixed)
    operate(house, random.Random(pages * budget), 10_000)
    assert house.num_finished > 500
