"""A chain that is replayed on the logits of its answer has the state that it had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from backtracking_world import PROMPT as WORLD_PROMPT
from backtracking_world import World
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chain import ProcessorChain
from adapters.contract import Context, ProcessorArgs, Reads, ShapingProcessor, Stage
from adapters.processors.stochastic import Mirostat
from adapters.third_party import third_party_processor
from adapters.vocabulary import Vocabulary
from worker.engines.embedded.plan import Plan, Request
from worker.engines.embedded.sampling import Sampler
from worker.engines.embedded.sampling.chain_replay import resume
from worker.engines.embedded.step import plan_edits
from worker.sampling import SamplingParams

SIZE, NEVER, PROMPT = 40, (7, 36, 37, 38, 39), [1, 2]
CONTEXT = Context(Vocabulary(SIZE))
MODEL: Any = SimpleNamespace(vocab_size=SIZE, undecodable_ids=NEVER)


class Flattens(ShapingProcessor):
    """A third party's, which leaves the ids that are no token a value of its own."""

    name = "acme/flattens"
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def __init__(self, stage: Stage) -> None:
        self.stage = stage  # type: ignore[misc]

    def shape(self, logits: torch.Tensor) -> None:
        logits.clamp_(1.0, 2.0)


class SumsTails:
    """A Dynamo processor whose state is made of the logits of ids that are no token."""

    def __init__(self) -> None:
        self.sum = 0.0

    def __call__(self, input_ids: list[int], logits: torch.Tensor) -> None:
        self.sum += float(logits.softmax(-1)[36:].sum())
        logits[3] += self.sum


def chain_of(stage: Stage) -> ProcessorChain:
    mirostat = Mirostat(Mirostat.Args(tau=3.0, eta=0.9), CONTEXT)
    return ProcessorChain(
        [Flattens(stage), mirostat, third_party_processor(SumsTails, stage=Stage.TRUNCATION)], CONTEXT
    )


def request_of(stage: Stage, generated: list[int]) -> Request:
    tokens, chain = [*PROMPT, *generated], chain_of(stage)
    chain.start(PROMPT)
    params = SamplingParams(temperature=1.0)
    return Request("one", 0, params, tokens, len(PROMPT), 64, frozenset(), seed=11, chain=chain)


def states(chain: ProcessorChain | None) -> list[Any]:
    assert chain is not None
    found: list[Any] = []
    for member in chain.members:
        member.processor.catch_up()
        found.append(getattr(member.processor, "_mus", None))
        found.append(getattr(getattr(member.processor, "_wrapped", None), "sum", None))
    return found


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8), st.sampled_from([Stage.SOFT, Stage.MASK, Stage.TEMPERATURE]))
def test_ids_that_are_no_token_count_in_neither(seed: int, count: int, stage: Stage) -> None:
    logits = 3.0 * torch.randn(count, SIZE, generator=torch.Generator().manual_seed(seed))
    sampler, request = Sampler(SIZE, NEVER), request_of(stage, [])
    assert request.chain is not None
    for row in logits:
        plan = Plan((), (), (request,))
        samples = sampler.sample(row[None].clone(), plan_edits(plan), plan)
        assert not samples.errors
        request.append(samples.token_ids[0])
        request.chain.accept(samples.token_ids[0], request.chain.position)
    resumed = request_of(stage, request.tokens[len(PROMPT) :])
    tap = resume(resumed, MODEL)
    assert tap is not None
    tap.see_prompt(len(PROMPT) - 1, logits)
    assert not tap.wants_prompt
    assert states(resumed.chain) == states(request.chain)


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 10))
def test_tokens_that_were_rewound_are_found_again(seed: int, count: int) -> None:
    """Several at one position, each sampled with a random number of its own."""
    world, size = World("abcdefgh", ["a", "b", "c", "de"], ["f"]), 8
    model: Any = SimpleNamespace(vocab_size=size, undecodable_ids=())
    params = SamplingParams(temperature=1.0)

    def request(tokens: list[int]) -> Request:
        chain = world.chain(others=[Mirostat(Mirostat.Args(tau=2.5, eta=0.9), Context(Vocabulary(size)))])
        return Request("one", 0, params, tokens, len(WORLD_PROMPT), 64, frozenset(), seed=seed, chain=chain)

    logits = 2.0 * torch.randn(count + 64, size, generator=torch.Generator().manual_seed(seed))
    first, sampler = request([*WORLD_PROMPT]), Sampler(size, ())
    assert first.chain is not None
    while len(first.tokens) < len(WORLD_PROMPT) + count or first.chain.held_from is not None:
        plan = Plan((), (), (first,))
        row = logits[len(first.tokens) - len(WORLD_PROMPT)]
        samples = sampler.sample(row[None].clone(), plan_edits(plan), plan)
        assert not samples.errors
        first.append(samples.token_ids[0])
        first.chain.accept(samples.token_ids[0], first.chain.position)
        position = first.chain.rewind_if_asked()
        if position is not None:
            del first.tokens[position:]
    resumed = request([*first.tokens])
    tap = resume(resumed, model)
    assert tap is not None
    tap.see_prompt(len(WORLD_PROMPT) - 1, logits[: len(first.tokens) - len(WORLD_PROMPT)].clone())
    assert states(resumed.chain) == states(first.chain)
