"""What a planner is told of each step: every token once, and every request where it is."""

from __future__ import annotations

from engine_doubles import ScriptedModel, request
from hypothesis import given
from hypothesis import strategies as st

from worker.engines.embedded.kv_cache.cache import KvCache
from worker.engines.embedded.scheduler import Scheduler
from worker.engines.embedded.step import Stepper
from worker.engines.forward_pass import ForwardPass
from worker.sampling import SamplingParams

PAGE, BLOCK = 8, 4


class Driver:
    """An engine of `num_pages` pages whose steps take 16 tokens, and what it tells a planner."""

    def __init__(self, num_pages: int) -> None:
        self.model = ScriptedModel()
        self.stepper = Stepper(self.model, Scheduler(KvCache(num_pages, PAGE, BLOCK), 3, 16))  # type: ignore[arg-type]
        self.passes: list[ForwardPass] = []
        self.stepper.pass_sink = self.passes.append

    def add(self, name: str, first: int, prompt: int, answer: int) -> None:
        tokens = [first, *range(10, 9 + prompt)]
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        self.stepper.add(request(self.model, name, tokens, params))

    def finish(self) -> None:
        while not self.stepper.scheduler.is_idle:
            self.stepper.step()


def counts(one: ForwardPass) -> tuple[int, ...]:
    prompts = one.num_prefill, one.prefill_tokens, one.prefill_kv_tokens
    return *prompts, one.num_decode, one.decode_kv_tokens, one.num_waiting_prefill, one.waiting_prefill_tokens


def test_chunks_hits_and_decode_rows() -> None:
    driver = Driver(num_pages=12)
    driver.add("a", 3, prompt=20, answer=3)
    driver.finish()
    driver.add("b", 3, prompt=20, answer=2)
    driver.finish()
    assert [counts(one) for one in driver.passes] == [
        (1, 16, 0, 0, 0, 0, 0),
        (1, 4, 16, 0, 0, 0, 0),
        (0, 0, 0, 1, 21, 0, 0),
        (0, 0, 0, 1, 22, 0, 0),
        (1, 4, 16, 0, 0, 0, 0),
        (0, 0, 0, 1, 21, 0, 0),
    ]


def test_more_requests_than_slots_wait() -> None:
    driver = Driver(num_pages=12)
    for number in range(5):
        driver.add(str(number), 3 + number, prompt=4, answer=2)
    driver.stepper.step()
    assert counts(driver.passes[0]) == (3, 12, 0, 0, 0, 2, 8)
    assert driver.passes[0].seconds > 0


@given(st.lists(st.tuples(st.integers(1, 24), st.integers(1, 20)), min_size=1, max_size=8), st.integers(6, 12))
def test_every_token_is_counted_once(wanted: list[tuple[int, int]], num_pages: int) -> None:
    driver = Driver(num_pages)
    for number, (prompt, answer) in enumerate(wanted):
        driver.add(str(number), 3 + number % 2, prompt, answer)
    queues, was_preempted = driver.stepper.scheduler.queues, False
    while not driver.stepper.scheduler.is_idle:
        driver.stepper.step()
        told, plan = driver.passes[-1], driver.model.plans[-1]
        assert told.prefill_tokens + told.num_decode == plan.num_tokens
        was_preempted = was_preempted or told.num_waiting_decode > 0
    assert len(driver.passes) == len(driver.model.plans)
    if was_preempted:
        assert queues.num_preemptions > 0
    else:
        computed = sum(one.prefill_tokens for one in driver.passes)
        hits = sum(prompt for prompt, _ in wanted) - computed
        assert queues.num_preemptions > 0 or 0 <= hits <= sum(prompt - 1 for prompt, _ in wanted)
