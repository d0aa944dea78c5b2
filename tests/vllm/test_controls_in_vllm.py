"""vLLM's own controls beside processors: each does what it says, and neither undoes the other."""

from __future__ import annotations

from typing import Any

import pytest
from engine import Recording, facts_of, generate, params, replayed
from vllm import LLM, SamplingParams

from adapters.vllm.reports import REPORTS

PROMPT = list(range(400, 420))
END = 0
"""SmolLM2's end token in generation_config.json."""

BIAS = {"name": "logit_bias", "args": {"bias": {"500": 4.0, "501": 4.0}}}
FORCED = {"name": "forced_sequence", "args": {"text": "one two three four"}}


def forced(llm: LLM, **fields: Any) -> tuple[str, str | None, int | str | None]:
    """Text, finish reason and stop reason of an answer whose text is forced."""
    output = llm.generate("Count:", params(FORCED, max_tokens=30, temperature=0.0, **fields), use_tqdm=False)
    answer = output[0].outputs[0]
    return answer.text, answer.finish_reason, answer.stop_reason


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"stop": [" three"]}, ("one two", "stop", " three")),
        ({"stop": ["wo thr"]}, ("one t", "stop", "wo thr")),
        ({"stop": ["wo thr"], "include_stop_str_in_output": True}, ("one two thr", "stop", "wo thr")),
        ({"stop": [" two", " four"], "min_tokens": 3}, ("one two three", "stop", " four")),
        ({"stop": ["five"]}, ("one two three four", "stop", END)),
    ],
    ids=["at a token", "across tokens", "included", "not before min_tokens", "elsewhere"],
)
def test_stop_strings_end_forced_text(llm: LLM, fields: dict[str, Any], answer: tuple[Any, ...]) -> None:
    assert forced(llm, **fields) == answer


def test_an_end_that_min_tokens_rules_out_is_a_failure(llm: LLM) -> None:
    """vLLM masks end tokens until then, before processors: what is forced cannot be had."""
    REPORTS.take_failures()
    assert forced(llm, min_tokens=12, report="early") == ("one two three four", "stop", END)
    (failure,) = REPORTS.take_failures()
    assert (failure["report"], failure["reason"]) == ("early", "unsatisfiable")


@pytest.mark.parametrize("number", [0, 1, 5])
def test_log_probabilities_are_counted_and_raw(llm: LLM, number: int) -> None:
    """As many as asked for, and the token's own; a processor's edits are not in them."""
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logprobs": number}
    plain = llm.generate("Once", SamplingParams(**fields), use_tqdm=False)[0].outputs[0]
    banned = {"name": "banned_tokens", "args": {"token_ids": [plain.token_ids[0]]}}
    masked = llm.generate("Once", params(banned, **fields), use_tqdm=False)[0].outputs[0]
    assert masked.token_ids[0] != plain.token_ids[0]
    for answer in (plain, masked):
        assert answer.logprobs is not None
        assert len(answer.logprobs) == 6
        for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
            assert token_id in entry
            assert len(entry) == number + (entry[token_id].rank > number)
    if number:
        first = masked.logprobs[0]
        assert first[plain.token_ids[0]].rank == 1
        assert first[masked.token_ids[0]].rank == 2


def test_prompt_log_probabilities_with_a_cached_prefix(llm: LLM) -> None:
    prompt: Any = {"prompt_token_ids": list(range(1000, 1100))}
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 2}
    llm.generate(prompt, params(BIAS, **fields), use_tqdm=False)
    first, second = (
        llm.generate(prompt, params(BIAS, prompt_logprobs=3, **fields), use_tqdm=False)[0] for _ in range(2)
    )
    cached = llm.generate(prompt, params(BIAS, **fields), use_tqdm=False)[0]
    assert cached.num_cached_tokens
    for output in (first, second):
        entries = output.prompt_logprobs
        assert entries is not None
        assert entries[0] is None
        assert len(entries) == 100
        for token_id, entry in zip(range(1001, 1100), entries[1:], strict=True):
            assert entry is not None
            assert token_id in entry
    assert first.prompt_logprobs == second.prompt_logprobs


ALLOWED = [500, 501, 502, 503, 504]

BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bad_words": ({"bad_words": [" the", " a"]}, {"name": "presence_penalty", "args": {"penalty": 0.5}}),
    "allowed_token_ids": ({"allowed_token_ids": ALLOWED}, {"name": "banned_tokens", "args": {"token_ids": [500, 502]}}),
    "logit_bias": ({"logit_bias": {500: 60.0, 501: 60.0}}, {"name": "banned_tokens", "args": {"token_ids": [500]}}),
    "penalties": (
        {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4},
        {"name": "banned_tokens", "args": {"token_ids": [28]}},
    ),
    "penalties and a late processor": (
        {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4},
        {"name": "xtc", "args": {"threshold": 0.1, "probability": 0.5}},
    ),
    "truncation and a late processor": ({"top_k": 12, "top_p": 0.9, "min_p": 0.02}, {"name": "mirostat"}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_field_beside_a_processor(llm: LLM, name: str) -> None:
    """Both hold, in eight requests at once, and a fresh chain chooses the same tokens."""
    fields, processor = BESIDE[name]
    Recording.raw.clear()
    asked = [params(processor, report=str(n), seed=n, max_tokens=10, ignore_eos=True, **fields) for n in range(8)]
    answers = generate(llm, [PROMPT] * 8, asked)
    model = facts_of(llm)
    for number, answer in enumerate(answers):
        assert answer == replayed(model, PROMPT, asked[number], answer, str(number))
    tokens = {token_id for answer in answers for token_id in answer}
    if "bad_words" in fields:
        words = {llm.get_tokenizer().decode([token_id]) for token_id in tokens}
        assert not words & {" the", " a"}
    if "allowed_token_ids" in fields:
        assert tokens <= {501, 503, 504}
    if "logit_bias" in fields:
        assert tokens == {501}


@pytest.mark.parametrize("fields", [{"repetition_penalty": 1.5}, {"frequency_penalty": 1.2, "presence_penalty": 0.8}])
def test_vllms_penalties_are_those_of_the_processors(llm: LLM, fields: dict[str, Any]) -> None:
    """Greedy: vLLM applies its own fields in one request, and processors do in the other."""
    more: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    named = [{"name": name, "args": {"penalty": value}} for name, value in fields.items()]
    asked = [SamplingParams(**fields, **more), params(*named, **more), SamplingParams(**more)]
    own, ours, plain = (generate(llm, [PROMPT], [each])[0] for each in asked)
    assert own == ours != plain


def test_a_seed_draws_the_same_whatever_runs_beside(llm: LLM) -> None:
    """The logits are made equal, so that nothing is left of what vLLM computes differently."""
    fixed = {"name": "acme/fixed"}
    fields: dict[str, Any] = {"temperature": 1.5, "top_p": 0.95, "max_tokens": 12, "ignore_eos": True}
    asked = [params(fixed, seed=seed, **fields) for seed in (7, 8)]
    alone = [generate(llm, [PROMPT], [each])[0] for each in asked]
    others = [params(BIAS, **fields) for _ in range(7)]
    prompts = [PROMPT[number:] for number in range(16)]
    batched = generate(llm, prompts, [*others, asked[0], *others, asked[1]])
    assert [batched[7], batched[15]] != [alone[0], alone[1]]  # the position is part of the draw
    again = generate(llm, [PROMPT] * 16, [*others, asked[0], *others, asked[1]])
    assert [again[7], again[15]] == alone
    assert alone[0] != alone[1]


def test_four_seeded_answers_differ_and_come_again(llm: LLM) -> None:
    asked = params({"name": "acme/fixed"}, n=4, seed=11, temperature=1.0, max_tokens=12, ignore_eos=True)

    def answers() -> list[tuple[int, ...]]:
        (output,) = llm.generate("Once", asked.clone(), use_tqdm=False)
        return [tuple(each.token_ids) for each in output.outputs]

    first = answers()
    assert len(set(first)) == 4
    assert answers() == first
