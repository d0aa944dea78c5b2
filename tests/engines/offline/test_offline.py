"""The offline engine against transformers: texts, ids, log probabilities, several answers, and
what is refused.
"""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from effort import examples
from engine_doubles import END, WIDTH, Drafting, ScriptedModel
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_doubles import END as RECALLED_END
from kv_doubles import RecallModel
from kv_doubles import answer as recalled
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapters import ForcedSequenceProcessor, TemperatureProcessor, create_trtllm_adapters
from adapters.chain import ProcessorChain
from adapters.client import healed
from adapters.contract import Context
from adapters.processors.length import MinTokens
from adapters.vocabulary import Vocabulary
from worker.engines.embedded import Engine, Plan
from worker.engines.embedded.admission import REFUSED
from worker.engines.embedded.drafted_rows import DraftedRows
from worker.engines.embedded.offline.request_builder import HONOURED
from worker.engines.embedded.offline.results import Answer, Result
from worker.engines.embedded.plan import Edits, Output, Samples
from worker.engines.embedded.sampling.prompt_logprobs import LogitsCollector
from worker.engines.embedded.scored_rows import SCORED_AT_ONCE
from worker.errors import InvalidRequest, StartupError
from worker.models import DEFAULT_MODEL, model_cache
from worker.models.checkpoint import FORMAT
from worker.models.default_model import _GGUF_SHA256
from worker.sampling import GuidedDecodingParams, SamplingParams
from worker.tiny_model import write_tiny_model

TEXTS = ["Once upon a time", "What is the capital of France?", "def add(left: int", "Grüße aus Köln"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path]) -> Engine:
    return Engine(checkpoints["llama"], max_num_seqs=4, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def tokenizer(checkpoints: dict[str, Path]) -> Any:
    return AutoTokenizer.from_pretrained(checkpoints["llama"])


@pytest.fixture(scope="module")
def network(checkpoints: dict[str, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoints["llama"], dtype=torch.float32)


def scripted(**settings: Any) -> Engine:
    """Without a tokenizer."""
    return Engine("no-checkpoint", model=ScriptedModel(), **{"max_num_seqs": 4, **settings})


def test_a_healed_prompt_goes_on_with_the_longest_word(engine: Engine, tokenizer: Any) -> None:
    """The boundary at the end of the prompt is the model's choice, its text is not."""
    words = sorted((tokenizer.decode([i]) for i in range(tokenizer.vocab_size)), key=len)
    word = next(text for text in reversed(words) if text[:1] == " " and text[1:].isalpha() and text.isascii())
    prompt = f"Once upon a{word[:-1]}"
    head, entry = healed(prompt)
    assert head == "Once upon a"
    (longer,) = tokenizer.encode(word, add_special_tokens=False)
    for boosts, expected in (({}, word[:-1]), ({longer: 100.0}, word)):
        bias = [{"name": "logit_bias", "args": {"bias": {str(key): value for key, value in boosts.items()}}}]
        (result,) = engine.generate(head, SamplingParams(max_tokens=8), processors=[entry, *(bias if boosts else [])])
        assert result.text is not None
        assert result.text.startswith(expected)
    assert longer in result.token_ids


def drain(engine: Engine) -> list[Result]:
    results = []
    while engine.unfinished:
        results += engine.step()
    return results


def reference_logprobs(network: Any, engine: Engine, tokens: Sequence[int]) -> torch.Tensor:
    """float64 ``[len(tokens), V]``; ids that are never sampled are not likely, but part of the
    whole.
    """
    with torch.no_grad():
        logprobs: torch.Tensor = network(torch.tensor([list(tokens)])).logits[0].double().log_softmax(-1)
    logprobs[:, list(engine.session.stepper.model.undecodable_ids)] = -torch.inf
    return logprobs


def test_texts_and_ids_are_those_of_transformers(engine: Engine, tokenizer: Any, network: Any) -> None:
    results = engine.generate(TEXTS, SamplingParams(max_tokens=12, ignore_eos=True), progress=False)
    for text, result in zip(TEXTS, results, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        never = list(engine.session.stepper.model.undecodable_ids)
        tokens = network.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            suppress_tokens=never,
        )[0, len(ids) :].tolist()
        assert (result.prompt, result.prompt_token_ids) == (text, ids)
        assert (result.token_ids, result.finish_reason) == (tokens, "length")
        assert result.text == tokenizer.decode(tokens, skip_special_tokens=True)
    by_ids = engine.generate([one.prompt_token_ids for one in results], SamplingParams(max_tokens=12, ignore_eos=True))
    assert [(one.prompt, one.token_ids) for one in by_ids] == [(None, one.token_ids) for one in results]


def test_logprobs_against_float64(engine: Engine, network: Any) -> None:
    params = SamplingParams(max_tokens=6, logprobs=3, prompt_logprobs=2, temperature=1.0, seed=5, ignore_eos=True)
    for result in engine.generate(TEXTS, params):
        tokens = result.prompt_token_ids + result.token_ids
        expected = reference_logprobs(network, engine, tokens)
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs[0] is None
        scored = [*result.prompt_logprobs[1:], *(result.logprobs or ())]
        assert len(scored) == len(tokens) - 1
        for place, entries in enumerate(scored):
            assert isinstance(entries, list)
            row = expected[place]
            top = 2 if place < len(result.prompt_token_ids) - 1 else 3
            best = row.topk(top)
            assert entries[0].token_id == tokens[place + 1]
            assert entries[0].rank == int((row > row[tokens[place + 1]]).sum()) + 1
            assert [one.token_id for one in entries[1:]] == best.indices.tolist()
            found = torch.tensor([one.logprob for one in entries], dtype=torch.float64)
            wanted = torch.cat((row[tokens[place + 1]][None], best.values))
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)
        total = sum(one[0].logprob for one in result.logprobs or () if isinstance(one, list))
        assert result.outputs[0].cumulative_logprob == total


def test_logits_on_request(engine: Engine, network: Any) -> None:
    params = SamplingParams(
        max_tokens=5, return_context_logits=True, return_generation_logits=True, ignore_eos=True, logprobs=0
    )
    (result,) = engine.generate("Once upon a time there was a small robot who learns to paint", params)
    tokens = result.prompt_token_ids + result.token_ids
    with torch.inference_mode():
        expected = network(torch.tensor([tokens])).logits[0]
    length = len(result.prompt_token_ids)
    assert result.context_logits is not None
    torch.testing.assert_close(result.context_logits, expected[:length], atol=2e-4, rtol=0)
    logits = result.outputs[0].generation_logits
    assert logits is not None
    torch.testing.assert_close(logits, expected[length - 1 : -1], atol=2e-4, rtol=0)


def test_prompts_in_chunks_have_the_same_scores(engine: Engine, checkpoints: dict[str, Path]) -> None:
    prompt = list(range(5, 75))
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)
    whole = Engine(checkpoints["llama"], max_num_seqs=4, max_num_batched_tokens=1024)
    (expected,) = whole.generate(prompt, params)
    (found,) = engine.generate(prompt, params)
    assert found.token_ids == expected.token_ids
    pairs = zip(found.prompt_logprobs or (), expected.prompt_logprobs or (), strict=True)
    for one, other in list(pairs)[1:]:
        assert isinstance(one, list)
        assert isinstance(other, list)
        assert [entry.token_id for entry in one] == [entry.token_id for entry in other]
        assert one[0].logprob == pytest.approx(other[0].logprob, abs=1e-4)


def test_few_logits_of_a_prompt_are_held_at_a_time(
    checkpoints: dict[str, Path], network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    see = LogitsCollector.see_prompt

    def count(collector: LogitsCollector, start: int, logits: torch.Tensor) -> None:
        assert start == sum(shown)
        shown.append(len(logits))
        see(collector, start, logits)

    monkeypatch.setattr(LogitsCollector, "see_prompt", count)
    whole = Engine(checkpoints["llama"], max_num_seqs=4, max_num_batched_tokens=1024)
    prompt = [5 + place * place % 900 for place in range(300)]
    (result,) = whole.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert (sum(shown), max(shown)) == (300, SCORED_AT_ONCE)
    expected = reference_logprobs(network, whole, prompt)
    for place, entries in enumerate((result.prompt_logprobs or [])[1:]):
        assert isinstance(entries, list)
        assert entries[0].logprob == pytest.approx(float(expected[place, prompt[place + 1]]), abs=2e-4)


def test_scores_of_a_prompt_do_not_come_out_of_a_cache(engine: Engine) -> None:
    prompt = list(range(5, 75))
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, return_context_logits=True)
    first, second = (engine.generate(prompt, params)[0] for _ in range(2))
    assert len(first.prompt_logprobs or ()) == len(second.prompt_logprobs or ()) == len(prompt)
    assert second.context_logits is not None
    assert second.context_logits.shape == (len(prompt), engine.info.vocab_size)


def test_simple_formats(engine: Engine) -> None:
    full, simple = (
        engine.generate(
            TEXTS[0],
            SamplingParams(
                max_tokens=4,
                logprobs=0,
                prompt_logprobs=0,
                logprobs_simple_format=simple,
                prompt_logprobs_simple_format=simple,
            ),
        )[0]
        for simple in (False, True)
    )
    assert simple.logprobs == [one[0].logprob for one in full.logprobs or () if isinstance(one, list)]
    assert simple.prompt_logprobs == [
        one[0].logprob if isinstance(one, list) else None for one in full.prompt_logprobs or ()
    ]


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_trim_text_tokens_and_logprobs(engine: Engine, tokenizer: Any, include: bool) -> None:
    params = SamplingParams(max_tokens=12, logprobs=0, ignore_eos=True, return_generation_logits=True)
    (full,) = engine.generate(TEXTS[0], params)
    assert full.text is not None
    stop = full.text[5:9]
    params = replace(params, stop=["never so", stop])
    params.include_stop_str_in_output = include
    (result,) = engine.generate(TEXTS[0], params)
    start = full.text.index(stop)
    assert result.text == full.text[: start + len(stop) if include else start]
    assert (result.finish_reason, result.outputs[0].stop_reason) == ("stop", stop)
    count = len(result.token_ids)
    assert result.token_ids == full.token_ids[:count]
    assert len(result.logprobs or ()) == count
    assert len(result.outputs[0].token_times_s) == count
    kept = tokenizer.decode(full.token_ids[:count])
    longer = tokenizer.decode(full.token_ids[: count + 1])
    if include:
        assert tokenizer.decode(full.token_ids[: count - 1]).find(stop) < 0 <= kept.find(stop)
    else:
        assert len(kept) <= start < len(longer)
    assert result.outputs[0].generation_logits is None or len(result.outputs[0].generation_logits) == count
    assert engine.session.is_idle


def test_an_argument_of_another_type_is_refused_by_its_name(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompts\[0\].sampling_params.stop: must be a text or a list of texts"):
        engine.generate([[5]], SamplingParams(stop=7))  # type: ignore[arg-type]
    with pytest.raises(
        InvalidRequest, match=r"^prompts\[0\].processors\[0\]: must be an object such as {.*}, got 'min_p'"
    ):
        engine.generate([[5]], processors=["min_p"])  # type: ignore[list-item]
    for processors in ({"name": "min_p"}, "min_p", 5):
        with pytest.raises(ValueError, match=r"^processors must be a list of processors by name, got"):
            engine.generate([[5]], processors=processors)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^processors must be a list of processors by name, got"):
            engine.add([5], processors=processors)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^speculation must be True or False, got 'no'"):
        engine.generate([[5]], speculation="no")  # type: ignore[arg-type]
    for predictions in (5, [5], b"ab"):
        with pytest.raises(ValueError, match=r"^predictions must be a text, or a list with a text or None for each"):
            engine.generate([[5]], predictions=predictions)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^there are 1 prompts and 2 predictions"):
        engine.generate([[5]], predictions=["a", None])
    for prompt in (5, None, b"ab", {5: 6}):
        with pytest.raises(InvalidRequest, match=r"^prompts\[0\]: must be a text or a list of token ids, got"):
            engine.add(prompt)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^sampling_params must be SamplingParams"):
        engine.add([5], {"max_tokens": 2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^processors must be a list of processors by name, got"):
        engine.add([5], processors={"name": "min_p"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^guided_decoding must be GuidedDecodingParams, got dict"):
        SamplingParams(guided_decoding={"regex": "a"})  # type: ignore[arg-type]
    assert engine.session.is_idle


def test_stop_and_end_tokens() -> None:
    engine = scripted()
    model = engine.session.stepper.model
    assert isinstance(model, ScriptedModel)
    answer = model.greedy([3, 4], 8)
    (hidden,) = engine.generate([3, 4], SamplingParams(max_tokens=8, stop_token_ids=[answer[4]], logprobs=0))
    place = answer.index(answer[4])
    assert (hidden.token_ids, hidden.finish_reason) == (answer[:place], "stop")
    assert hidden.outputs[0].stop_reason == answer[4]
    assert hidden.text is None
    shown = SamplingParams(max_tokens=8, stop_token_ids=[answer[4]], include_stop_str_in_output=True)
    assert engine.generate([3, 4], shown)[0].token_ids == answer[: place + 1]
    longer = SamplingParams(max_tokens=8, stop_token_ids=[answer[4]], min_tokens=6)
    assert answer[4] not in engine.generate([3, 4], longer)[0].token_ids[:6]


def test_answers_to_one_prompt_are_as_if_alone(engine: Engine) -> None:
    params = SamplingParams(max_tokens=10, n=3, temperature=1.0, seed=11)
    (together,) = engine.generate("Hello", params)
    assert [one.index for one in together.outputs] == [0, 1, 2]
    assert len({tuple(one.token_ids) for one in together.outputs}) == 3
    (alone,) = engine.generate("Hello", SamplingParams(max_tokens=10, temperature=1.0, seed=11))
    assert together.outputs[0].token_ids == alone.token_ids
    mixed = engine.generate(["Hello", "Yes or no?", [7, 8]], params)
    assert [one.token_ids for one in mixed[0].outputs] == [one.token_ids for one in together.outputs]
    with pytest.raises(ValueError, match="3 answers"):
        _ = together.text


def test_answers_to_one_prompt_share_it(engine: Engine) -> None:
    prompt = list(range(200, 270))
    (result,) = engine.generate(prompt, SamplingParams(max_tokens=2, n=3, temperature=1.0, seed=1, ignore_eos=True))
    first, *others = result.outputs
    assert first.num_cached_tokens == 0
    assert [one.num_cached_tokens for one in others] == [64, 64]  # whole blocks of 16, and one token is computed


def test_best_of_returns_the_likeliest(engine: Engine) -> None:
    def ask(**changes: Any) -> Result:
        return engine.generate("Hello", SamplingParams(max_tokens=6, temperature=1.0, seed=3, **changes))[0]

    every = ask(n=5, logprobs=0).outputs
    best = sorted(every, key=lambda one: -(one.cumulative_logprob or 0))
    found = ask(n=2, best_of=5)
    assert [one.token_ids for one in found.outputs] == [one.token_ids for one in best[:2]]
    assert found.outputs[0].logprobs is None
    assert found.outputs[0].cumulative_logprob is None
    assert ask(n=2, best_of=5, logprobs=0).outputs[0].cumulative_logprob == best[0].cumulative_logprob


def test_processors_by_name(engine: Engine) -> None:
    results = engine.generate(
        ["Hello", "Yes"],
        SamplingParams(max_tokens=5, n=2, temperature=1.0, seed=1),
        processors=[[{"name": "allowed_tokens", "args": {"token_ids": [20, 21]}}], []],
    )
    assert all(set(one.token_ids) <= {20, 21} for one in results[0].outputs)
    assert results[0].outputs[0].receipt is not None
    assert results[1].outputs[0].receipt is None
    assert any(not set(one.token_ids) <= {20, 21} for one in results[1].outputs)


def test_processors_by_callable(engine: Engine) -> None:
    vocabulary = Vocabulary(engine.info.vocab_size)
    chain = ProcessorChain([MinTokens(MinTokens.Args(n=4), Context(vocabulary, frozenset({5})))], Context(vocabulary))
    adapters = create_trtllm_adapters([chain])
    params = SamplingParams(max_tokens=6, logits_processor=list(adapters), temperature=1.0, seed=2)
    assert len(engine.generate("Hello", params)[0].token_ids) >= 4
    with pytest.raises(InvalidRequest, match="a chain serves one answer"):
        engine.generate(["Hello", "Yes"], params)
    cold = create_trtllm_adapters([TemperatureProcessor(1e-4)])
    shared = SamplingParams(max_tokens=6, logits_processor=list(cold), temperature=1.0, seed=2, ignore_eos=True)
    greedy = engine.generate(TEXTS[:2], SamplingParams(max_tokens=6, ignore_eos=True))
    assert [one.token_ids for one in engine.generate(TEXTS[:2], shared)] == [one.token_ids for one in greedy]


def test_a_callable_with_a_state_is_given_as_it_was() -> None:
    """Each answer has a copy, in a later call too: where the first one began is no matter of it."""

    class Failing:  # of no module, so that it cannot be pickled
        def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
            raise ZeroDivisionError

    class Reports:
        def __init__(self) -> None:
            self.found: list[Any] = []

        def add(self, failure: Any) -> None:
            self.found.append(failure)

    engine, forced = scripted(), ForcedSequenceProcessor([20, 21, 22], 5)
    params = SamplingParams(max_tokens=4, ignore_eos=True, logits_processor=list(create_trtllm_adapters([forced])))
    for prompts in ([[3, 4]], [[3, 4, 6]], [[3], [3, 4]]):
        assert [one.token_ids for one in engine.generate(prompts, params)] == [[20, 21, 22, 5]] * len(prompts)
    assert forced.prompt_length is None
    reports = Reports()
    failing = create_trtllm_adapters([Failing()], report=reports.add)
    results = engine.generate([[3], [4]], SamplingParams(max_tokens=4, logits_processor=list(failing)))
    assert [one.finish_reason for one in results] == ["error"] * 2
    assert len(reports.found) == 2
    assert failing[0].failure is None


def test_a_callable_that_cannot_be_copied_has_one_answer() -> None:
    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
            logits[20] = 100.0

    engine = scripted()
    params = SamplingParams(max_tokens=1, logits_processor=list(create_trtllm_adapters([Locked()])))
    assert engine.generate([[3]], params)[0].token_ids == [20]
    for prompts in ([[3]], [[3], [4]]):
        with pytest.raises(InvalidRequest, match=r"Locked is given for several answers and cannot be copied"):
            engine.generate(prompts, params)


def test_a_chain_has_one_answer_in_all() -> None:
    """The fields of its answer and other callables have joined it: a second one had them twice."""
    engine = scripted()
    context = Context(Vocabulary(engine.info.vocab_size))
    cold = create_trtllm_adapters([ProcessorChain([], context), TemperatureProcessor(0.5)])
    params = SamplingParams(max_tokens=2, ignore_eos=True, logits_processor=list(cold))
    first = engine.add([3, 4], params)
    with pytest.raises(InvalidRequest, match="a chain serves one answer"):
        engine.add([3, 4], params)
    engine.abort(first)
    with pytest.raises(InvalidRequest, match="a chain serves one answer"):
        engine.generate([[3, 4]], params)
    assert engine.session.is_idle


def test_guides_bad_words_and_thinking(engine: Engine, tokenizer: Any) -> None:
    guided = SamplingParams(max_tokens=20, guided_decoding=GuidedDecodingParams(regex="[0-9]{3}-[a-c]{2}"))
    (result,) = engine.generate("Number:", guided)
    assert result.text is not None
    assert result.text[3] == "-"
    (plain,) = engine.generate("Hello", SamplingParams(max_tokens=8, ignore_eos=True))
    word = tokenizer.decode(plain.token_ids[2:3])
    (changed,) = engine.generate("Hello", SamplingParams(max_tokens=8, ignore_eos=True, bad=word))
    assert changed.token_ids[:2] == plain.token_ids[:2]
    assert changed.token_ids[2] != plain.token_ids[2]
    tag = {"begin": "<f>", "schema": {"const": 7}, "end": "</f>"}
    tags = json.dumps({"type": "structural_tag", "structures": [tag], "triggers": ["<f>"]})
    structured = GuidedDecodingParams(structural_tag=tags)
    forced = [{"name": "forced_prefix", "args": {"text": "So <f>"}}]
    (result,) = engine.generate("x", SamplingParams(max_tokens=16, guided_decoding=structured), processors=forced)
    assert result.text is not None
    assert result.text.startswith("So <f>7</f>")
    for malformed, problem in (("{", "must be JSON"), ("{}", "format")):
        with pytest.raises(InvalidRequest, match=problem):
            engine.generate("x", SamplingParams(guided_decoding=GuidedDecodingParams(structural_tag=malformed)))
    with pytest.raises(InvalidRequest, match=r"guided_decoding: must hold a guide"):
        engine.generate("x", SamplingParams(guided_decoding=GuidedDecodingParams()))


def test_the_fields_of_served_requests_hold_offline_too(engine: Engine) -> None:
    choice = SamplingParams(max_tokens=20, guided_decoding=GuidedDecodingParams(choice=["yes", "no"]))
    assert engine.generate("Well?", choice)[0].text in ("yes", "no")
    allowed = SamplingParams(max_tokens=8, allowed_token_ids=[40, 41, 42])
    assert set(engine.generate("Hello", allowed)[0].token_ids) <= {40, 41, 42}
    (plain,) = engine.generate("Hello", SamplingParams(max_tokens=8, ignore_eos=True))
    banned = SamplingParams(max_tokens=8, ignore_eos=True, bad_words_token_ids=[plain.token_ids[:2]])
    (changed,) = engine.generate("Hello", banned)
    assert changed.token_ids[0] == plain.token_ids[0]
    assert changed.token_ids[1] != plain.token_ids[1]


def test_a_prompts_field_and_its_processor_are_refused_together(engine: Engine) -> None:
    named = [{"name": "bad_words", "args": {"words": ["x"]}}]
    with pytest.raises(
        InvalidRequest, match=r"prompts\[0\]\.sampling_params\.bad: is set, and the processor bad_words"
    ):
        engine.generate("Hello", SamplingParams(bad="y"), processors=named)
    named = [{"name": "min_tokens", "args": {"n": 2}}]
    with pytest.raises(InvalidRequest, match=r"sampling_params\.min_tokens: is set, and the processor min_tokens"):
        engine.generate("Hello", SamplingParams(min_tokens=3), processors=named)


def test_a_processor_that_fails_leaves_the_others_as_they_are() -> None:
    engine = scripted()

    def breaks(number: int, logits: torch.Tensor, ids: list[list[int]], stream: object, client: object) -> None:
        if len(ids[0]) == 5:
            raise RuntimeError("no")

    params = [SamplingParams(max_tokens=6, logits_processor=breaks), SamplingParams(max_tokens=6)]
    failed, fine = engine.generate([[3, 4], [5, 6]], params)
    assert failed.finish_reason == "error"
    assert "RuntimeError" in (failed.outputs[0].error or "")
    assert len(failed.token_ids) == 3
    assert fine.token_ids == engine.generate([5, 6], params[1])[0].token_ids


def test_prompts_are_cut_and_special_tokens_are_text_on_request(engine: Engine) -> None:
    params = SamplingParams(max_tokens=2, truncate_prompt_tokens=3)
    (result,) = engine.generate([9, 8, 7, 6, 5], params)
    assert result.prompt_token_ids == [7, 6, 5]
    end = engine.info.eos_token_ids[0]
    only = [{"name": "allowed_tokens", "args": {"token_ids": [end]}}]
    ask = {"max_tokens": 2, "ignore_eos": True}
    texts = [
        engine.generate("x", SamplingParams(**ask, skip_special_tokens=skip), processors=only)[0].text
        for skip in (True, False)
    ]
    assert texts == ["", "<|im_end|><|im_end|>"]
    assert engine.generate("x", SamplingParams(**ask, detokenize=False))[0].text is None


def test_more_prompts_than_places_and_results_in_order(engine: Engine) -> None:
    prompts = [[token_id] for token_id in range(10, 30)]
    params = [SamplingParams(max_tokens=1 + place % 4, ignore_eos=True) for place in range(20)]
    results = engine.generate(prompts, params)
    assert [one.prompt_token_ids for one in results] == prompts
    assert [len(one.token_ids) for one in results] == [one.max_tokens for one in params]


def test_nothing_starts_if_one_prompt_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\].prompt_token_ids: must be token ids"):
        engine.generate([[5], [10**6]])
    with pytest.raises(InvalidRequest, match=r"^prompts\[0\].sampling_params.use_beam_search"):
        engine.generate([[5]], SamplingParams(use_beam_search=True))
    with pytest.raises(InvalidRequest, match=r"^prompts\[0\].processors\[0\].name: unknown logits processor"):
        engine.generate([[5]], processors=[{"name": "min_token"}])
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]: must be a text or a list of token ids"):
        engine.generate([[5], 7])
    for value in ({"prompt": "a"}, {"prompt_token_ids": [5]}, None, 5, b"a", iter(["a"])):  # vLLM takes the first two
        with pytest.raises(InvalidRequest, match=r"^prompts: must be texts or lists of token ids, or a single one"):
            engine.generate(value)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\].prompt: has half of a surrogate pair"):
        engine.generate(["a", "\ud800"])
    for params in ({"max_tokens": 2}, [{"max_tokens": 2}], "max_tokens"):
        with pytest.raises(ValueError, match=r"^sampling_params must be SamplingParams"):
            engine.generate([[5]], params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 prompts and 1 sampling_params"):
        engine.generate([[5], [6]], [SamplingParams()])
    with pytest.raises(ValueError, match="2 prompts and 1 lists of processors"):
        engine.generate([[5], [6]], processors=[[{"name": "min_tokens", "args": {"n": 1}}]])
    assert engine.session.is_idle


@pytest.mark.parametrize("field", sorted(set(REFUSED) - HONOURED))
def test_what_stays_refused(field: str) -> None:
    values: dict[str, Any] = {
        "beam_search_diversity_rate": 0.5,
        "length_penalty": 1.0,
        "early_stopping": 1,
        "beam_width_array": [2],
        "top_p_min": 0.5,
        "top_p_reset_ids": 5,
        "top_p_decay": 0.5,
        "prompt_ignore_length": 2,
        "exclude_input_from_output": False,
        "additional_model_outputs": ["hidden_states"],
        "lookahead_config": object(),
    }
    with pytest.raises(InvalidRequest, match=rf"sampling_params\.{field}"):
        scripted().generate([5], SamplingParams(**{field: values.get(field, True)}))


def test_fields_supported_only_offline_are_refused_in_serving() -> None:
    assert set(REFUSED) >= HONOURED


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"stop": "x"}, "stop"), ({"bad": "x"}, "bad"), ({"stop": [""]}, "stop")],
)
def test_text_needs_a_tokenizer(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"sampling_params\.{field}"):
        scripted().generate([5], SamplingParams(**changes))
    with pytest.raises(InvalidRequest, match="has no tokenizer"):
        scripted().generate("text")


@pytest.mark.parametrize(("settings", "expected"), [({}, 40), ({"max_mixed_chunk": 8}, 8)])
def test_prompts_take_whole_steps_unless_told_otherwise(settings: dict[str, Any], expected: int) -> None:
    engine = scripted(max_num_batched_tokens=128, **settings)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add([3, 4], params)
    engine.step()
    engine.add([5] * 40, params)
    engine.step()
    [chunk] = engine.session.stepper.model.plans[-1].chunks
    assert chunk.stop == expected


def test_unknown_settings() -> None:
    with pytest.raises(TypeError, match="max_seqs"):
        Engine("no-checkpoint", max_seqs=4)
    with pytest.raises(StartupError, match="no such directory"):
        Engine("no-checkpoint")


def test_abort_keeps_what_there_is() -> None:
    engine = scripted()
    model = engine.session.stepper.model
    assert isinstance(model, ScriptedModel)
    request_id = engine.add([3, 4], SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(5):
        assert engine.step() == []
    result = engine.abort(request_id)
    assert result is not None
    assert (result.token_ids, result.finish_reason) == (model.greedy([3, 4], 5), "cancelled")
    assert engine.abort(request_id) is None
    assert engine.unfinished == []
    engine.session.stepper.scheduler.check_integrity()


def test_preempted_answers_and_scores_are_the_same(checkpoints: dict[str, Path]) -> None:
    prompts = [[(place * 7 + which) % 900 + 5 for place in range(250)] for which in range(3)]
    params = SamplingParams(
        max_tokens=12,
        prompt_logprobs=0,
        logprobs=0,
        return_generation_logits=True,
        ignore_eos=True,
        n=2,
        seed=4,
        top_k=3,
    )
    settings: dict[str, Any] = {"context_length": 512, "max_num_seqs": 4, "max_num_batched_tokens": 300}
    roomy = Engine(checkpoints["llama"], **settings)
    narrow = Engine(checkpoints["llama"], kv_blocks=48, **settings)
    expected, found = (engine.generate(prompts, params) for engine in (roomy, narrow))
    assert narrow.session.stepper.scheduler.queues.num_preemptions > 0
    for one, other in zip(expected, found, strict=True):
        assert len(other.prompt_logprobs or ()) == 250
        scores, again = (
            [entry[0].logprob for entry in result.prompt_logprobs or () if isinstance(entry, list)]
            for result in (one, other)
        )
        assert again == pytest.approx(scores, abs=2e-4)
        for answer, same in zip(one.outputs, other.outputs, strict=True):
            assert answer.token_ids == same.token_ids
            assert answer.generation_logits is not None
            assert same.generation_logits is not None
            torch.testing.assert_close(answer.generation_logits, same.generation_logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("after", [0, 1, 2, 5, 9])
def test_suspended_and_resumed_at_any_step_changes_nothing(engine: Engine, after: int) -> None:
    prompt = list(range(5, 75))  # three steps of prompt
    params = SamplingParams(
        max_tokens=8,
        temperature=1.0,
        seed=9,
        n=2,
        ignore_eos=True,
        logprobs=0,
        frequency_penalty=0.5,
        prompt_logprobs=0,
    )
    (expected,) = engine.generate(prompt, params)
    request_id = engine.add(prompt, params)
    other = engine.add([7, 8], SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(after):
        assert engine.step() == []
    engine.suspend(request_id)
    engine.suspend(request_id)
    for _ in range(3):
        assert engine.step() == []
    engine.resume(request_id)
    results = {one.request_id: one for one in drain(engine)}
    assert set(results) == {request_id, other}
    found = results[request_id]
    for one, wanted in zip(found.outputs, expected.outputs, strict=True):
        assert one.token_ids == wanted.token_ids
        pairs = zip(one.logprobs or (), wanted.logprobs or (), strict=True)
        for mine, theirs in pairs:
            assert isinstance(mine, list)
            assert isinstance(theirs, list)
            assert mine[0].logprob == pytest.approx(theirs[0].logprob, abs=1e-4)
    assert len(found.prompt_logprobs or ()) == len(prompt)
    with pytest.raises(KeyError):
        engine.resume(request_id)


def test_a_prompt_that_is_computed_again_behind_its_end() -> None:
    """After a preemption a piece may begin beyond the prompt: nothing of it is wanted."""
    engine = scripted(max_num_batched_tokens=32)
    prompt = list(range(3, 23))
    params = SamplingParams(max_tokens=80, ignore_eos=True, prompt_logprobs=1, return_context_logits=True)
    (expected,) = engine.generate([prompt], params)
    request_id = engine.add(prompt, params)
    for _ in range(60):
        engine.step()
    engine.suspend(request_id)
    engine.session.stepper.scheduler.cache.clear()
    engine.resume(request_id)
    (found,) = drain(engine)
    assert same_results(found, expected)


def same_results(one: Result, other: Result) -> bool:
    """Whether all that depends on tokens and logits is the same, bit by bit."""

    def parts(result: Result) -> list[object]:
        answers = [(each.token_ids, each.logprobs, each.finish_reason, each.error) for each in result.outputs]
        return [result.prompt_token_ids, answers, result.prompt_logprobs]

    def logits(result: Result) -> list[torch.Tensor]:
        kept = [result.context_logits, *(each.generation_logits for each in result.outputs)]
        return [each for each in kept if each is not None]

    pairs = zip(logits(one), logits(other), strict=True)
    return parts(one) == parts(other) and all(torch.equal(*pair) for pair in pairs)


def disturb(engine: Engine, source: random.Random) -> list[Result]:
    """Step to the end, with preemptions, suspensions and forgotten KV in between."""
    results: list[Result] = []
    suspended: list[str] = []
    scheduler = engine.session.stepper.scheduler
    while engine.unfinished:
        kind = source.choice(["preempt", "suspend", "resume", "forget", *["step"] * 12])
        running = [*scheduler.queues.decoding, *scheduler.queues.prefilling]
        awake = [one for one in engine.unfinished if one not in suspended]
        if kind == "preempt" and running:
            scheduler.queues.preempt(source.choice(running))
        elif kind == "suspend" and awake:
            suspended.append(source.choice(awake))
            engine.suspend(suspended[-1])
        elif kind == "forget":
            scheduler.cache.clear()
        elif suspended and (kind == "resume" or not awake):
            engine.resume(suspended.pop(source.randrange(len(suspended))))
        results += engine.step()
        scheduler.check_integrity()
    return results


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3))
def test_disturbances_at_any_step_change_no_result(seed: int, lengths: list[int]) -> None:
    source = random.Random(seed)
    engine = scripted(max_num_batched_tokens=source.choice([8, 24, 100]))
    asked = []
    for place, length in enumerate(lengths):
        params = SamplingParams(
            max_tokens=source.randrange(1, 90),
            n=source.choice([1, 1, 3]),
            temperature=1.0,
            seed=seed + place,
            prompt_logprobs=source.choice([None, 0, 2]),
            return_context_logits=source.random() < 0.5,
            return_generation_logits=source.random() < 0.5,
            logprobs=source.choice([None, 1]),
        )
        asked.append(([source.randrange(3, 80) for _ in range(length)], params))
    expected = [engine.generate([prompt], params)[0] for prompt, params in asked]
    engine.session.stepper.scheduler.cache.clear()
    ids = [engine.add(prompt, params) for prompt, params in asked]
    found = {one.request_id: one for one in disturb(engine, source)}
    assert set(found) == set(ids)
    assert all(same_results(found[name], one) for name, one in zip(ids, expected, strict=True))


@pytest.mark.parametrize("which", ["see_prompt", "see_generated"])
def test_logits_that_cannot_be_kept_end_their_own_answer_alone(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(max_num_batched_tokens=16)
    params = SamplingParams(
        max_tokens=30, n=2, seed=3, temperature=1.0, ignore_eos=True, prompt_logprobs=1, return_generation_logits=True
    )
    prompts = [[5] * 40, [6, 7] * 20]
    expected = engine.generate(prompts, params)
    see = getattr(LogitsCollector, which)

    def fails(collector: LogitsCollector, position: int, logits: torch.Tensor) -> None:
        if collector._prompt == prompts[0] and collector._top_n is not None and position >= 20:
            raise MemoryError("no room for logits")
        see(collector, position, logits)

    monkeypatch.setattr(LogitsCollector, which, fails)
    failed, fine = engine.generate(prompts, params)
    assert same_results(fine, expected[1])
    first, second = failed.outputs
    assert first.finish_reason == "error"
    assert first.error == "its logits could not be kept: MemoryError: no room for logits"
    assert first.token_ids == []
    assert second.token_ids == expected[0].outputs[1].token_ids
    assert engine.session.is_idle
    engine.session.stepper.scheduler.check_integrity()


def test_each_result_comes_once_if_answers_end_in_one_step() -> None:
    engine = scripted(max_num_seqs=8)
    params = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=1, ignore_eos=True)
    ids = [engine.add([3 + place], params) for place in range(3)]
    steps = []
    while engine.unfinished:
        steps.append([one.request_id for one in engine.step()])
    assert sorted(each for step in steps for each in step) == ids
    assert max(map(len, steps)) > 1


@pytest.mark.parametrize("how", ["field", "name", "callable"])
def test_min_tokens_holds_for_stop_strings_however_it_is_given(engine: Engine, how: str) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (full,) = engine.generate(TEXTS[0], params)
    assert full.text is not None
    stop = full.text[5:9]
    stopped = replace(params, stop=stop)
    assert len(engine.generate(TEXTS[0], stopped)[0].token_ids) < 11
    named = []
    if how == "field":
        stopped = replace(stopped, min_tokens=11)
    elif how == "name":
        named = [{"name": "min_tokens", "args": {"n": 11}}]
    else:
        context = Context(Vocabulary(engine.info.vocab_size), frozenset({5}))
        chain = ProcessorChain([MinTokens(MinTokens.Args(n=11), context)], context)
        stopped = replace(stopped, logits_processor=list(create_trtllm_adapters([chain])))
    (result,) = engine.generate(TEXTS[0], stopped, processors=named)
    again = full.text.find(stop, 9)
    assert again < 0, "the text has the stop string twice; take another"
    assert (result.text, result.finish_reason) == (full.text, "length")


@pytest.mark.parametrize("what", ["suspend", "abort"])
def test_another_thread_gets_its_turn_while_generating(what: str) -> None:
    model = ScriptedModel()
    engine = Engine("no-checkpoint", model=model, max_num_seqs=4)
    third = threading.Event()
    seen: list[int] = []

    def other() -> None:
        third.wait()
        request_id = engine.unfinished[0]
        getattr(engine, what)(request_id)
        seen.append(len(model.plans))
        if what == "suspend":
            engine.resume(request_id)

    def hook(plan: object, logits: torch.Tensor) -> None:
        if len(model.plans) == 3:
            third.set()
            while not engine.session.lock.is_awaited:
                time.sleep(0)

    model.hook = hook
    thread = threading.Thread(target=other)
    thread.start()
    first, second = engine.generate([[3, 4], [5]], SamplingParams(max_tokens=6, ignore_eos=True))
    thread.join()
    assert seen == [3]
    count = 6 if what == "suspend" else 3
    assert (first.token_ids, second.token_ids) == (model.greedy([3, 4], count), model.greedy([5], 6))
    assert first.finish_reason == ("length" if what == "suspend" else "cancelled")


def test_threads_that_generate_at_once_get_their_own_results() -> None:
    """A thread that got another one's results left it waiting for ever."""
    model = ScriptedModel()
    engine = Engine("no-checkpoint", model=model, max_num_seqs=4)
    added = engine.add([9], SamplingParams(max_tokens=3, ignore_eos=True))
    found: dict[int, list[list[int]]] = {}

    def generate(first: int) -> None:
        prompts = [[first, 20 + place] for place in range(6)]
        results = engine.generate(prompts, SamplingParams(max_tokens=9, ignore_eos=True), progress=False)
        found[first] = [result.token_ids for result in results]

    threads = [threading.Thread(target=generate, args=(first,), daemon=True) for first in range(3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {first: [model.greedy([first, 20 + place], 9) for place in range(6)] for first in range(3, 7)}
    assert [(one.request_id, one.token_ids) for one in engine.step()] == [(added, model.greedy([9], 3))]


@pytest.mark.parametrize("how", ["step", "generate"])
def test_a_thread_whose_prompts_are_suspended_holds_none_up(how: str) -> None:
    """Another one, which would have resumed them, waited for ever to compute something first."""
    model = ScriptedModel()
    engine = Engine("no-checkpoint", model=model, max_num_seqs=4)
    params, found, is_begun = SamplingParams(max_tokens=6, ignore_eos=True), list[Result](), threading.Event()

    def hook(plan: object, logits: torch.Tensor) -> None:
        if len(model.plans) == 2:
            is_begun.set()
            while not engine.session.lock.is_awaited:
                time.sleep(0)

    def between() -> None:
        """Computes something else, then what it resumes itself, too, or leaves it to its thread."""
        is_begun.wait()
        (suspended,) = engine.unfinished
        engine.suspend(suspended)
        found.extend(engine.generate([5], params, progress=False))
        engine.resume(suspended)
        if how == "generate":
            found.extend(engine.generate([6], params, progress=False))
        while how == "step" and engine.unfinished:
            assert engine.step() == []

    model.hook = hook
    threads = [threading.Thread(target=between, daemon=True)]
    threads += [threading.Thread(target=lambda: found.extend(engine.generate([3, 4], params)), daemon=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    prompts = [[3, 4], [5], *([[6]] if how == "generate" else [])]
    expected = sorted((prompt, model.greedy(prompt, 6)) for prompt in prompts)
    assert sorted((one.prompt_token_ids, one.token_ids) for one in found) == expected
    assert engine.step() == []


FORKED = """
import os, sys, torch
from worker.engines.embedded import Engine
from worker.sampling import SamplingParams

torch.set_num_threads(2)
engine = Engine(sys.argv[1])
for number in range(2):
    if os.fork() == 0:
        torch.set_num_threads(2 - number)
        try:
            print(engine.generate([[5, 6, 7] * 30], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids)
        except RuntimeError as error:
            print(error)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
print(engine.generate([[5, 6, 7] * 30], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids)
"""


def test_a_forked_process_computes_with_one_thread(checkpoints: dict[str, Path]) -> None:
    """With more it waited for threads that only the process before has."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(checkpoints["llama"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    refused, alone, before = done.stdout.splitlines()
    assert refused.startswith("this process was forked from the one that loaded the model")
    assert alone == before


def test_a_processor_must_not_call_the_engine() -> None:
    engine = scripted()

    def calls_back(*arguments: object) -> None:
        engine.abort("0")

    (result,) = engine.generate([3], SamplingParams(max_tokens=2, logits_processor=calls_back))
    assert result.finish_reason == "error"
    assert "RuntimeError" in (result.outputs[0].error or "")
    assert engine.session.is_idle


def test_a_progress_bar_on_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown(stream: io.StringIO, progress: bool) -> str:
        monkeypatch.setattr("sys.stderr", stream)
        scripted().generate([[3], [4], [5]], SamplingParams(max_tokens=2), progress)
        return stream.getvalue()

    assert "3/3" in shown(Terminal(), True)
    assert shown(Terminal(), False) == ""
    assert shown(io.StringIO(), True) == ""


def test_an_interrupt_leaves_the_engine_usable() -> None:
    model = ScriptedModel()
    engine = Engine("no-checkpoint", model=model, max_num_seqs=4)

    def interrupt(plan: object, logits: torch.Tensor) -> None:
        if len(model.plans) == 3:
            raise KeyboardInterrupt

    model.hook = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[3, 4], [5]], SamplingParams(max_tokens=10))
    assert engine.unfinished == []
    engine.session.stepper.scheduler.check_integrity()
    assert engine.generate([3, 4], SamplingParams(max_tokens=4))[0].token_ids == model.greedy([3, 4], 4)


def test_an_interrupt_between_prompts_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted()
    add, added = engine.session.add, Mock()

    def interrupted(group: Any) -> None:
        if added.called:
            raise KeyboardInterrupt
        added(group)
        add(group)

    monkeypatch.setattr(engine.session, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[3], [4], [5]], SamplingParams(max_tokens=2))
    assert engine.unfinished == []


def test_an_interrupted_step_loses_no_result() -> None:
    model = ScriptedModel()
    engine = Engine("no-checkpoint", model=model, max_num_seqs=4)
    added = engine.add([3], SamplingParams(max_tokens=1))
    engine.generate([4], SamplingParams(max_tokens=6, ignore_eos=True))
    engine.add([5], SamplingParams(max_tokens=1))

    def interrupt(plan: object, logits: torch.Tensor) -> None:
        raise KeyboardInterrupt

    model.hook = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    model.hook = None
    assert added in [one.request_id for one in engine.step()]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [1, 2])
def test_tokens_before_an_interrupted_draft_are_kept(error: type[BaseException], at: int) -> None:
    """A step gives several tokens, and ends after some of them."""
    model = ScriptedModel()
    engine = Engine("no-checkpoint", model=model, max_num_seqs=4)
    stepper = engine.session.stepper
    stepper.speculator = Drafting(lambda one: model.greedy(one.tokens, 3))
    counts = {
        engine.add([token], SamplingParams(max_tokens=count, ignore_eos=True)): (token, count)
        for token, count in ((3, 12), (4, 2), (5, 12))
    }
    engine.step()
    sample, num_calls = stepper.sampler.sample, 0

    def interrupted(logits: torch.Tensor, edits: Edits, plan: Plan) -> Samples:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1 + at:
            raise error
        return sample(logits, edits, plan)

    stepper.sampler.sample = interrupted  # type: ignore[method-assign]
    with pytest.raises(error):
        engine.step()
    results: dict[str, Result] = {}
    for _ in range(40):
        results |= {one.request_id: one for one in engine.step()}
    assert {key: one.token_ids for key, one in results.items()} == {
        key: model.greedy([token], count) for key, (token, count) in counts.items()
    }
    assert engine.unfinished == []


def test_an_interrupt_behind_an_end_loses_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedModel()
    engine = Engine("no-checkpoint", model=model, max_num_seqs=4)
    keys = [engine.add([token], SamplingParams(max_tokens=1, ignore_eos=True)) for token in (3, 4)]
    monkeypatch.setattr(
        engine.session.stepper.speculator, "remember", Mock(side_effect=[KeyboardInterrupt, None, None])
    )
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert [one.request_id for one in engine.step()] == keys
    assert engine.session.is_idle


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_answer_that_cannot_take_a_token_touches_no_other(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of its step keep theirs."""
    model, take, num_calls = ScriptedModel(), Answer.take, 0
    engine = Engine("no-checkpoint", model=model, max_num_seqs=4)
    _, *others = [engine.add([token], SamplingParams(max_tokens=4, ignore_eos=True)) for token in (3, 4, 5)]

    def taking(self: Answer, output: Output, time_s: float) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            raise error
        take(self, output, time_s)

    monkeypatch.setattr(Answer, "take", taking)
    engine.step()
    with pytest.raises(error):
        engine.step()
    results: dict[str, Result] = {}
    for _ in range(8):
        results |= {one.request_id: one for one in engine.step()}
    for key, token in zip(others, (4, 5), strict=True):
        assert results[key].token_ids == model.greedy([token], 4)


def test_an_aborted_prompt_is_no_result_of_an_interrupted_step() -> None:
    model = ScriptedModel()
    engine = Engine("no-checkpoint", model=model, max_num_seqs=4)
    stepper = engine.session.stepper
    stepper.speculator = Drafting(lambda one: model.greedy(one.tokens, 3))
    first, second = (engine.add([token], SamplingParams(max_tokens=4, ignore_eos=True)) for token in (3, 4))
    engine.step()
    verify = stepper._verify

    def interrupted(plan: Plan, drafts: DraftedRows, outputs: list[Output]) -> dict[int, int]:
        verify(plan, drafts, outputs)
        raise KeyboardInterrupt

    stepper._verify = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    aborted = engine.abort(first)
    assert aborted is not None
    assert aborted.token_ids == model.greedy([3], 4)
    assert [one.request_id for one in engine.step()] == [second]
    assert engine.session.is_idle


class Interrupted(RecallModel):
    """Now and then a step ends before anything is copied or computed, or behind that."""

    chance = random.Random(0)

    def forward(self, plan: Plan) -> torch.Tensor:
        if self.chance.random() < (0.4 if plan.copies else 0.1):
            raise KeyboardInterrupt
        logits = super().forward(plan)
        if self.chance.random() < 0.1:
            raise RuntimeError("out of memory")
        return logits


@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_interrupted_goes_on_with_its_own_kv(seed: int) -> None:
    """A prefix hit that was to be copied was taken for copied, and so by all that came later."""
    model = Interrupted(256)
    source = model.chance = random.Random(seed)
    engine = Engine("no-checkpoint", model=model, max_num_seqs=4, kv_block_size=4, max_num_batched_tokens=32)  # type: ignore[arg-type]
    expected = {}
    for _ in range(8):
        prompt = [7 + place for place in range(source.randrange(40))] + source.choices(range(6, 90), k=3)
        count = source.randrange(1, 12)
        tokens = [token for token in recalled(prompt, count) if token != RECALLED_END]
        expected[engine.add(prompt, SamplingParams(max_tokens=count))] = tokens
    results: list[Result] = []
    while engine.unfinished:
        with suppress(KeyboardInterrupt, RuntimeError):
            results += engine.step()
        engine.session.stepper.scheduler.check_integrity()
    assert {one.request_id: one.token_ids for one in results} == expected


def test_generate_beside_requests_that_were_added() -> None:
    engine = scripted()
    added = engine.add([3], SamplingParams(max_tokens=2, ignore_eos=True))
    (result,) = engine.generate([4], SamplingParams(max_tokens=6, ignore_eos=True))
    assert result.prompt_token_ids == [4]
    assert [one.request_id for one in engine.step()] == [added]


def test_an_aborted_prompt_waits_for_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted()
    other = engine.add([3, 4], SamplingParams(max_tokens=50, ignore_eos=True))
    advance = engine._advance

    def advance_and_abort() -> list[Result]:
        """What another thread may do between two steps."""
        done = advance()
        for request_id in engine.unfinished:
            if request_id != other:
                engine.abort(request_id)
        return done

    monkeypatch.setattr(engine, "_advance", advance_and_abort)
    (result,) = engine.generate([[7]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert (result.finish_reason, len(result.token_ids)) == ("cancelled", 1)
    assert engine.unfinished == [other]


def test_leaving_the_engine_drops_what_runs() -> None:
    with scripted() as engine:
        engine.add([3], SamplingParams(max_tokens=2))
    assert engine.unfinished == []
    assert engine.session.is_idle


def test_padding_is_never_likely() -> None:
    (result,) = scripted().generate([[3, WIDTH - 1, 4]], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert result.prompt_logprobs is not None
    padding, after = result.prompt_logprobs[1:]
    assert isinstance(padding, list)
    assert padding[0].token_id == WIDTH - 1
    assert padding[0].logprob > float("-inf")  # the model's own
    assert isinstance(after, list)
    assert all(one.token_id < WIDTH - 6 for one in after)
    assert END < WIDTH - 6


def test_an_end_token_that_the_tokenizer_lacks_ends_answers(tmp_path: Path) -> None:
    end = 1010  # in the padding of the rows
    path = write_tiny_model(tmp_path / "model")
    generation = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": end}))
    engine = Engine(path)
    assert engine.info.eos_token_ids == (end,)
    asked = [{"name": "choice", "args": {"choices": ["yes", "no"]}}]
    (result,) = engine.generate([TEXTS[0]], SamplingParams(max_tokens=8, logprobs=0), processors=asked)
    assert (result.text, result.finish_reason, result.outputs[0].stop_reason) in [
        (text, "stop", end) for text in ("yes", "no")
    ]
    assert 1011 in engine.session.stepper.model.undecodable_ids


def test_models_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model is in the cache, its weights kept: nothing is fetched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packed = model_cache() / f"{_GGUF_SHA256[:16]}-{FORMAT}-quantised" / DEFAULT_MODEL
    packed.parent.mkdir(parents=True)
    write_tiny_model(packed)
    engine = Engine("default", device="cpu", context_length=64)
    assert (engine.config.model_path, engine.config.dtype) == (packed, "float32")
    assert engine.generate("Once", SamplingParams(max_tokens=2), progress=False)[0].text
    assert Engine("default", device="cpu", dtype="bfloat16", context_length=64).config.dtype == "bfloat16"
    tiny = Engine("tiny", device="cpu", context_length=64)
    assert tiny.config.model_path == tmp_path / "dynamo-logits-worker" / "tiny-model"
    with pytest.raises(StartupError, match="no such directory"):
        Engine(Path("default"))
