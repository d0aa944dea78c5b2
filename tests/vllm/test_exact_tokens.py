"""The class alone: every token of vLLM's is the one that a fresh chain chooses from its own logits.

`test_golden_in_vllm` has the same of the worker's engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import pytest
from engine import Recording, default_model, facts_of, generate, num_preemptions, params, replayed, running
from golden_cases import FIELDS, Case, Cases
from vllm import LLM, SamplingParams

from adapters.processors import BUILTINS
from adapters.vllm.model import ServedModel
from adapters.vllm.requests import chain_of, read

NUM_TOKENS = 8
NUM_TOKENS_LONG = 24
NUM_BATCHED = 32
REFUSED = {"cfg", "contrastive", "phrase_ban"}


def cases_of(llm: LLM, num_tokens: int) -> list[Case]:
    """Every processor with arguments that act, greedy and seeded, but for what is refused."""
    maker = Cases(facts_of(llm).context.vocabulary, num_tokens, is_short=True)
    plain = maker.plain()
    answer = generate(llm, [plain.prompt], [SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)])[0]
    found = [case for case in maker.all(answer) if case.row not in FIELDS and case.row not in REFUSED]
    assert {case.row for case in found} >= {each.name for each in BUILTINS} - REFUSED
    return found


def asked_of(case: Case, number: int) -> SamplingParams:
    fields = {"max_tokens": case.max_tokens, **case.sampling_options}
    fields.pop("seed" if case.sampling == "greedy" else "", None)
    return params(*case.processors, report=str(number), **fields)


def compare(llm: LLM, cases: Sequence[Case], asked: Sequence[SamplingParams], answers: Sequence[Sequence[int]]) -> None:
    """Every token must be the one of a fresh chain."""
    model, wrong = facts_of(llm), {}
    for number, (case, answer) in enumerate(zip(cases, answers, strict=True)):
        expected = replayed(model, case.prompt, asked[number], answer, str(number))
        if list(answer) != expected:
            wrong[str(case)] = (answer, expected)
    assert not wrong
    assert all(answers)


def test_each_processor_in_a_batch_of_sixty_four() -> None:
    with running(default_model(), max_num_seqs=64) as llm:
        cases = cases_of(llm, NUM_TOKENS)
        Recording.raw.clear()
        asked = [asked_of(case, number) for number, case in enumerate(cases)]
        compare(llm, cases, asked, generate(llm, [case.prompt for case in cases], asked))
        assert Recording.most_rows == 64


def draws(case: Case, model: ServedModel) -> bool:
    """Whether the chain draws the token without a seed of the request."""
    asked = asked_of(case, 0)
    asked.seed = None
    found = read(asked, model)
    return found is not None and chain_of(found, asked, model)[1]


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    """An engine that computes prompts in chunks, and has KV for some of its requests only."""
    with running(
        default_model(),
        max_num_batched_tokens=NUM_BATCHED,
        num_gpu_blocks_override=9,
        max_model_len=192,
        enable_prefix_caching=False,
    ) as found:
        yield found


def test_each_processor_in_chunks_and_preempted(small: LLM) -> None:
    """Preempted where the KV cache is full, and all of them at every sixth step."""
    model, engine = facts_of(small), small.llm_engine
    found = [case for case in cases_of(small, NUM_TOKENS_LONG) if case.sampling == "greedy" or draws(case, model)]
    assert all(len(case.prompt) > NUM_BATCHED for case in found)
    asked = [asked_of(case, number) for number, case in enumerate(found)]
    for each in asked:  # vLLM's engine ends on a seed in chunks of a prompt, on a CPU; the chain draws one itself
        each.seed = None
    Recording.raw.clear()
    for number, (case, each) in enumerate(zip(found, asked, strict=True)):
        engine.add_request(str(number), {"prompt_token_ids": list(case.prompt)}, each)
    answers: dict[int, list[int]] = {}
    for step in count(1):
        for output in engine.step():
            answers[int(output.request_id)] = list(output.outputs[0].token_ids)
        if not engine.has_unfinished_requests():
            break
        if step % 6 == 0:
            engine.reset_prefix_cache(reset_running_requests=True)
    compare(small, found, asked, [answers[number] for number in range(len(found))])
    assert num_preemptions(small) > len(found)
    assert len(Recording.resumed) > len(found) / 4
