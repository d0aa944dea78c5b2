"""Contrastive decoding: a token from the rows of two models, however they come about."""

from __future__ import annotations

import math
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
from transformers import AutoModelForCausalLM

from adapters.vocabulary import Vocabulary
from worker.engines.embedded import EmbeddedConfig, Engine
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.plan import Plan
from worker.engines.embedded.sampling import LogitsCollector
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

ARGUMENTS = {"alpha": 0.3, "beta": 1.5, "amateur_temperature": 0.8}

Models = tuple[HfModel, HfModel]
"""The expert and the amateur, of one tokenizer."""


@pytest.fixture(scope="module")
def models(checkpoints: dict[str, Path]) -> Models:
    expert, amateur = (
        load_model(EmbeddedConfig(model_path=checkpoints[arch], dtype="float32", numerics="exact"))
        for arch in ("llama", "qwen3")
    )
    assert isinstance(expert, HfModel)
    assert isinstance(amateur, HfModel)
    VOCABULARIES[:] = [Vocabulary.from_pretrained(str(checkpoints["llama"]), expert.vocab_size, expert.eos_token_ids)]
    return expert, amateur


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path]) -> Engine:
    drafts = {"model": str(checkpoints["qwen3"])}
    return Engine(checkpoints["llama"], max_num_seqs=8, dtype="float32", numerics="exact", speculative_config=drafts)


def contrastive(**arguments: Any) -> dict[str, Any]:
    return {"name": "contrastive", "args": arguments}


@pytest.mark.parametrize("arguments", [{}, ARGUMENTS], ids=["defaults", "all"])
def test_greedy_tokens_are_those_of_transformers(
    engine: Engine, checkpoints: dict[str, Path], arguments: dict[str, float]
) -> None:
    networks: list[Any] = [
        AutoModelForCausalLM.from_pretrained(checkpoints[arch], dtype=torch.float32) for arch in ("llama", "qwen3")
    ]
    alpha, beta, temperature = {"alpha": 0.1, "beta": 0.5, "amateur_temperature": 1.0, **arguments}.values()
    never, tokens = list(engine.session.stepper.model.undecodable_ids), list(PROMPT)
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            expert, amateur = (network(torch.tensor([tokens])).logits[0, -1].double() for network in networks)
        expert[never] = -math.inf
        scores = (1 + beta) * expert - beta * amateur / temperature
        scores[expert < expert.max() + math.log(alpha)] = -math.inf
        tokens.append(int(scores.argmax()))
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    chains = [[contrastive(**arguments)], []]
    contrasted, plain = (one.token_ids for one in engine.generate([PROMPT] * 2, params, processors=chains))
    assert contrasted == tokens[len(PROMPT) :]
    assert contrasted != plain


def alone(models: Models, *processors: dict[str, Any], **changes: Any) -> Answer:
    stepper = stepper_of(models[0], amateur=models[1])
    own = {"draft_model": stepper.draft_model, **changes}
    return decode(stepper, [request_of(models[0], "alone", PROMPT, *processors, **own)])[0]


@pytest.mark.parametrize("changes", SAMPLINGS.values(), ids=SAMPLINGS)
def test_chunks_batches_and_preemptions_change_no_bit(models: Models, changes: dict[str, Any]) -> None:
    own = contrastive(**ARGUMENTS)
    led = {"name": "forced_prefix", "args": {"token_ids": PROMPT[:6]}}
    penalty = {"name": "repetition_penalty", "args": {"penalty": 1.2}}
    cfg = {"name": "cfg", "args": {"scale": 2.5}}
    chains = {"own": [own], "both": [penalty, own], "led": [own, led], "cfg": [cfg], "none": []}
    expected = {name: alone(models, *chain, **changes) for name, chain in chains.items()}
    assert len({tuple(answer) for answer in expected.values()}) == len(chains)
    num_preemptions = num_drafted = 0
    places: list[dict[str, Any]] = [{"budget": 9}, {"budget": 64, "mixed": 1}, {"rows": 3}, {"pages": 16}]
    for place in (*places, {"method": "draft_model"}, {"method": "draft_model", "rows": 4, "pages": 16}):
        stepper = stepper_of(models[0], amateur=models[1], **place)
        asked = [(name, PROMPT, chain) for name, chain in chains.items()]
        asked[2:2] = [(f"other {number}", prompt, [own]) for number, prompt in enumerate(OTHERS)]
        asked.append(("again", PROMPT, [own]))
        requests = [
            request_of(models[0], name, prompt, *chain, draft_model=stepper.draft_model, **changes)
            for name, prompt, chain in asked
        ]
        decoded = decode(stepper, requests, preempts="pages" in place)
        answers = dict(zip([one.id for one in requests], decoded, strict=True))
        assert {name: answers[name] for name in expected} == expected, place
        assert answers["again"] == expected["own"], place
        num_preemptions += stepper.scheduler.queues.num_preemptions
        num_drafted += sum(counts.proposed for counts in stepper.speculator.counts.values())
    assert num_preemptions
    assert num_drafted


@pytest.mark.parametrize("changes", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drafts_change_no_bit(models: Models, changes: dict[str, Any]) -> None:
    own, penalty = contrastive(**ARGUMENTS), {"name": "repetition_penalty", "args": {"penalty": 1.2}}
    led = {"name": "forced_prefix", "args": {"token_ids": PROMPT[:6]}}
    cfg = {"name": "cfg", "args": {"scale": 2.5}}
    chains = {"own": [own], "both": [penalty, own], "led": [own, led], "cfg": [cfg], "none": []}
    expected = {name: alone(models, *chain, **changes) for name, chain in chains.items()}
    places: list[dict[str, Any]] = [{"rows": 2}, {"rows": 5}, {"rows": 9}, {"budget": 12}, {"pages": 16}]
    for seed, place in enumerate(places):
        stepper = stepper_of(models[0], amateur=models[1], **place)
        speculator = drafting(stepper, expected, seed)
        own_model: dict[str, Any] = {"draft_model": stepper.draft_model}
        requests = [request_of(models[0], name, PROMPT, *each, **own_model, **changes) for name, each in chains.items()]
        answers = decode(stepper, requests, preempts="pages" in place)
        assert dict(zip(expected, answers, strict=True)) == expected, place
        assert sum(speculator.accepted) > 5, place


@pytest.mark.parametrize("changes", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_migration_at_any_token_changes_no_bit(models: Models, changes: dict[str, Any]) -> None:
    expected = alone(models, contrastive(**ARGUMENTS), **changes)
    for number in range(1, NEW_TOKENS):
        stepper = stepper_of(models[0], amateur=models[1], budget=24)
        own = {"draft_model": stepper.draft_model, "generated": [token for token, _ in expected[:number]], **changes}
        request = request_of(models[0], "migrated", PROMPT, contrastive(**ARGUMENTS), **own)
        assert decode(stepper, [request]) == [expected[number:]], number


def test_rewound_tokens_are_rewound_in_both_models(models: Models) -> None:
    changes = SAMPLINGS["sampled"]
    free = [token for token, _ in alone(models, contrastive(), **changes)]
    text = VOCABULARIES[0].decode(free[8:16])
    phrase = next(text[start : start + 2] for start in range(9) if "\ufffd" not in text[start : start + 2])
    chain = [contrastive(), {"name": "phrase_ban", "args": {"phrases": [phrase]}}]
    answers: list[list[int]] = []
    for number in (0, 1, 9, 16):  # a fresh companion goes on as the rewound one did
        stepper = stepper_of(models[0], amateur=models[1])
        own = {"draft_model": stepper.draft_model, "generated": answers[0][:number] if answers else [], **changes}
        request = request_of(models[0], "banned", PROMPT, *chain, **own)
        decode(stepper, [request])
        answers.append(request.tokens[len(PROMPT) :])
        assert request.chain is not None
        assert number or sum(record.rollbacks or 0 for record in request.chain.receipt.records)
    assert answers == answers[:1] * 4
    assert answers[0] != free


def test_the_amateurs_kv_is_found_in_its_prefix_cache(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = stepper_of(models[0], amateur=models[1])
    plans: list[Plan] = []
    forward = models[1].forward

    def seen(plan: Plan) -> torch.Tensor:
        plans.append(plan)
        return forward(plan)

    monkeypatch.setattr(models[1], "forward", seen)
    prompt = PROMPT[:60]
    first, second = (
        decode(stepper, [request_of(models[0], name, prompt, contrastive(), draft_model=stepper.draft_model)])
        for name in "ab"
    )
    assert first == second
    assert [chunk.start for plan in plans for chunk in plan.chunks] == [0, 48]
    assert [copy.num_tokens for plan in plans for copy in plan.copies] == [16], "half a page is copied on write"


def test_raw_log_probabilities_are_the_experts_own(models: Models) -> None:
    found = []
    for chain in ([contrastive(**ARGUMENTS)], []):
        stepper = stepper_of(models[0], amateur=models[1])
        asked: dict[str, Any] = {"max_tokens": 1, "logprobs": 3, "logprobs_mode": "raw"}
        request = request_of(models[0], "raw", PROMPT, *chain, draft_model=stepper.draft_model, **asked)
        request.tap = tap = LogitsCollector(PROMPT, keep_generated=True)
        stepper.add(request)
        (output,) = (one for _ in range(3) for one in stepper.step())
        row = tap.generated_logits(1)
        assert output.logprobs is not None
        assert row is not None
        found.append((output.token_id, output.logprobs[1:], row.tolist()))
    assert found[0][0] != found[1][0]
    assert found[0][1:] == found[1][1:]


def test_the_first_of_three_choices_is_that_of_one(engine: Engine) -> None:
    fixed: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 5, "logprobs": 1}
    chain = [contrastive()]
    (three,) = engine.generate([PROMPT], SamplingParams(n=3, best_of=3, **fixed), processors=[chain])
    (one,) = engine.generate([PROMPT], SamplingParams(**fixed), processors=[chain])
    assert three.outputs[0].logprobs == one.logprobs
    assert three.outputs[0].token_ids == one.token_ids
    assert len({tuple(each.token_ids) for each in three.outputs}) == 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"alpha": 0}, r"args\.alpha: .*greater than 0, got 0"),
        ({"alpha": 1.5}, r"args\.alpha: .*less than or equal to 1, got 1.5"),
        ({"beta": 0}, r"args\.beta: .*greater than 0, got 0"),
        ({"beta": -1.0}, r"args\.beta: .*greater than 0"),
        ({"beta": 101}, r"args\.beta: .*less than or equal to 100"),
        ({"beta": float("nan")}, r"processors: NaN is not JSON"),
        ({"amateur_temperature": 0}, r"args\.amateur_temperature: .*greater than or equal to 0\.01"),
        ({"gamma": 1}, r"args\.gamma"),
    ],
)
def test_bad_arguments_are_refused(engine: Engine, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        engine.generate(PROMPT, SamplingParams(max_tokens=4), processors=[[contrastive(**arguments)]])


@pytest.mark.parametrize(
    ("beside", "problem"),
    [
        ({"name": "mirostat", "args": {"tau": 3.0}}, "contrastive cannot be combined with mirostat"),
        ({"name": "cfg", "args": {"scale": 2.0}}, "cfg cannot be combined with contrastive: a request has one"),
        (contrastive(), "contrastive may be named once"),
    ],
    ids=["mirostat", "cfg", "itself"],
)
def test_what_needs_more_rows_beside_it_is_refused(engine: Engine, beside: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        engine.generate(PROMPT, SamplingParams(max_tokens=4), processors=[[beside, contrastive()]])


def test_what_can_never_run_is_refused(models: Models) -> None:
    model, own = models[0], contrastive()
    with pytest.raises(InvalidRequest, match=r"contrastive needs a draft model, .*--speculative-config"):
        request_of(model, "one", PROMPT, own)
    single = stepper_of(model, amateur=models[1], rows=1)
    with pytest.raises(InvalidRequest, match="takes two rows of a batch, and --max-num-seqs is 1"):
        single.check(request_of(model, "one", PROMPT, own, draft_model=single.draft_model))
    stepper = stepper_of(model, amateur=models[1])
    assert stepper.draft_model is not None
    stepper.draft_model.context_length = len(PROMPT)
    with pytest.raises(InvalidRequest, match=f"shorter than the draft model's context of {len(PROMPT)} tokens"):
        request_of(model, "one", PROMPT, own, draft_model=stepper.draft_model)
    stepper.draft_model.context_length += 3
    (answer,) = decode(stepper, [request_of(model, "one", PROMPT, own, draft_model=stepper.draft_model)])
    assert len(answer) == 3 < CONTEXT - len(PROMPT)
