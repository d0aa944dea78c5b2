"""Companions under random arrivals, aborts and preemptions, with every read of KV checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from effort import examples
from engine_doubles import Drafting
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_doubles import END, RecallModel, answer
from speculation_runs import Repeating

from adapters.catalog import Catalog, Requested, Selection
from adapters.contract import Context
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest
from worker.engines.chain_builder import ChainBuilder
from worker.engines.embedded.admission import admit
from worker.engines.embedded.draft_model import DraftModel
from worker.engines.embedded.kv_cache import KvCache
from worker.engines.embedded.plan import Output, Plan, Request
from worker.engines.embedded.scheduler import Scheduler
from worker.engines.embedded.speculation import DraftModelProposer
from worker.engines.embedded.step import Stepper
from worker.engines.weights import WeightVersion
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams

CONTEXT = 64
BUILDER = ChainBuilder(Catalog.default(), Context(Vocabulary(RecallModel.vocab_size)))

Arrival = tuple[int, int, int, bool]
"""Tokens of the prompt, of the negative one (0: the prompt's last, -1: no guidance, -2: contrast
with the draft model), of the answer at most; and whether the negative prompt begins as the prompt
does."""

CONTRAST = -2

arrivals = st.tuples(
    st.integers(1, 40), st.one_of(st.just(CONTRAST), st.integers(-1, 40)), st.integers(1, 24), st.booleans()
)


class House:
    """A stepper whose model checks the KV of every row, its draft model too, and its requests.

    Each row of these models is one-hot, at the next token: a guided answer is the plain one.
    """

    def __init__(
        self,
        pages: int,
        rows: int,
        budget: int,
        mixed: int,
        seed: int,
        *,
        drafts: str = "none",
        drafted: int | None = None,
    ) -> None:
        self.model = RecallModel(CONTEXT)
        self.model.allocate_kv(pages, 8)
        self.draft_model = DraftModel(
            RecallModel(CONTEXT),  # type: ignore[arg-type]
            num_drafted=rows if drafts == "model" else 0,
            num_companions=rows // 2,
            context_length=CONTEXT,
            page_size=12,
            block_size=4,
            num_tokens=drafted,
        )
        cache = KvCache(pages, 8, 4)
        scheduler = Scheduler(cache, rows, max(budget, rows), mixed, draft_model=self.draft_model)
        self.source = random.Random(seed)
        settings = {"method": "draft_model", "model": "unused"} if drafts == "model" else {}
        proposer = partial(DraftModelProposer, self.draft_model) if drafts == "model" else None
        speculator = Drafting(self.often_right) if drafts == "often right" else Repeating(settings, proposer)
        self.stepper = Stepper(self.model, scheduler, speculator)  # type: ignore[arg-type]
        self.live: dict[str, Request] = {}
        self.num_finished = 0

    def often_right(self, request: Request) -> list[int]:
        """A draft whose first tokens are those of the answer."""
        length, generated = request.prompt_length, len(request.tokens) - request.prompt_length
        right = answer(request.tokens[:length], generated + self.source.randrange(4))[generated:]
        return right + [self.source.randrange(3, 96) for _ in range(self.source.randrange(4))]

    def arrive(self, number: int, arrival: Arrival) -> None:
        length, negative, max_tokens, is_alike = arrival
        prompt = [3 + (7 * position) % 80 for position in range(length - 1)] + [3 + number % 80]
        asked = EngineRequest(str(number), prompt, SamplingParams(max_tokens=max_tokens))
        if negative != -1:
            begin = [3 + (7 * position + (not is_alike)) % 80 for position in range(negative)]
            args = {"scale": 2.0, **({"negative_token_ids": begin} if begin else {})}
            wanted = Requested("contrastive") if negative == CONTRAST else Requested("cfg", args)
            context = BUILDER.context(frozenset({END}), 0, max_tokens)
            asked = BUILDER.prepare(asked, Selection((wanted,)), context)
        request = admit(asked, 0, self.model, CONTEXT, draft_model=self.draft_model)  # type: ignore[arg-type]
        try:
            self.stepper.check(request)
        except InvalidRequest:
            return
        request.client = self.source.choice([None, "a", "b"])
        self.live[request.id] = request
        self.stepper.add(request)

    def step(self) -> None:
        scheduler = self.stepper.scheduler
        if self.source.random() < 0.1 and (running := scheduler.queues.running):
            scheduler.queues.preempt(self.source.choice(running))
        if self.source.random() < 0.05 and self.live:
            assert self.stepper.abort(self.live.popitem()[0]) is not None
        for output in self.stepper.step(prompts_first=self.source.random() < 0.3):
            request = self.live[output.request_id]
            assert output.error is None
            generated = request.tokens[request.prompt_length :]
            assert generated == answer(request.tokens[: request.prompt_length], len(generated))
            self.check_companion(request, generated)
            if output.finish_reason is not None:
                self.num_finished += 1
                del self.live[output.request_id]
        for sequence in (one for request in scheduler.queues.decoding for one in request.sequences):
            assert sequence.num_computed == len(sequence.tokens) - 1
            cache = scheduler.queues.cache_of(sequence)
            assert len(sequence.pages) <= cache.count_pages(len(sequence.tokens)), "pages of rejected drafts"
        scheduler.check_integrity()
        scheduler.cache.check_blocks()
        self.draft_model.cache.check_blocks()

    def steps(self, arrivals: list[Arrival]) -> Iterator[None]:
        """Requests arrive and are computed, one step for each item, until all are answered."""
        scheduler, left, num_steps = self.stepper.scheduler, list(enumerate(arrivals)), 0
        while left or not scheduler.is_idle:
            if left and (scheduler.is_idle or self.source.random() < 0.5):
                self.arrive(*left.pop(0))
            if not scheduler.is_idle:
                self.step()
            num_steps += 1
            assert num_steps < 5000, f"no progress: {scheduler!r}"
            yield

    def check_companion(self, request: Request, generated: list[int]) -> None:
        """It has the same answer, and its row was that before the newest token of it."""
        companion = request.companion
        if companion is None:
            return
        begin = companion.tokens[: companion.prompt_length]
        assert companion.tokens == [*begin, *generated]
        assert request.chain is not None
        assert request.chain.companion is not None
        assert request.chain.companion.second_row is not None
        row = request.chain.companion.second_row(len(request.tokens) - 1)
        assert row.argmax() == answer_after([*begin, *generated[:-1]])


@pytest.mark.parametrize(("drafted", "most"), [(None, 4), (20, 2)])
def test_requests_wait_for_pages_of_the_draft_model(drafted: int | None, most: int) -> None:
    house = House(pages=60, rows=8, budget=200, mixed=200, seed=1, drafted=drafted)
    for number in range(4):
        house.stepper.add(contrasted(house, number))
    scheduler = house.stepper.scheduler
    running, finished = 0, 0
    while not scheduler.is_idle:
        finished += sum(output.finish_reason is not None for output in house.stepper.step())
        scheduler.check_integrity()
        running = max(running, len(scheduler.queues.running))
    assert (running, finished) == (most, 4)
    assert scheduler.queues.num_preemptions == 0
    assert house.draft_model.cache.num_pages == (24 if drafted is None else 8)


def contrasted(house: House, number: int, last: int = 49) -> Request:
    """The first tokens differ: no page is shared, and each takes 4 of 12 tokens."""
    asked = EngineRequest(str(number), [3 + number, *range(10, last)], SamplingParams(max_tokens=8))
    asked = BUILDER.prepare(asked, Selection((Requested("contrastive"),)), BUILDER.context(frozenset({END}), 0, 8))
    return admit(asked, 0, house.model, CONTEXT, draft_model=house.draft_model)  # type: ignore[arg-type]


@pytest.mark.parametrize("negative", [9, CONTRAST], ids=["cfg", "contrastive"])
def test_only_companions_of_one_salt_share_kv(negative: int) -> None:
    house = House(pages=20, rows=4, budget=40, mixed=8, seed=1)

    def guided(number: int, salt: str | None) -> Request:
        asked = EngineRequest(str(number), [*range(3, 23)], SamplingParams(max_tokens=2), cache_salt=salt)
        cfg = Requested("cfg", {"scale": 2.0, "negative_token_ids": [*range(30, 50)]})
        wanted = Requested("contrastive") if negative == CONTRAST else cfg
        asked = BUILDER.prepare(asked, Selection((wanted,)), BUILDER.context(frozenset({END}), 0, 2))
        return admit(asked, 0, house.model, CONTEXT, draft_model=house.draft_model)  # type: ignore[arg-type]

    house.stepper.add(guided(0, "a"))
    while not house.stepper.scheduler.is_idle:
        house.stepper.step()
    for number, (salt, is_found) in enumerate((("a", True), ("b", False), (None, False)), 1):
        companion = guided(number, salt).companion
        assert companion is not None
        found = house.stepper.scheduler.queues.cache_of(companion).match_prefix(companion)
        assert bool(found) == is_found


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_a_receipt_says_that_the_draft_model_is_not_exact(numerics: str) -> None:
    house = House(pages=20, rows=4, budget=40, mixed=8, seed=1)
    house.draft_model.model.numerics = numerics
    chain = contrasted(house, 0).chain
    assert chain is not None
    assert chain.receipt.numerics == numerics


def test_requests_do_not_wait_for_pages_of_drafts_that_ended() -> None:
    house = House(pages=60, rows=4, budget=200, mixed=200, seed=1, drafts="model", drafted=100)
    requests = [contrasted(house, number) for number in range(2)]
    draft = house.draft_model.begin_draft(requests[0])
    while house.draft_model.append_draft_page(draft):
        pass
    assert house.draft_model.cache.num_available < 8
    house.draft_model.end_draft(draft)
    for one in requests:
        house.stepper.add(one)
    house.stepper.step()
    assert len(house.stepper.scheduler.queues.running) == 2


@pytest.mark.parametrize("negative", [9, CONTRAST], ids=["cfg", "contrastive"])
def test_a_companion_that_is_not_finite_ends_its_owner_alone(negative: int) -> None:
    house = House(pages=20, rows=6, budget=40, mixed=8, seed=1)
    for number, one in enumerate((negative, -1, 0)):
        house.arrive(number, (12, one, 8, False))
    spoilt = house.live.pop("0")
    model = house.draft_model.model if negative == CONTRAST else house.model
    model.spoiled = lambda plan: [one for one in plan.owners() if one is spoilt.companion]  # type: ignore[method-assign]
    ends: dict[str, str | None] = {}
    while not house.stepper.scheduler.is_idle:
        for output in house.stepper.step():
            if output.finish_reason is not None:
                ends[output.request_id] = output.error
    assert ends == {"0": "the model's hidden state of a token is NaN or infinite", "1": None, "2": None}
    house.arrive(0, (12, negative, 8, False))
    companion = house.live["0"].companion
    assert companion is not None
    assert not house.stepper.scheduler.queues.cache_of(companion).match_prefix(companion), "spoiled KV is cached"


@settings(max_examples=examples(200), deadline=None)
@given(
    arrivals=st.lists(arrivals, min_size=2, max_size=10),
    pages=st.integers(12, 20),
    rows=st.integers(2, 6),
    seed=st.integers(0, 2**16),
    drafted=st.none() | st.integers(1, 100),
)
def test_a_request_gives_way_only_to_one_that_begins(
    arrivals: list[Arrival], pages: int, rows: int, seed: int, drafted: int | None
) -> None:
    house = House(pages, rows, budget=16, mixed=8, seed=seed, drafted=drafted)
    queues = house.stepper.scheduler.queues
    gave_way: list[Request] = []
    began: list[Request] = []
    give_way, start_prefill = queues.turns.give_way, queues.start_prefill
    queues.turns.give_way = lambda request: (gave_way.append(request), give_way(request))[1]  # type: ignore[method-assign, func-returns-value]
    queues.start_prefill = lambda request: (began.append(request), start_prefill(request))[1]  # type: ignore[method-assign, func-returns-value]
    for _ in house.steps(arrivals):
        assert not gave_way or {one.client for one in began} - {one.client for one in gave_way}
        gave_way.clear()
        began.clear()


def test_a_copy_that_was_not_carried_out_is_no_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page that it was for was found by its tokens, once the source had been evicted."""
    house = House(pages=60, rows=4, budget=200, mixed=200, seed=1)
    stepper, cache = house.stepper, house.draft_model.cache
    first, second = (contrasted(house, 0, last=54) for _ in range(2))
    stepper.add(first)
    while not stepper.scheduler.is_idle:
        stepper.step()
    stepper.add(second)

    def interrupted(plan: Plan) -> torch.Tensor:
        assert plan.copies
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(house.draft_model.model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stepper.step()
    stepper.drop_kv()
    draft = house.draft_model.begin_draft(second)
    for _ in range(len(cache._pool.free) + 2):  # the last page of the first, and the source
        cache.append_page(draft)
    house.draft_model.end_draft(draft)
    while not stepper.scheduler.is_idle:
        stepper.step()
    assert second.tokens == first.tokens


@settings(max_examples=examples(50), deadline=None)
@given(
    arrivals=st.lists(arrivals, min_size=2, max_size=10),
    seed=st.integers(0, 2**16),
    drafts=st.sampled_from(["none", "model", "often right"]),
    drafted=st.none() | st.integers(1, 100),
)
def test_kv_of_an_interrupted_step_is_computed_again(
    arrivals: list[Arrival], seed: int, drafts: str, drafted: int | None
) -> None:
    """Whichever model it is interrupted in, whose copies are not carried out."""
    house = House(pages=20, rows=6, budget=16, mixed=8, seed=seed, drafts=drafts, drafted=drafted)
    chance, step = random.Random(seed), house.stepper.step

    def interrupted(forward: Callable[[Plan], torch.Tensor]) -> Callable[[Plan], torch.Tensor]:
        def either(plan: Plan) -> torch.Tensor:
            if chance.random() < (0.4 if plan.copies else 0.05):
                raise KeyboardInterrupt
            return forward(plan)

        return either

    def recovered(prompts_first: bool = False) -> list[Output]:
        try:
            return step(prompts_first)
        except KeyboardInterrupt:
            house.stepper.drop_kv()
            return []

    for model in (house.model, house.draft_model.model):
        model.forward = interrupted(model.forward)  # type: ignore[method-assign, assignment]
    house.stepper.step = recovered  # type: ignore[method-assign]
    for _ in house.steps(arrivals):
        pass


@pytest.mark.parametrize("negative", [9, CONTRAST], ids=["cfg", "contrastive"])
@pytest.mark.parametrize("drafts", ["model", "often right"])
def test_drafts_are_accepted_and_rejected_in_both_sequences(drafts: str, negative: int) -> None:
    house = House(pages=40, rows=6, budget=40, mixed=8, seed=1, drafts=drafts)
    house.source.random = lambda: 0.9  # type: ignore[method-assign]
    for number in range(6):
        house.arrive(number, (12, negative, 20, False))
    while not house.stepper.scheduler.is_idle:
        house.step()
    assert house.num_finished == 6
    if drafts == "model":
        [counts] = house.stepper.speculator.counts.values()
        assert counts.accepted > 20
    else:
        assert isinstance(house.stepper.speculator, Drafting)
        assert sum(house.stepper.speculator.accepted) > 20


@pytest.mark.parametrize("negative", [9, CONTRAST], ids=["cfg", "contrastive"])
def test_a_draft_not_finite_in_the_companion_is_decoded_again(negative: int) -> None:
    """Its owner is preempted, and has the same answer; the others are not concerned, also where
    logits of theirs were left out of the step.
    """
    house = House(pages=40, rows=6, budget=40, mixed=8, seed=1, drafts="often right")
    house.source.random = lambda: 0.9  # type: ignore[method-assign]
    house.arrive(0, (12, negative, 24, False))
    spoilt = house.live["0"].companion
    for _ in range(3):
        house.step()
    for number in (1, 2, 3):  # rows behind its own
        house.arrive(number, (12, negative if number == 3 else -1, 24, False))
    model = house.draft_model.model if negative == CONTRAST else house.model
    queues = house.stepper.scheduler.queues

    def due(plan: Plan) -> bool:
        drafts = dict(zip(map(id, plan.decode), plan.drafts, strict=False))
        return bool(drafts.get(id(spoilt))) and len(queues.decoding) > 3 - queues.num_preemptions > 0

    def spoiled(plan: Plan) -> list[Request]:
        if looked_at[0] is not plan:
            looked_at[:] = plan, due(plan)
        return [spoilt] if spoilt is not None and looked_at[1] else []

    looked_at: list[Any] = [None, False]
    model.spoiled = spoiled  # type: ignore[method-assign]
    while not house.stepper.scheduler.is_idle:
        house.step()
    assert (queues.num_preemptions, house.num_finished) == (3, 4)


def answer_after(tokens: list[int]) -> int:
    return answer(tokens, 1)[0]


@settings(max_examples=examples(200), deadline=None)
@given(
    arrivals=st.lists(arrivals, min_size=1, max_size=10),
    pages=st.integers(8, 20),
    rows=st.integers(1, 6),
    budget=st.integers(1, 40),
    mixed=st.integers(1, 8),
    seed=st.integers(0, 2**16),
    drafts=st.sampled_from(["none", "model", "often right"]),
    drafted=st.none() | st.integers(1, 100),
)
def test_a_companion_is_computed_and_freed_with_its_owner(
    arrivals: list[Arrival],
    pages: int,
    rows: int,
    budget: int,
    mixed: int,
    seed: int,
    drafts: str,
    drafted: int | None,
) -> None:
    house = House(pages, rows, budget, mixed, seed, drafts=drafts, drafted=drafted)
    scheduler = house.stepper.scheduler
    for _ in house.steps(arrivals):
        pass
    assert scheduler.cache.num_available == pages
    assert not house.live


@settings(max_examples=examples(100), deadline=None)
@given(
    arrivals=st.lists(arrivals, min_size=2, max_size=9),
    pages=st.integers(12, 20),
    rows=st.integers(1, 6),
    steps=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)
def test_hashes_are_of_the_weights_that_compute(
    arrivals: list[Arrival], pages: int, rows: int, steps: int, seed: int
) -> None:
    house = House(pages, rows, budget=16, mixed=8, seed=seed)
    stepper = house.stepper
    stepper.weights = WeightVersion()
    left = list(enumerate(arrivals))
    while left:
        for arrival in left[:3]:
            house.arrive(*arrival)
        del left[:3]
        for _ in range(steps):
            if not stepper.scheduler.is_idle:
                house.step()
        stepper.shut_gate()  # those that have only waited come in with the new weights
        stepper.change_weights(lambda: None, WeightVersion(stepper.weights.number + 1))
        stepper.open_gate()
        for sequence in (one for request in stepper.scheduler.queues.live for one in request.sequences):
            assert sequence.weights is stepper.weights
            assert not sequence.block_hashes, f"{sequence.id} has hashes of other weights"
