"""Whatever is drafted, tokens, logprobs, receipts and stops are those of plain decoding."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import random_checkpoints
import torch
from effort import examples
from engine_doubles import (
    PADDING,
    WIDTH,
    Draft,
    Drafting,
    ScriptedModel,
    StartEngine,
    collect,
    config,
    request,
    stepper,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_doubles import END as END_OF_RECALL
from kv_doubles import RecallModel, answer, recall_request
from prometheus_client import CollectorRegistry
from random_checkpoints import EVERY_TYPE
from safetensors.torch import load_file, save_file
from speculation_runs import EXAMPLES, NEW_TOKENS, PLAIN, TEXTS, Repeating, outcome, params_of

from adapters.catalog import Catalog, parse_selection
from adapters.chain import ProcessorChain
from adapters.contract import Context, Reads, Stage, SteeringProcessor, Unsatisfiable
from adapters.processors.forcing import ForcedSequence
from adapters.testing.kit_model import KEY_ID, kit_context
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest, TokenDelta
from worker.engines.embedded import EmbeddedEngine, Engine, Plan, Request
from worker.engines.embedded.draft_model import DraftModel
from worker.engines.embedded.drafted_rows import DraftedRows
from worker.engines.embedded.kv_cache import KvCache
from worker.engines.embedded.scheduler import Scheduler
from worker.engines.embedded.speculation import DraftModelProposer, SpeculativeConfig, Speculator
from worker.engines.embedded.step import Stepper, make_stepper
from worker.errors import StartupError
from worker.metrics import LoadMetrics
from worker.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

USABLE = WIDTH - PADDING


def guesses(seed: int, known: Callable[[Request], Sequence[int]], most: int = 8) -> Draft:
    """Drafts of 0 to `most` tokens: `known` ones up to a random place, then random ones."""
    source = random.Random(seed)

    def draft(one: Request) -> Sequence[int]:
        right = list(known(one))[: source.choice((0, 1, 2, most))]
        return (right + [source.randrange(USABLE) for _ in range(most)])[: source.randrange(most + 1)]

    return draft


@dataclass
class Asked:
    name: str
    prompt: list[int]
    params: SamplingParams
    then: Callable[[Request], None] = field(default=lambda one: None)


def decode(model: ScriptedModel, asked: Sequence[Asked], draft: Draft | None, **changes: Any) -> dict[str, TokenDelta]:
    """All answers, decoded together, with every receipt; pages are checked after each step."""
    blocks = changes.pop("num_blocks", 200)
    driver = make_stepper(config(**{"max_num_seqs": len(asked), **changes}), model, blocks)
    driver.speculator = Speculator(SpeculativeConfig(chain=False)) if draft is None else Drafting(draft)
    for one in asked:
        driver.add(request(model, one.name, one.prompt, one.params))
    answers = {one.name: TokenDelta() for one in asked}
    while not driver.scheduler.is_idle:
        for output in driver.step():
            delta = answers[output.request_id]
            assert delta.finish_reason is None
            if output.token_id is not None:
                delta.token_ids.append(output.token_id)
                delta.logprobs = [*(delta.logprobs or ()), output.logprobs or []]
            delta.finish_reason, delta.stop_reason, delta.error = (
                output.finish_reason,
                output.stop_reason,
                output.error,
            )
            if output.chain is not None:
                delta.engine_data = output.chain.receipt.as_json()
        driver.scheduler.check_integrity()
        driver.scheduler.cache.check_blocks()
    return answers


def controls(source: random.Random) -> dict[str, Any]:
    """Controls of one request, of every kind that depends on history."""
    chosen: dict[str, Any] = {"seed": source.randrange(100)}
    if source.random() < 0.5:
        chosen["temperature"] = source.choice((0.5, 1.0, 2.0))
        chosen |= source.choice(({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05, "top_k": 40}))
    for name, value in (
        ("repetition_penalty", 1.3),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.8),
        ("no_repeat_ngram_size", 2),
        ("min_tokens", 7),
        ("logprobs", 3),
        ("logprobs_mode", "processed"),
    ):
        if source.random() < 0.3:
            chosen[name] = value
    if source.random() < 0.3:
        chosen["stop_token_ids"] = [source.randrange(USABLE) for _ in range(4)]
    return chosen


@given(seed=st.integers(0, 2**32), size=st.integers(1, 5), budget=st.sampled_from((8, 24, 512)))
@settings(max_examples=examples(40), deadline=None)
def test_whatever_is_drafted_answers_are_those_of_plain_decoding(seed: int, size: int, budget: int) -> None:
    source = random.Random(seed)
    model = ScriptedModel()
    asked = [
        Asked(
            str(number),
            [source.randrange(USABLE) for _ in range(source.randrange(1, 40))],
            SamplingParams(max_tokens=source.randrange(1, 40), **controls(source)),
        )
        for number in range(size)
    ]
    changes = {"max_num_batched_tokens": budget, "num_blocks": 40 if source.random() < 0.3 else 200}
    plain = decode(model, asked, None, **changes)
    known = {one.name: one.prompt + plain[one.name].token_ids for one in asked}
    speculated = decode(model, asked, guesses(seed, lambda one: known[one.id][len(one.tokens) :]), **changes)
    assert speculated == plain


@pytest.mark.parametrize(
    ("numerics", "device", "given", "method"),
    [
        ("exact", "cpu", None, "ngram"),
        ("exact", "cpu", {"chain": False}, "ngram"),
        ("exact", "cpu", {"method": "none"}, "none"),
        ("fast", "cpu", None, "none"),
        ("exact", "cuda", None, "none"),
        ("fast", "cuda", {"method": "suffix"}, "suffix"),
    ],
)
def test_ngrams_are_drafted_where_no_token_depends_on_drafts(
    numerics: str, device: str, given: dict[str, Any] | None, method: str
) -> None:
    model = ScriptedModel()
    model.numerics, model.device = numerics, torch.device(device)
    assert make_stepper(config(speculative_config=given), model, 200).speculator.config.method == method


@pytest.mark.parametrize("length", range(1, 9))
def test_a_right_draft_saves_steps(length: int) -> None:
    model = ScriptedModel()
    tokens = model.greedy([5], 40)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    found = decode(model, [Asked("a", [5], params)], lambda one: tokens[len(one.tokens) - 1 :][:length])
    assert found["a"].token_ids == tokens
    assert len(model.plans) == 1 + -(-39 // (length + 1))


@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(6, 14),
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=6),
)
@settings(max_examples=examples(40), deadline=None)
def test_kv_of_rejected_drafts_is_never_read_and_pages_balance(
    seed: int, num_pages: int, lengths: list[tuple[int, int]]
) -> None:
    source = random.Random(seed)
    model = RecallModel(64)
    model.allocate_kv(num_pages, 8)
    driver = Stepper(model, Scheduler(KvCache(num_pages, 8, 4), 4, 32, 4))
    wanted: dict[str, list[int]] = {}

    def right(one: Request) -> list[int]:
        return wanted[one.id][len(one.tokens) - one.prompt_length :]

    driver.speculator = Drafting(guesses(seed, right, most=12))
    live: dict[str, Request] = {}
    for number, (length, most) in enumerate(lengths):
        prompt = [3 + source.randrange(4) for _ in range(length)]
        most = min(most, 8 * num_pages - length)
        one = live[str(number)] = recall_request(model, str(number), prompt, most)
        wanted[one.id] = answer(prompt, most)
        driver.add(one)
    while not driver.scheduler.is_idle:
        driver.step()
        driver.scheduler.check_integrity()
        driver.scheduler.cache.check_blocks()
        for one in driver.scheduler.queues.decoding:
            assert len(one.pages) == driver.scheduler.cache.count_pages(one.num_computed)
            assert one.num_computed == len(one.tokens) - 1
    assert {name: one.tokens[one.prompt_length :] for name, one in live.items()} == wanted
    assert driver.scheduler.cache.num_available == num_pages


def test_a_draft_takes_only_free_pages_and_ends_with_the_answer() -> None:
    model = RecallModel(64)
    model.allocate_kv(3, 8)
    scheduler = Scheduler(KvCache(3, 8, 4), 4, 9)
    driver = Stepper(model, scheduler)
    seen: list[Plan] = []
    forward = model.forward
    model.forward = lambda plan: (seen.append(plan), forward(plan))[1]  # type: ignore[method-assign,func-returns-value]
    driver.speculator = Drafting(lambda one: [9] * 40)
    driver.add(recall_request(model, "a", [3] * 6, 9))
    driver.add(recall_request(model, "b", [4] * 6, 2))
    while not scheduler.is_idle:
        driver.step()
    drafts = [dict(zip([one.id for one in plan.decode], plan.drafts, strict=False)) for plan in seen]
    assert all(plan.num_tokens <= 9 for plan in seen)
    assert not any(one.get("b") for one in drafts)  # one token is left of it, which a draft cannot save
    assert 0 < max(len(one.get("a", ())) for one in drafts) <= 7  # of 40: the answer ends before
    assert scheduler.queues.num_preemptions == 0


def test_a_draft_that_overflows_leaves_nothing_behind() -> None:
    model = ScriptedModel()
    asked = [Asked(str(token), [token], SamplingParams(max_tokens=12, seed=1)) for token in (5, 9)]
    plain = decode(model, asked, None)
    bad = next(token for token in range(USABLE) if all(token not in one.token_ids for one in plain.values()))

    def overflow(plan: Plan, logits: torch.Tensor) -> None:
        for first, draft in zip(plan.first_rows(), plan.drafts, strict=False):
            if draft:
                logits[first + 1 : first + 1 + len(draft)] = torch.nan

    model.hook = overflow
    driver = make_stepper(config(), model, 200)
    driver.speculator = Drafting(lambda one: [bad, bad] if one.id == "5" and len(one.tokens) == 4 else [])
    for one in asked:
        driver.add(request(model, one.name, one.prompt, one.params))
    found: dict[str, list[int]] = {"5": [], "9": []}
    while not driver.scheduler.is_idle:
        for output in driver.step():
            found[output.request_id] += [] if output.token_id is None else [output.token_id]
    assert found == {name: one.token_ids for name, one in plain.items()}
    assert driver.scheduler.queues.num_preemptions == 1


@given(
    drafts=st.lists(
        st.tuples(st.lists(st.tuples(st.integers(0, USABLE - 1), st.booleans())), st.booleans()), min_size=1
    ),
    taken=st.sets(st.integers(0, 30), min_size=1),
)
def test_rows_are_those_of_their_history_whoever_leaves_a_step(
    drafts: list[tuple[list[tuple[int, bool]], bool]], taken: set[int]
) -> None:
    """Of each request a draft, which of its logits are left out, and whether it leaves."""
    model = ScriptedModel()
    decode = tuple(request(model, str(row), [5 + row, 7], SamplingParams(max_tokens=9)) for row in range(len(drafts)))
    owners, unread = list[int](), list[int]()
    for owner, (draft, _) in enumerate(drafts):
        unread += [len(owners) + place for place, (_, is_unread) in enumerate(draft) if is_unread]
        owners += [owner] * (1 + len(draft))
    tokens = tuple(tuple(token for token, _ in draft) for draft, _ in drafts)
    plan = Plan(decode, (), decode, drafts=tokens, unread={row: row for row in unread})
    logits = model.forward(plan)
    left, rows = plan.without([one for one, (_, leaves) in zip(decode, drafts, strict=True) if leaves])
    kept = [row for row, owner in enumerate(owners) if not drafts[owner][1]]
    some = [row for row in sorted(taken) if row < len(kept)]
    if some:
        found = DraftedRows(model, left, logits[rows])
        assert torch.equal(found.take(some), model.left_out[[kept[row] for row in some]])
        assert found.late == {kept[row] for row in some} & set(unread)


# -- what ends is freed


class Fails(SteeringProcessor):
    """Cannot be satisfied after 20 tokens."""

    name, stage, reads = "fails", Stage.MASK, Reads.GENERATED

    def edit(self) -> None:
        if self.num_generated == 20:
            raise Unsatisfiable("no more")


class Minimum(SteeringProcessor):
    """Does not know whether the answer may end."""

    name, stage, reads = "minimum", Stage.MASK, Reads.GENERATED

    def edit(self) -> None:
        return None

    @property
    def is_too_short(self) -> bool:
        raise ZeroDivisionError


def test_a_minimum_that_raises_ends_its_request_alone() -> None:
    model = ScriptedModel()
    driver = stepper(model)
    one, other = (request(model, name, [5], SamplingParams(max_tokens=3)) for name in "ab")
    context = Context(Vocabulary(WIDTH), frozenset({0}))
    one.chain = ProcessorChain([Minimum(None, context)], context)
    one.chain.start(one.tokens)
    driver.add(one)
    driver.add(other)
    outputs = []
    while not driver.scheduler.is_idle:
        outputs += driver.step()
    assert [output.error for output in outputs if output.request_id == "a"] == [
        "logits processor minimum: raised ZeroDivisionError at position 2"
    ]
    assert [output.error for output in outputs if output.request_id == "b"] == [None] * 3


def test_nothing_is_sampled_behind_an_error_within_a_draft() -> None:
    """Whose next token would be the one before, which was right."""
    model = ScriptedModel()
    model.by_position[:, 7] = 100.0
    one = request(model, "a", [5], SamplingParams(max_tokens=30))
    context = Context(Vocabulary(WIDTH), frozenset({0}))
    one.chain = ProcessorChain([Fails(None, context)], context)
    one.chain.start(one.tokens)
    driver = stepper(model)
    driver.speculator = Drafting(lambda one: [7] * 6)
    driver.add(one)
    outputs = []
    while not driver.scheduler.is_idle:
        outputs += driver.step()
    assert [output.token_id for output in outputs] == [7] * 20 + [None]
    assert "no more" in str(outputs[-1].error)


def test_a_failed_request_is_freed_without_garbage_collection() -> None:
    """A grammar is megabytes of the compiler's, of which the collector knows nothing."""
    model = ScriptedModel()
    driver = stepper(model)
    one = request(model, "a", [5], SamplingParams(max_tokens=30))
    context = Context(Vocabulary(WIDTH), frozenset({0}))
    forces = ForcedSequence(ForcedSequence.Args(token_ids=[7] * 25), context)
    one.chain = ProcessorChain([forces, Fails(None, context)], context)
    one.chain.start(one.tokens)
    left = weakref.ref(one)
    driver.add(one)
    del one, forces
    gc.collect()
    gc.disable()
    try:
        outputs = []
        while not driver.scheduler.is_idle:
            outputs += driver.step()
        assert "no more" in outputs[-1].error
        del outputs
        model.plans.clear()
        driver.add(request(model, "b", [5], SamplingParams(max_tokens=1)))
        driver.step()  # until then the sampler may keep the rows of the last one
        assert left() is None
        assert driver.speculator.counts["chain"].accepted > 0
    finally:
        gc.enable()


# -- a draft model


def test_a_draft_model_reads_its_own_kv_however_its_drafts_end() -> None:
    source = random.Random(1)
    draft_model = DraftModel(RecallModel(64), num_drafted=3, context_length=64, page_size=64, block_size=4)
    model = ScriptedModel()
    asked = [Asked(str(number), [5 + number] * (1 + 7 * number), SamplingParams(max_tokens=30)) for number in range(3)]
    plain = decode(model, asked, None)
    proposers: dict[str, DraftModelProposer] = {}

    def draft(one: Request) -> Sequence[int]:
        proposer = proposers.setdefault(one.id, DraftModelProposer(draft_model, one))
        found = list(proposer.propose(one.tokens, source.randrange(1, 5)).tokens)
        right = plain[one.id].token_ids[len(one.tokens) - one.prompt_length :]
        assert found == answer(one.tokens, len(found)) or END_OF_RECALL in found
        return (right[: source.randrange(3)] + found)[:4]

    assert decode(model, asked, draft) == plain
    proposers.clear()
    gc.collect()
    draft_model.check_integrity([])
    assert draft_model.cache.num_available == draft_model.cache.num_pages


def test_the_model_itself_as_its_draft_is_always_right() -> None:
    model = ScriptedModel()
    asked = request(model, "a", [5], SamplingParams())
    proposer = DraftModelProposer(
        DraftModel(ScriptedModel(), num_drafted=1, context_length=256, page_size=256, block_size=16), asked
    )
    tokens = model.greedy([5], 30)
    found = decode(
        model,
        [Asked("a", [5], SamplingParams(max_tokens=30, ignore_eos=True))],
        lambda one: [min(token, USABLE - 1) for token in proposer.propose(one.tokens, 4).tokens],
    )
    assert found["a"].token_ids == tokens


def test_a_draft_model_with_another_vocabulary_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    random_checkpoints.write(tmp_path / "other", "gemma2", random_checkpoints.TYPES["gemma2"])
    with pytest.raises(StartupError, match="has a vocabulary of 320 ids"):
        Engine(
            checkpoints["llama"],
            kv_blocks=128,
            speculative_config={"method": "draft_model", "model": str(tmp_path / "other")},
        )


@pytest.mark.parametrize("part", ["vocabulary", "added token"])
def test_a_draft_model_with_another_tokenizer_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, part: str
) -> None:
    draft = Path(shutil.copytree(checkpoints["llama"], tmp_path / "draft"))
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    if part == "vocabulary":
        vocabulary = tokenizer["model"]["vocab"]
        one, other = [*vocabulary][-2:]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    else:
        tokenizer["added_tokens"][0]["content"] = "<another>"
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(StartupError, match=f"--speculative-config: model {draft} has another tokenizer than"):
        Engine(checkpoints["llama"], kv_blocks=128, speculative_config={"method": "draft_model", "model": str(draft)})


def test_a_draft_model_that_overflows_is_named_by_its_option(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    draft = Path(shutil.copytree(checkpoints["llama"], tmp_path / "draft"))
    weights = load_file(draft / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)
    weights["lm_head.weight"].fill_(1e10)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=f"^--speculative-config: model {draft}: .*first forward pass"):
        Engine(checkpoints["llama"], kv_blocks=128, speculative_config={"method": "draft_model", "model": str(draft)})


def test_an_option_that_does_not_fit_the_draft_model_names_it(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """With ``--dtype auto`` the draft model has its own data type, here another than the target."""
    draft = shutil.copytree(checkpoints["llama"], tmp_path / "draft")
    settings = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(settings | {"torch_dtype": "bfloat16"}))
    speculative = {"method": "draft_model", "model": str(draft)}
    said = f"--speculative-config: model {draft}: --kv-cache-dtype int16 needs --dtype float32: elements of bfloat16"
    with pytest.raises(StartupError, match=re.escape(said)):
        Engine(checkpoints["llama"], kv_cache_dtype="int16", speculative_config=speculative)
    Engine(checkpoints["llama"], kv_cache_dtype="int16", dtype="float32", speculative_config=speculative)


def test_a_draft_model_end_to_end(checkpoints: dict[str, Path]) -> None:
    settings = {"method": "draft_model", "model": str(checkpoints["llama"]), "num_speculative_tokens": 3}
    engine = Engine(checkpoints["llama"], max_num_seqs=2, context_length=256, speculative_config=settings)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    plain = [one.token_ids for one in engine.generate(TEXTS, params, speculation=False)]
    assert engine.session.stepper.speculator.counts == {}
    assert [one.token_ids for one in engine.generate(TEXTS, params)] == plain
    counts = engine.session.stepper.speculator.counts["draft_model"]
    assert counts.proposed >= counts.accepted > 0


# -- real models


@pytest.fixture(scope="module")
def engines(every_checkpoint: dict[str, Path]) -> dict[str, Engine]:
    return {}


def engine_of(name: str, every_checkpoint: dict[str, Path], engines: dict[str, Engine]) -> Engine:
    if name not in engines:
        drafts = {"model": str(every_checkpoint["qwen3"])} if name == "llama" else None  # contrastive needs one
        fixed: dict[str, Any] = {"max_num_seqs": 4, "dtype": "float32", "numerics": "exact", "kv_blocks": 128}
        engines[name] = Engine(every_checkpoint[name], speculative_config=drafts, **fixed)
    return engines[name]


def check_equal(engine: Engine, settings: dict[str, Any], prompts: Any, params: Any, processors: Any = ()) -> int:
    """Plain and speculated answers are equal; returns how many drafted tokens were accepted."""
    plain = outcome(engine, Speculator(SpeculativeConfig.parse(PLAIN)), prompts, params, processors)
    speculator = Repeating(settings)
    assert outcome(engine, speculator, prompts, params, processors) == plain
    return sum(counts.accepted for counts in speculator.counts.values())


MIXED = [
    {},
    {"logprobs": 2, "repetition_penalty": 1.05},
    {"temperature": 0.7, "seed": 3, "top_k": 20, "logprobs": 1, "logprobs_mode": "processed"},
    {"temperature": 0.3, "seed": 4, "min_p": 0.1, "frequency_penalty": 0.1, "min_tokens": 9},
]
"""Four requests of a batch."""


def check_type(engine: Engine, settings: dict[str, Any]) -> int:
    source = random.Random(5)
    shared = [source.randrange(3, 300) for _ in range(9)]
    prompts = [shared * 3 + [source.randrange(3, 300)] for _ in MIXED]
    params = [SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **{"seed": 1, **one}) for one in MIXED]
    return check_equal(engine, settings, prompts, params)


@pytest.mark.parametrize("arch", EVERY_TYPE)
def test_every_model_type(arch: str, every_checkpoint: dict[str, Path], engines: dict[str, Engine]) -> None:
    length = 1 + EVERY_TYPE.index(arch) % 8
    method = ("ngram", "suffix")[EVERY_TYPE.index(arch) % 2]
    settings = {"method": method, "num_speculative_tokens": length, "prompt_lookup_min": 1}
    check_type(engine_of(arch, every_checkpoint, engines), settings)


@pytest.fixture(scope="module")
def engine(every_checkpoint: dict[str, Path], engines: dict[str, Engine]) -> Engine:
    found = engine_of("llama", every_checkpoint, engines)
    builder = found.session.builder
    keyed = replace(builder._chains.model, watermark_keys={KEY_ID: bytes(range(32))})
    builder._chains = replace(builder._chains, model=keyed)
    return found


def test_what_a_chain_forces_is_drafted_without_a_setting(engine: Engine) -> None:
    stepper = engine.session.stepper
    forced = [{"name": "forced_sequence", "args": {"text": TEXTS[0]}}]
    stepper.speculator = speculator = Speculator(clock=lambda: 0.0)  # free tokens, however busy the machine is
    forwards: list[Plan] = []
    forward = stepper.model.forward
    stepper.model.forward = lambda plan: (forwards.append(plan), forward(plan))[1]  # type: ignore[method-assign,func-returns-value]
    (result,) = engine.generate(TEXTS[1], SamplingParams(max_tokens=32), processors=forced)
    stepper.model.forward = forward  # type: ignore[method-assign]
    assert result.text == TEXTS[0]
    counts = speculator.counts["chain"]
    assert counts.proposed == counts.accepted == len(result.token_ids) - len(forwards) + 1
    assert len(forwards) <= 2 + len(result.token_ids) // 16


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_forced_run_is_one_step_in_a_batch_of_any_size(engine: Engine, batch: int) -> None:
    """However dear a token of a step is."""
    stepper = engine.session.stepper
    forced = [{"name": "forced_sequence", "args": {"text": " ".join(TEXTS)}}]
    stepper.speculator = speculator = Speculator(clock=lambda: 0.0)
    for count in range(1, 400):
        speculator._costs.learn(count, 0.010 * count)
    plans: list[Plan] = []
    forward = stepper.model.forward
    stepper.model.forward = lambda plan: (plans.append(plan), forward(plan))[1]  # type: ignore[method-assign,func-returns-value]
    params = SamplingParams(max_tokens=64)
    results = engine.generate([f"{TEXTS[1]} {number}" for number in range(batch)], params, processors=forced)
    stepper.model.forward = forward  # type: ignore[method-assign]
    length = len(results[0].token_ids)
    assert length > 16
    assert all(result.text == " ".join(TEXTS) and len(result.token_ids) == length for result in results)
    drafts = [len(draft) for plan in plans for draft in plan.drafts if draft]
    assert len(drafts) == batch
    assert speculator.counts["chain"].accepted == sum(drafts) >= batch * (length - 3)


class Forcing(Speculator):
    """Every draft is a run that a chain forces."""

    def _is_forced(self, row: int) -> bool:
        return True


def test_ends_of_runs_are_computed_if_they_are_often_not_forced() -> None:
    one = request(ScriptedModel(), "one", [3, 4], SamplingParams(max_tokens=8))
    plan, speculator = Plan((one,), (), (one,), drafts=((5, 6, 7),)), Forcing()
    for late in ((), (2,), (2,)):
        left = speculator.leave_out(plan)
        assert set(left.unread) == {0, 1, 2}
        speculator.learn_late(left, late)
    left = speculator.leave_out(plan)
    assert set(left.unread) == {0, 1}
    for _ in range(50):  # that it is forced by now nobody sees, so that it is tried again
        speculator.learn_late(left, ())
    assert set(speculator.leave_out(plan).unread) == {0, 1, 2}


def test_a_grammar_drafts_the_text_that_it_forces(engine: Engine) -> None:
    properties = {"customer_identification": {"type": "boolean"}, "preferred_language": {"enum": ["en", "de"]}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    engine.session.stepper.speculator = speculator = Speculator(
        clock=lambda: 0.0
    )  # free tokens, however busy the machine is
    named = [{"name": "json_schema", "args": {"schema": schema}}]
    (result,) = engine.generate(TEXTS[1], SamplingParams(max_tokens=128), processors=named)
    assert set(json.loads(result.text or "")) == set(properties)
    assert speculator.counts["chain"].accepted > 0
    (plain,) = engine.generate(TEXTS[1], SamplingParams(max_tokens=128), processors=named, speculation=False)
    assert plain.token_ids == result.token_ids


@given(seeds=st.lists(st.integers(0, 99), min_size=4, max_size=4), data=st.data())
@settings(max_examples=examples(20), deadline=None)
def test_forced_rows_beside_others_that_are_sampled(engine: Engine, seeds: list[int], data: st.DataObject) -> None:
    """Of a position of a batch only the rows that are not forced are sampled."""
    properties = {"kind": {"enum": ["a", "bird", "catamaran"]}, "is_old": {"type": "boolean"}, "n": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    forms = [
        [{"name": "json_schema", "args": {"schema": schema}}],
        [{"name": "forced_sequence", "args": {"text": TEXTS[0]}}],
        [{"name": "json_schema", "args": {"schema": schema}}, {"name": "min_tokens", "args": {"n": 4}}],
        [],
    ]
    named = [data.draw(st.sampled_from(forms)) for _ in seeds]
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=40, logprobs=data.draw(st.sampled_from([None, None, 1])))
        for seed in seeds
    ]
    prompts = [f"{TEXTS[1]} {seed}" for seed in seeds]
    plain = outcome(engine, Speculator(SpeculativeConfig.parse(PLAIN)), prompts, params, named)
    assert outcome(engine, Speculator(clock=lambda: 0.0), prompts, params, named) == plain


class Remembering(Drafting):
    """Keeps what it is told of logits that were left out."""

    def learn_late(self, plan: Plan, late: Collection[int]) -> None:
        self.late = {*late}
        self.left_out = {*plan.unread}


@pytest.mark.parametrize("batch", [1, 3])
def test_logits_that_are_wanted_after_all_are_told(batch: int) -> None:
    """Of every second row the logits behind a draft are left out, and nothing forces a token."""
    model = ScriptedModel()
    drafting = Remembering(lambda one: model.greedy(one.tokens, 3))
    found = stepper(model)
    found.speculator = drafting
    for row in range(batch):
        found.add(request(model, f"{row}", [3 + row, 4], SamplingParams(max_tokens=12, ignore_eos=True)))
    found.step()
    found.step()
    assert drafting.accepted[-batch:] == [3] * batch
    assert drafting.late == drafting.left_out == {4 * row + depth for row in range(0, batch, 2) for depth in range(3)}


@pytest.mark.parametrize("processors", [(), [{"name": "no_repeat_ngram", "args": {"n": 3}}]])
def test_a_prediction_changes_no_answer(engine: Engine, processors: Any) -> None:
    """Right, edited, of another text, or of none: the answers are the same, in fewer steps."""
    params = SamplingParams(max_tokens=NEW_TOKENS, seed=7, ignore_eos=True, logprobs=0)
    plain = outcome(engine, Speculator(SpeculativeConfig.parse(PLAIN)), TEXTS, params, processors)
    right = [text for _, text, *_ in plain]
    for predictions in (right, [text[:9] + "x" + text[12:] for text in right], TEXTS, ["", None], "the"):
        assert outcome(engine, Repeating({}), TEXTS, params, processors, predictions) == plain
    with patch.object(engine.session.builder, "predicted", {text: ids for ids, text, *_ in plain}.get):  # as sampled
        speculator = Repeating({})
        assert outcome(engine, speculator, TEXTS, params, processors, right) == plain
        assert speculator.counts["prediction"].accepted >= 2 * (NEW_TOKENS - 2)
        engine.session.stepper.speculator = speculator = Repeating({})
        engine.generate(TEXTS, params, predictions=right, speculation=False)
        assert speculator.counts == {}


def test_a_request_may_forgo_drafts(engine: Engine) -> None:
    engine.session.stepper.speculator = speculator = Speculator(SpeculativeConfig(method="ngram", prompt_lookup_min=1))
    forced = [{"name": "forced_sequence", "args": {"text": TEXTS[0]}}]
    engine.generate(TEXTS, SamplingParams(max_tokens=16), processors=forced, speculation=False)
    assert speculator.counts == {}
    chain = Catalog.default().build_chain(parse_selection('{"version": 1, "speculation": false}'), kit_context())
    assert not chain.speculates


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("min_tokens", [None, 12])
def test_stop_strings_end_an_answer_within_a_draft(engine: Engine, include: bool, min_tokens: int | None) -> None:
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=1)
    stepper = engine.session.stepper
    stepper.speculator = Speculator(SpeculativeConfig.parse(PLAIN))
    (free,) = engine.generate(TEXTS[0], params)
    assert free.text is not None
    stop = free.text[len(free.text) // 3 :][:2]
    named = [{"name": "frequency_penalty", "args": {"penalty": 0.0001}}]
    cut = replace(params, stop=[stop], logprobs=1, min_tokens=min_tokens, include_stop_str_in_output=include)
    plain = outcome(engine, Speculator(SpeculativeConfig.parse(PLAIN)), TEXTS[0], cut, named)
    known = free.token_ids

    def right(one: Request) -> Sequence[int]:
        return known[len(one.tokens) - one.prompt_length :][:7]

    drafting = Drafting(right)
    assert outcome(engine, drafting, TEXTS[0], cut, named) == plain
    assert sum(drafting.accepted) > 0
    assert plain[0][4] == stop or min_tokens


async def test_served_answers_and_counts(start_engine: StartEngine) -> None:
    model = ScriptedModel()
    engine = await start_engine(model, speculative_config='{"method": "ngram", "prompt_lookup_min": 1}')
    prompt = [5, 6, 7] * 5
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    tokens, _ = await collect(engine, "a", prompt, params)
    assert tokens == model.greedy(prompt, 40)
    proposed, accepted = engine.load().drafted["ngram"]
    assert proposed >= accepted
    registry = CollectorRegistry()
    assert engine._info is not None
    LoadMetrics(engine, engine._info, registry)
    found = registry.get_sample_value("dlw_speculation_proposed_tokens_total", {"proposer": "ngram"})
    assert found == proposed > 0
    assert registry.get_sample_value("dlw_speculation_accepted_tokens_total", {"proposer": "ngram"}) == accepted


async def test_the_step_thread_alone_frees_drafted_pages(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer of a stream may be the last one that has its request."""
    threads = set[str]()
    free = KvCache.free

    def noted(cache: KvCache, sequence: Request) -> None:
        threads.update([threading.current_thread().name] if sequence.pages else [])
        free(cache, sequence)

    monkeypatch.setattr(KvCache, "free", noted)
    drafts = {"method": "draft_model", "model": str(checkpoints["llama"])}
    engine = EmbeddedEngine(
        config(model_path=checkpoints["llama"], context_length=256, packed_copy="off", speculative_config=drafts)
    )
    await engine.start()
    try:
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        slow = engine.generate(EngineRequest("a", [5] * 8, params))
        await anext(slow)
        while engine.num_unfinished():
            await asyncio.sleep(0.01)
        await collect(engine, "b", [6] * 8, params)  # the step thread forgets the first one
        await slow.aclose()
        del slow
        await collect(engine, "c", [7] * 8, params)
        assert threads == {"embedded-step"}
    finally:
        await engine.stop()


async def test_a_wrong_setting_stops_the_start(start_engine: StartEngine) -> None:
    with pytest.raises(StartupError, match="method 'eagle' is not served"):
        await start_engine(ScriptedModel(), speculative_config='{"method": "eagle"}')


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_builtin(name: str, engine: Engine) -> None:
    length = 1 + sorted(EXAMPLES).index(name) % 8
    settings = {"method": "ngram", "num_speculative_tokens": length, "prompt_lookup_min": 1}
    named = [{"name": name, "args": EXAMPLES[name][0]}]
    check_equal(engine, settings, TEXTS, params_of(name), named)
