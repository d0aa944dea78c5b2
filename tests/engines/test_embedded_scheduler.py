"""What a step computes, and who is preempted; nothing here needs a model."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from engine_doubles import ScriptedModel, request, stepper
from kv_doubles import RecallModel, answer, recall_request

from worker.engines import QueueTimes
from worker.engines.embedded import step
from worker.engines.embedded.kv_cache.cache import KvCache
from worker.engines.embedded.mixed_steps import MixedSteps
from worker.engines.embedded.plan import Output, Plan, Request
from worker.engines.embedded.scheduler import Scheduler
from worker.engines.embedded.step import Stepper
from worker.sampling import SamplingParams

MODEL = ScriptedModel()
BLOCK = 16


class Driver:
    """A scheduler on a model that checks its KV, and the plans of all steps."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_num_seqs: int = 8,
        budget: int = 1024,
        mixed: MixedSteps | int | None = None,
    ) -> None:
        self.model = RecallModel(num_pages * page_size)
        self.model.allocate_kv(num_pages, page_size)
        self.cache = KvCache(num_pages, page_size, BLOCK)
        self.scheduler = Scheduler(self.cache, max_num_seqs, budget, mixed)
        self.plans: list[Plan] = []

    def add(self, name: str, prompt: Sequence[int], max_tokens: int) -> Request:
        one = recall_request(self.model, name, prompt, max_tokens)
        one.end_ids = frozenset()
        self.scheduler.add(one)
        return one

    def step(self, prompts_first: bool = False) -> list[Output]:
        plan = self.scheduler.schedule(prompts_first)
        self.plans.append(plan)
        self.scheduler.settle(plan)
        outputs = self.scheduler.commit(plan, self.model.choose(plan))
        self.scheduler.check_integrity()
        self.cache.check_blocks()
        return outputs

    def finish(self) -> list[Output]:
        outputs = []
        while not self.scheduler.is_idle:
            outputs += self.step()
        return outputs

    def work(self) -> list[tuple[list[str], list[tuple[str, int, int]]]]:
        """Per step the decode rows, and the chunks."""
        return [
            ([one.id for one in plan.decode], [(chunk.request.id, chunk.start, chunk.stop) for chunk in plan.chunks])
            for plan in self.plans
        ]


def prompt(length: int, first: int = 3) -> list[int]:
    """Prompts with different first tokens have nothing in common."""
    return [first, *(3 + position * position % 90 for position in range(1, length))]


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


def test_prompts_first_leaves_out_the_decode_rows_and_keeps_them() -> None:
    driver = Driver(8, 32)
    driver.add("a", prompt(20), 8)
    driver.step()
    driver.add("b", prompt(20, 4), 8)
    assert [output.request_id for output in driver.step(prompts_first=True)] == ["b"]
    assert [output.request_id for output in driver.step(prompts_first=True)] == ["a", "b"]
    assert driver.work()[1:] == [([], [("b", 0, 20)]), (["a", "b"], [])]
    driver.finish()


def test_prompts_first_of_a_prompt_in_pieces() -> None:
    driver = Driver(8, 32, budget=8)
    driver.add("a", prompt(4), 8)
    driver.step()
    driver.add("b", prompt(20, 4), 8)
    assert driver.step(prompts_first=True) == []
    assert [output.request_id for output in driver.step()] == ["a"]
    driver.finish()


def test_the_queues_head_waits_for_memory_and_is_not_overtaken() -> None:
    driver = Driver(num_pages=4, page_size=16)
    first = driver.add("first", prompt(40, first=3), 5)
    driver.add("large", prompt(60, first=4), 2)
    driver.add("small", prompt(4, first=5), 2)
    driver.step()
    assert [one.id for one in driver.scheduler.queues.waiting] == ["large", "small"]
    assert first.pages == [0, 1, 2]
    driver.scheduler.abort("first")
    driver.step()
    assert [one.id for one in driver.plans[-1].sampled] == ["large"]
    assert len(driver.finish()) == 3


def test_a_long_prompt_does_not_starve_short_ones_behind_it() -> None:
    driver = Driver(num_pages=64, page_size=256, budget=1024)
    driver.add("long", prompt(5000, first=3), 4)
    for name in range(4):
        driver.add(str(name), prompt(100, first=10 + name), 4)
    driver.step()
    assert driver.work() == [([], [("long", 0, 624), *((str(name), 0, 100) for name in range(4))])]


def test_equally_long_prompts_share_a_step_oldest_gets_the_rest() -> None:
    driver = Driver(num_pages=64, page_size=256, budget=1024)
    for name in range(3):
        driver.add(str(name), prompt(2000, first=10 + name), 4)
    driver.step()
    assert driver.work() == [([], [("0", 0, 684), ("1", 0, 170), ("2", 0, 170)])]


def known(steps: dict[int, float], prompt_token_s: float) -> MixedSteps:
    """Seconds of steps by their rows, and of each prompt token beside them."""
    costs = MixedSteps()
    first = next(iter(steps))
    costs.learn_decode(first, steps[first])
    for _ in range(4):
        costs.learn_mixed(first, 64, steps[first] + 64 * prompt_token_s)
    for rows, seconds in steps.items():
        costs.learn_decode(rows, seconds)
    return costs


@pytest.mark.parametrize(("rows", "size"), [(1, 30), (17, 61)])
def test_prompts_take_as_long_as_decoding_and_a_half(rows: int, size: int) -> None:
    costs = known({1: 0.010, 17: 0.020}, 0.00049)
    driver = Driver(num_pages=64, page_size=256, max_num_seqs=32, mixed=costs)
    for name in range(rows):
        driver.add(str(name), prompt(20, first=60 + name), 100)
    driver.step()
    driver.add("long", prompt(1500, first=4), 2)
    sizes = []
    while driver.scheduler.queues.prefilling or driver.scheduler.queues.waiting:
        driver.step()
        assert len(driver.plans[-1].decode) == rows
        sizes += [chunk.stop - chunk.start for chunk in driver.plans[-1].chunks]
    assert sum(sizes) == 1500
    assert set(sizes[:-1]) == {size}


def test_the_engine_learns_what_its_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def take(plan: Plan, logits: torch.Tensor) -> None:
        nonlocal now_s
        now_s += 0.010 + 0.0049 * (plan.num_tokens - plan.num_decode_tokens)

    model = ScriptedModel(take)
    monkeypatch.setattr(step, "time", SimpleNamespace(perf_counter=lambda: now_s))
    driver = stepper(model, max_mixed_chunk=None)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    driver.add(request(model, "early", [3] * 4, params))
    for _ in range(3):
        driver.step()
    driver.add(request(model, "long", [3] * 200, params))
    for _ in range(30):
        driver.step()
    sizes = [plan.num_tokens - 1 for plan in model.plans[3:]]
    assert sizes[0] == 16
    assert set(sizes[1:]) == {0, 3}


@pytest.mark.parametrize(("prompts", "size"), [(1, 30), (2, 40), (6, 122)])
def test_prompts_that_many_wait_for_take_more(prompts: int, size: int) -> None:
    driver = Driver(num_pages=64, page_size=256, mixed=known({1: 0.010}, 0.00049))
    driver.add("early", prompt(100, first=3), 100)
    driver.step()
    for name in range(prompts):
        driver.add(str(name), prompt(1000, first=10 + name), 2)
    driver.step()
    assert sum(chunk.stop - chunk.start for chunk in driver.plans[-1].chunks) == size


@pytest.mark.parametrize("prompts", [1, 7])
def test_prompts_share_the_tokens_of_an_operators_choice(prompts: int) -> None:
    driver = Driver(num_pages=64, page_size=256, mixed=64)
    driver.add("early", prompt(100, first=3), 100)
    driver.step()
    for name in range(prompts):
        driver.add(str(name), prompt(1000, first=10 + name), 2)
    driver.step()
    assert sum(chunk.stop - chunk.start for chunk in driver.plans[-1].chunks) == 64


def test_one_that_comes_back_is_served_before_the_younger_ones() -> None:
    driver = Driver(num_pages=64, page_size=256, budget=1024)
    first = driver.add("first", prompt(3000, first=3), 4)
    second = driver.add("second", prompt(3000, first=4), 4)
    driver.step()
    driver.scheduler.queues.preempt(first)
    driver.step()
    assert driver.scheduler.queues.prefilling == [first, second]
    assert [(chunk.request.id, chunk.stop - chunk.start) for chunk in driver.plans[-1].chunks] == [
        ("first", 768),
        ("second", 256),
    ]


def test_the_last_page_is_left_to_those_who_will_grow() -> None:
    driver = Driver(num_pages=4, page_size=16)
    driver.add("grows", prompt(10, first=3), 40)
    driver.add("fits", prompt(30, first=4), 3)
    driver.add("waits", prompt(10, first=5), 3)
    driver.step()
    assert [one.id for one in driver.scheduler.queues.waiting] == ["waits"]
    driver.finish()
    assert driver.scheduler.queues.num_preemptions == 0


def test_nothing_is_left_to_those_who_will_not_grow() -> None:
    driver = Driver(num_pages=2, page_size=16)
    driver.add("short", prompt(10, first=3), 6)
    driver.add("as short", prompt(10, first=4), 6)
    driver.step()
    assert not driver.scheduler.queues.waiting


def test_the_last_that_came_is_the_first_that_goes() -> None:
    driver = Driver(num_pages=6, page_size=16)
    for name in range(3):
        driver.add(str(name), prompt(10, first=10 + name), 40)
    outputs = driver.finish()
    assert driver.scheduler.queues.num_preemptions > 0
    assert [output.request_id for output in outputs if output.finish_reason] == ["0", "1", "2"]
    for name in range(3):
        tokens = [output.token_id for output in outputs if output.request_id == str(name)]
        assert tokens == answer_without_end(prompt(10, first=10 + name), 40)


def answer_without_end(prompt: Sequence[int], count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += answer([*prompt, *tokens], count - len(tokens))
    return tokens


def test_a_preempted_request_goes_on_where_it_was() -> None:
    driver = Driver(num_pages=8, page_size=64)
    one = driver.add("one", prompt(20), 50)
    for _ in range(30):
        driver.step()
    driver.scheduler.queues.preempt(one)
    assert list(driver.scheduler.queues.waiting) == [one]
    assert one.num_preemptions == 1  # its receipt says so
    driver.step()
    chunk = driver.plans[-1].chunks[0]
    assert (chunk.start, chunk.stop) == (48, 50)  # three blocks were known
    driver.finish()
    assert one.tokens == prompt(20) + answer_without_end(prompt(20), 50)
    assert one.num_cached_tokens == 0  # it was not found when the prompt was first admitted


def test_preempted_requests_keep_their_order() -> None:
    driver = Driver(num_pages=8, page_size=64)
    requests = [driver.add(str(name), prompt(20, first=10 + name), 5) for name in range(4)]
    driver.step()
    late = driver.add("late", prompt(3, first=30), 5)
    for one in (requests[2], requests[0], requests[3]):
        driver.scheduler.queues.preempt(one)
    assert list(driver.scheduler.queues.waiting) == [requests[0], requests[2], requests[3], late]


def test_answers_to_one_prompt_compute_it_once() -> None:
    driver = Driver(num_pages=32, page_size=64)
    alone = prompt(500, first=50)
    for choice in range(4):
        driver.add(str(choice), prompt(700), 3)
    driver.add("alone", alone, 3)
    driver.step()
    assert [chunk.request.id for chunk in driver.plans[0].chunks] == ["0", "alone"]  # the others wait for the first
    outputs = driver.finish()
    assert driver.model.num_computed < 700 + 500 + 3 * (700 % BLOCK + 1) + 5 * 3
    cached = {output.request_id: output.num_cached_tokens for output in outputs if output.num_cached_tokens}
    assert cached == dict.fromkeys(["1", "2", "3"], 700 // BLOCK * BLOCK)


def test_a_small_common_beginning_makes_nobody_wait() -> None:
    driver = Driver(num_pages=32, page_size=64)
    for name in range(4):
        driver.add(str(name), [*prompt(20), *prompt(30, first=10 + name)], 3)
    driver.step()
    assert len(driver.plans[0].chunks) == 4


def test_who_waits_for_a_prompt_that_is_aborted_computes_it() -> None:
    driver = Driver(num_pages=32, page_size=64, budget=100)
    first = driver.add("first", prompt(500), 3)
    second = driver.add("second", prompt(500), 3)
    driver.step()
    assert (first.num_computed, list(driver.scheduler.queues.waiting)) == (100, [second])
    driver.scheduler.abort("first")
    driver.step()
    assert (second.num_cached_tokens, second.num_computed) == (96, 196)


def test_a_request_larger_than_the_store_is_our_own_mistake() -> None:
    driver = Driver(num_pages=2, page_size=64)
    one = recall_request(driver.model, "one", prompt(100), 20)
    one.limit = 129
    with pytest.raises(AssertionError, match="may take 3 pages"):
        driver.scheduler.add(one)


def test_nothing_is_computed_while_all_pages_are_pinned() -> None:
    driver = Driver(num_pages=4, page_size=16)
    stepper_ = Stepper(driver.model, driver.scheduler)  # type: ignore[arg-type]
    pinned = recall_request(driver.model, "pinned", prompt(40, first=3), 1)
    assert driver.scheduler.transfers.pin(pinned) == ()
    one = driver.add("one", prompt(14, first=4), 30)
    while one.pages or not driver.scheduler.queues.num_preemptions:
        stepper_.step()
    computed = driver.model.num_computed
    assert stepper_.step() == []
    assert stepper_.wait_s is not None
    assert stepper_.wait_s > 0
    assert driver.model.num_computed == computed
    driver.scheduler.transfers.unpin(pinned)
    while not driver.scheduler.is_idle:
        assert len(stepper_.step()) == 1
        assert driver.scheduler.is_idle or stepper_.wait_s == 0
    assert one.tokens == prompt(14, first=4) + answer_without_end(prompt(14, first=4), 30)


def test_a_transfer_that_waits_for_pages_is_not_overtaken() -> None:
    driver = Driver(num_pages=4, page_size=16)
    driver.add("runs", prompt(40, first=3), 5)
    driver.step()
    transfer = recall_request(driver.model, "transfer", prompt(40, first=4), 1)
    driver.scheduler.queues.arrive(transfer)
    assert driver.scheduler.transfers.pin(transfer) is None
    late = driver.add("late", prompt(4, first=5), 2)
    driver.step()
    assert list(driver.scheduler.queues.waiting) == [late]
    driver.scheduler.transfers.unblock(transfer)  # it was aborted
    driver.step()
    assert not driver.scheduler.queues.waiting
    driver.finish()


def test_a_transfer_waits_for_requests_that_arrived_earlier() -> None:
    driver = Driver(num_pages=4, page_size=16)
    driver.add("early", prompt(4, first=3), 2)
    transfer = recall_request(driver.model, "transfer", prompt(20, first=4), 1)
    driver.scheduler.queues.arrive(transfer)
    assert driver.scheduler.transfers.pin(transfer) is None
    driver.add("late", prompt(4, first=5), 2)
    driver.step()
    assert [chunk.request.id for chunk in driver.plans[-1].chunks] == ["early", "late"]
    assert driver.scheduler.transfers.pin(transfer) == ()
    assert driver.scheduler.queues.pinned == [transfer]
    driver.scheduler.transfers.unpin(transfer)
    driver.finish()


def test_detached_pages_stay_pinned_during_recomputation() -> None:
    driver = Driver(num_pages=8, page_size=16)
    one = recall_request(driver.model, "one", prompt(40), 3)
    one.end_ids = frozenset()
    driver.scheduler.queues.arrive(one)
    assert driver.scheduler.transfers.pin(one) == ()
    pages = one.pages
    stand_in = driver.scheduler.transfers.detach_pages(one)
    assert (one.pages, stand_in.pages, driver.scheduler.queues.pinned) == ([], pages, [stand_in])
    driver.scheduler.add(one)
    driver.step()
    assert not set(one.pages) & set(pages)
    driver.finish()
    assert driver.cache.num_available == 8 - len(pages)
    driver.scheduler.transfers.unpin(stand_in)
    assert driver.cache.num_available == 8
    assert one.tokens == prompt(40) + answer_without_end(prompt(40), 3)


def test_queue_times_survive_preemption_and_enclose_the_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(num_pages=8, page_size=16)
    moments = iter(range(10, 20))
    clock = SimpleNamespace(monotonic=lambda: next(moments))
    for module in ("admission_order", "pinned"):
        monkeypatch.setattr(f"worker.engines.embedded.{module}.time", clock)
    plain = driver.add("plain", prompt(4, first=3), 2)
    assert plain.queue_times is None
    driver.step()
    assert plain.queue_times == QueueTimes(10, 10)
    driver.scheduler.queues.preempt(plain)
    driver.step()
    assert plain.queue_times == QueueTimes(10, 10)
    transfer = recall_request(driver.model, "transfer", prompt(20, first=4), 1)
    driver.scheduler.queues.arrive(transfer)
    assert driver.scheduler.transfers.pin(transfer) == ()
    assert transfer.queue_times == QueueTimes(11, 11)
    driver.scheduler.transfers.complete(transfer, transfer.num_computed)
    driver.scheduler.transfers.resume(transfer)
    assert transfer.queue_times == QueueTimes(11, 13, 12)
    driver.finish()
