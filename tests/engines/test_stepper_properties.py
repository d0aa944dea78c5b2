"""The whole step under all that happens to it at once: every request ends once, with the tokens of
an engine that nothing happens to, and leaves nothing behind.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from backtracking_world import Spelled
from effort import examples
from engine_doubles import Drafting
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kv_doubles import END, FIRST, WIDTH, Listener, RecallModel, answer, next_token
from speculation_runs import Repeating

from adapters.catalog import Catalog, Requested, Selection
from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors.phrase_ban import PhraseBan
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest
from worker.engines.chain_builder import ChainBuilder
from worker.engines.embedded.admission import admit
from worker.engines.embedded.draft_model import DraftModel
from worker.engines.embedded.kv_cache import KvCache
from worker.engines.embedded.logits_tap import LogitsTap
from worker.engines.embedded.plan import Edits, Output, Plan, Request, Samples
from worker.engines.embedded.sampling.sampler import Sampler
from worker.engines.embedded.scheduler import Scheduler
from worker.engines.embedded.scored_rows import show_scored
from worker.engines.embedded.speculation import DraftModelProposer
from worker.engines.embedded.step import Stepper
from worker.engines.embedded.turns import Turns
from worker.engines.weights import WeightVersion
from worker.sampling import SamplingParams

CONTEXT, PAGE, BLOCK = 64, 8, 4
KINDS = ("plain", "scored", "cfg", "contrastive", "phrase_ban")
SCORED = ("scored", "phrase_ban")
"""Kinds of requests whose prompts are scored."""
BUILDER = ChainBuilder(Catalog.default(), Context(Vocabulary(WIDTH)))
LETTERS = Vocabulary(WIDTH, Spelled([b"abc"[token % 3 : token % 3 + 1] for token in range(WIDTH)]), [END])  # type: ignore[arg-type]


class Chance:
    """What may go wrong in a step, and how often."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.interrupts = self.defects = self.spoils = 0.0

    def __call__(self, share: float) -> bool:
        return self.source.random() < share


class Troubled(RecallModel):
    """Scores prompts; is interrupted, and finds tokens that are not finite, by chance."""

    def __init__(self, chance: Chance, version: int = 0) -> None:
        super().__init__(CONTEXT)
        self.chance = chance
        self.first = FIRST + version
        self.budget = CONTEXT
        self.found_bad: list[Request] = []
        self._looked_at: Plan | None = None

    def forward(self, plan: Plan) -> torch.Tensor:
        self._may_be_interrupted()
        assert plan.num_tokens <= self.budget, "drafts exceed the token budget"
        logits = super().forward(plan)
        if plan.scored:
            show_scored(plan, torch.tensor(self.computed), one_hot)
        self._may_be_interrupted()
        return logits

    def late_logits(self, rows: Sequence[int]) -> torch.Tensor:
        self._may_be_interrupted()
        return super().late_logits(rows)

    def spoiled(self, plan: Plan) -> list[Request]:  # type: ignore[override]
        if plan is not self._looked_at:
            owners = {id(one): one for one in plan.owners()}.values()
            self._looked_at, self.found_bad = plan, [one for one in owners if self.chance(self.chance.spoils)]
        return self.found_bad

    def _may_be_interrupted(self) -> None:
        if self.chance(self.chance.interrupts):
            raise KeyboardInterrupt


class Defective(Sampler):
    """Fails now and then where it samples several rows, or is interrupted."""

    def __init__(self, chance: Chance) -> None:
        super().__init__(WIDTH, ())
        self.chance = chance

    def sample(self, logits: torch.Tensor, edits: Edits, plan: Plan, *others: Any) -> Samples:
        if self.chance(self.chance.interrupts):
            raise KeyboardInterrupt
        if len(plan.sampled) > 1 and self.chance(self.chance.defects):
            logits.fill_(torch.nan)
            raise IndexError("a defect")
        return super().sample(logits, edits, plan, *others)


class Scores(LogitsTap):
    """A tap that keeps the most likely token behind each one of a prompt."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.found: list[int] = []

    @property
    def wants_prompt(self) -> bool:
        return len(self.found) < self.length

    def see_prompt(self, start: int, logits: torch.Tensor) -> None:
        rows = logits.argmax(-1).tolist()[: self.length - start] if start < self.length else []
        assert start <= len(self.found)
        self.found += rows[len(self.found) - start :]

    def start_over(self) -> None:
        self.found = []

    def see_generated(self, position: int, logits: torch.Tensor) -> None:
        raise AssertionError("nothing was asked for")


def one_hot(kv: torch.Tensor) -> torch.Tensor:
    tokens = torch.tensor([next_token(each) for each in kv.tolist()], dtype=torch.long)
    return torch.nn.functional.one_hot(tokens, WIDTH).float()


class House:
    """A stepper, and what its requests have said."""

    def __init__(
        self, pages: int, rows: int, seed: int = 0, drafts: str = "none", version: int = 0, budget: int = 24
    ) -> None:
        self.chance = chance = Chance(seed)
        self.model = Troubled(chance, version)
        self.model.allocate_kv(pages, PAGE)
        self.model.budget = max(budget, rows)
        self.draft_model = DraftModel(
            Troubled(chance),  # type: ignore[arg-type]
            num_drafted=rows if drafts == "model" else 0,
            num_companions=rows // 2,
            context_length=CONTEXT,
            page_size=PAGE,
            block_size=BLOCK,
            num_tokens=8 * pages,
        )
        cache, turns = KvCache(pages, PAGE, BLOCK), Turns(lambda: 0.0)
        scheduler = Scheduler(cache, rows, max(budget, rows), 8, turns, self.draft_model)
        named = {"method": "draft_model", "model": "unused"} if drafts == "model" else {}
        proposer = partial(DraftModelProposer, self.draft_model) if drafts == "model" else None
        speculator = Drafting(self.often_right) if drafts == "often right" else Repeating(named, proposer)
        speculator._clock = lambda: 0.0
        self.stepper = Stepper(self.model, scheduler, speculator)  # type: ignore[arg-type]
        self.stepper.sampler._sampler = Defective(chance)
        self.stepper.weights = WeightVersion(version, str(version))
        self.may_fail: set[str] = set()
        self.said: dict[str, list[Output]] = {}

    def often_right(self, request: Request) -> list[int]:
        length, count = request.prompt_length, len(request.tokens) - request.prompt_length
        source = self.chance.source
        right = answer(request.tokens[:length], count + source.randrange(5), self.model.first)[count:]
        return right + [source.randrange(3, WIDTH) for _ in range(source.randrange(3))]

    def request(self, name: str, kind: str, prompt: list[int], count: int, generated: Sequence[int] = ()) -> Request:
        asked = EngineRequest(name, prompt, SamplingParams(max_tokens=count), generated_token_ids=generated)
        if kind in ("cfg", "contrastive"):
            args = {"scale": 2.0, "negative_token_ids": prompt[-7:]} if kind == "cfg" else {}
            context = BUILDER.context(frozenset({END}), 0, count)
            asked = BUILDER.prepare(asked, Selection((Requested(kind, args),)), context)
        if kind == "phrase_ban":
            context = Context(LETTERS, frozenset({END}))
            banned = PhraseBan(PhraseBan.Args(phrases=["ab", "cac"]), context)
            asked = EngineRequest(name, prompt, asked.params, ProcessorChain([banned], context), generated)
        request = admit(asked, 0, self.model, CONTEXT, draft_model=self.draft_model)  # type: ignore[arg-type]
        self.stepper.check(request)
        return request

    def step(self, prompts_first: bool = False) -> None:
        self.model.found_bad = self.draft_model.model.found_bad = []  # type: ignore[attr-defined]
        try:
            outputs = self.stepper.step(prompts_first)
        except KeyboardInterrupt:  # as in an offline session
            outputs = self.stepper.recover()
        bad = [*self.model.found_bad, *self.draft_model.model.found_bad]  # type: ignore[attr-defined]
        self.may_fail |= {one.id for one in bad}
        for output in outputs:
            assert output.error is None or output.request_id in self.may_fail, output.error
            self.said.setdefault(output.request_id, []).append(output)

    def finished(self, name: str) -> str | None:
        said = self.said.get(name)
        return None if not said else said[-1].finish_reason

    def tokens(self, name: str) -> list[int]:
        shown = [one.token_id if one.stop_reason is None else one.stop_reason for one in self.said.get(name, ())]
        return [token for token in shown if token is not None]


@cache
def undisturbed(kind: str, prompt: tuple[int, ...], count: int, so_far: tuple[int, ...], version: int) -> list[int]:
    """The rest of an answer behind `so_far`, in an engine of its own, of one version."""
    house = House(40, 4, version=version)
    house.stepper.add(house.request("one", kind, list(prompt), count, so_far))
    while house.finished("one") is None:
        house.step()
    return house.tokens("one")


class Steps(RuleBasedStateMachine):
    """Requests of every kind come and go while weights change, steps fail and memory is short."""

    @initialize(
        pages=st.integers(16, 24),
        rows=st.integers(2, 6),
        seed=st.integers(0, 2**16),
        drafts=st.sampled_from(["none", "model", "often right"]),
        troubles=st.tuples(*[st.sampled_from([0.0, 0.05])] * 3),
        budget=st.sampled_from([4, 24]),
    )
    def begin(
        self, pages: int, rows: int, seed: int, drafts: str, troubles: tuple[float, float, float], budget: int
    ) -> None:
        self.house = House(pages, rows, seed, drafts, budget=budget)
        chance = self.house.chance
        chance.interrupts, chance.defects, chance.spoils = troubles
        self.router = Listener(self.house.stepper.scheduler.cache)
        self.asked: dict[str, tuple[str, list[int], int]] = {}
        self.requests: dict[str, Request] = {}
        self.gone: set[str] = set()

    @property
    def live(self) -> list[str]:
        return [name for name in self.asked if name not in self.gone and self.house.finished(name) is None]

    @rule(
        kind=st.sampled_from(KINDS),
        family=st.integers(0, 2),
        shared=st.integers(0, 24),
        own=st.integers(1, 8),
        count=st.integers(1, 24),
        client=st.sampled_from([None, "a", "b"]),
    )
    def arrive(self, kind: str, family: int, shared: int, own: int, count: int, client: str | None) -> None:
        name = str(len(self.asked))
        source = random.Random(name)
        prompt = [3 + (family + position * position) % 80 for position in range(shared)]
        prompt += [source.randrange(6, 90) for _ in range(own)]
        request = self.house.request(name, kind, prompt, count)
        if kind in SCORED:
            request.tap = Scores(len(prompt))
        request.client = client
        self.asked[name], self.requests[name] = (kind, prompt, count), request
        self.house.stepper.add(request)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 99))
    def abort(self, number: int) -> None:
        name = self.live[number % len(self.live)]
        output = self.house.stepper.abort(name)
        assert output is not None
        assert (output.request_id, output.finish_reason) == (name, "cancelled")
        assert self.house.stepper.abort(name) is None
        self.gone.add(name)

    @precondition(lambda self: self.house.stepper.scheduler.queues.running)
    @rule(number=st.integers(0, 99))
    def preempt(self, number: int) -> None:
        queues = self.house.stepper.scheduler.queues
        queues.preempt(queues.running[number % len(queues.running)])

    @rule(steps=st.integers(1, 4), prompts_first=st.booleans())
    def step(self, steps: int, prompts_first: bool) -> None:
        for _ in range(steps):
            if self.house.stepper.wait_s == 0:
                self.house.step(prompts_first)
            self.check()

    @rule()
    def pause(self) -> None:
        self.house.stepper.is_paused = True

    @rule()
    def shut_gate(self) -> None:
        self.house.stepper.shut_gate()

    @rule()
    def open_gate(self) -> None:
        self.house.stepper.open_gate()

    @rule()
    def give_up_kv(self) -> None:
        self.house.stepper.drop_kv()

    @rule()
    def change_weights(self) -> None:
        house = self.house
        assert house.stepper.weights is not None
        version = house.stepper.weights.number + 1

        def change() -> None:
            house.model.first = FIRST + version

        house.stepper.change_weights(change, WeightVersion(version, str(version)))
        house.may_fail.clear()

    def check(self) -> None:
        scheduler = self.house.stepper.scheduler
        scheduler.check_integrity()
        scheduler.cache.check_blocks()
        self.house.draft_model.cache.check_blocks()
        self.router.check()

    def teardown(self) -> None:
        if not hasattr(self, "house"):
            return
        stepper = self.house.stepper
        stepper.open_gate()
        for _ in range(20_000):
            if stepper.scheduler.is_idle:
                break
            self.house.step()
            self.check()
        assert not self.live, f"not ended: {stepper.scheduler!r}"
        left = (stepper._held._held, stepper._tapped, stepper.sampler._suspects)
        assert not any(left), f"left behind: {left}"
        assert stepper.scheduler.cache.num_available == stepper.scheduler.cache.num_pages
        for name in self.asked:
            self.check_answer(name)

    def check_answer(self, name: str) -> None:
        (kind, prompt, count), house = self.asked[name], self.house
        said, tokens = house.said.get(name, []), house.tokens(name)
        ends = [output.finish_reason for output in said if output.finish_reason is not None]
        assert len(ends) == (name not in self.gone), f"request {name} ended {len(ends)} times"
        if ends == ["error"]:
            assert "NaN" in str(said[-1].error)
            if kind == "phrase_ban":
                return  # tokens that might have been rewound are sent with the error
        named = [output.weights for output in said if output.weights is not None]
        assert not tokens or named[0][0] == 0
        stops = [*[first for first, _ in named], len(tokens)][1:]
        for (first, version), stop in zip(named, stops, strict=True):
            wanted = undisturbed(kind, tuple(prompt), count, tuple(tokens[:first]), version.number)
            assert tokens[first:stop] == wanted[: stop - first]
        if ends in (["stop"], ["length"]):
            assert stops[-1] - named[-1][0] == len(wanted), f"request {name} is too short"
        if kind in SCORED and tokens:
            tap = self.requests[name].tap
            assert isinstance(tap, Scores)
            first_of_all = FIRST + named[0][1].number
            assert tap.found == [answer(prompt[: end + 1], 1, first_of_all)[0] for end in range(len(prompt))]


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=examples(1000), stateful_step_count=30, deadline=None)
