"""A phrase that must not be written is taken back before anybody has seen it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapters.catalog import Catalog, parse_selection
from adapters.chain import ProcessorChain
from adapters.contract import ArgumentError, Context
from adapters.processors.phrase_ban import PhraseBan
from adapters.testing.kit_model import kit_context
from adapters.vocabulary import Vocabulary, byte_index
from worker.engines.embedded import Engine
from worker.engines.embedded.fused import FusedSamplingProcessor
from worker.engines.embedded.sampling import Sampler
from worker.engines.embedded.speculation import SpeculativeConfig, Speculator
from worker.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["the quick brown fox", "a b a b a c a b"]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path]) -> Engine:
    return Engine(checkpoints["llama"], max_num_seqs=4, dtype="float32", numerics="exact", kv_blocks=128)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 1, "seed": 1, **changes})


def ban(*phrases: str) -> list[dict[str, Any]]:
    return [{"name": "phrase_ban", "args": {"phrases": list(phrases)}}]


def phrase_in(text: str | None, start: int, length: int) -> str:
    """Whole characters of a text from about `start` on, with the case of letters changed."""
    assert text is not None
    while "\ufffd" in text[start : start + length]:
        start += 1
    assert start + length <= len(text)
    return text[start : start + length].swapcase()


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.8, "seed": 4}])
@pytest.mark.parametrize(("start", "length"), [(8, 1), (12, 3), (10, 6)])
def test_a_phrase_is_never_written(engine: Engine, changes: dict[str, Any], start: int, length: int) -> None:
    (free,) = engine.generate(PROMPTS[0], params(**changes))
    assert free.text is not None
    phrase = phrase_in(free.text, start, length)
    results = engine.generate([PROMPTS[0], PROMPTS[1]], params(**changes), processors=[ban(phrase), []])
    plain = engine.generate(PROMPTS[1], params(**changes))[0]
    assert (results[1].token_ids, results[1].logprobs) == (plain.token_ids, plain.logprobs)  # its batch-mate's own
    found = results[0]
    assert found.text is not None
    assert phrase.casefold() not in found.text.casefold()
    assert found.finish_reason == "length"
    assert len(found.token_ids) == NEW_TOKENS
    record = found.outputs[0].receipt.as_json()["processors"][0]  # type: ignore[union-attr]
    assert record["rollbacks"] >= 1
    # what precedes the token in which the phrase began is as it was
    common = next(i for i, (a, b) in enumerate(zip(free.token_ids, found.token_ids, strict=True)) if a != b)
    head = engine.tokenizer.decode(free.token_ids[:common])
    assert len(head) <= free.text.casefold().index(phrase.casefold())
    assert engine.session.stepper.scheduler.is_idle


@pytest.mark.parametrize("phrases", [["in", "st"], ["\ufffd"]])
def test_what_is_taken_back_opens_what_was_before_it(engine: Engine, phrases: list[str]) -> None:
    letters = [letter.encode() for letter in "inston "] if "in" in phrases else [b"\xe4", b"\xb8", b"\xad", b"A", b" "]
    index = byte_index(Vocabulary(engine.info.vocab_size, engine.tokenizer))
    allowed = {"token_ids": sorted({index.ids[letter][0] for letter in letters}), "allow_end": False}
    named = [*ban(*phrases), {"name": "allowed_tokens", "args": allowed}]
    seeds = [params(temperature=1.5, seed=seed, max_tokens=16) for seed in range(40)]
    results = engine.generate([PROMPTS[0]] * len(seeds), seeds, processors=[named] * len(seeds))
    assert {(result.finish_reason, len(result.token_ids)) for result in results} == {("length", 16)}
    for result in results:
        assert result.text is not None
        assert not any(phrase in result.text for phrase in phrases)


def test_answers_do_not_depend_on_drafts_batch_or_preemption(engine: Engine) -> None:
    free = engine.generate(PROMPTS, params())
    named = [ban(phrase_in(one.text, 6, 2), phrase_in(one.text, 20, 4)) for one in free]
    plain = engine.generate(PROMPTS, params(), processors=named, speculation=False)
    stepper = engine.session.stepper
    before = stepper.speculator
    stepper.speculator = Speculator(SpeculativeConfig(method="ngram", prompt_lookup_min=1), clock=lambda: 0.0)
    drafted = engine.generate(PROMPTS, params(), processors=named)
    stepper.speculator = before
    group = engine.add(PROMPTS[0], params(), named[0])
    engine.add(PROMPTS[1], params(), named[1])
    results: list[Any] = []
    for step in range(1000):
        if stepper.scheduler.queues.decoding and step % 5 == 4:
            stepper.scheduler.queues.preempt(stepper.scheduler.queues.decoding[0])
        results += engine.step()
        stepper.scheduler.check_integrity()
        stepper.scheduler.cache.check_blocks()
        if len(results) == 2:
            break
    results.sort(key=lambda one: one.request_id != group)
    for one, other, third in zip(plain, drafted, results, strict=True):
        assert one.token_ids == other.token_ids == third.token_ids
        assert one.logprobs == other.logprobs == third.logprobs
        receipts = [each.outputs[0].receipt.as_json() for each in (one, other, third)]  # type: ignore[union-attr]
        assert receipts[0] == receipts[1] == receipts[2]


def test_sent_tokens_stay_and_those_of_a_begun_phrase_wait(engine: Engine) -> None:
    (free,) = engine.generate(PROMPTS[0], params())
    phrase = phrase_in(free.text, 10, 5)
    engine.add(PROMPTS[0], params(), ban(phrase))
    (group,) = engine.session._groups.values()
    request = group.answers[0].request
    sent: list[int] = []
    taken_back = 0
    while not group.is_done:
        before = request.tokens[request.prompt_length :]
        engine.step()
        assert group.answers[0].token_ids[: len(sent)] == sent
        sent = list(group.answers[0].token_ids)
        taken_back += len(request.tokens) < request.prompt_length + len(before)
        decoded = engine.tokenizer.decode(request.tokens[request.prompt_length :]).casefold()
        shown = engine.tokenizer.decode(sent).casefold()
        if not group.is_done:
            check_held(decoded, shown, phrase.casefold())
    assert len(sent) == NEW_TOKENS
    assert taken_back


def test_a_suspended_request_resumes_where_its_client_stopped(engine: Engine) -> None:
    (free,) = engine.generate(PROMPTS[0], params())
    named = ban(phrase_in(free.text, 10, 5), "th", "er", "in", "an", "co")
    plain = engine.generate(PROMPTS[0], params(), processors=named)[0]
    group_id = engine.add(PROMPTS[0], params(), named)
    (group,) = engine.session._groups.values()
    request, times = group.answers[0].request, 0
    results: list[Any] = []
    while not results:
        results = engine.step()
        if not results and times < 3 and len(request.tokens) - request.prompt_length > len(group.answers[0].token_ids):
            engine.suspend(group_id)
            engine.resume(group_id)
            times += 1
    assert times
    assert (results[0].token_ids, results[0].logprobs) == (plain.token_ids, plain.logprobs)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.8, "seed": 4}])
def test_a_continued_answer_holds_back_what_it_may_rewind(engine: Engine, changes: dict[str, Any]) -> None:
    (free,) = engine.generate(PROMPTS[0], params(**changes))
    named = ban(phrase_in(free.text, 10, 5))
    plain = engine.generate(PROMPTS[0], params(**changes), processors=named)[0].token_ids
    num_common = next(i for i, (a, b) in enumerate(zip(free.token_ids, plain, strict=True)) if a != b)
    assert num_common, "nothing was sent before the phrase began"
    for num_sent in range(1, num_common + 1):
        engine.add(PROMPTS[0], params(**changes), named)
        (group,) = engine.session._groups.values()
        request = group.answers[0].request
        assert request.chain is not None
        for token_id in plain[:num_sent]:  # as admission does
            request.tokens.append(token_id)
            request.chain.accept(token_id, len(request.tokens) - 1)
        while not group.is_done:
            engine.step()
        assert group.answers[0].error is None
        assert group.answers[0].token_ids == plain[num_sent:], num_sent


def test_a_phrase_that_begins_in_a_sent_token_fails_the_request(engine: Engine) -> None:
    (free,) = engine.generate(PROMPTS[0], params())
    named = ban(phrase_in(free.text, 10, 5))
    plain = engine.generate(PROMPTS[0], params(), processors=named)[0].token_ids
    num_common = next(i for i, (a, b) in enumerate(zip(free.token_ids, plain, strict=True)) if a != b)
    engine.add(PROMPTS[0], params(), named)
    (group,) = engine.session._groups.values()
    request = group.answers[0].request
    assert request.chain is not None
    for token_id in free.token_ids[: num_common + 1]:  # by an engine that does not hold it back
        request.tokens.append(token_id)
        request.chain.accept(token_id, len(request.tokens) - 1)
    while not group.is_done:
        engine.step()
    assert f"phrase_ban: takes back generated token {num_common}, which was sent" in (group.answers[0].error or "")


def check_held(text: str, sent: str, phrase: str) -> None:
    """Nothing of what may become the phrase has been sent."""
    assert phrase not in sent
    assert text.startswith(sent)
    begun = max((count for count in range(1, len(phrase)) if text.endswith(phrase[:count])), default=0)
    assert len(sent) <= len(text) - begun


def test_where_every_way_on_writes_the_phrase_the_request_fails(engine: Engine) -> None:
    allowed = engine.tokenizer.encode("a", add_special_tokens=False)
    named = [*ban("aaa"), {"name": "allowed_tokens", "args": {"token_ids": allowed, "allow_end": False}}]
    (result,) = engine.generate(PROMPTS[0], params(), processors=named)
    assert result.finish_reason == "error"
    assert "no token is left" in (result.outputs[0].error or "")
    assert not result.token_ids


def test_an_engine_that_cannot_take_tokens_back_refuses(engine: Engine) -> None:
    chain = Catalog.default().build_chain(
        parse_selection('{"version": 1, "processors": [{"name": "phrase_ban", "args": {"phrases": ["x"]}}]}'),
        kit_context(),
    )
    request = engine.session.builder.build(0, [5], SamplingParams(), (), frozenset(), "").answers[0].request
    request.chain = chain
    sampler = Sampler(engine.info.vocab_size, ())
    with pytest.raises(ValueError, match="may take tokens back"):
        FusedSamplingProcessor(sampler, [request], torch.device("cpu"))


# -- the processor alone


def started(*phrases: str) -> tuple[ProcessorChain, PhraseBan]:
    context = kit_context()
    processor = PhraseBan(PhraseBan.Args(phrases=list(phrases)), context)
    chain = ProcessorChain([processor], context)
    chain.start([40, 41])
    return chain, processor


def ids_of(text: bytes) -> list[int]:
    """A token for each byte."""
    index = byte_index(kit_context().vocabulary)
    return [index.ids[bytes([byte])][0] for byte in text]


@pytest.mark.parametrize(
    ("phrase", "text", "begin"),
    [
        ("fox", b"a fOx", 2),
        ("STRASSE", "die Straße".encode(), 4),
        ("é", "né".encode(), 1),
        ("aab", b"aaab", 1),
        ("Grüße", "GRÜSSE".encode(), 0),
    ],
)
def test_a_phrase_is_found_in_any_case_and_split_of_characters(phrase: str, text: bytes, begin: int) -> None:
    chain, processor = started(phrase)
    tokens = ids_of(text)
    for token_id in tokens[:-1]:
        chain.accept(token_id, chain.position)
        assert chain.rewind_if_asked() is None
    chain.accept(tokens[-1], chain.position)
    assert chain.rewind_if_asked() == 2 + begin
    assert chain.position == 2 + begin
    assert chain.plan().bans[0].token_ids.tolist() == [tokens[begin]]
    assert processor.held_from is None or processor.held_from < begin


@given(st.text(alphabet="abAB é", max_size=12), st.text(alphabet="abé", min_size=1, max_size=4))
def test_what_may_become_a_phrase_is_held(text: str, phrase: str) -> None:
    chain, _ = started(phrase)
    tokens = ids_of(text.encode())
    seen: list[int] = []
    for token_id in tokens:
        chain.accept(token_id, chain.position)
        seen.append(token_id)
        if (position := chain.rewind_if_asked()) is not None:
            del seen[position - 2 :]
        held = chain.held_from
        sent = seen[: None if held is None else held - 2]
        shown = text_of(sent).decode()  # whole characters
        check_held(text_of(seen).decode("utf-8", "ignore").casefold(), shown.casefold(), phrase.casefold())


def text_of(tokens: list[int]) -> bytes:
    index = byte_index(kit_context().vocabulary)
    return b"".join(index[token_id] for token_id in tokens)


def test_it_needs_a_tokenizer() -> None:
    args = PhraseBan.Args(phrases=["x"])
    with pytest.raises(ArgumentError, match="phrases: "):
        PhraseBan(args, Context(Vocabulary(50)))


@pytest.mark.parametrize("shown", [True, False])
def test_an_end_token_completes_a_phrase_only_if_it_is_shown(engine: Engine, shown: bool) -> None:
    (free,) = engine.generate(PROMPTS[0], params())
    decode, ids = engine.tokenizer.decode, free.token_ids
    at = next(i for i in range(2, len(ids)) if ids[i] not in ids[:i] and "\ufffd" not in decode(ids[i - 1 : i + 1]))
    phrase = decode(ids[at - 1 : at + 1])
    ends = params(stop_token_ids=[ids[at]], include_stop_str_in_output=shown)
    (ended,) = engine.generate(PROMPTS[0], ends)
    assert (ended.finish_reason, ended.outputs[0].stop_reason) == ("stop", ids[at])
    (found,) = engine.generate(PROMPTS[0], ends, processors=ban(phrase))
    assert found.text is not None
    assert phrase.casefold() not in found.text.casefold()
    rollbacks = found.outputs[0].receipt.as_json()["processors"][0].get("rollbacks", 0)  # type: ignore[union-attr]
    assert (rollbacks > 0) == shown
    if not shown:  # the end token's text is no part of the answer
        assert (found.text, found.outputs[0].stop_reason) == (ended.text, ids[at])


def test_a_stop_string_within_a_draft_leaves_the_receipt(checkpoints: dict[str, Path]) -> None:
    """What else the step gave, whatever was taken back there, is no part of it."""
    sizes: dict[str, Any] = {"max_num_seqs": 4, "dtype": "float32", "numerics": "exact", "kv_blocks": 128}
    llama = checkpoints["llama"]
    plain = Engine(llama, speculative_config={"method": "none", "chain": False}, **sizes)
    drafting = Engine(llama, speculative_config={"method": "draft_model", "model": str(llama)}, **sizes)
    stepper = drafting.session.stepper
    stepper.speculator = Speculator(stepper.speculator.config, stepper.speculator._make, clock=lambda: 0.0)
    compared = 0
    for seed in range(40):
        asked, phrases = params(seed=seed, temperature=0.7 * (seed % 2)), ban(*("the o", "er")[seed % 2].split())
        text = plain.generate(PROMPTS[0], asked, processors=phrases)[0].text
        assert text is not None
        stop = text[2 + seed % 5 :][:2]
        if not stop or "\ufffd" in stop:
            continue
        compared += 1
        ended = [
            engine.generate(
                PROMPTS[0], params(seed=seed, temperature=0.7 * (seed % 2), stop=[stop]), processors=phrases
            )[0].outputs[0]
            for engine in (plain, drafting)
        ]
        assert ended[0].token_ids == ended[1].token_ids
        assert ended[0].receipt.as_json()["processors"] == ended[1].receipt.as_json()["processors"]  # type: ignore[union-attr]
    assert compared
