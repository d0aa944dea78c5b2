"""Prefill here, decode there: the same tokens, whatever happens between, and every page back
at the end.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from connector_doubles import BLOCK, CONTEXT, Side, run
from engine_doubles import Drafting
from kv_doubles import END, WIDTH, answer, recall_request

from adapters.catalog import Catalog, Requested, Selection
from adapters.contract import Context
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest
from worker.engines.chain_builder import ChainBuilder
from worker.engines.embedded import Request
from worker.engines.embedded.admission import admit
from worker.engines.embedded.transfer.transport import KvRead
from worker.sampling import SamplingParams


class Pair(SimpleNamespace):
    prefill: Side
    decode: Side

    def __iter__(self) -> Iterator[Side]:
        yield from (self.prefill, self.decode)

    def run(self, until: object) -> None:
        run(list(self), until)  # type: ignore[arg-type]

    def serve(self, name: str, prompt: list[int], count: int) -> list[int]:
        self.prefill.prefill(name, prompt)
        self.run(lambda: self.prefill.finished(name))
        self.decode.decode(name, prompt, self.prefill.handle(name), count)
        self.run(lambda: self.decode.finished(name))
        return self.decode.tokens(name)

    def settle(self) -> None:
        self.run(lambda: self.prefill.is_empty and self.decode.is_empty)


@pytest.fixture
def now() -> list[float]:
    """The prefill worker's clock."""
    return [0.0]


@pytest.fixture
def pair(now: list[float]) -> Iterator[Pair]:
    both = Pair(prefill=Side(lease_s=60.0, clock=lambda: now[0]), decode=Side())
    yield both
    for side in both:
        side.close()
        assert side.is_empty


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, WIDTH), k=length)


def guided_request(side: Side, name: str, prompt: list[int], count: int) -> Request:
    """One with a companion, whose answer is that without it."""
    builder = ChainBuilder(Catalog.default(), Context(Vocabulary(WIDTH)))
    guidance = Requested("cfg", {"scale": 2.0, "negative_token_ids": prompt[:3]})
    asked = EngineRequest(name, prompt, SamplingParams(max_tokens=count))
    asked = builder.prepare(asked, Selection((guidance,)), builder.context(frozenset({END}), 0, count))
    return admit(asked, 0, side.model, CONTEXT)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 63, 64, 65, 200, CONTEXT - 12])
def test_the_same_tokens_and_nothing_left(pair: Pair, length: int) -> None:
    prompt = prompt_of(length)
    assert pair.serve("one", prompt, 10) == answer(prompt, 10)
    assert pair.prefill.outputs["one"][-1].finish_reason == "length"
    assert pair.prefill.tokens("one") == []
    pair.settle()
    counts = pair.decode.connector.counts
    assert pair.prefill.connector.counts == {"leased": 1, "released": 1}
    if length > BLOCK:
        assert counts == {"received": 1, "bytes": 2 * 8 * (length - 1)}
        answered = len(answer(prompt, 10))
        assert pair.decode.model.num_computed == answered  # the prompt's last position, the answer but for its last
    else:
        assert counts == {"cached": 1}


def test_a_prompt_computed_elsewhere_is_looked_at_at_once(pair: Pair) -> None:
    prompt = prompt_of(70)
    pair.prefill.prefill("one", prompt)
    pair.run(lambda: pair.prefill.finished("one"))
    assert pair.decode.stepper.wait_s is None
    pair.decode.decode("one", prompt, pair.prefill.handle("one"), 5)
    assert pair.decode.stepper.scheduler.is_idle
    assert pair.decode.stepper.wait_s == 0
    pair.run(lambda: pair.decode.finished("one"))
    pair.settle()


def test_drafts_behind_a_prompt_that_was_received(pair: Pair) -> None:
    prompt = prompt_of(70)
    expected, source = answer(prompt, 40), random.Random(1)

    def draft(one: Request) -> list[int]:
        right = expected[len(one.tokens) - one.prompt_length :][: source.randrange(4)]
        return [*right, 7, 8, 9]

    pair.decode.stepper.speculator = drafting = Drafting(draft)
    assert pair.serve("one", prompt, 40) == expected
    assert sum(drafting.accepted) > 0
    pair.settle()


def test_what_decode_knows_is_not_sent(pair: Pair) -> None:
    common = prompt_of(100)
    first, second = common + prompt_of(20, 1), common + prompt_of(60, 2)
    assert pair.serve("first", first, 5) == answer(first, 5)
    before = pair.decode.connector.counts["bytes"]
    assert pair.serve("second", second, 5) == answer(second, 5)
    assert pair.decode.connector.counts["bytes"] - before == 2 * 8 * (len(second) - 1 - 100)
    assert pair.serve("again", first, 5) == answer(first, 5)
    assert pair.decode.connector.counts["cached"] == 1
    pair.settle()


def test_prefill_reuses_cached_blocks_under_several_leases(pair: Pair) -> None:
    prompt = prompt_of(150)
    for name in ("first", "second"):
        pair.prefill.prefill(name, prompt)
        pair.run(lambda name=name: pair.prefill.finished(name))
    assert pair.prefill.model.num_computed < 160
    for name in ("first", "second"):
        pair.decode.decode(name, prompt, pair.prefill.handle(name), 6)
    pair.run(lambda: pair.decode.finished("first") and pair.decode.finished("second"))
    assert pair.decode.tokens("first") == pair.decode.tokens("second") == answer(prompt, 6)
    pair.settle()


def test_a_lease_times_out_and_a_late_reader_computes(pair: Pair, now: list[float]) -> None:
    prompt = prompt_of(90)
    pair.prefill.prefill("late", prompt)
    pair.run(lambda: pair.prefill.finished("late"))
    handle = pair.prefill.handle("late")
    pair.prefill.step()
    assert pair.prefill.connector.num_leased == 1
    now[0] = 61.0
    pair.prefill.step()
    assert pair.prefill.is_empty
    others = [prompt_of(200, seed) for seed in range(1, 9)]  # they overwrite what was held
    for number, other in enumerate(others):
        pair.prefill.prefill(f"other{number}", other)
    pair.run(lambda: all(pair.prefill.finished(f"other{number}") for number in range(8)))
    pair.decode.decode("late", prompt, handle, 8)
    pair.run(lambda: pair.decode.finished("late"))
    assert pair.decode.tokens("late") == answer(prompt, 8)
    assert pair.decode.connector.counts == {"expired": 1}
    assert pair.prefill.connector.counts["timed_out"] == 1
    now[0] = 200.0
    pair.settle()


def test_a_lease_that_ends_under_a_reader_is_noticed(
    pair: Pair, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engines.embedded.transfer.transport.SLICE_BYTES", 64)
    monkeypatch.setattr("worker.engines.embedded.transfer.decode_side.IDLE_BUDGET_S", 0.0)
    prompt = prompt_of(200)
    pair.prefill.prefill("torn", prompt)
    pair.run(lambda: pair.prefill.finished("torn"))
    pair.decode.decode("torn", prompt, pair.prefill.handle("torn"), 8)
    pair.run(lambda: bool((pair.decode.model.keys != -1).any()))  # some of it has come
    assert not pair.decode.connector.counts
    now[0] = 61.0
    pair.prefill.step()
    pair.prefill.model.keys.fill_(-7)
    pair.run(lambda: pair.decode.finished("torn"))
    assert pair.decode.tokens("torn") == answer(prompt, 8)
    assert pair.decode.connector.counts == {"expired": 1}
    pair.settle()


def test_too_many_leases_fail_their_request_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.prefill.connector.transport, "grant", lambda pages: None)
    pair.prefill.prefill("one", prompt_of(50))
    pair.run(lambda: pair.prefill.finished("one"))
    assert pair.prefill.finished("one") == "error"
    assert "too many prompts" in str(pair.prefill.outputs["one"][-1].error)
    pair.settle()


def test_a_prompt_that_fails_beside_another_is_not_leased(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pair.prefill.model, "spoiled", lambda plan: [one for one in plan.owners() if one.id == "bad"][-1:]
    )
    for seed, name in enumerate(("bad", "good")):
        pair.prefill.prefill(name, prompt_of(20, seed))
    pair.run(lambda: pair.prefill.finished("good"))
    assert pair.prefill.finished("good") == "length"
    assert pair.prefill.finished("bad") == "error"
    assert pair.prefill.outputs["bad"][-1].kv is None
    assert pair.prefill.connector.counts == {"leased": 1}
    pair.decode.decode("good", prompt_of(20, 1), pair.prefill.handle("good"), 3)
    pair.run(lambda: pair.decode.finished("good"))
    pair.settle()


def test_readers_are_served_for_a_moment_whatever_came_before(pair: Pair, now: list[float]) -> None:
    """However long a step took, or an idle worker was not polled."""
    pair.prefill.prefill("one", prompt_of(20))
    pair.run(lambda: pair.prefill.finished("one"))
    pair.prefill.connector._prefill._polled_s -= 1000.0
    began_s = time.monotonic()
    pair.prefill.connector.poll()
    assert time.monotonic() - began_s < 10.0
    now[0] += 61.0
    pair.settle()
    assert pair.prefill.stepper.wait_s is not None, "a late reader cannot connect"
    assert pair.decode.stepper.wait_s is None


@pytest.mark.parametrize("phase", ["waiting", "reading", "ready", "decoding"])
def test_an_abort_in_every_phase(pair: Pair, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(200)
    pair.serve("connect", prompt_of(40, 9), 2)
    connector = pair.decode.connector
    if phase == "reading":
        monkeypatch.setattr("worker.engines.embedded.transfer.transport.SLICE_BYTES", 64)
        monkeypatch.setattr("worker.engines.embedded.transfer.decode_side.IDLE_BUDGET_S", 0.0)
    pair.prefill.prefill("one", prompt)
    pair.run(lambda: pair.prefill.finished("one"))
    pair.decode.decode("one", prompt, pair.prefill.handle("one"), 50)
    if phase == "ready":
        monkeypatch.setattr(type(pair.decode.stepper.scheduler.queues), "has_slot", lambda self, request: False)
    reached = {
        "waiting": lambda: bool(connector._decode._waiting),
        "reading": lambda: bool(connector._decode._reading),
        "ready": lambda: bool(connector._decode._ready),
        "decoding": lambda: len(pair.decode.tokens("one")) > 1,
    }[phase]
    pair.run(reached)
    pair.decode.abort("one")
    assert pair.decode.finished("one") == "cancelled"
    pair.settle()
    assert pair.prefill.connector.counts["released"] == 2


@pytest.mark.parametrize("ending", ["abort", "lost"])
def test_pages_stay_pinned_while_a_read_cannot_be_cancelled(
    pair: Pair, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engines.embedded.transfer.transport.SLICE_BYTES", 64)
    monkeypatch.setattr("worker.engines.embedded.transfer.decode_side.IDLE_BUDGET_S", 0.0)
    prompt = prompt_of(200)
    pair.prefill.prefill("one", prompt)
    pair.run(lambda: pair.prefill.finished("one"))
    request = guided_request(pair.decode, "one", prompt, 8)  # whose companion has pages, too
    pair.decode.connector.receive(request, pair.prefill.handle("one"))
    pair.run(lambda: bool((pair.decode.model.keys != -1).any()))  # some of it has come
    scheduler, release = pair.decode.stepper.scheduler, KvRead.release
    pages, still_writing = scheduler.queues.pinned[0].pages, [True]
    monkeypatch.setattr(KvRead, "release", lambda read: not still_writing and release(read))
    if ending == "abort":
        pair.decode.abort("one")
    else:
        monkeypatch.setattr(KvRead, "poll", lambda read, budget_s: "lost")
    pair.run(lambda: pair.decode.finished("one"))
    assert pair.decode.tokens("one") == ([] if ending == "abort" else answer(prompt, 8))
    assert [one.pages for one in scheduler.queues.pinned] == [pages]
    polled: list[None] = []
    monkeypatch.setattr(pair.decode.connector.transport.agent, "poll", lambda: polled.append(None))
    pair.decode.step()
    assert polled, "nothing moves the read on"
    still_writing.clear()
    pair.settle()


def test_a_read_that_hangs_keeps_no_other_waiting(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engines.embedded.transfer.decode_side.IDLE_BUDGET_S", 0.0)
    prompts = {name: prompt_of(60, seed) for seed, name in enumerate(("hangs", "goes on"))}
    for name, prompt in prompts.items():
        pair.prefill.prefill(name, prompt)
        pair.run(lambda name=name: pair.prefill.finished(name))
    hangs, poll = pair.prefill.handle("hangs"), KvRead.poll
    monkeypatch.setattr(
        KvRead, "poll", lambda read, budget_s: "busy" if read._handle.token == hangs.token else poll(read, budget_s)
    )
    for name, prompt in prompts.items():
        pair.decode.decode(name, prompt, pair.prefill.handle(name), 5)
    pair.run(lambda: pair.decode.finished("goes on"))
    assert pair.decode.tokens("goes on") == answer(prompts["goes on"], 5)
    pair.decode.abort("hangs")
    pair.settle()


def test_many_requests_with_disconnects_in_every_phase(pair: Pair, now: list[float]) -> None:
    chance = random.Random(7)
    families = [prompt_of(90, seed) for seed in range(4)]
    wanted: dict[str, tuple[list[int], int]] = {}
    sent: set[str] = set()
    gone: set[str] = set()
    for number in range(200):
        name = f"r{number}"
        family = chance.choice(families)
        wanted[name] = (family[: chance.randrange(1, 90)] + prompt_of(chance.randrange(1, 60), number), 12)
        pair.prefill.prefill(name, wanted[name][0])
        for _ in range(chance.randrange(4)):
            for side in pair:
                side.step()
        for one, (prompt, count) in wanted.items():
            if one not in sent | gone and pair.prefill.finished(one) == "length":
                sent.add(one)
                if chance.random() < 0.9:  # the rest never reach decode: their leases time out
                    pair.decode.decode(one, prompt, pair.prefill.handle(one), count)
                else:
                    gone.add(one)
        if chance.random() < 0.5:
            victim = chance.choice(list(wanted))
            gone.add(victim)
            pair.prefill.abort(victim)
            pair.decode.abort(victim)
        now[0] += 0.05

    def later(condition: bool) -> bool:
        now[0] += 0.02
        return condition

    for name, (prompt, count) in wanted.items():
        if name not in gone and name not in sent:
            pair.run(lambda name=name: later(bool(pair.prefill.finished(name))))
            pair.decode.decode(name, prompt, pair.prefill.handle(name), count)
    pair.run(lambda: all(pair.decode.finished(name) for name in wanted if name not in gone))
    for name, (prompt, count) in wanted.items():
        if name not in gone:
            assert pair.decode.tokens(name) == answer(prompt, count)
    now[0] += 100.0
    pair.settle()
    counts = pair.prefill.connector.counts
    assert counts["leased"] == counts["released"] + counts["timed_out"]
    assert pair.decode.connector.counts["received"] > 50
    assert len(gone) > 50


def test_prompts_that_wait_for_a_slot_count_as_waiting(now: list[float]) -> None:
    pair = Pair(prefill=Side(lease_s=60.0), decode=Side(max_num_seqs=1))
    prompts = {f"r{number}": prompt_of(20, number) for number in range(3)}
    for name, prompt in prompts.items():
        pair.prefill.prefill(name, prompt)
    pair.run(lambda: all(pair.prefill.finished(name) for name in prompts))
    for name, prompt in prompts.items():
        pair.decode.decode(name, prompt, pair.prefill.handle(name), 8)
    assert pair.decode.stepper.num_waiting == 3
    running = pair.decode.stepper.scheduler.queues
    pair.run(lambda: bool(running.running))
    assert pair.decode.stepper.num_waiting == 2
    pair.run(lambda: all(pair.decode.finished(name) for name in prompts))
    assert pair.decode.stepper.num_waiting == 0
    pair.settle()
    for side in pair:
        side.close()


def test_two_rows_are_kept_for_a_prompt_with_a_companion(now: list[float]) -> None:
    """Requests that came later, and take one row each, do not pass it for ever."""
    pair = Pair(prefill=Side(lease_s=60.0), decode=Side(max_num_seqs=2))
    prompt, decode = prompt_of(20), pair.decode
    pair.prefill.prefill("guided", prompt)
    pair.run(lambda: bool(pair.prefill.finished("guided")))

    def come(number: int) -> None:
        own = recall_request(decode.model, f"r{number}", prompt_of(6, number + 1), 20 + number % 2)
        own.end_ids = frozenset()
        decode.stepper.add(own)

    for number in range(4):
        come(number)
    decode.step()
    decode.connector.receive(guided_request(decode, "guided", prompt, 8), pair.prefill.handle("guided"))
    for number in range(4, 40):
        come(number)
        for _ in range(10):
            for side in pair:
                side.step()
    assert decode.tokens("guided") == answer(prompt, 8)
    pair.run(lambda: decode.stepper.scheduler.is_idle)
    pair.settle()
    for side in pair:
        side.close()


def test_a_transfer_that_was_given_up_blocks_nobody() -> None:
    """It waited for pages, and what came later for it."""
    pair = Pair(prefill=Side(lease_s=60.0), decode=Side(kv_blocks=2 * CONTEXT // BLOCK))
    decode, prompts = pair.decode, {name: prompt_of(40, seed) for seed, name in enumerate(("a", "b", "far", "late"))}
    pair.prefill.prefill("far", prompts["far"])
    pair.run(lambda: bool(pair.prefill.finished("far")))
    for name in ("a", "b"):
        decode.stepper.add(recall_request(decode.model, name, prompts[name], 30))
    decode.step()
    decode.decode("far", prompts["far"], pair.prefill.handle("far"), 5)
    decode.stepper.add(recall_request(decode.model, "late", prompts["late"], 5))
    decode.step()
    assert [one.id for one in decode.stepper.scheduler.queues.waiting] == ["late"]
    decode.abort("far")
    pair.run(lambda: all(decode.finished(name) for name in prompts))
    assert decode.tokens("late") == answer(prompts["late"], 5)
    pair.settle()
    for side in pair:
        side.close()


def test_a_read_goes_on_while_a_request_waits_for_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engines.embedded.transfer.transport.SLICE_BYTES", 64)
    monkeypatch.setattr("worker.engines.embedded.transfer.decode_side.BUSY_BUDGET_S", 0.0)
    monkeypatch.setattr("worker.engines.embedded.transfer.decode_side.IDLE_BUDGET_S", 0.0)
    pair = Pair(prefill=Side(lease_s=60.0), decode=Side(kv_blocks=CONTEXT // BLOCK))
    decode, prompts = pair.decode, {name: prompt_of(200, seed) for seed, name in enumerate(("far", "late"))}
    pair.prefill.prefill("far", prompts["far"])
    pair.run(lambda: bool(pair.prefill.finished("far")))
    decode.decode("far", prompts["far"], pair.prefill.handle("far"), 5)
    decode.stepper.add(recall_request(decode.model, "late", prompts["late"], 5))
    decode.step()
    assert decode.connector._decode.is_reading
    assert not decode.stepper.scheduler.queues.running
    assert decode.stepper.wait_s == 0, "the read waits for the step that waits for it"
    pair.run(lambda: all(decode.finished(name) for name in prompts))
    assert all(decode.tokens(name) == answer(prompt, 5) for name, prompt in prompts.items())
    pair.settle()
    for side in pair:
        side.close()


def test_little_memory_on_both_sides(now: list[float]) -> None:
    """Holds and reads wait for each other's memory, and all get through."""
    blocks = 2 * CONTEXT // BLOCK
    pair = Pair(prefill=Side(lease_s=60.0, kv_blocks=blocks), decode=Side(kv_blocks=blocks))
    prompts = {f"r{number}": prompt_of(180, number) for number in range(12)}
    for name, prompt in prompts.items():
        pair.prefill.prefill(name, prompt)
    sent: set[str] = set()

    def hand_over() -> bool:
        for name, prompt in prompts.items():
            if name not in sent and pair.prefill.finished(name):
                sent.add(name)
                pair.decode.decode(name, prompt, pair.prefill.handle(name), 40)
        return all(pair.decode.finished(name) for name in prompts)

    pair.run(hand_over)
    for name, prompt in prompts.items():
        assert pair.decode.tokens(name) == answer(prompt, 40)
    pair.settle()
    for side in pair:
        side.close()
