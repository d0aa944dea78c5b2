"""Text arguments on trained tokenizers: what is written is the text, what is looked for is found
in any split.
"""

from __future__ import annotations

import pickle
import re
from functools import cache
from typing import Any

import pytest
from effort import examples
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from small_tokenizers import MODELS
from tokenizers import AddedToken
from trained_tokenizers import KINDS, PREFIXED, context_of, made, prompt_of, said, speak, vocabulary_of
from transformers import PreTrainedTokenizerFast

from adapters.chain import ProcessorChain
from adapters.contract import ArgumentError, Context, Force
from adapters.processors.forcing import ForcedPrefix, ForcedSequence, ForceLastPhrase
from adapters.processors.masks import BadWords
from adapters.processors.multiple_choice import MultipleChoice
from adapters.processors.thinking import ThinkingBudget
from adapters.processors.trigger_phrase import TriggerPhrase
from adapters.vocabulary import Vocabulary, byte_index
from adapters.vocabulary.exact_text import TextEncoder

kinds = pytest.mark.parametrize("kind", KINDS)
prefixed = pytest.mark.parametrize("kind", PREFIXED)
letters = st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")
words = st.sampled_from(
    ["Yes", " Yes", "the answer", "secret", " ", "  ", "\n", "\n\n", "▁", "é", "e\u0301", "中文", "😀", "<think>", "x"]
)
texts = st.lists(words | st.text(letters, min_size=1, max_size=6), min_size=1, max_size=5).map("".join)


def plain_tokens(kind):
    pieces = vocabulary_of(kind).token_bytes
    return [i for i, piece in enumerate(pieces) if piece]


@kinds
@settings(max_examples=examples(100), deadline=None)
@given(text=texts, before=texts, data=st.data())
@example(text="Yes", before="x", data=None)
@example(text=" Yes", before="x", data=None)
@example(text="e\u0301", before="x", data=None)
@example(text="<think>\n</s>Yes", before="x", data=None)
def test_a_text_behind_any_other_decodes_to_exactly_that_text(kind, text, before, data) -> None:
    vocabulary = vocabulary_of(kind)
    history = prompt_of(kind) + vocabulary.tokenizer.encode(before, add_special_tokens=False)
    if data is not None:
        history += data.draw(st.lists(st.sampled_from(plain_tokens(kind)), max_size=6))
        history += data.draw(st.sampled_from([[], vocabulary.encode("</s>"), vocabulary.encode("<think>")]))
    assume("\ufffd" not in vocabulary.decode(history))  # half a character is none that a text could stand behind
    assert said(kind, history, vocabulary.encode(text)) == text


ODD_ADDED = ["▁▁", "▁x", "é", "ÿ", "Ġ", "Ġx", "  ", "a b", "\n\n", "<tag>", "<ta", "e\u0301", "<|a|>", "##x", "x</w>"]


@pytest.mark.parametrize("kind", [*KINDS, *MODELS])
def test_added_tokens_have_the_text_they_decode_to(kind) -> None:
    backend = made(kind) if kind in KINDS else MODELS[kind].make()
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ODD_ADDED])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend)
    vocabulary = Vocabulary(len(tokenizer) + 100, tokenizer)
    [x] = vocabulary.encode("x")
    for text in ODD_ADDED:
        token_id: Any = backend.token_to_id(text)
        written = vocabulary.token_bytes[token_id].decode(errors="replace")
        assert vocabulary.decode([x, token_id, x]) == f"x{written}x"
        assert vocabulary.decode([x, *vocabulary.encode(text), x]) == f"x{text}x"


@kinds
def test_the_tokenizers_own_tokens_are_used_if_they_are_the_text(kind) -> None:
    vocabulary = vocabulary_of(kind)
    own = vocabulary.tokenizer.encode("the answer is Yes", add_special_tokens=False)
    exact = vocabulary.encode("the answer is Yes")
    assert (exact != own) == (kind in PREFIXED)
    assert vocabulary.encode(" the answer is Yes") == vocabulary.tokenizer.encode(
        " the answer is Yes" if kind not in ("llama-legacy",) else "the answer is Yes", add_special_tokens=False
    )


@kinds
def test_names_of_added_tokens_are_these_tokens(kind) -> None:
    vocabulary = vocabulary_of(kind)
    token = vocabulary.tokenizer.convert_tokens_to_ids
    assert vocabulary.encode("</think>") == [token("</think>")]
    ids = vocabulary.encode("[TURN]Yes</s>")
    assert ids == [token("[TURN]"), *vocabulary.encode("Yes"), token("</s>")]
    assert vocabulary.encode("") == []


def test_a_text_without_tokens_is_refused() -> None:
    class Letters:
        def encode(self, text, *, add_special_tokens):
            return [ord(c) - ord("a") for c in text if c in "abc"]

        def convert_ids_to_tokens(self, ids):
            return ["abc"[i] for i in ids]

        def decode(self, ids, **_):
            return "".join("abc"[i] for i in ids)

        def __len__(self):
            return 3

    facts = Context(Vocabulary(3, Letters(), [2]), frozenset([2]))
    assert facts.vocabulary.encode("aba") == [0, 1, 0]
    with pytest.raises(ArgumentError, match="text: 'adb' cannot be written in tokens of this model"):
        ForcedPrefix(ForcedPrefix.Args(text="adb"), facts)


# The processors


def chain_of(kind, processor, *, prompt=None, **arguments):
    facts = context_of(kind, max_tokens=60)
    chain = ProcessorChain(processor.build(processor.Args(**arguments), facts), facts)
    chain.start(prompt_of(kind) if prompt is None else prompt)
    return chain


answers = st.sampled_from(["Yes", " Yes", "the secret", "中文 Yes", "😀", "\nYes", "e\u0301", "x  y", "<think>"])


@kinds
@settings(max_examples=examples(20), deadline=None)
@given(text=answers, wants=st.sampled_from(["", "No, the answer", "🙀 the", "secret"]))
def test_forced_text_is_the_text(kind, text, wants) -> None:
    prompt = prompt_of(kind)
    chain = chain_of(kind, ForcedSequence, text=text)
    assert said(kind, prompt, speak(kind, chain, wants)) == f"{text}</s>"
    chain = chain_of(kind, ForcedPrefix, text=text)
    assert said(kind, prompt, speak(kind, chain, wants)) == f"{text}{wants}</s>"
    chain = chain_of(kind, MultipleChoice, choices=[text, "No"])
    assert said(kind, prompt, speak(kind, chain, text)) == f"{text}</s>"
    chain = chain_of(kind, TriggerPhrase, text=text, trigger="answer")
    after = wants.replace("answer", f"answer{text}", 1)
    assert said(kind, prompt, speak(kind, chain, wants)) == f"{after}</s>"


@kinds
@pytest.mark.parametrize("phrase", ["Yes.", " Yes.", "😀 bye", "\n中"])
@pytest.mark.parametrize("wants", ["", "Wait", "the fox ", "中"])
def test_the_last_phrase_is_the_phrase(kind, phrase, wants) -> None:
    answer = speak(kind, chain_of(kind, ForceLastPhrase, text=phrase), wants)
    assert said(kind, prompt_of(kind), answer).endswith(f"{phrase}</s>")


@kinds
@pytest.mark.parametrize("end", ["</think>", "</ reason >", " done", "  ", "終わり", "\n</think>", "Yes"])
def test_a_closing_tag_of_any_text_is_written_once(kind, end) -> None:
    facts = context_of(kind, max_tokens=60)
    budget = ThinkingBudget(ThinkingBudget.Args(tokens=3, end=end), facts)
    prompt = [*prompt_of(kind), *facts.think_start]
    # There is no room left to begin a tag whose characters are split, so a model does not close
    # with one by itself.
    closes = f"x{end}The question" if end.isascii() else "Wait, the fox"
    for wants in ("The question is", closes, "🙀🙀🙀"):
        chain = ProcessorChain([pickle.loads(pickle.dumps(budget))], facts)
        chain.start(prompt)
        text = said(kind, prompt, speak(kind, chain, wants))
        assert text.count(end) == 1
        assert "\ufffd" not in text


@prefixed
def test_a_tag_of_one_plain_token_is_found_behind_a_space(kind) -> None:
    facts = context_of(kind)
    assert len(facts.vocabulary.encode("a")) == 1
    budget = ThinkingBudget(ThinkingBudget.Args(tokens=9, end="a"), facts)
    chain = ProcessorChain([budget], facts)
    chain.start([*prompt_of(kind), *facts.think_start])
    text = "x a fox jumps over the dog, then the quick fox sleeps"
    assert said(kind, chain.tokens[:], speak(kind, chain, text)) == f"{text}</s>"


# Bad words


def forms(word):
    bare = word.lstrip()
    return {word, bare, f" {bare}"} if bare else {word}


def completing(vocabulary, generated, wanted):
    """Brute force: every token that ends one of the words, begun with any of the last tokens."""
    pieces = vocabulary.token_bytes
    found = set()
    for start in range(len(generated) + 1):
        begun = b"".join(pieces[i] for i in generated[start:])
        if not all(pieces[i] for i in generated[start:]):
            continue
        found |= {i for i, piece in enumerate(pieces) if piece and any(begun + piece == w.encode() for w in wanted)}
    return found


BAD = ["secret", " Yes", "the answer", "中", "😀", "ee", "\n", "s", "ans"]


@kinds
@settings(max_examples=examples(25), deadline=None)
@given(
    bad=st.lists(st.sampled_from(BAD), min_size=1, max_size=3, unique=True),
    parts=st.lists(st.sampled_from(["sec", "ret", " ", "the", " the", " answ", "er", "e", b"\xe4", b"\xb8", "Ye"])),
)
def test_bad_words_are_banned_in_every_spelling(kind, bad, parts) -> None:
    facts = context_of(kind)
    index = byte_index(facts.vocabulary)
    generated = []
    for part in parts:
        generated += index.spell(part if isinstance(part, bytes) else part.encode())
    processor = pickle.loads(pickle.dumps(BadWords(BadWords.Args(words=bad), facts)))
    processor.start(prompt_of(kind))
    wanted = set().union(*map(forms, bad))
    for k in range(len(generated) + 1):
        edit = processor.edit()
        banned = set(edit.token_ids.tolist()) if edit else set()
        assert banned == completing(facts.vocabulary, generated[:k], wanted)
        if k < len(generated):
            processor.accept(generated[k], processor.position)
    fresh = BadWords(BadWords.Args(words=bad), facts)
    fresh.start(prompt_of(kind))
    for token in generated:
        fresh.accept(token, fresh.position)
    fresh.rewind(fresh.position - len(generated) // 2)
    fresh.rewind(len(prompt_of(kind)))
    again = fresh.edit()
    assert (set(again.token_ids.tolist()) if again else set()) == completing(facts.vocabulary, [], wanted)


@kinds
@pytest.mark.parametrize("wants", ["secret", " secret", "the secret is", "x=secret", "no secrets", "consecreted"])
def test_a_bad_word_never_comes_up(kind, wants) -> None:
    chain = chain_of(kind, BadWords, words=["secret"])
    text = said(kind, prompt_of(kind), speak(kind, chain, wants, most=30))
    index = byte_index(vocabulary_of(kind))
    holding = [i for i in index.containing(b"secret") if index[i] not in (b"secret", b" secret")]
    assert "secret" not in text or any(token in holding for token in chain.tokens)


@kinds
def test_a_special_token_is_banned_by_its_name(kind) -> None:
    facts = context_of(kind)
    (turn,) = facts.vocabulary.encode("[TURN]")
    processor = BadWords(BadWords.Args(words=["[TURN]", "secret"]), facts)
    processor.start([])
    banned = processor.edit().token_ids.tolist()
    assert turn in banned
    assert banned == sorted(set(banned))
    with pytest.raises(ArgumentError, match="use banned_tokens"):
        BadWords(BadWords.Args(words=["</s>"]), facts)
    stopped = context_of(kind, end_token_ids=frozenset(facts.vocabulary.encode("Yes")))
    if len(stopped.end_token_ids) == 1:
        with pytest.raises(ArgumentError, match="use banned_tokens"):
            BadWords(BadWords.Args(words=["Yes"]), stopped)


@kinds
def test_a_trigger_that_names_a_special_token_is_found(kind) -> None:
    facts = context_of(kind)
    (turn,) = facts.vocabulary.encode("[TURN]")
    processor = TriggerPhrase(TriggerPhrase.Args(text="Yes", trigger="[TURN]"), facts)
    processor.start([])
    processor.accept(turn, 0)
    assert processor.edit() == Force(facts.vocabulary.encode("Yes")[0])


@given(st.lists(st.sampled_from([*ODD_ADDED, "<", "a", "é", "|>", "x", "-", "]"]), max_size=12).map("".join))
def test_texts_are_split_at_the_longest_names(text: str) -> None:
    encoder = TextEncoder(odd_tokenizer(), 1000, lambda: pytest.fail("no index is needed"))
    names = sorted(encoder._added, key=len, reverse=True)
    assert len(names) > 5
    pattern = re.compile(f"({'|'.join(map(re.escape, names))})")
    assert [part for part in encoder._parts(text) if part] == [part for part in pattern.split(text) if part]


@cache
def odd_tokenizer() -> Any:
    backend = made("byte-level")
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in [*ODD_ADDED, "]]", "-]"]])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_added_tokens_are_read_once_for_many_tags() -> None:
    """Some models have thousands of them, and as many names are looked for."""
    num_read = 0

    class Counted:
        def __getattr__(self, name: str) -> Any:
            nonlocal num_read
            num_read += name == "added_tokens_decoder"
            return getattr(odd_tokenizer(), name)

        def __len__(self) -> int:
            return len(odd_tokenizer())

    vocabulary = Vocabulary(len(odd_tokenizer()), Counted())
    counts = []
    for _ in range(3):
        assert [len(vocabulary.tag(text)) for text in ("<tag>", "<|a|>", "]]")] == [1, 1, 1]
        counts.append(num_read)
    assert counts[1:] == counts[:1] * 2
