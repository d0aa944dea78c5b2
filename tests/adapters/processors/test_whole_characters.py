"""Forcing never cuts a character, and never exceeds the number of tokens that it was given."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trained_tokenizers import context_of, prompt_of, said, speak, vocabulary_of
from vocab_for_tests import run_row

from adapters.chain import ProcessorChain
from adapters.processors.characters import begun
from adapters.processors.forcing import ForceLastPhrase
from adapters.processors.repetition import LoopStop
from adapters.processors.thinking import ThinkingBudget
from adapters.processors.trigger_phrase import TriggerPhrase
from adapters.vocabulary import byte_index

kinds = pytest.mark.parametrize("kind", ["llama-legacy", "unigram-first", "byte-level"])
few = settings(max_examples=examples(40), deadline=None)
said_parts = st.sampled_from(["😀", "🙀", "🚀🎉", "中", "é", "a", " the", "\n", "x "])
wishes = st.lists(said_parts, min_size=1, max_size=25).map("".join)
phrases = st.sampled_from([" Yes", "Yes", "🎉!", "中"])


def chain_of(kind, processors, facts, prompt=None):
    chain = ProcessorChain(processors, facts)
    chain.start(prompt_of(kind) if prompt is None else prompt)
    return chain


def length_before(kind, answer, text):
    """Tokens before the one in which ``text`` begins."""
    pieces = vocabulary_of(kind).token_bytes
    data = b"".join(pieces[i] for i in answer)
    place, count = data.index(text.encode()), 0
    for k, token in enumerate(answer):
        if count == place:
            return k
        count += len(pieces[token])
    raise AssertionError("it begins inside a token")


@kinds
@few
@given(wants=wishes, after=st.integers(1, 12), phrase=phrases)
@example(wants="😀" * 9, after=1, phrase="Yes")
@example(wants="😀" * 9, after=2, phrase="Yes")
@example(wants="😀" * 9, after=6, phrase="🎉!")
def test_a_phrase_after_some_tokens(kind, wants, after, phrase) -> None:
    wants = wants.replace("🎉", "🚀").replace("中", "é")
    wants += " the" * 26
    facts = context_of(kind)
    processor = TriggerPhrase(TriggerPhrase.Args(text=phrase, after_tokens=after, times=2), facts)
    answer = speak(kind, chain_of(kind, [processor], facts), wants)
    text = said(kind, prompt_of(kind), answer)
    assert "\ufffd" not in text
    assert text.count(phrase) == 2
    length = len(facts.vocabulary.encode(phrase))
    assert answer[after : after + length] == facts.vocabulary.encode(phrase)
    assert answer[2 * after + length : 2 * (after + length)] == facts.vocabulary.encode(phrase)


@kinds
@few
@given(wants=wishes, tokens=st.integers(0, 12), grace=st.integers(0, 3), end=st.sampled_from([None, "終わり", "</r>"]))
@example(wants="😀" * 9, tokens=2, grace=0, end=None)
@example(wants="😀" * 9, tokens=1, grace=1, end="終わり")
def test_a_thinking_budget(kind, wants, tokens, grace, end) -> None:
    facts = context_of(kind)
    budget = ThinkingBudget(ThinkingBudget.Args(tokens=tokens, grace=grace, end=end), facts)
    prompt = [*prompt_of(kind), *facts.think_start]
    answer = speak(kind, chain_of(kind, [budget], facts, prompt), wants + "😀" * 12)
    text = said(kind, prompt, answer)
    assert "\ufffd" not in text
    thought = length_before(kind, answer, end or "</think>")
    assert thought <= tokens + grace
    if tokens and "\n" not in wants:
        assert thought == tokens + grace


@kinds
@few
@given(wants=wishes, max_tokens=st.integers(8, 40), phrase=phrases)
@example(wants="😀" * 12, max_tokens=10, phrase="Yes")
@example(wants="😀" * 12, max_tokens=11, phrase="🎉!")
def test_the_last_phrase_within_max_tokens(kind, wants, max_tokens, phrase) -> None:
    wants = wants.replace("🎉", "🚀").replace("中", "é")
    facts = context_of(kind, max_tokens=max_tokens)
    processors = ForceLastPhrase.build(ForceLastPhrase.Args(text=phrase), facts)
    answer = speak(kind, chain_of(kind, processors, facts), wants, most=max_tokens)
    text = said(kind, prompt_of(kind), answer)
    assert text.endswith(f"{phrase}</s>")
    assert "\ufffd" not in text


@kinds
def test_a_model_that_would_end_inside_a_character_ends_it_first(kind) -> None:
    facts = context_of(kind)
    vocabulary = facts.vocabulary
    (end,) = facts.end_token_ids
    lead = byte_index(vocabulary).ids[b"\xf0"][0]
    chain = chain_of(kind, ForceLastPhrase.build(ForceLastPhrase.Args(text="Yes"), facts), facts)
    chain.accept(lead, chain.position)
    first = vocabulary.encode("Yes")[0]
    row = shaped(chain, end)
    assert row[end] == row[first] == float("-inf")
    for byte in "😀".encode()[1:]:
        chain.accept(byte_index(vocabulary).ids[bytes([byte])][0], chain.position)
    row = shaped(chain, end)
    assert int(row.argmax()) == first


def shaped(chain, end):
    row = torch.zeros(chain.context.vocabulary.size)
    row[end] = 9.0
    return run_row(chain, row)


@kinds
@few
@given(before=st.sampled_from(["", "a", "🀀", "b😀🀀", "中"]), cycle=st.sampled_from(["😀", "a😀", "中", "🙀é", "ab"]))
@example(before="🀀", cycle="😀")
def test_a_loop_is_stopped_behind_a_whole_character(kind, before, cycle) -> None:
    facts = context_of(kind)
    processor = LoopStop(LoopStop.Args(max_period=12, copies=3), facts)
    answer = speak(kind, chain_of(kind, [processor], facts), before + cycle * 40)
    text = said(kind, prompt_of(kind), answer)
    assert "\ufffd" not in text
    assert text.endswith("</s>")
    assert len(text) < len(before) + 10 * len(cycle)


@pytest.mark.parametrize("kind", ["llama-legacy", "unigram-first"])
def test_a_loop_that_is_seen_inside_a_character(kind) -> None:
    """The byte before the first copy is the last of the cycle's, so three copies are complete
    one byte early.
    """
    facts = context_of(kind)
    index = byte_index(facts.vocabulary)
    generated = [index.ids[bytes([byte])][0] for byte in ("🀀" + "😀" * 3).encode()[:-1]]
    chain = chain_of(kind, [LoopStop(LoopStop.Args(max_period=4, copies=3), facts)], facts)
    chain.start(prompt_of(kind), generated)
    plan = chain.plan()
    assert plan.force is None
    kept = [i for i in range(facts.vocabulary.num_tokens) if plan.permits(i)]
    pieces = facts.vocabulary.token_bytes
    assert not any(begun(b"\xf0\x9f\x98" + pieces[i]) for i in kept if pieces[i])
    other = index.ids[b"\x81"][0]  # ends the character, and breaks the loop; it is stopped all the same
    chain.accept(other, chain.position)
    assert chain.plan().force == facts.end_token_id
    chain.rewind(chain.position - 1)
    assert chain.plan().force is None
    chain.rewind(chain.position - 1)
    assert not chain.plan().bans


def test_a_trigger_may_end_in_a_token_that_begins_a_character() -> None:
    kind = "byte-level"
    facts = context_of(kind)
    assert byte_index(facts.vocabulary).ids[b"!\xf0\x9f"]
    processor = TriggerPhrase(TriggerPhrase.Args(text="Yes", trigger="!"), facts)
    answer = speak(kind, chain_of(kind, [processor], facts), "Wait!🎈🎈 the")
    assert said(kind, prompt_of(kind), answer) == "Wait!🎈Yes🎈 the</s>"
    assert b"!\xf0\x9f" in [facts.vocabulary.token_bytes[token] for token in answer]
