"""A defect of the sampler ends one request: the others' answers are those that they have alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from effort import examples
from engine_doubles import PADDING, WIDTH, Drafting, ScriptedModel, request, stepper
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors.stochastic import Mirostat
from adapters.vocabulary import Vocabulary
from worker.engines.embedded.plan import Edits, Output, Plan, Samples
from worker.engines.embedded.sampling.isolation import IsolatingSampler
from worker.engines.embedded.sampling.sampler import Sampler
from worker.sampling import SamplingParams

CONTROLS: Sequence[dict[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 5, "logprobs": 2, "logprobs_mode": "processed"},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 1.2, "frequency_penalty": 0.5},
)
LENGTH = 12


class Defective(Sampler):
    """Raises where a step samples a token of a request of `to_blame` at `position`, or, without
    one, wherever it samples more than `most` rows; before that it spoils the logits.
    """

    def __init__(self, to_blame: set[str], position: int, most: int) -> None:
        super().__init__(WIDTH, tuple(range(WIDTH - PADDING, WIDTH)))
        self.to_blame, self.position, self.most = to_blame, position, most

    def sample(self, logits: torch.Tensor, edits: Edits, plan: Plan, *_: Any) -> Samples:
        bad = any(one.id in self.to_blame and len(one.tokens) >= self.position for one in plan.sampled)
        if bad or len(plan.sampled) > self.most:
            logits.fill_(torch.nan)
            raise IndexError("a defect")
        return super().sample(logits, edits, plan)


Answers = dict[str, tuple[list[int], list[Any], str | None, str | None]]


def run(
    wanted: dict[str, tuple[list[int], SamplingParams]], sampler: Sampler | None, drafts: Drafting | None
) -> Answers:
    driver = stepper(ScriptedModel(), max_num_seqs=max(4, len(wanted)))
    if sampler is not None:
        driver.sampler._sampler = sampler
    if drafts is not None:
        driver.speculator = drafts
    for name, (prompt, params) in wanted.items():
        driver.add(request(driver.model, name, prompt, params))  # type: ignore[arg-type]
    outputs: list[Output] = []
    for _ in range(400):
        if driver.scheduler.is_idle:
            break
        outputs += driver.step()
        driver.scheduler.check_integrity()
    answers: Answers = {}
    for name in wanted:
        own = [one for one in outputs if one.request_id == name]
        tokens = [one.token_id for one in own if one.token_id is not None]
        logprobs = [one.logprobs for one in own if one.token_id is not None]
        answers[name] = (tokens, logprobs, own[-1].finish_reason, own[-1].error)
    return answers


@settings(max_examples=examples(200))
@given(
    controls=st.lists(st.integers(0, len(CONTROLS) - 1), min_size=1, max_size=5),
    blamed=st.sets(st.integers(0, 4), max_size=2),
    position=st.integers(0, LENGTH + 3),
    most=st.integers(1, 5),
    with_drafts=st.booleans(),
)
def test_others_answer_as_they_do_alone(
    controls: list[int], blamed: set[int], position: int, most: int, with_drafts: bool
) -> None:
    wanted = {
        str(row): ([5, 6, 7 + row], SamplingParams(max_tokens=LENGTH, seed=row, ignore_eos=True, **CONTROLS[one]))
        for row, one in enumerate(controls)
    }
    model = ScriptedModel()
    drafts = Drafting(lambda one: model.greedy(one.tokens, 2)) if with_drafts else None
    to_blame = {str(one) for one in blamed if one < len(controls)}
    found = run(wanted, Defective(to_blame, position, most), drafts)
    for name, (prompt, params) in wanted.items():
        alone = run({name: (prompt, params)}, None, None)[name]
        if name in to_blame and position < len(prompt) + LENGTH:
            sent = max(0, position - len(prompt))
            problem = "its token could not be sampled: IndexError: a defect"
            assert found[name] == (alone[0][:sent], alone[1][:sent], "error", problem)
        else:
            assert found[name] == alone


@pytest.mark.parametrize("aborted", ["", "0", "01"])
def test_rows_are_sampled_together_again(aborted: str) -> None:
    """Once those have ended, or were aborted, that were there when it raised."""
    driver = stepper(ScriptedModel())
    driver.sampler._sampler = Defective(set(), 0, 1)
    short, long = (SamplingParams(max_tokens=count, ignore_eos=True) for count in (3, 30))
    for name in ("0", "1"):
        driver.add(request(driver.model, name, [5, 6], short))  # type: ignore[arg-type]
    driver.step()
    assert driver.sampler._suspects == {"0", "1"}
    for name in aborted:
        assert driver.abort(name) is not None
    while not driver.scheduler.is_idle:
        driver.step()
    driver.sampler._sampler = whole = Counting()
    for name in ("2", "3"):
        driver.add(request(driver.model, name, [5, 6], long))  # type: ignore[arg-type]
    while not driver.scheduler.is_idle:
        driver.step()
    assert set(whole.counts) == {2}


def test_a_suspect_that_ends_leaves_the_others_suspected() -> None:
    sampler = IsolatingSampler(WIDTH, ())
    sampler._sampler = counting = Counting()
    requests = tuple(request(ScriptedModel(), name, [5, 6], SamplingParams(max_tokens=3)) for name in "ab")
    sampler.suspect(requests)
    for ended, counts in (("a", [1, 1]), ("b", [2])):
        sampler.forget([ended])
        counting.counts.clear()
        sampler.sample(torch.zeros(2, WIDTH), Edits(), Plan(requests, (), requests))
        assert counting.counts == counts


class Counting(Sampler):
    """Notes how many rows it samples at once."""

    def __init__(self) -> None:
        super().__init__(WIDTH, ())
        self.counts: list[int] = []

    def sample(self, logits: torch.Tensor, edits: Edits, plan: Plan, *_: Any) -> Samples:
        self.counts.append(len(plan.sampled))
        return super().sample(logits, edits, plan)


def test_a_defect_is_logged_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    run({"one": ([5, 6], params)}, Defective({"one"}, 4, 5), None)
    assert "request one: its token at 4 could not be sampled" in caplog.text
    assert "IndexError: a defect" in caplog.text


def test_processors_that_may_have_followed_the_logits_end() -> None:
    """Mirostat may have seen a row that is computed again; the one to blame is its neighbour."""
    driver = stepper(ScriptedModel())
    driver.sampler._sampler = Defective({"bad"}, 5, 5)
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0)
    for name in ("bad", "follows", "plain"):
        one = request(driver.model, name, [5, 6], params)  # type: ignore[arg-type]
        if name == "follows":
            context = Context(Vocabulary(WIDTH), frozenset({0}), seed=1)
            one.chain = ProcessorChain([Mirostat(Mirostat.Args(), context)], context)
            one.chain.start(one.tokens)
        driver.add(one)
    outputs: list[Output] = []
    while not driver.scheduler.is_idle:
        outputs += driver.step()
    ends = {one.request_id: one.error for one in outputs if one.finish_reason is not None}
    assert ends["plain"] is None
    assert "IndexError: a defect" in str(ends["bad"])
    assert str(ends["follows"]).startswith("sampling failed for it, or for a request beside it")
    assert len([one for one in outputs if one.request_id == "follows" and one.token_id is not None]) == 3
