from __future__ import annotations

import itertools
import json
import pickle
import random
import re
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import adapters.processors.grammar as grammar_module
from adapters.chain import ProcessorChain, ProcessorFailed, apply_edits, plan_rows
from adapters.contract import ArgumentError, Context, is_allowed
from adapters.grammars import compiler
from adapters.grammars.json_schema import lark_grammar
from adapters.grammars.masks import MAX_MASKS, GrammarMasks, ThreadMasks, Words
from adapters.processors.grammar import Choice, Grammar, GrammarProcessor, JsonSchema, Regex, grammar_cache
from adapters.processors.structural_source import StructuralSource
from adapters.vocabulary import Vocabulary, vocabulary_at
from worker.tiny_model import write_tiny_model

NUM_BYTES, END, OTHER_END, WIDTH = 256, 256, 257, 270


class ByteTokenizer:
    """One token for each byte, two end tokens; so every text has one tokenisation."""

    all_special_ids = (END, OTHER_END)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        raise NotImplementedError("the vocabulary is given the bytes of its tokens")

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return bytes(token_ids).decode()

    def __len__(self) -> int:
        return NUM_BYTES + 2


class ByteVocabulary(Vocabulary):
    token_bytes: ClassVar = (*(bytes([i]) for i in range(NUM_BYTES)), *[b""] * (WIDTH - NUM_BYTES))


BYTES = ByteVocabulary(WIDTH, ByteTokenizer(), [END])
CONTEXT = Context(BYTES, end_token_ids=frozenset({END, OTHER_END}))
PROMPT = [104, 105]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "qwen3")


@pytest.fixture(scope="module")
def real(checkpoint: Path) -> Context:
    """A byte-level BPE vocabulary, of which one text has many tokenisations, and a row that is
    wider.
    """
    vocabulary = Vocabulary.from_pretrained(str(checkpoint), 1088)
    assert vocabulary.num_tokens < 1088
    return Context(vocabulary, end_token_ids=vocabulary.eos_token_ids | {1})


def built(kind: type[GrammarProcessor], context: Context, **args: Any) -> ProcessorChain:
    chain = ProcessorChain(list(kind.build(kind.Args.model_validate(args), context)), context)
    chain.start(PROMPT)
    return chain


def allowed(chain: ProcessorChain) -> set[int]:
    """What a row of equal logits has left, through the chain as engines use it."""
    width = chain.context.vocabulary.size
    logits = torch.zeros(1, width)
    planned, failures = plan_rows([(0, chain)])
    assert not failures
    assert not apply_edits(logits, planned)
    assert set(torch.unique(logits).tolist()) <= {0.0, -torch.inf}
    return set(torch.nonzero(logits[0] == 0.0).flatten().tolist())


def expected(texts: set[bytes], so_far: bytes) -> set[int]:
    """Tokens that can follow ``so_far`` in one of the texts of a finite language."""
    tokens = {text[len(so_far)] for text in texts if text.startswith(so_far) and len(text) > len(so_far)}
    return tokens | ({END, OTHER_END} if so_far in texts else set())


def check_language(chain: ProcessorChain, texts: set[bytes]) -> None:
    """Every prefix of every text: exactly the right tokens. After an end token only end tokens."""
    prefixes = {text[:i] for text in texts for i in range(len(text) + 1)}
    for so_far in sorted(prefixes):
        chain.sync([*PROMPT, *so_far])
        assert allowed(chain) == expected(texts, so_far), so_far
        if so_far in texts:
            chain.accept(END, chain.position)
            assert allowed(chain) == {END, OTHER_END}


WORDS = st.text('ab/\n"é😀', min_size=1, max_size=4)


@settings(max_examples=examples(50))
@given(st.lists(WORDS, min_size=1, max_size=5))
def test_choice_allows_the_prefixes_of_its_texts(choices: list[str]) -> None:
    check_language(built(Choice, CONTEXT, choices=choices), {text.encode() for text in choices})


@pytest.mark.parametrize(
    "pattern",
    [
        *("a|b", "ab?a", "(a|ab)(b|ba)?", "[ab]{1,3}", "a(ba){0,2}", "(a|b)(a|b)b?", "a/b|a\\.b", "(|a)b", "[/]a\\/"),
        *("(?x)\n a # a/b\n b", "a\nb|[\n]a", "a\\\nb", "/", "//"),
    ],
)
def test_regex_allows_what_pythons_re_matches_as_a_whole(pattern: str) -> None:
    candidates = ("".join(c) for n in range(6) for c in itertools.product("ab/.\n", repeat=n))
    language = {text.encode() for text in candidates if re.fullmatch(pattern, text)}
    check_language(built(Regex, CONTEXT, pattern=pattern), language)


def test_lark_grammar_is_context_free() -> None:
    chain = built(Grammar, CONTEXT, lark='start: "a" start? "b"')
    for depth in range(1, 8):
        chain.sync([*PROMPT, *b"a" * depth])
        assert allowed(chain) == set(b"ab")
        chain.sync([*PROMPT, *b"a" * depth, *b"b" * depth])
        assert allowed(chain) == {END, OTHER_END}


def walk(chain: ProcessorChain, choose: Callable[[list[int]], int], limit: int = 400) -> str:
    """The text of one random walk along the allowed tokens, up to an end token."""
    end = chain.context.end_token_ids
    for _ in range(limit):
        token_id = choose(sorted(allowed(chain)))
        chain.accept(token_id, chain.position)
        if token_id in end:
            return chain.context.vocabulary.decode(chain.tokens[len(PROMPT) : -1])
    raise AssertionError("the walk did not end")


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    return (
        set(value) <= {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and len(value.get("tags", [])) <= 3
        and set(value.get("tags", [])) <= {"x", "y"}
    )


@pytest.mark.parametrize("seed", range(20))
def test_every_walk_through_a_schema_is_compact_json_of_it(real: Context, seed: int) -> None:
    text = walk(built(JsonSchema, real, schema=PERSON), random.Random(seed).choice)
    assert is_person(json.loads(text))
    outside_strings = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    assert not re.search(r"\s", outside_strings)


def test_whitespace_is_a_matter_of_choice() -> None:
    flexible = built(JsonSchema, CONTEXT, schema=PERSON, compact=False)
    compact = built(JsonSchema, CONTEXT, schema=PERSON)
    for chain in (flexible, compact):
        chain.sync([*PROMPT, *b'{"name":'])
    assert ord(" ") in allowed(flexible)
    assert allowed(compact) == {ord('"')}


@pytest.mark.parametrize("schema", [True, {}, {"type": "object"}])
def test_a_schema_may_be_a_boolean(schema: Any) -> None:
    chain = built(JsonSchema, CONTEXT, schema=schema)
    chain.sync([*PROMPT, *b'{"a":[1,true]}'])
    assert allowed(chain) == {END, OTHER_END}


@settings(max_examples=examples(25))
@given(st.randoms(use_true_random=False), st.data())
def test_replay_and_rewinding_give_the_same_as_stepping(chooser: random.Random, data: st.DataObject) -> None:
    args = {"schema": PERSON}
    stepped = built(JsonSchema, CONTEXT, **args)
    masks = []
    for _ in range(30):
        masks.append(allowed(stepped))
        stepped.accept(chooser.choice(sorted(masks[-1])), stepped.position)
    for _ in range(5):
        kept = data.draw(st.integers(0, 29))
        replayed = built(JsonSchema, CONTEXT, **args)
        replayed.start(PROMPT, stepped.tokens[len(PROMPT) : len(PROMPT) + kept], mode="migrated")
        assert allowed(replayed) == masks[kept]
        rewound = synced_copy(stepped, args)
        rewound.rewind(len(PROMPT) + kept)
        assert allowed(rewound) == masks[kept]
        assert allowed(rewound) == masks[kept]  # asking twice changes nothing


def synced_copy(chain: ProcessorChain, args: dict[str, Any]) -> ProcessorChain:
    copy = built(JsonSchema, CONTEXT, **args)
    copy.sync(chain.tokens)
    return copy


def test_inside_a_string_the_edit_stays_the_same_object() -> None:
    chain = built(JsonSchema, CONTEXT, schema={"type": "string"})
    masks = []
    for token in b'"ab':
        chain.accept(token, chain.position)
        masks.append(chain.plan().allows[0])
    assert masks[0] is masks[1] is masks[2]
    chain.accept(ord("\\"), chain.position)
    escaped = chain.plan().allows[0]
    assert (is_allowed(masks[0], ord("x")), is_allowed(escaped, ord("x"))) == (True, False)


@settings(max_examples=examples(25))
@given(st.randoms(use_true_random=False), st.lists(st.integers(0, 8), max_size=30))
def test_masks_that_were_handed_out_do_not_change(chooser: random.Random, rewound: list[int]) -> None:
    """And each is counted right, whether it is another one than at the position planned before."""
    chain = built(JsonSchema, CONTEXT, schema=PERSON)
    masks, copies = [], []
    for num_tokens in rewound:
        for _ in range(4):
            (mask,) = chain.plan().allows
            masks.append(mask)
            copies.append(mask.clone())
            tokens = [token for token in range(WIDTH) if is_allowed(mask, token)]
            assert chain.last_edits() == [(0, "masked", BYTES.num_tokens - len(tokens))]
            chain.accept(chooser.choice(tokens), chain.position)
        chain.rewind(max(len(PROMPT), chain.position - num_tokens))
    assert all(map(torch.equal, masks, copies))


def test_edits_of_one_mask_differ_by_end_tokens_and_completeness() -> None:
    masks = ThreadMasks(WIDTH)
    masks.clear()
    corrected: list[bool] = []

    def correct(words: Words, complete: bool) -> None:
        corrected.append(complete)
        words[0] = len(corrected)

    asked = [(False, (END,)), (True, (END,)), (True, (OTHER_END,))]
    edits = [masks.edit(complete, ends, correct) for complete, ends in [*asked, *asked]]
    assert [int(edit.bitmask[0]) for edit in edits] == [1, 2, 3, 1, 2, 3]
    assert corrected == [False, True, True]


def test_the_masks_found_last_are_kept() -> None:
    masks = ThreadMasks(WIDTH)
    masks.clear()

    def nothing(words: Words, complete: bool) -> None:
        pass

    first = masks.edit(True, (0,), nothing)
    for end_id in range(1, MAX_MASKS):
        masks.edit(True, (end_id,), nothing)
    assert masks.edit(True, (0,), nothing) is first
    second = masks.edit(True, (1,), nothing)
    for end_id in range(MAX_MASKS, 2 * MAX_MASKS - 1):
        masks.edit(True, (end_id,), nothing)
    assert masks.edit(True, (1,), nothing) is second
    assert masks.edit(True, (0,), nothing) is not first


def test_threads_do_not_share_masks() -> None:
    masks = grammar_cache(BYTES).masks
    assert isinstance(masks, GrammarMasks)
    masks.own.clear()
    edits = [masks.own.edit(True, (END,), lambda words, complete: None)]

    def in_a_thread() -> None:
        masks.own.compute(compiled_of(built(Choice, CONTEXT, choices=["a"])).matcher.deep_copy())
        edits.append(masks.own.edit(True, (END,), lambda words, complete: None))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    edits.append(masks.own.edit(True, (END,), lambda words, complete: None))
    assert edits[2] is edits[0]
    assert bool(edits[1].bitmask.any())


def test_drafts_are_peeked_and_forgotten() -> None:
    chain = built(Choice, CONTEXT, choices=["abc", "abd"])
    plans = chain.peek(list(b"abc"))
    assert [is_allowed(plan.allows[0], token) for plan, token in zip(plans, [*b"abc", END], strict=True)] == [True] * 4
    assert len(chain.peek(list(b"abx"))) == 3  # x is ruled out, nothing is planned after it
    assert allowed(chain) == {ord("a")}


def test_a_history_outside_the_grammar_fails_until_it_is_rewound() -> None:
    chain = built(Choice, CONTEXT, choices=["ab"])
    chain.accept(ord("x"), 2)
    with pytest.raises(ProcessorFailed, match="do not match the grammar") as caught:
        chain.plan()
    assert caught.value.reason == "unsatisfiable"
    chain.accept(ord("b"), 3)
    chain.rewind(3)
    with pytest.raises(ProcessorFailed):
        chain.plan()
    chain.rewind(2)
    assert allowed(chain) == {ord("a")}


def test_an_ordinary_end_token_waits_for_a_complete_text() -> None:
    context = Context(BYTES, end_token_ids=frozenset({ord("b"), END}))
    chain = built(Regex, context, pattern="ab?c?")
    assert allowed(chain) == {ord("a")}
    chain.accept(ord("a"), 2)
    assert allowed(chain) == {ord("b"), ord("c"), END}
    chain.accept(ord("b"), 3)  # the end, not the pattern's b
    assert allowed(chain) == {ord("b"), END}


@pytest.mark.parametrize(
    ("kind", "args"), [(Regex, {"pattern": r"(.|\n)*"}), (Grammar, {"lark": "start: T\nT: ~/never/"})]
)
def test_padding_and_other_end_tokens_are_never_offered(
    real: Context, kind: type[GrammarProcessor], args: dict[str, Any]
) -> None:
    chain = built(kind, Context(real.vocabulary, end_token_ids=frozenset({1})), **args)
    offered = allowed(chain)
    assert max(offered) < real.vocabulary.num_tokens
    assert offered & (real.vocabulary.eos_token_ids | {1}) == {1}
    chain.accept(min(offered - {1}), chain.position)
    assert chain.members[0].record.tokens_masked == real.vocabulary.num_tokens - len(offered)


def test_scope_answer_begins_after_the_closing_tag() -> None:
    context = Context(BYTES, end_token_ids=frozenset({END}), think_start=(ord("<"),), think_end=(ord(">"),))
    args = Choice.Args(choices=["ab"])
    chain = ProcessorChain(list(Choice.build(args, context)), context, scopes=["answer"])
    chain.start([*PROMPT, ord("<")])
    thinking = chain.plan()  # only the end is held back
    assert not thinking.allows
    assert [ban.token_ids.tolist() for ban in thinking.bans] == [[END]]
    for token in b"hm>":
        chain.accept(token, chain.position)
    assert allowed(chain) == {ord("a")}
    assert Choice.scopes == ("all", "answer")


NESTED: Any = {}
for _ in range(300):
    NESTED = {"type": "array", "items": NESTED}
NESTED_300 = NESTED
for _ in range(4700):
    NESTED = {"type": "array", "items": NESTED}

BOMBS: list[tuple[type[GrammarProcessor], str, Any]] = [
    (JsonSchema, "schema", NESTED_300),
    (JsonSchema, "schema", NESTED),
    (JsonSchema, "schema", {"enum": [f"value {i}" for i in range(200_000)]}),
    (JsonSchema, "schema", {"type": "string", "pattern": "(" * 60_000 + "a" + ")" * 60_000}),
    (Regex, "pattern", "(" * 60_000 + "a" + ")" * 60_000),
    (Regex, "pattern", "((a{1,200}){1,200}){1,200}"),
    (Grammar, "lark", "start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
]


@pytest.mark.parametrize(("kind", "argument", "bomb"), BOMBS, ids=lambda value: getattr(value, "name", ""))
def test_bombs_are_refused_at_admission(real: Context, kind: type[GrammarProcessor], argument: str, bomb: Any) -> None:
    for _ in range(2):  # the second time from the cache
        with pytest.raises(ArgumentError) as caught:
            built(kind, real, **{argument: bomb})
        assert caught.value.argument == argument
        assert len(caught.value.problem) < 200
        assert "((((" not in caught.value.problem


def test_a_grammar_that_explodes_in_decoding_fails_and_recovers(real: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "PROBE_STEPS", 1)
    bomb = built(Regex, real, pattern="((a{1,200}){1,199}){1,200}")
    first = allowed(bomb)

    def explode() -> None:
        for _ in range(200):
            bomb.accept(min(allowed_by_plan(bomb)), bomb.position)

    with pytest.raises(ProcessorFailed, match="exceeded its limits") as caught:
        explode()
    assert caught.value.processor == "regex"
    bomb.rewind(len(PROMPT))
    assert allowed(bomb) == first


def test_a_grammar_whose_steps_take_longer_and_longer_is_refused(real: Context) -> None:
    with pytest.raises(ArgumentError, match=r"Too many items \(limit 10000"):
        built(Grammar, real, lark='start: (x{1,14350} "a"){39}\nx: /[a-z]/ | "a"')


def allowed_by_plan(chain: ProcessorChain) -> list[int]:
    (bitmask,) = chain.plan().allows
    width = chain.context.vocabulary.size
    return [i for i in range(width) if is_allowed(bitmask, i) and i not in chain.context.end_token_ids]


@pytest.mark.parametrize(
    ("kind", "args", "problem"),
    [
        (Regex, {"pattern": "(a"}, "unclosed group"),
        (Regex, {"pattern": "(?=a)b"}, "look-around"),
        (Regex, {"pattern": "a\\"}, "incomplete escape sequence"),
        (Regex, {"pattern": "\\\\\\"}, "incomplete escape sequence"),
        (Regex, {"pattern": r"[^\s\S]"}, "no text matches"),
        (JsonSchema, {"schema": False}, "no JSON matches"),
        (JsonSchema, {"schema": {"items": {"unevaluatedItems": False}}}, "#/items/unevaluatedItems"),
        (JsonSchema, {"schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "no JSON matches"),
        (JsonSchema, {"schema": {"$ref": "#"}}, "without an end"),
        (Grammar, {"lark": "rule: /a/"}, "start"),
        (Grammar, {"lark": "start: start"}, "no text matches"),
        (Grammar, {"lark": ' {"grammars": []}'}, "got JSON"),
        (Grammar, {"lark": 'root ::= "yes" | "no"'}, "in Lark's syntax, .* got EBNF's"),
        (Grammar, {"lark": '\n  root-1 ::= [^"]\n'}, "in Lark's syntax, .* got EBNF's"),
        (Grammar, {"lark": '%llguidance {"no_forcng": true}\nstart: "a"'}, "no option 'no_forcng', only no_forcing"),
        (Grammar, {"lark": 'start: %lark {\n%llguidance {"lenient": true}\nstart: "a"\n}'}, "no option 'lenient'"),
        (Grammar, {"lark": 'start: a\na[temperature=0.5]: "x"'}, "temperature"),
    ],
)
def test_refusals_say_why(kind: type[GrammarProcessor], args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem) as caught:
        built(kind, CONTEXT, **args)
    assert caught.value.argument == kind.argument


def test_a_literal_temperature_is_not_an_attribute() -> None:
    chain = built(Grammar, CONTEXT, lark='start: "temperature=" /temperature = 1/ // temperature=')
    assert allowed(chain) == {ord("t")}


def test_needs_an_end_token_and_a_tokenizer() -> None:
    with pytest.raises(ArgumentError, match="end token"):
        built(Choice, Context(BYTES), choices=["a"])
    with pytest.raises(ArgumentError, match="tokenizer"):
        built(Choice, Context(Vocabulary(10), end_token_ids=frozenset({1})), choices=["a"])


def test_compiled_grammars_are_shared_and_their_state_is_not() -> None:
    first, second = built(Choice, CONTEXT, choices=["ab"]), built(Choice, CONTEXT, choices=["ab"])
    assert compiled_of(first) is compiled_of(second)
    first.accept(ord("a"), 2)
    assert (allowed(first), allowed(second)) == ({ord("b")}, {ord("a")})


def compiled_of(chain: ProcessorChain) -> Any:
    processor = chain.members[0].processor
    assert isinstance(processor, GrammarProcessor)
    return processor._matcher.compiled


def test_built_in_one_thread_and_stepped_in_another(real: Context) -> None:
    chains: list[ProcessorChain] = []
    threads = [threading.Thread(target=lambda: chains.append(built(JsonSchema, real, schema=PERSON))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = {walk(chain, random.Random(7).choice) for chain in chains}
    assert len(texts) == 1
    assert is_person(json.loads(texts.pop()))


def test_pickling_rebuilds_the_grammar_from_the_vocabularys_path(real: Context, checkpoint: Path) -> None:
    chain = built(JsonSchema, real, schema=PERSON)
    for _ in range(6):
        chain.accept(min(allowed(chain)), chain.position)
    data = pickle.dumps(chain)
    assert len(data) < 5000
    other = pickle.loads(data)
    end = tuple(sorted(real.vocabulary.eos_token_ids))
    assert other.context.vocabulary is vocabulary_at(str(checkpoint), 1088, end)
    assert allowed(other) == allowed(chain)
    other.rewind(len(PROMPT) + 2)
    chain.rewind(len(PROMPT) + 2)
    assert allowed(other) == allowed(chain)


def test_pickling_without_a_path_says_so() -> None:
    with pytest.raises(pickle.PicklingError, match="path"):
        pickle.dumps(built(Choice, CONTEXT, choices=["a"]).members[0].processor)


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        (JsonSchema, {}),
        (JsonSchema, {"schema": "{}"}),
        (JsonSchema, {"schema": {}, "compact": 1}),
        (JsonSchema, {"schema": {}, "lenient": True}),
        (Regex, {"pattern": ""}),
        (Regex, {"pattern": "a" * (2**20 + 1)}),
        (Choice, {"choices": []}),
        (Choice, {"choices": [""]}),
        (Choice, {"choices": ["a" * 4097]}),
        (Choice, {"choices": ["a"] * 4097}),
        (Grammar, {"lark": ""}),
    ],
)
def test_arguments_are_bounded(kind: type[GrammarProcessor], args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        kind.Args.model_validate(args)


def test_an_exploding_request_leaves_others_of_its_grammar_alone(
    real: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance's copies of a matcher share a lexer, which stays in an error."""
    monkeypatch.setattr(compiler, "PROBE_STEPS", 1)
    pattern = "((b{1,200}){1,199}){1,200}"
    bomb, before, after = [built(Regex, real, pattern=pattern) for _ in range(3)]

    def masks(chain: ProcessorChain) -> list[set[int]]:
        found = []
        for _ in range(8):
            found.append(allowed(chain))
            chain.accept(min(allowed_by_plan(chain)), chain.position)
        return found

    def explode() -> None:
        for _ in range(200):
            bomb.accept(min(allowed_by_plan(bomb)), bomb.position)

    expected = masks(before)
    with pytest.raises(ProcessorFailed, match="exceeded its limits"):
        explode()
    assert allowed(before)
    before.rewind(len(PROMPT))
    assert masks(before) == masks(after) == masks(built(Regex, real, pattern=pattern)) == expected


def lettered(number: int) -> dict[str, Any]:
    """A schema of a thousand characters, whose grammar has millions."""
    return {"type": "string", "pattern": "^" + 200 * r"\p{L}" + f"{number}$"}


def test_schemas_in_a_grammar_are_so_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have a grammar of 4 MiB, and a grammar's source room for hundreds of them."""
    num_made, made = 0, lark_grammar

    def counted(schema: Any) -> str:
        nonlocal num_made
        num_made += 1
        return made(schema)

    monkeypatch.setattr(grammar_module, "lark_grammar", counted)
    source = "start: " + " | ".join(f"%json {json.dumps(lettered(number))}" for number in range(9))
    with pytest.raises(ArgumentError, match="characters in all"):
        Grammar.grammar(Grammar.Args(lark=source), BYTES)
    assert num_made < 4


def test_json_of_any_depth_in_a_grammar_is_refused_as_such() -> None:
    """Two readers, one of which goes a step deeper, differ about where that begins."""
    for depth in range(440, 500):
        source = 'start: %json {"a":' + '{"a":' * 2 * depth + "1" + "}" * 2 * depth + "}"
        with pytest.raises(ArgumentError, match="nested too deeply"):
            Grammar.grammar(Grammar.Args(lark=source), BYTES)


def test_the_schemas_of_tools_are_so_large_together() -> None:
    source = StructuralSource("tools", BYTES)
    with pytest.raises(ArgumentError, match="characters in all"):
        deque((source.json(lettered(number), f"tools[{number}]") for number in range(3)), maxlen=0)
