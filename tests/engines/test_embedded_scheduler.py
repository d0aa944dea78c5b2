"""Scheduler and KV ranges under random arrivals, aborts and ends; nothing here needs a model."""

from __future__ import annotations

import random

import pytest
from engine_doubles import ScriptedModel, config, request, stepper
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.engines.embedded.kv_cache import KvCache
from worker.engines.embedded.plan import Plan, Request, Samples
from worker.engines.embedded.scheduler import Scheduler
from worker.sampling import SamplingParams

CONTEXT = 64
MODEL = ScriptedModel()


class Requests(RuleBasedStateMachine):
    """Arrivals, aborts and steps in any order, on a store that holds less than all slots could use."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCache(num_segments=24, segment_size=4)
        self.scheduler = Scheduler(self.cache, max_num_seqs=4, max_num_batched_tokens=10)
        self.live: dict[str, Request] = {}
        self.arrived: list[str] = []
        self.started: list[str] = []
        self.computed: dict[str, int] = {}

    @rule(prompt=st.integers(1, 40), max_tokens=st.integers(1, 30))
    def arrive(self, prompt: int, max_tokens: int) -> None:
        name = str(len(self.computed))
        one = request(MODEL, name, [3] * prompt, SamplingParams(max_tokens=max_tokens))
        one.limit = min(one.limit, CONTEXT)
        self.scheduler.add(one)
        self.live[name] = one
        self.arrived.append(name)
        self.computed[name] = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        output = self.scheduler.abort(name)
        assert output is not None
        assert (output.request_id, output.finish_reason) == (name, "cancelled")
        assert self.scheduler.abort(name) is None
        self.live.pop(name)
        if name not in self.started:
            self.arrived.remove(name)

    @precondition(lambda self: not self.scheduler.is_idle)
    @rule(seed=st.integers(0, 2**32))
    def step(self, seed: int) -> None:
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        source = random.Random(seed)
        tokens = [2 if source.random() < 0.2 else 5 for _ in plan.sampled]
        errors = {row: "spoilt" for row in range(len(tokens)) if source.random() < 0.05}
        outputs = self.scheduler.commit(plan, Samples(tokens, errors))
        assert [output.request_id for output in outputs] == [one.id for one in plan.sampled]
        for row, output in enumerate(outputs):
            expected = self.expected_end(self.live[output.request_id], tokens[row], row in errors)
            assert output.finish_reason == expected
            if expected is not None:
                del self.live[output.request_id]

    def expected_end(self, one: Request, token: int, failed: bool) -> str | None:
        if failed:
            return "error"
        if token == 2:
            return "stop"
        return "length" if len(one.tokens) == one.limit else None

    def check_plan(self, plan: Plan) -> None:
        assert 0 < plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert plan.sampled == plan.decode + tuple(chunk.request for chunk in plan.chunks if chunk.is_last)
        assert len(set(map(id, plan.sampled))) == len(plan.sampled)
        for chunk in plan.chunks:
            assert chunk.start == self.computed[chunk.request.id]
            self.computed[chunk.request.id] = chunk.stop
            if chunk.request.id not in self.started:
                self.started.append(chunk.request.id)
        assert self.started == self.arrived[: len(self.started)], "not first come, first served"
        for one in plan.decode:
            assert self.computed[one.id] == one.prompt_length

    @invariant()
    def whole(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.is_idle == (not self.live)
        if not self.live:
            assert self.cache.num_free == self.cache.num_segments

    def teardown(self) -> None:
        for _ in range(2000):
            if self.scheduler.is_idle:
                return
            self.step(self.scheduler.cache.num_free)
        raise AssertionError("requests starve")


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_leak_is_noticed() -> None:
    cache = KvCache(num_segments=4, segment_size=4)
    assert cache.allocate(5) == [0, 1]
    with pytest.raises(AssertionError, match="live requests own"):
        cache.check_integrity([])
    cache._held.clear()
    with pytest.raises(AssertionError, match="leaked"):
        cache.check_integrity([])


def test_decode_rows_come_before_prompts_and_share_the_budget() -> None:
    driver = stepper(MODEL, max_num_seqs=3, max_num_batched_tokens=6)
    driver.add(request(MODEL, "short", [3] * 2, SamplingParams(max_tokens=50, ignore_eos=True)))
    driver.add(request(MODEL, "long", [3] * 13, SamplingParams(max_tokens=50, ignore_eos=True)))
    MODEL.plans.clear()
    for _ in range(4):
        driver.step()
    work = [
        ([one.id for one in plan.decode], [(chunk.request.id, chunk.start, chunk.stop) for chunk in plan.chunks])
        for plan in MODEL.plans
    ]
    assert work == [
        ([], [("short", 0, 2), ("long", 0, 4)]),
        (["short"], [("long", 4, 9)]),
        (["short"], [("long", 9, 13)]),
        (["short", "long"], []),
    ]


def test_the_head_of_the_queue_waits_for_memory_and_nobody_overtakes_it() -> None:
    settings_ = config(max_num_seqs=4)
    cache = KvCache(num_segments=4, segment_size=16)
    scheduler = Scheduler(cache, settings_.max_num_seqs, settings_.max_num_batched_tokens)
    for name, size in (("first", 40), ("large", 60), ("small", 8)):
        scheduler.add(request(MODEL, name, [3] * 4, SamplingParams(max_tokens=size - 4, ignore_eos=True)))
    plan = scheduler.schedule()
    assert [one.id for one in plan.sampled] == ["first"]
    assert [one.id for one in scheduler.waiting] == ["large", "small"]
    scheduler.abort("first")
    assert [one.id for one in scheduler.schedule().sampled] == ["large"]
