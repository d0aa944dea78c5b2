"""Turns between clients: whoever sends much waits for itself, and not others for it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines.embedded.kv_cache.cache import KvCache
from worker.engines.embedded.mixed_steps import MixedSteps
from worker.engines.embedded.plan import Plan, Request, Samples
from worker.engines.embedded.prompt_chunks import FAIR_CHUNK
from worker.engines.embedded.scheduler import Scheduler
from worker.engines.embedded.turns import MAX_KNOWN, SHARED_S, Turns
from worker.sampling import SamplingParams

BLOCK = 16


def request(name: str, client: str | None, prompt: int = 1, answer: int = 1) -> Request:
    source = random.Random(name)
    tokens = [source.randrange(100_000) for _ in range(prompt)]
    one = Request(name, 0, SamplingParams(), tokens, prompt, prompt + answer, frozenset(), 0)
    one.client = client
    return one


@dataclass(slots=True)
class Engine:
    """A scheduler without a model; a step takes as long as its tokens say."""

    slots: int
    pages: int = 10_000
    mixed: MixedSteps | int | None = 64
    now_s: float = 0.0
    scheduler: Scheduler = field(init=False)
    plans: list[Plan] = field(default_factory=list)
    first_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cache = KvCache(self.pages, BLOCK, BLOCK)
        self.scheduler = Scheduler(cache, self.slots, 1024, self.mixed, Turns(lambda: self.now_s))

    def step(self) -> list[str]:
        """Ids of the requests that ended."""
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        seconds = 0.012 + 0.0006 * plan.num_tokens  # a model of 125 million parameters on two cores
        self.now_s += seconds
        if plan.decode:
            self.scheduler.learn_cost(plan, seconds)
        self.scheduler.settle(plan)
        outputs = self.scheduler.commit(plan, Samples([7] * len(plan.sampled)))
        self.scheduler.check_integrity()
        for output in outputs:
            self.first_s.setdefault(output.request_id, self.now_s)
        return [output.request_id for output in outputs if output.finish_reason is not None]

    @property
    def running(self) -> list[Request]:
        return [*self.scheduler.queues.decoding, *self.scheduler.queues.prefilling]


def order_of(engine: Engine) -> list[str]:
    """In which order requests get their first tokens, one slot for all."""
    while not engine.scheduler.is_idle:
        engine.step()
    return sorted(engine.first_s, key=lambda name: engine.first_s[name])


def test_a_step_that_makes_room_computes_the_prompt() -> None:
    """Rows that were to be decoded alone, to learn what they take, gave their place to another
    client's prompt: the step was empty, and what its prefix hit had to copy was never copied.
    """
    engine = Engine(slots=2, mixed=MixedSteps())
    engine.scheduler.add(request("a0", "a", 3000))
    engine.scheduler.add(request("a1", "a", 1, 100))
    engine.step()
    assert [one.id for one in engine.scheduler.queues.decoding] == ["a1"]
    engine.scheduler.add(request("b", "b", BLOCK, 100))
    engine.step()
    assert {one.id for one in engine.running} == {"a0", "b"}
    assert engine.plans[-1].num_tokens > 0


def test_clients_take_turns() -> None:
    engine = Engine(slots=1)
    for name, client in (("a0", "a"), ("a1", "a"), ("a2", "a"), ("b0", "b"), ("a3", "a"), ("b1", "b"), ("c0", None)):
        engine.scheduler.add(request(name, client))
    assert order_of(engine) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


@pytest.mark.parametrize("client", [None, "a"])
def test_one_client_is_served_in_order_of_arrival(client: str | None) -> None:
    engine = Engine(slots=1)
    names = [f"a{number}" for number in range(20)]
    for name in names:
        engine.scheduler.add(request(name, client))
    assert order_of(engine) == names


def test_one_that_comes_back_has_no_turn_too_many() -> None:
    """Nor does a client pay for requests that it has given up."""
    engine = Engine(slots=1)
    for number in range(50):
        engine.scheduler.add(request(f"a{number}", "a"))
    for number in range(1, 40):
        engine.scheduler.abort(f"a{number}")
    for number in range(3):
        engine.scheduler.add(request(f"b{number}", "b"))
    assert order_of(engine)[:6] == ["a0", "b0", "a40", "b1", "a41", "b2"]


def test_a_client_without_a_slot_gets_one_of_whoever_has_most() -> None:
    engine = Engine(slots=4)
    for number in range(3):
        engine.scheduler.add(request(f"a{number}", "a", 40, 100))
    engine.scheduler.add(request("b0", "b", 40, 100))
    engine.step()
    engine.scheduler.add(request("c0", "c", 40, 2))
    engine.step()
    assert sorted(one.id for one in engine.running) == ["a0", "a1", "b0", "c0"]
    while "c0" in {one.id for one in engine.running}:
        engine.step()
    engine.step()
    assert sorted(one.id for one in engine.running) == ["a0", "a1", "a2", "b0"]
    assert engine.scheduler.queues.num_preemptions == 1
    while not engine.scheduler.is_idle:
        engine.step()
    assert len(engine.first_s) == 5


def test_nobody_loses_an_only_slot() -> None:
    engine = Engine(slots=2)
    for name in "ab":
        engine.scheduler.add(request(name, name, 4, 5))
    engine.step()
    engine.scheduler.add(request("c", "c"))
    engine.step()
    assert sorted(one.id for one in engine.running) == ["a", "b"]
    assert engine.scheduler.queues.num_preemptions == 0


def test_pages_are_made_room_for_too() -> None:
    engine = Engine(slots=8, pages=12)
    for number in range(3):
        engine.scheduler.add(request(f"a{number}", "a", 3 * BLOCK + 1, BLOCK - 2))
    engine.step()
    engine.scheduler.add(request("b", "b", 3 * BLOCK + 1, 1))
    engine.step()
    assert "b" in engine.first_s
    while not engine.scheduler.is_idle:
        engine.step()
    assert len(engine.first_s) == 4


def test_a_prompt_does_not_wait_for_the_end_of_others() -> None:
    engine = Engine(slots=64, mixed=None)
    for number in range(20):
        engine.scheduler.add(request(f"a{number}", "a", 2000, 2))
    engine.step()
    engine.scheduler.add(request("b", "b", FAIR_CHUNK, 2))
    engine.step()
    assert "b" in engine.first_s


def test_where_pages_are_few_a_small_request_passes_a_large_one() -> None:
    """It passes as many times as requests may run; then the large one begins."""
    engine = Engine(slots=3, pages=8)
    engine.scheduler.add(request("a0", "a", 4 * BLOCK, 3 * BLOCK - 1))
    engine.step()
    engine.scheduler.add(request("a1", "a", 4 * BLOCK, 1))
    for number in range(5):
        engine.scheduler.add(request(f"b{number}", "b", 4, 1))
        engine.step()
    assert [name for name in engine.first_s if name != "a0"] == ["b0", "b1", "b2", "b3"]  # the first in its turn
    while not engine.scheduler.is_idle:
        engine.step()
    assert set(list(engine.first_s)[-2:]) == {"a1", "b4"}


@pytest.mark.parametrize("seed", range(6))
def test_preemptions_give_nobody_more_who_pass_it(seed: int) -> None:
    """Under a steady load of clients whose requests grow until some are preempted: whoever waits
    for pages is passed by as many as may run, and not by as many again for each that comes back.
    """
    source, slots = random.Random(seed), 8
    engine, large = Engine(slots=slots, pages=24), request("large", "large", 15 * BLOCK, 1)
    number, passed = 0, set[str]()
    for step in range(3000):
        if step == 100:
            engine.scheduler.add(large)
        here = {one.client for one in engine.scheduler.queues.live}
        for client in sorted(set("bcdef") - here):
            number += 1
            answer = source.randint(2 * BLOCK, 5 * BLOCK)
            engine.scheduler.add(request(f"{client}{number}", client, source.randint(1, 4) * BLOCK, answer))
        engine.step()
        if large.id in engine.first_s or large in engine.running:
            break
        passed |= {one.id for one in engine.running if one.arrival > large.arrival >= 0}
    assert large.id in engine.first_s or large in engine.running
    assert engine.scheduler.queues.num_preemptions > 0
    assert len(passed) <= slots


def test_clients_lead_the_prompts_in_turn() -> None:
    turns = Turns(lambda: 0.0)
    prompts = [request("a0", "a"), request("a1", "a"), request("b0", "b")]
    orders = []
    for _ in range(3):
        ordered = turns.prompts(prompts)
        turns.computed(ordered[0])
        orders.append([one.id for one in ordered])
    assert orders == [["a0", "b0", "a1"], ["b0", "a0", "a1"], ["a0", "b0", "a1"]]


def test_steps_are_short_while_several_clients_come() -> None:
    def tokens(engine: Engine) -> int:
        engine.step()
        return engine.plans[-1].num_tokens

    engine = Engine(slots=64)
    engine.scheduler.add(request("a0", "a", 10_000))
    assert tokens(engine) == 1024
    engine.scheduler.add(request("b0", "b", 10))
    assert tokens(engine) == 128
    engine.now_s += SHARED_S
    assert tokens(engine) == 1024


def test_a_probe_is_no_second_client() -> None:
    """It comes where an engine is idle for a while: steps of the one client there is would be short
    from then on.
    """
    engine = Engine(slots=64)
    for name, client in (("a0", "a"), ("probe", None), ("a1", "a")):
        engine.scheduler.add(request(name, client))
        while not engine.scheduler.is_idle:
            engine.step()
    engine.scheduler.add(request("a2", "a", 10_000))
    engine.step()
    assert engine.plans[-1].num_tokens == 1024


def test_labels_that_nobody_uses_any_more_are_dropped() -> None:
    turns = Turns(lambda: 0.0)
    for number in range(10 * MAX_KNOWN):
        one = request("x", f"client {number}")
        turns.arrived(one)
        turns.admit(one)
    assert len(turns._next) == MAX_KNOWN


ARRIVALS = st.lists(
    st.tuples(st.sampled_from("aaaaabcd"), st.integers(1, 60), st.integers(1, 8), st.integers(0, 3)),
    min_size=1,
    max_size=60,
)


@given(ARRIVALS, st.integers(1, 5), st.sampled_from([12, 40, 1000]))
@settings(max_examples=examples(200), deadline=None)
def test_a_client_waits_for_a_bounded_number_of_others(
    arrivals: list[tuple[str, int, int, int]], slots: int, pages: int
) -> None:
    """Bounded by the number of clients and slots, whatever the others send."""
    engine = Engine(slots=slots, pages=pages)
    clients = len({client for client, *_ in arrivals})
    admitted: list[Request] = []
    at_arrival: dict[str, tuple[int, int]] = {}

    def step() -> None:
        before = {id(one) for one in engine.running}
        ended = engine.step()
        plan = engine.plans[-1]
        assert plan.num_tokens
        admitted.extend(chunk.request for chunk in plan.chunks if id(chunk.request) not in before)
        del ended

    everyone = []
    for number, (client, prompt, answer, steps) in enumerate(arrivals):
        one = request(f"{client}{number}", client, prompt, answer)
        ahead = sum(other.client == client for other in engine.scheduler.queues.waiting)
        at_arrival[one.id] = (len(admitted), ahead)
        everyone.append(one)
        engine.scheduler.add(one)
        for _ in range(steps):
            if not engine.scheduler.is_idle:
                step()
    while not engine.scheduler.is_idle:
        step()
    first = {}  # type: ignore[var-annotated]
    for index, one in enumerate(admitted):
        first.setdefault(one.id, index)
    for one in everyone:
        begin, ahead = at_arrival[one.id]
        others = Counter(other.client for other in admitted[begin : first[one.id]] if other.client != one.client)
        for client, count in others.items():  # type: ignore[assignment]
            assert count <= (ahead + 2) * (clients + slots), (one.id, client, count)


def test_a_step_without_prompts_is_nobodys_turn() -> None:
    """One that only decodes, to be measured."""
    engine = Engine(slots=8, mixed=MixedSteps())
    engine.scheduler.add(request("a0", "a", 4, 50))
    engine.step()
    turns, plans = engine.scheduler.queues.turns, engine.plans
    for name in ("a", "b"):
        engine.scheduler.add(request(f"{name}1", name, 400, 1))
    before = turns._num_led
    engine.step()
    assert (plans[-1].chunks, turns._num_led) == ((), before)
    engine.step()
    assert (len(plans[-1].chunks), turns._num_led) == (1, before + 1)


@pytest.mark.parametrize(("answer", "prompt"), [(64, (64, 512)), (400, (16, 64)), (16, (1000, 2000))])
def test_first_tokens_of_a_small_client_beside_a_large_one(answer: int, prompt: tuple[int, int]) -> None:
    """At most three times as late as alone, of all 60; 64 of the other's are always under way."""
    source = random.Random(1)
    alone = 0.012 + 0.0006 * FAIR_CHUNK
    engine = Engine(slots=64, mixed=MixedSteps())
    num_large, waits = 0, []

    def fill() -> None:
        nonlocal num_large
        live = len(engine.running) + len(engine.scheduler.queues.waiting)
        for _ in range(64 - live):
            engine.scheduler.add(request(f"large{num_large}", "large", source.randint(*prompt), answer))
            num_large += 1

    while engine.now_s < 20:  # it knows what its steps take
        fill()
        engine.step()
    engine.scheduler.add(request("small", "small", 1, 1))  # it has been here before
    for number in range(60):
        begin_s = engine.now_s + source.uniform(0.05, 0.3)
        name, since_s = f"small{number}", begin_s
        while engine.now_s < begin_s:
            since_s = engine.now_s
            fill()
            engine.step()
        engine.scheduler.add(request(name, "small", FAIR_CHUNK, 1))
        while name not in engine.first_s:
            engine.step()
            fill()
        assert since_s <= begin_s <= engine.now_s
        waits.append(engine.first_s[name] - begin_s)
    assert max(waits) <= 3 * alone
    assert engine.scheduler.queues.num_preemptions <= 60 + 1
