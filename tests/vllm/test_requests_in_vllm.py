"""Refusals, failures, aborts, stop strings and several answers, on the engine in this process."""

from __future__ import annotations

from typing import Any

import pytest
from engine import Recording, facts_of, generate, params, replayed, selected
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from adapters.vllm.reports import REPORTS

FATIGUE = {"name": "dynamo/fatigue"}
MIROSTAT = {"name": "mirostat"}
PROMPT = list(range(400, 420))


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"name": "json_schema", "args": {"schema": value}}


@pytest.mark.parametrize(
    ("processor", "problem"),
    [
        ({"name": "nope"}, r"logits_processors\.processors\[0\]\.name: "),
        (schema({"type": "nonsense"}), r"logits_processors\.processors\[0\]\.args\.schema"),
        ({"name": "regex", "args": {"pattern": "(a|b"}}, r"logits_processors\.processors\[0\]\.args\.pattern"),
        ({"name": "phrase_ban", "args": {"phrases": ["the"]}}, r"phrase_ban takes tokens back.*use .*embedded engine"),
        ({"name": "cfg", "args": {"scale": 2}}, r"cfg needs a second row of logits.*use .*embedded engine"),
        ({"name": "contrastive"}, r"contrastive needs a second row of logits.*use .*embedded engine"),
        ({"name": "top_k", "args": {"k": "many"}}, r"logits_processors\.processors\[0\]\.args\.k"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_admission(llm: LLM, processor: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, VLLMValidationError), match=problem):
        llm.generate("x", params(processor), use_tqdm=False)


BOMBS = [
    {"name": "regex", "args": {"pattern": "((a{1,300}){1,300}){1,300}"}},
    schema({"type": "integer", "multipleOf": 99999989}),
    schema({"type": "array", "items": {"type": "integer", "multipleOf": 99999971}}),
]


@pytest.mark.parametrize("bomb", BOMBS, ids=["regex", "schema", "items"])
def test_a_grammar_that_explodes_is_refused_and_others_go_on(llm: LLM, bomb: dict[str, Any]) -> None:
    with pytest.raises((ValueError, VLLMValidationError), match=r"logits_processors\.processors\[0\]"):
        llm.generate("x", params(bomb), use_tqdm=False)
    output = llm.generate("Yes or no?", params({"name": "choice", "args": {"choices": ["yes", "no"]}}), use_tqdm=False)
    assert output[0].outputs[0].text in {"yes", "no"}


def test_a_failing_processor_ends_its_own_request_only(llm: LLM) -> None:
    """The engine's kernels depend on the batch; what the neighbours' chains did to it does not."""
    REPORTS.take_failures()
    Recording.raw.clear()
    fields = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    asked = [params({"name": "acme/raises"}, report="bad", **fields)]
    asked += [params(each, report=str(n), **fields) for n, each in enumerate([FATIGUE, MIROSTAT] * 4)]
    answers = generate(llm, [PROMPT] * len(asked), asked)
    model = facts_of(llm)
    end_id = min(model.context.vocabulary.eos_token_ids)
    assert answers[0][2:] == [end_id] * 10
    for number, answer in enumerate(answers[1:]):
        assert answer == replayed(model, PROMPT, asked[number + 1], answer, str(number))
    (failure,) = REPORTS.take_failures()
    assert (failure["report"], failure["processor"], failure["position"]) == ("bad", "acme/raises", len(PROMPT) + 2)


def test_a_failed_request_stops_at_its_end_token(llm: LLM) -> None:
    output = llm.generate("Once", params({"name": "acme/raises"}, temperature=0.0, max_tokens=50), use_tqdm=False)
    answer = output[0].outputs[0]
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) <= 3


def test_an_aborted_request_leaves_the_others_theirs(llm: LLM) -> None:
    engine = llm.llm_engine
    Recording.raw.clear()
    asked = [params(MIROSTAT, report=str(n), seed=n, max_tokens=12, ignore_eos=True) for n in range(6)]
    names = [engine.add_request(f"abort-{n}", {"prompt_token_ids": PROMPT}, each) for n, each in enumerate(asked)]
    for _ in range(4):
        engine.step()
    engine.abort_request([str(names[1]), str(names[4])])
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    model = facts_of(llm)
    for number in (0, 2, 3, 5):
        answer = found[f"abort-{number}"]
        assert len(answer) == 12
        assert answer == replayed(model, PROMPT, asked[number], answer, str(number))


@pytest.mark.parametrize("seed", [None, 5])
def test_several_answers_differ_and_have_chains_of_their_own(llm: LLM, seed: int | None) -> None:
    asked = params(MIROSTAT, {"name": "no_repeat_ngram", "args": {"n": 1, "over": "generated"}}, n=20, seed=seed)
    (output,) = llm.generate("Once", asked, use_tqdm=False)
    answers = [tuple(each.token_ids) for each in output.outputs]
    assert len(answers) == 20
    assert len(set(answers)) > 15
    assert all(len(set(answer)) == len(answer) for answer in answers)


def test_a_seed_gives_the_same_answer_again(llm: LLM) -> None:
    asked = [params({"name": "xtc", "args": {"threshold": 0.1, "probability": 0.5}}, seed=3) for _ in range(2)]
    first, second = (generate(llm, [PROMPT], [each])[0] for each in asked)
    assert first == second


def test_plain_requests_beside_processors_are_vllms_own(llm: LLM) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=8)
    choice = params({"name": "choice", "args": {"choices": ["yes", "no"]}}, temperature=0.0)
    outputs = llm.generate(["Hello", "Yes or no?"], [plain, choice], use_tqdm=False)
    assert outputs[1].outputs[0].text in {"yes", "no"}
    assert len(outputs[0].outputs[0].token_ids) == 8


def test_a_client_cannot_plant_rows(llm: LLM) -> None:
    processors = [{"name": "choice", "args": {"choices": ["yes", "no"]}}]
    extra = {**selected(*processors), "logits_processors_rows": ["planted"]}
    output = llm.generate("Yes?", SamplingParams(extra_args=extra, temperature=0.0), use_tqdm=False)
    assert output[0].outputs[0].text in {"yes", "no"}
