"""Classifier-free guidance: a token from two rows of logits, however they come about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from guidance_runs import (
    CONTEXT,
    NEW_TOKENS,
    OTHERS,
    PROMPT,
    SAMPLINGS,
    VOCABULARIES,
    Answer,
    decode,
    drafting,
    request_of,
    stepper_of,
)
from speculation_runs import Repeating
from transformers import AutoModelForCausalLM

from adapters.catalog import Catalog, Requested, Selection, model_context
from adapters.chain import ProcessorChain
from adapters.contract import CompanionProcessor, Context
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest, KeepKv
from worker.engines.chain_builder import ChainBuilder
from worker.engines.embedded import EmbeddedConfig, Engine, Request
from worker.engines.embedded.admission import admit
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.sampling import LogitsCollector
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

NEGATIVE = [5, 66, 7, 8, *range(200, 245)]


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> HfModel:
    found = load_model(EmbeddedConfig(model_path=checkpoints["llama"], dtype="float32", numerics="exact"))
    assert isinstance(found, HfModel)
    VOCABULARIES[:] = [Vocabulary.from_pretrained(str(checkpoints["llama"]), found.vocab_size, found.eos_token_ids)]
    return found


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path]) -> Engine:
    return Engine(checkpoints["llama"], max_num_seqs=4, dtype="float32", numerics="exact")


def cfg(scale: float = 2.5, **arguments: Any) -> dict[str, Any]:
    return {"name": "cfg", "args": {"scale": scale, **arguments}}


@pytest.mark.parametrize("negative", [None, NEGATIVE])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_greedy_tokens_are_those_of_transformers(
    arch: str, negative: list[int] | None, checkpoints: dict[str, Path]
) -> None:
    engine = Engine(checkpoints[arch], dtype="float32", numerics="exact", max_num_seqs=4)
    network: Any = AutoModelForCausalLM.from_pretrained(checkpoints[arch], dtype=torch.float32)
    negatives = {} if negative is None else {"negative_prompt_ids": torch.tensor([negative])}
    expected = network.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        guidance_scale=2.5,
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        suppress_tokens=list(engine.session.stepper.model.undecodable_ids),
        **negatives,
    )[0, len(PROMPT) :].tolist()
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    own: dict[str, Any] = {} if negative is None else {"negative_token_ids": negative}
    guided, plain = engine.generate([PROMPT, PROMPT], params, processors=[[cfg(**own)], []])
    assert guided.token_ids == expected
    assert guided.token_ids != plain.token_ids


def alone(model: HfModel, *processors: dict[str, Any], **changes: Any) -> Answer:
    return decode(stepper_of(model), [request_of(model, "alone", PROMPT, *processors, **changes)])[0]


@pytest.mark.parametrize("changes", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("begin", [{}, {"negative_token_ids": NEGATIVE}], ids=["last token", "negative"])
def test_chunks_batches_and_preemptions_change_no_bit(
    model: HfModel, begin: dict[str, Any], changes: dict[str, Any]
) -> None:
    guidance = cfg(**begin)
    led = {"name": "forced_prefix", "args": {"token_ids": PROMPT[:6]}}
    penalty = {"name": "repetition_penalty", "args": {"penalty": 1.2}}
    chains = {"cfg": [guidance], "both": [penalty, guidance], "led": [guidance, led], "none": []}
    expected = {name: alone(model, *chain, **changes) for name, chain in chains.items()}
    assert len({tuple(answer) for answer in expected.values()}) == 4
    num_preemptions = num_accepted = 0
    for place in ({"budget": 9}, {"budget": 64, "mixed": 1}, {"rows": 3}, {"pages": 16}, {"method": "ngram"}):
        stepper = stepper_of(model, **place)
        requests = [
            request_of(model, "cfg", PROMPT, guidance, **changes),
            request_of(model, "none", PROMPT, **changes),
            request_of(model, "drafted", OTHERS[0], {"name": "forced_prefix", "args": {"token_ids": PROMPT[:16]}}),
            *(request_of(model, f"other {number}", prompt, cfg(3.0)) for number, prompt in enumerate(OTHERS)),
            request_of(model, "led", PROMPT, guidance, led, **changes),
            request_of(model, "both", PROMPT, guidance, penalty, **changes),
            request_of(model, "again", PROMPT, guidance, **changes),
        ]
        answers = dict(
            zip([one.id for one in requests], decode(stepper, requests, preempts="pages" in place), strict=True)
        )
        assert {name: answers[name] for name in expected} == expected, place
        assert answers["again"] == expected["cfg"], place
        num_preemptions += stepper.scheduler.queues.num_preemptions
        num_accepted += sum(counts.accepted for counts in stepper.speculator.counts.values())
    assert num_preemptions
    assert num_accepted


@pytest.mark.parametrize("changes", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drafts_change_no_bit(model: HfModel, changes: dict[str, Any]) -> None:
    led = {"name": "forced_prefix", "args": {"token_ids": PROMPT[:6]}}
    penalty = {"name": "repetition_penalty", "args": {"penalty": 1.2}}
    guidance = cfg(negative_token_ids=NEGATIVE)
    chains = {"cfg": [cfg()], "negative": [guidance], "both": [penalty, guidance], "led": [guidance, led], "none": []}
    expected = {name: alone(model, *chain, **changes) for name, chain in chains.items()}
    places: list[dict[str, Any]] = [{"rows": 2}, {"rows": 5}, {"rows": 9}, {"budget": 12}, {"pages": 16}]
    for seed, place in enumerate(places):
        stepper = stepper_of(model, **place)
        speculator = drafting(stepper, expected, seed)
        requests = [request_of(model, name, PROMPT, *chain, **changes) for name, chain in chains.items()]
        answers = decode(stepper, requests, preempts="pages" in place)
        assert dict(zip(expected, answers, strict=True)) == expected, place
        assert sum(speculator.accepted) > 5, place


@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
def test_proposers_draft_for_a_guided_request(model: HfModel, method: str) -> None:
    led, prompt = {"name": "forced_prefix", "args": {"token_ids": PROMPT[:9]}}, list(range(20, 220))
    plain, stepper = stepper_of(model), stepper_of(model)
    plain.speculator = Repeating({"method": "none", "chain": False})
    expected = decode(plain, [request_of(model, "alone", prompt, cfg(), led)])
    stepper.speculator = Repeating({"method": method, "prompt_lookup_min": 1})
    assert decode(stepper, [request_of(model, "alone", prompt, cfg(), led)]) == expected
    assert not plain.speculator.counts
    assert stepper.speculator.counts["chain"].accepted
    assert (method in stepper.speculator.counts) == (method != "none")


@pytest.mark.parametrize("changes", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("begin", [{}, {"negative_token_ids": NEGATIVE}], ids=["last token", "negative"])
def test_a_migration_at_any_token_changes_no_bit(
    model: HfModel, begin: dict[str, Any], changes: dict[str, Any]
) -> None:
    expected = alone(model, cfg(**begin), **changes)
    for number in range(1, NEW_TOKENS):
        generated = [token for token, _ in expected[:number]]
        request = request_of(model, "migrated", PROMPT, cfg(**begin), generated=generated, **changes)
        assert decode(stepper_of(model, budget=24), [request]) == [expected[number:]], number


def test_rewound_tokens_are_rewound_in_both_sequences(model: HfModel) -> None:
    free = alone(model, cfg(), **SAMPLINGS["sampled"])
    text = VOCABULARIES[0].decode([token for token, _ in free[8:16]])
    phrase = next(text[start : start + 2] for start in range(9) if "\ufffd" not in text[start : start + 2])
    chain = [cfg(), {"name": "phrase_ban", "args": {"phrases": [phrase]}}]
    request = request_of(model, "banned", PROMPT, *chain, **SAMPLINGS["sampled"])
    decode(stepper_of(model), [request])
    answer = request.tokens[len(PROMPT) :]
    assert request.chain is not None
    assert sum(record.rollbacks or 0 for record in request.chain.receipt.records)
    assert answer != [token for token, _ in free]
    for number in (1, 9, 16):  # a fresh companion goes on as the rewound one did
        migrated = request_of(model, "banned", PROMPT, *chain, generated=answer[:number], **SAMPLINGS["sampled"])
        decode(stepper_of(model), [migrated])
        assert migrated.tokens[len(PROMPT) :] == answer, number


def test_raw_log_probabilities_are_those_before_guidance(model: HfModel) -> None:
    """The model's own most likely tokens, whichever is taken; a tap sees its own row, too."""
    found = []
    for chain in ([cfg()], []):
        request = request_of(model, "raw", PROMPT, *chain, max_tokens=1, logprobs=3, logprobs_mode="raw")
        request.tap = tap = LogitsCollector(PROMPT, keep_generated=True)
        stepper = stepper_of(model)
        stepper.add(request)
        (output,) = (one for _ in range(3) for one in stepper.step())
        row = tap.generated_logits(1)
        assert output.logprobs is not None
        assert row is not None
        found.append((output.token_id, output.logprobs[1:], row.tolist()))
    assert found[0][0] != found[1][0]
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"scale": 1.0}, r"processors\[0\]\.args\.scale: .*greater than 1, got 1"),
        ({"scale": 0.5}, r"processors\[0\]\.args\.scale: .*greater than 1"),
        ({"scale": float("inf")}, r"processors: Infinity is not JSON"),
        ({}, r"processors\[0\]\.args\.scale: .*required"),
        ({"scale": 2.0, "negative_token_ids": []}, r"args\.negative_token_ids: .*at least 1"),
        ({"scale": 2.0, "negative_prompt": ""}, r"args\.negative_prompt: .*at least 1"),
        (
            {"scale": 2.0, "negative_token_ids": [1 << 20]},
            r"args\.negative_token_ids: expected token ids between 0 and",
        ),
        ({"scale": 2.0, "negative_token_ids": [-1]}, r"args\.negative_token_ids\[0\]: .*greater than or equal to 0"),
        (
            {"scale": 2.0, "negative_token_ids": [3] * 2048},
            r"cfg: the negative prompt must be shorter than the context",
        ),
        ({"scale": 2.0, "negative_prompt": "x", "negative_token_ids": [3]}, r"give either negative_prompt or"),
        ({"scale": 2.0, "guidance": 3}, r"args\.guidance"),
    ],
)
def test_bad_arguments_are_refused(engine: Engine, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        engine.generate(PROMPT, SamplingParams(max_tokens=4), processors=[[{"name": "cfg", "args": arguments}]])


class Echo(CompanionProcessor):
    """Guidance of a third party; `begin` is what its companion begins with."""

    name = "acme/echo"
    begin: Any = None

    @property
    def companion_prompt(self) -> Sequence[int]:
        return list(self.begin)

    def shape(self, logits: torch.Tensor) -> None:
        logits += self.companion_row()


@pytest.mark.parametrize(
    ("begin", "problem"),
    [
        (None, "acme/echo: raised TypeError"),
        ([], "must begin with token ids"),
        ([5, 1 << 20], "must begin with token ids"),
        ([-1], "must begin with token ids"),
        ("text", "must begin with token ids"),
    ],
)
def test_a_companion_begins_with_tokens(model: HfModel, begin: Any, problem: str) -> None:
    context = Context(Vocabulary(model.vocab_size))
    echo = Echo(None, context)
    echo.begin = begin
    chain = ProcessorChain([echo], context)
    with pytest.raises(InvalidRequest, match=problem):
        admit(EngineRequest("one", PROMPT, SamplingParams(max_tokens=4), chain=chain), 0, model, CONTEXT)


def test_mirostat_beside_it_is_refused(engine: Engine) -> None:
    mirostat = {"name": "mirostat", "args": {"tau": 3.0}}
    with pytest.raises(InvalidRequest, match="cfg cannot be combined with mirostat"):
        engine.generate(PROMPT, SamplingParams(max_tokens=4), processors=[[cfg(), mirostat]])


def test_what_can_never_run_is_refused(model: HfModel) -> None:
    with pytest.raises(InvalidRequest, match="takes two rows of a batch, and --max-num-seqs is 1"):
        stepper_of(model, rows=1).check(request_of(model, "one", PROMPT, cfg()))
    with pytest.raises(InvalidRequest, match="6 blocks, and --kv-blocks is 4") as caught:
        stepper_of(model, pages=2).check(request_of(model, "one", PROMPT[:8], cfg(), max_tokens=30))
    assert caught.value.field == "logits_processors"


def test_the_answer_ends_where_either_sequence_fills_the_context(model: HfModel) -> None:
    begin = [7] * (CONTEXT - 3)
    (answer,) = decode(stepper_of(model), [request_of(model, "one", PROMPT, cfg(negative_token_ids=begin))])
    assert len(answer) == 3


def test_a_last_phrase_that_the_second_sequence_cuts_off(model: HfModel) -> None:
    guided = cfg(negative_token_ids=[7] * (CONTEXT - 9))
    phrase = {"name": "force_last_phrase", "args": {"text": "ab"}}
    problem = "force_last_phrase counts on an answer of 24 tokens, and beside cfg, .* at most 9; lower max_tokens"
    with pytest.raises(InvalidRequest, match=problem):
        request_of(model, "one", PROMPT, guided, phrase, ends=[2])
    request = request_of(model, "one", PROMPT, guided, phrase, ends=[2], max_tokens=9)
    (answer,) = decode(stepper_of(model), [request])
    assert VOCABULARIES[0].decode([token for token, _ in answer][:-1]).endswith("ab")


def test_a_prefill_worker_leaves_the_length_to_the_decode_worker(model: HfModel) -> None:
    """It is asked for one token of whatever answer, and builds the chain for the whole context."""
    builder = ChainBuilder(Catalog.default(), model_context(VOCABULARIES[0]))
    selection = Selection((Requested("cfg", {"scale": 2.5}), Requested("force_last_phrase", {"text": "ab"})))
    context = builder.context(frozenset([2]), 3, CONTEXT - len(PROMPT))

    def admitted(kv: KeepKv | None) -> Request:
        asked = EngineRequest("one", PROMPT, SamplingParams(max_tokens=1, end_id=2), kv=kv)
        return admit(builder.prepare(asked, selection, context), 0, model, CONTEXT)

    assert admitted(KeepKv()).limit == len(PROMPT) + 1
    with pytest.raises(InvalidRequest, match=r"beside cfg, .* at most 1; lower max_tokens"):
        admitted(None)


def test_a_text_is_tokenised_as_a_prompt_is(engine: Engine) -> None:
    text = "Guidance moves away from this."
    ids = list(engine.tokenizer.encode(text))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    chains = [[cfg(negative_prompt=text)], [cfg(negative_token_ids=ids)], [cfg()]]
    first, second, third = (one.token_ids for one in engine.generate([PROMPT] * 3, params, processors=chains))
    assert first == second != third
