"""Masks of grammars allow exactly the tokens that can continue, whatever tokenizer a model has.

Expected masks are made of the vocabulary's own bytes and of plain strings: of a language that is a
set of texts, a token can continue a text if both together begin one of the set.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from effort import examples, grid
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from schema_strategies import schemas
from schema_texts import Writer
from small_tokenizers import MODELS, vocabulary_like
from test_json_schemas import BYTES
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from written_calls import ONLY_FIRST, SPELLINGS, Call, format_of, said_before_calls, written

from adapters.calls import FORMATS, NUMBER
from adapters.chain import ProcessorChain, apply_edits, plan_rows
from adapters.contract import ArgumentError, Context
from adapters.grammars import compiler
from adapters.grammars.compiler import compile_grammar, load_tokenizer, walk
from adapters.grammars.sandbox import GrammarSandbox
from adapters.processors.forcing import ForcedPrefix
from adapters.processors.grammar import (
    Choice,
    Grammar,
    GrammarProcessor,
    JsonSchema,
    Regex,
    grammar_cache,
    tokenizer_tables,
)
from adapters.processors.masks import BannedTokens
from adapters.processors.structural import StructuralTag
from adapters.processors.tool_calls import ToolCalls
from adapters.vocabulary import Vocabulary

Symbols = tuple[int, ...]
"""An answer: its bytes, and each special token as 256 and its id."""

PROMPT = [1]
NAMES = [name for model in MODELS.values() for name in (*model.special, *model.plain)]


def context_of(name: str) -> Context:
    vocabulary = vocabulary_like(name)
    return Context(vocabulary, end_token_ids=vocabulary.eos_token_ids)


def symbols_of(vocabulary: Vocabulary) -> dict[int, Symbols]:
    """What each token adds to an answer; ids without a token, and byte 255, add nothing."""
    special = vocabulary.special_token_ids - vocabulary.gap_ids
    found: dict[int, Symbols] = {token_id: (256 + token_id,) for token_id in special}
    found |= {i: tuple(text) for i, text in enumerate(vocabulary.token_bytes) if text and text[0] != 0xFF}
    return found


def answer(vocabulary: Vocabulary, text: str, *, named: bool = False) -> Symbols:
    """``text`` as bytes; with ``named``, names of special tokens in it are those tokens."""
    tokenizer: Any = vocabulary.tokenizer
    ids = {tokenizer.convert_ids_to_tokens(i): i for i in vocabulary.special_token_ids} if named else {}
    if not ids:
        return tuple(text.encode())
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", text)
    return tuple(symbol for part in parts for symbol in ([256 + ids[part]] if part in ids else part.encode()))


def built(context: Context, *processors: tuple[Any, dict[str, Any]]) -> ProcessorChain:
    found = [one for kind, args in processors for one in kind.build(kind.Args.model_validate(args), context)]
    chain = ProcessorChain(found, context)
    chain.start(PROMPT)
    return chain


def allowed(chain: ProcessorChain) -> set[int]:
    """What a row of equal logits has left."""
    logits = torch.zeros(1, chain.context.vocabulary.size)
    planned, failures = plan_rows([(0, chain)])
    assert not failures, failures
    assert not apply_edits(logits, planned)
    return set(torch.nonzero(logits[0] > -torch.inf).flatten().tolist())


def expected(context: Context, language: Iterable[Symbols], so_far: Symbols) -> set[int]:
    """Tokens that can follow ``so_far`` in one of the answers, and the ends behind a whole one."""
    rest = {one[len(so_far) :] for one in language if one[: len(so_far)] == so_far}
    tokens = symbols_of(context.vocabulary)
    lengths = sorted(set(map(len, tokens.values())))
    heads = {one[: lengths[-1]] for one in rest}  # few, where many texts differ in a number later on
    begins = {head[:length] for head in heads for length in lengths if length <= len(head)}
    found = {token_id for token_id, symbols in tokens.items() if symbols in begins}
    return (found - context.end_token_ids) | (context.end_token_ids if () in rest else set())


def follow_to_the_end(chain: ProcessorChain, language: set[Symbols], choose: random.Random) -> None:
    """A random way through ``language``; every mask is the expected one."""
    table = symbols_of(chain.context.vocabulary)
    so_far: Symbols = ()
    while True:
        wanted = expected(chain.context, language, so_far)
        if choose.random() < 0.3:
            chain.foresee(16)  # a guess changes nothing
        assert allowed(chain) == wanted, bytes(symbol for symbol in so_far if symbol < 256)
        token_id = choose.choice(sorted(wanted))
        chain.accept(token_id, chain.position)
        if token_id in chain.context.end_token_ids:
            assert so_far in language
            assert allowed(chain) == chain.context.end_token_ids
            return
        so_far += table[token_id]
        if choose.random() < 0.2:
            chain.rewind(chain.position - 1)
            chain.accept(token_id, chain.position)


def segmented(vocabulary: Vocabulary, wanted: Symbols, choose: random.Random) -> list[int]:
    """Tokens that write ``wanted``, in one of all ways."""
    table, found = symbols_of(vocabulary), list[int]()
    while wanted:
        fits = [token_id for token_id, symbols in table.items() if wanted[: len(symbols)] == symbols]
        found.append(choose.choice(fits))
        wanted = wanted[len(table[found[-1]]) :]
    return found


OBJECT = {
    "type": "object",
    "properties": {"name": {"enum": ["the quick", "</think>", "é"]}, "a": {"const": 1}},
    "required": ["name", "a"],
    "additionalProperties": False,
}
OBJECTS = [f'{{"name":"{name}","a":1}}' for name in ("the quick", "</think>", "é")]
TAGGED = [f"{a}{b}{c}" for a in ("the ", "<table>") for b in ("the ", "<table>") for c in ("", "é", "中")]
QUICK = [f"the{a}{b}" for a in ("", " quick") for b in ("<think>", "a\n", "b\n", "aa\n", "ab\n", "ba\n", "bb\n")]
MARKED = ["<tag>", "[tag]", "<\uff5cUser\uff5c>"]
LANGUAGES: list[tuple[type[GrammarProcessor], dict[str, Any], list[str]]] = [
    (Choice, {"choices": ["</think>"]}, ["</think>"]),
    (Choice, {"choices": ["the quick brown fox"]}, ["the quick brown fox"]),
    (Choice, {"choices": NAMES}, NAMES),
    (Choice, {"choices": ["<tool_call>", "<tool", " <tool_call> "]}, ["<tool_call>", "<tool", " <tool_call> "]),
    (Choice, {"choices": ["😀", "😁", "é", "中", "\n\n", "  x"]}, ["😀", "😁", "é", "中", "\n\n", "  x"]),
    (JsonSchema, {"schema": {"const": "x</think>y"}}, ['"x</think>y"']),
    (JsonSchema, {"schema": {"enum": MARKED}}, [f'"{text}"' for text in MARKED]),
    (JsonSchema, {"schema": OBJECT}, OBJECTS),
    (Regex, {"pattern": "a</think>[0-9]"}, [f"a</think>{digit}" for digit in range(10)]),
    (Regex, {"pattern": "(the |<table>){2}[é中]?"}, TAGGED),
    (Grammar, {"lark": 'start: "the" [" quick"] x\nx: "<think>" | /[ab]{1,2}/ "\\n"'}, QUICK),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("kind", "args", "texts"), LANGUAGES, ids=lambda value: getattr(value, "name", ""))
def test_a_mask_is_what_can_continue(
    model: str, kind: type[GrammarProcessor], args: dict[str, Any], texts: list[str]
) -> None:
    context = context_of(model)
    language = {answer(context.vocabulary, text) for text in texts}
    for seed in range(8):
        follow_to_the_end(built(context, (kind, args)), language, random.Random(seed))


FRAGMENTS = st.sampled_from([*NAMES, " ", "the", "{", '"', "é", "😀", "<", ">", "|", "\n", "▁", "<0x0A>"])


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(list(MODELS)),
    st.lists(st.lists(FRAGMENTS, min_size=1, max_size=4).map("".join), min_size=1, max_size=6),
    st.sampled_from(["choice", "schema", "lark"]),
    st.randoms(use_true_random=False),
)
def test_a_mask_of_any_texts_is_what_can_continue(
    model: str, texts: list[str], how: str, choose: random.Random
) -> None:
    context = context_of(model)
    if how == "choice":
        chain = built(context, (Choice, {"choices": texts}))
    elif how == "schema":
        texts = [text.translate(str.maketrans({'"': "'", "\n": " "})) for text in texts]  # type: ignore[arg-type]
        chain, texts = built(context, (JsonSchema, {"schema": {"enum": texts}})), [f'"{text}"' for text in texts]
    else:
        escaped = [text.replace('"', '\\"').replace("\n", "\\n") for text in texts]
        chain = built(context, (Grammar, {"lark": "start: " + " | ".join(f'"{text}"' for text in escaped)}))
    follow_to_the_end(chain, {answer(context.vocabulary, text) for text in texts}, choose)


ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"enum": [1, "</tool_call>"]}},
    "required": ["a"],
    "additionalProperties": False,
}


FINITE = [name for name, wanted in FORMATS.items() if wanted.channels is None]
"""Formats in which few texts are a call, whatever the number of one in them."""

NUMBERED = [name for name in FINITE if NUMBER in FORMATS[name].name_prefix + FORMATS[name].name_suffix]
REQUIRED = [
    *grid((case for case in product(MODELS, FINITE) if case[1] not in NUMBERED or case[0] == "qwen"), fast=4),
    *(pytest.param(*case, marks=pytest.mark.campaign) for case in product(MODELS, NUMBERED) if case[0] != "qwen"),
]
"""Models and formats of a required call."""

NUMBERS = [f"{number:0{width}}" for width in (1, 2, 3) for number in range(10**width)]
"""Numbers that a call may have."""


def calls(format_: str, **options: Any) -> tuple[type[ToolCalls], dict[str, Any]]:
    return ToolCalls, {"format": format_, "tools": [{"name": "one", "parameters": ARGUMENTS}], **options}


def tags(marks: Sequence[str], end: str, **options: bool) -> tuple[type[StructuralTag], dict[str, Any]]:
    given = [{"begin": f"{mark}=", "content": {"type": "regex", "pattern": "[ab]"}, "end": end} for mark in marks]
    return StructuralTag, {"format": {"type": "triggered_tags", "triggers": list(marks), "tags": given, **options}}


@pytest.mark.parametrize(("model", "name"), REQUIRED)
def test_a_mask_of_a_required_call_is_what_can_continue(model: str, name: str) -> None:
    """In each spelling of the format; before a call in channels there may be any thinking."""
    context = context_of(model)
    spellings = [spelling for spelling in SPELLINGS if format_of(spelling) == name]
    texts = [written(spelling, Call("one", {"a": value})) for spelling in spellings for value in (1, "</tool_call>")]
    wanted = FORMATS[name]
    for before, behind in (part.split(NUMBER) for part in (wanted.name_prefix, wanted.name_suffix) if NUMBER in part):
        texts = [text.replace(f"{before}0{behind}", f"{before}{each}{behind}") for text in texts for each in NUMBERS]
    texts += [f">>>{text}" for text in texts if name == "functionary_v3_2"]
    language = {answer(context.vocabulary, text, named=True) for text in texts}
    for seed in range(4):
        chain = built(context, calls(name, choice="required", parallel=False))
        follow_to_the_end(chain, language, random.Random(seed))


@pytest.mark.parametrize("model", MODELS)
def test_a_mask_of_a_tag_is_what_can_continue(model: str) -> None:
    """Whatever the marks of a tag are: text, an added token, special or not."""
    context, added = context_of(model), MODELS[model]
    marks = [*added.special[added.num_ends :], *added.plain[:3], "<f", "[f"]
    for mark in (mark for mark in marks if mark.strip("\n▁")):
        for end in ("!", *marks[:2]):
            language = {answer(context.vocabulary, f"{mark}={x}{end}", named=True) for x in "ab"}
            chain = built(context, tags([mark], end, at_least_one=True, stop_after_first=True))
            follow_to_the_end(chain, language, random.Random(0))


@pytest.mark.parametrize(("model", "spelling"), grid(product(MODELS, SPELLINGS), fast=4))
def test_free_text_and_a_call_can_be_written_in_any_tokens(model: str, spelling: str) -> None:
    context = context_of(model)
    call = Call("one", {"a": "</tool_call>"})
    text = written(spelling, call)
    if spelling not in ONLY_FIRST:
        others = [mark for mark in MODELS[model].plain if mark not in text]
        text = said_before_calls(spelling, f"Let me see, {''.join(others)} é😀: ", call)
    if context.end_token_ids.intersection(context.vocabulary.tag("<|call|>")):
        text = text.removesuffix("<|call|>")
    name = format_of(spelling)
    for seed in range(4):
        choose = random.Random(seed)
        chain = built(context, calls(name))
        for token_id in segmented(context.vocabulary, answer(context.vocabulary, text, named=True), choose):
            options = allowed(chain)
            assert token_id in options, (context.vocabulary.decode([token_id]), chain.tokens)
            check_that_each_can_be_taken(chain, choose.sample(sorted(options), min(12, len(options))))
            chain.accept(token_id, chain.position)
        assert context.end_token_ids <= allowed(chain)


@settings(max_examples=examples(150), deadline=None)
@example("gemma", {"type": "array", "items": {"multipleOf": 3}}, False, random.Random(1))
@example("qwen", {"type": "integer", "multipleOf": 2, "minimum": 3}, False, random.Random(1))
@given(st.sampled_from(list(MODELS)), schemas(), st.booleans(), st.randoms(use_true_random=False))
def test_a_mask_of_a_schema_is_that_of_its_bytes(model: str, schema: Any, compact: bool, choose: random.Random) -> None:
    """Whatever tokens have written the text, and whatever they end in the middle of."""
    context, args = context_of(model), {"schema": schema, "compact": compact}
    try:
        chain = built(context, (JsonSchema, args))
    except ArgumentError:
        return
    writer, table, text = Writer(JsonSchema, BYTES, **args), context.vocabulary.token_bytes, b""
    for _ in range(20):
        options = allowed(chain)
        for token_id in choose.sample(sorted(symbols_of(context.vocabulary).keys() - context.end_token_ids), 16):
            wanted = token_id not in context.vocabulary.special_token_ids and writer.goes_on(text + table[token_id])
            assert (token_id in options) == wanted, (text, table[token_id])
        assert (context.end_token_ids <= options) == writer.writes(text.decode(errors="replace"))
        token_id = choose.choice(sorted(options))
        if token_id in context.end_token_ids:
            json.loads(text)
            break
        chain.accept(token_id, chain.position)
        text += table[token_id]


def check_that_each_can_be_taken(chain: ProcessorChain, options: Iterable[int]) -> None:
    for token_id in options:
        chain.accept(token_id, chain.position)
        chain.plan()
        chain.rewind(chain.position - 1)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["<tag>", "[tag]", "é"]}, "maxItems": 3},
        "n": {"type": "number"},
    },
    "required": ["name", "tags"],
}
ENDLESS: list[tuple[Any, dict[str, Any]]] = [
    (JsonSchema, {"schema": SCHEMA}),
    (JsonSchema, {"schema": SCHEMA, "compact": False}),
    (JsonSchema, {"schema": True}),
    (JsonSchema, {"schema": {"type": "array", "items": {"multipleOf": 3}}, "compact": False}),
    (Regex, {"pattern": "(?s:.){0,40}"}),
    (Regex, {"pattern": r"[^<]*(</think>|\[/INST\])\p{L}+"}),
    (Grammar, {"lark": 'start: T | x\nT: ~/(?s:.*)never(?s:.*)/\nx: "a" x "b" | "</think>"'}),
    (Grammar, {"lark": 'start: <[*]> "x" <[^5]> y*\ny[lazy]: /[a-z]*;/\n%ignore /[ ]+/'}),
    (Grammar, {"lark": 'start: s "d" m\ns[suffix="c"]: /[abé]*/\nm[max_tokens=3]: /[a-z]*/'}),
    (Grammar, {"lark": f'start: %json {{"const": "<tool_call>"}} | {"(" * 9}"x"{")" * 9}'}),
    *(calls(name) for name in FORMATS),
    tags(["<tool_call>", "<f"], "[/INST]"),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("kind", "args"), ENDLESS, ids=lambda value: getattr(value, "name", ""))
def test_each_token_that_a_mask_allows_can_be_taken(
    model: str, kind: type[GrammarProcessor], args: dict[str, Any]
) -> None:
    context = context_of(model)
    for seed in range(3):
        choose = random.Random(seed)
        chain = built(context, (kind, args))
        for _ in range(25):
            options = allowed(chain)
            assert options.isdisjoint(context.vocabulary.gap_ids)
            check_that_each_can_be_taken(chain, choose.sample(sorted(options), min(6, len(options))))
            token_id = choose.choice(sorted(options))
            chain.accept(token_id, chain.position)
            if token_id in context.end_token_ids:
                break


@pytest.mark.parametrize("model", MODELS)
def test_the_trial_of_a_grammar_knows_the_same_tokens(model: str) -> None:
    vocabulary = vocabulary_like(model)
    tokenizer = grammar_cache(vocabulary).tokenizer()
    for kind, args in [*((kind, args) for kind, args, _ in LANGUAGES), *ENDLESS]:
        walk(compile_grammar(tokenizer, kind.grammar(kind.Args.model_validate(args), vocabulary)), tokenizer)


@pytest.mark.parametrize("model", MODELS)
def test_forced_text_and_a_grammar_go_together(model: str) -> None:
    """In whatever tokens the text is forced, the grammar takes it, and goes on behind it."""
    context = context_of(model)
    texts = [f'{{"a":"{value}"}}' for value in ("", "ab", "</think>", "the quick é")]
    schema = {**OBJECT, "properties": {"a": {"enum": [text[6:-2] for text in texts]}}, "required": ["a"]}
    language = {answer(context.vocabulary, text) for text in texts}
    for text in texts:
        for length in range(1, len(text)):
            chain = built(context, (ForcedPrefix, {"text": text[:length]}), (JsonSchema, {"schema": schema}))
            for token_id in context.vocabulary.encode(text[:length]):
                assert chain.plan().force == token_id
                chain.accept(token_id, chain.position)
            assert allowed(chain) == expected(context, language, answer(context.vocabulary, text[:length]))


@pytest.mark.parametrize("model", MODELS)
def test_a_text_is_written_without_tokens_that_are_banned(model: str) -> None:
    context = context_of(model)
    text = "the quick <think>"
    banned = sorted(
        {token_id for token_id in context.vocabulary.encode(text) if len(symbols_of(context.vocabulary)[token_id]) > 1}
    )
    choices = (Choice, {"choices": [text]})
    chain = built(context, choices, (BannedTokens, {"token_ids": banned}))
    so_far: Symbols = ()
    while so_far != answer(context.vocabulary, text):
        options = expected(context, {answer(context.vocabulary, text)}, so_far) - set(banned)
        assert allowed(chain) == options
        so_far += symbols_of(context.vocabulary)[max(options)]
        chain.accept(max(options), chain.position)


def pieces_alone(pieces: dict[str, int], **options: Any) -> Any:
    """A tokenizer whose tokens follow each other without spaces."""
    tokenizer = Tokenizer(models.BPE(pieces, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def test_the_sandbox_finds_what_cannot_be_written() -> None:
    vocabulary = vocabulary_like("qwen")
    grammars = [ToolCalls.grammar(ToolCalls.Args.model_validate(calls("hermes")[1]), vocabulary)]
    grammars += [Choice.grammar(Choice.Args(choices=[text]), vocabulary) for text in ("</think>", "<|im_end|>")]
    letters = Vocabulary(4, pieces_alone({"a": 0, "b": 1}))
    with GrammarSandbox(partial(tokenizer_tables, vocabulary)) as sandbox:
        assert [sandbox.submit(grammar).result(60).outcome for grammar in grammars] == ["compiled"] * 3
    with GrammarSandbox(partial(tokenizer_tables, letters)) as sandbox:
        found = [sandbox.submit(str(LLMatcher.grammar_from_regex(text))).result(60) for text in ("ab", "ab(c|d)", "c")]
    assert [one.outcome for one in found] == ["compiled", "refused", "refused"]
    assert found[1].problem == "no token of this model goes on with a text of it"


NAMED: list[tuple[Any, dict[str, Any], str]] = [
    (Grammar, {"lark": 'start: "a" <|im_end|> "b"'}, "lark"),
    (Grammar, {"lark": 'start: "a" (<[399]> | "b")'}, "lark"),
    (Grammar, {"lark": 'start: x\nx: "/" /["#]/ <[399,400-400]> // <|im_start|>'}, "lark"),
    (Grammar, {"lark": 'start: %lark {\nstart: "a" <|endoftext|>\n}'}, "lark"),
    (*tags(["<f"], "<|im_end|>"), "format"),
    (*tags(["<|endoftext|>"], "!"), "format"),
    (*calls("llama3_json"), "tools"),
]


@pytest.mark.parametrize(("kind", "args", "argument"), NAMED)
def test_a_grammar_that_names_an_end_token_is_refused(
    kind: type[GrammarProcessor], args: dict[str, Any], argument: str
) -> None:
    """By name or by id, special or not: the answer would end there."""
    vocabulary = vocabulary_like("qwen")
    ends = vocabulary.eos_token_ids | set(vocabulary.tag("<|python_tag|>"))
    with pytest.raises(ArgumentError, match=r'names the token "<\|.*" \(id \d+\), which ends the answer') as caught:
        built(Context(vocabulary, end_token_ids=ends), (kind, args))
    assert caught.value.argument == argument
    others = {vocabulary.tag("<|im_start|>")[0]}
    assert allowed(built(Context(vocabulary, end_token_ids=frozenset(others)), (kind, args)))


def test_an_end_token_that_is_text_can_be_written_in_others() -> None:
    vocabulary = vocabulary_like("qwen")
    context = Context(vocabulary, end_token_ids=frozenset(vocabulary.tag("</think>")))
    follow_to_the_end(
        built(context, (Choice, {"choices": ["</think>"]})), {answer(vocabulary, "</think>")}, random.Random(0)
    )
    chain = built(context, tags(["<f"], "</think>", at_least_one=True, stop_after_first=True))
    follow_to_the_end(chain, {answer(vocabulary, f"<f={x}</think>") for x in "ab"}, random.Random(0))


@pytest.mark.parametrize("model", MODELS)
def test_a_lark_grammar_names_tokens_as_the_tokenizer_does(model: str) -> None:
    context, added = context_of(model), MODELS[model]
    names = [name for name in (*added.special[added.num_ends :], *added.plain) if re.fullmatch(r"<[^<>\s]+>", name)]
    for name in names:
        quoted = name.replace("/", "\\/")
        source = f'start: "{name}" {name} x // {name}\nx: /{quoted}/ %json {{"const": "{name}"}} | "#" {name}'
        (token_id,) = context.vocabulary.tag(name)
        chain = built(context, (Grammar, {"lark": source}))
        for one in [*context.vocabulary.encode(name[:2]), *context.vocabulary.encode(name[2:])]:
            chain.accept(one, chain.position)
        assert allowed(chain) == {token_id}
        chain.accept(token_id, chain.position)
        for one in context.vocabulary.encode("#"):
            chain.accept(one, chain.position)
        assert allowed(chain) == {token_id}
        chain.accept(token_id, chain.position)
        assert allowed(chain) == context.end_token_ids


@pytest.mark.parametrize(
    ("lark", "problem"),
    [
        ('start: "a" <nothing>', "names the token <nothing>, which this model does not have"),
        ('start: "a" <[410]>', "names the token of id 410, which this model does not have"),
        ('start: "a" <[9999]>', "Token range end too large"),
        ("start: <[a]>", "invalid digit"),
        ("start: %json", "expected JSON behind %json"),
        ("start: %json " + "[" * 200_000, "nested too deeply"),
    ],
)
def test_tokens_that_a_grammar_cannot_name_are_refused(lark: str, problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem) as caught:
        built(context_of("qwen"), (Grammar, {"lark": lark}))
    assert caught.value.argument == "lark"


@pytest.mark.parametrize("model", MODELS)
def test_what_a_grammar_foresees_is_the_text_that_it_forces(model: str) -> None:
    context = context_of(model)
    vocabulary = context.vocabulary
    for (kind, args), text in (
        ((Choice, {"choices": ["the quick brown fox"]}), "the quick brown fox"),
        ((Choice, {"choices": ["the answer: yes", "the answer: no"]}), "the answer:"),
        ((Choice, {"choices": ["中! é", "中! a"]}), "中!"),
        ((Choice, {"choices": ["!é", "!è"]}), "!"),
        ((JsonSchema, {"schema": OBJECT}), '{"name":"'),
        (calls("mistral", choice="required"), '[TOOL_CALLS][{"name": "one", "arguments": {"a":'),
    ):
        chain = built(context, (kind, args))
        foreseen = list(chain.foresee(64))
        assert vocabulary.decode(foreseen).strip() == text
        assert list(chain.foresee(2)) == foreseen[:2]
        for token_id in foreseen:
            assert token_id in allowed(chain)
            chain.accept(token_id, chain.position)


@pytest.mark.parametrize("length", [1023, 1024, 1025, 5000])
def test_a_token_too_long_for_a_mask_is_written_with_others(length: int) -> None:
    """llguidance's trie ends at 1,024 bytes."""
    pieces = {"a": 0, "a" * length: 1, "</s>": 2}
    context = Context(Vocabulary(3, pieces_alone(pieces, eos_token="</s>"), [2]), end_token_ids=frozenset({2}))
    chain = built(context, (Regex, {"pattern": "a*"}))
    assert allowed(chain) == ({0, 1, 2} if length <= 1024 else {0, 2})


def test_tokens_that_llguidance_reads_otherwise_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "is_text", lambda token: True)
    with pytest.raises(ValueError, match=r"llguidance 1\.\S+ reads the tokens \[1\] of this model otherwise"):
        load_tokenizer([b"a", b"\xff", b"b"])
