"""Speculative decoding, beside which TensorRT-LLM calls no logits processors: its own guides, and
what is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from stand_in import collect, running
from trtllm_files import configured

from adapters.chain import ProcessorChain
from adapters.contract import Context, Processor
from adapters.grammars.compiler import compile_grammar, load_tokenizer
from adapters.grammars.lark import in_one
from adapters.processors.forcing import ForcedPrefix
from adapters.processors.grammar import Choice, Grammar, GrammarProcessor, JsonSchema, Regex
from adapters.processors.structural import StructuralTag
from adapters.vocabulary import Vocabulary
from worker.engines import TokenDelta
from worker.engines.embedded import EmbeddedEngine
from worker.engines.trtllm import TrtllmEngine
from worker.engines.trtllm.plain_regex import plain_regex
from worker.engines.trtllm.speculation import METHODS
from worker.errors import ConfigurationError, InvalidRequest, StartupError
from worker.sampling import SamplingParams

DRAFTS = ["--override-engine-args", '{"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}}']
GUIDED = [*DRAFTS, "--guided-decoding-backend", "llguidance"]
PROMPT = [9, 30, 41, 77]
NUM_IDS, ENDS = 1024, (4, 1)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "tags": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TAGS = {
    "type": "triggered_tags",
    "triggers": ["<call"],
    "tags": [
        {"begin": "<call>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</call>"},
        {"begin": "<calls>", "content": {"type": "regex", "pattern": "[{/]+x"}, "end": "</calls>"},
    ],
    "at_least_one": True,
    "stop_after_first": True,
}
GUIDES: dict[str, tuple[type[GrammarProcessor], dict[str, Any]]] = {
    "json_schema": (JsonSchema, {"schema": SCHEMA}),
    "regex": (Regex, {"pattern": "(yes|no)/[0-9]{3}"}),
    "choice": (Choice, {"choices": ["a {b}", "/", "ünï"]}),
    "grammar": (Grammar, {"lark": 'start: "x" item ("," item)* "@item"\nitem: %json {"type": "boolean"} | /[{]+/'}),
    "structural_tag": (StructuralTag, {"format": TAGS}),
}


@pytest.fixture(scope="session")
def vocabulary(model: Path) -> Vocabulary:
    return Vocabulary.from_pretrained(str(model), NUM_IDS, ENDS)


def chain_of(vocabulary: Vocabulary, kind: str, *others: Processor) -> ProcessorChain:
    context = Context(vocabulary, frozenset(ENDS), 0)
    made, args = GUIDES[kind]
    return ProcessorChain([made(made.Args.model_validate(args), context), *others], context)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drafting(model: Path) -> AsyncIterator[TrtllmEngine]:
    async with running(model, *GUIDED) as started:
        yield started


def text_of(vocabulary: Vocabulary, answer: TokenDelta) -> str:
    return b"".join(vocabulary.token_bytes[token_id] for token_id in answer.token_ids).decode()


@pytest.mark.parametrize("kind", GUIDES)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_engines_own_guide_is_the_grammar_of_the_processor(
    drafting: TrtllmEngine, reference: EmbeddedEngine, vocabulary: Vocabulary, kind: str
) -> None:
    """Greedily, token by token what the processor makes of the same model."""
    params = SamplingParams(max_tokens=200)
    expected = await collect(reference, PROMPT, params, f"{kind}-there", chain=chain_of(vocabulary, kind))
    found = await collect(drafting, PROMPT, params, kind, chain=chain_of(vocabulary, kind))
    assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)
    assert found.error is None


@pytest.mark.asyncio(loop_scope="module")
async def test_sampled_answers_keep_to_the_guide(drafting: TrtllmEngine, vocabulary: Vocabulary) -> None:
    found = set()
    for number in range(6):
        params = SamplingParams(max_tokens=100, temperature=5.0, top_p=0.99)
        answer = await collect(drafting, PROMPT, params, f"{number}", chain=chain_of(vocabulary, "json_schema"))
        assert answer.finish_reason in ("stop", "length"), answer.error
        if answer.finish_reason == "stop":
            text = text_of(vocabulary, answer)
            data = json.loads(text)
            assert data["name"] in ("Ada", "Bob")
            assert all(isinstance(each, bool) for each in data["tags"])
            found.add(text)
    assert found


@pytest.mark.asyncio(loop_scope="module")
async def test_without_a_guide_the_engine_decodes_as_it_does(drafting: TrtllmEngine, reference: EmbeddedEngine) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = await collect(reference, PROMPT, params, "there")
    assert (await collect(drafting, PROMPT, params, "here")).token_ids == expected.token_ids


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"repetition_penalty": 1.2}, "sampling_params.repetition_penalty: needs a logits processor"),
    ({"bad_token_ids": [3]}, "sampling_params.bad_token_ids: needs a logits processor"),
    ({"min_tokens": 3}, "sampling_params.min_tokens: needs a logits processor"),
    ({"embedding_bias": [0.0] * NUM_IDS}, "sampling_params.embedding_bias: needs a logits processor"),
    ({"logprobs": 1}, "sampling_params.logprobs: needs a logits processor"),
    ({"temperature": 1.0, "min_p": 0.1}, "sampling_params.min_p: needs a logits processor"),
    ({"temperature": 1.0, "seed": 3}, "sampling_params.seed: needs a logits processor"),
    ({"logits_processor": lambda *given: None}, "sampling_params.logits_processor: needs a logits processor"),
]


@pytest.mark.parametrize(("fields", "problem"), REFUSED)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_needs_a_processor_is_refused_by_name(
    drafting: TrtllmEngine, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(problem)):
        await collect(drafting, PROMPT, SamplingParams(max_tokens=3, **fields))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_receipt_beside_drafts_is_refused_by_name(
    drafting: TrtllmEngine, vocabulary: Vocabulary, temperature: float
) -> None:
    """Without a processor, too; the seed that the worker chose for it is not to blame."""
    chain = ProcessorChain([], Context(vocabulary, frozenset(ENDS), 0))
    chain.wants_receipt = True
    params = SamplingParams(max_tokens=3, temperature=temperature, seed=7)
    with pytest.raises(InvalidRequest, match=r"^logits_processors\.receipt: lists the edits of processors"):
        await collect(drafting, PROMPT, params, chain=chain)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_guide_does_not_go_with(drafting: TrtllmEngine, vocabulary: Vocabulary) -> None:
    context = Context(vocabulary, frozenset(ENDS), 0)
    forced = ForcedPrefix(ForcedPrefix.Args(token_ids=[40]), context)
    guided = chain_of(vocabulary, "regex")
    wanting = chain_of(vocabulary, "regex")
    wanting.wants_receipt = True
    two = ProcessorChain(
        [
            *(m.processor for m in chain_of(vocabulary, "json_schema").members),
            *(m.processor for m in chain_of(vocabulary, "regex").members),
        ],
        context,
    )
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"chain": chain_of(vocabulary, "regex", forced)}, "logits_processor: holds forced_prefix, and TensorRT"),
        ({}, {"chain": two}, "guided_decoding: must be one guide"),
        ({}, {"chain": wanting}, "logits_processors.receipt: lists the edits of processors"),
        ({}, {"chain": guided, "generated_token_ids": [5]}, "guided_decoding: cannot go on after a migration"),
        ({"n": 2, "best_of": 2, "temperature": 1.0}, {"chain": guided}, "n: must be 1 beside a guide"),
        ({"ignore_eos": True}, {"chain": guided}, "ignore_eos: must be false beside a guide"),
        ({"stop_token_ids": [77]}, {"chain": guided}, "stop_token_ids: must be the model's own beside a guide"),
    ]
    for fields, given_, problem in cases:
        with pytest.raises(InvalidRequest, match=re.escape(problem)):
            await collect(drafting, PROMPT, SamplingParams(max_tokens=3, **fields), **given_)


async def test_a_grammar_that_begins_after_the_thinking_is_refused(model: Path, vocabulary: Vocabulary) -> None:
    context = Context(
        vocabulary, frozenset(ENDS), 0, think_start=vocabulary.tag("<think>"), think_end=vocabulary.tag("</think>")
    )
    made, args = GUIDES["regex"]
    chain = ProcessorChain([made(made.Args.model_validate(args), context)], context, scopes=["answer"])
    async with running(model, *GUIDED) as drafting:
        with pytest.raises(InvalidRequest, match="guided_decoding: begins after the thinking"):
            await collect(drafting, PROMPT, SamplingParams(max_tokens=3), chain=chain)


async def test_a_token_that_the_guide_forbids_is_not_sent(model: Path, vocabulary: Vocabulary) -> None:
    """A version that forgets a guide."""
    async with running(model, *GUIDED, loosens_guides_at=5) as drafting:
        chain = chain_of(vocabulary, "json_schema")
        answer = await collect(drafting, PROMPT, SamplingParams(max_tokens=60), chain=chain)
        assert answer.finish_reason == "error"
        assert "does not match the grammar, and TensorRT-LLM sampled it" in str(answer.error)
        whole = b"".join(vocabulary.token_bytes[token_id] for token_id in answer.token_ids)
        assert b'{"name":"Ada","tags":['.startswith(whole) or b'{"name":"Bob","tags":['.startswith(whole)


async def test_a_version_that_is_greedy_beside_drafts(model: Path) -> None:
    async with running(model, *DRAFTS, greedy_beside_drafts=True) as drafting:
        with pytest.raises(InvalidRequest, match=r"sampling_params\.temperature: this version .* decodes greedily"):
            await collect(drafting, PROMPT, SamplingParams(max_tokens=3, temperature=1.0))
        assert (await collect(drafting, PROMPT, SamplingParams(max_tokens=3))).finish_reason == "length"


async def test_without_a_backend_guides_are_refused_by_name(model: Path, vocabulary: Vocabulary) -> None:
    async with running(model, *DRAFTS) as drafting:
        with pytest.raises(
            InvalidRequest, match=r"guided_decoding: cannot be enforced beside .* start the worker with"
        ):
            await collect(drafting, PROMPT, SamplingParams(max_tokens=3), chain=chain_of(vocabulary, "regex"))


async def test_a_guide_that_has_no_effect_ends_the_start(model: Path) -> None:
    with pytest.raises(StartupError, match="where a guide leaves '2048' alone"):
        async with running(model, *GUIDED, loosens_guides_at=0):
            pass


@pytest.mark.asyncio(loop_scope="module")
async def test_xgrammar_gets_what_it_reads_alike(
    model: Path, reference: EmbeddedEngine, vocabulary: Vocabulary
) -> None:
    async with running(model, *DRAFTS, "--guided-decoding-backend", "xgrammar") as drafting:
        for kind in ("regex", "choice"):
            params = SamplingParams(max_tokens=100)
            expected = await collect(reference, PROMPT, params, f"{kind}-there", chain=chain_of(vocabulary, kind))
            found = await collect(drafting, PROMPT, params, kind, chain=chain_of(vocabulary, kind))
            assert (found.token_ids, found.finish_reason) == (expected.token_ids, "stop")
        for kind in ("json_schema", "grammar", "structural_tag"):
            problem = f"XGrammar does not read {kind} as this worker does; start it with guided_decoding_backend: llgu"
            with pytest.raises(InvalidRequest, match=problem):
                await collect(drafting, PROMPT, SamplingParams(max_tokens=3), chain=chain_of(vocabulary, kind))


# Start


@pytest.mark.parametrize(
    ("config", "argv", "problem"),
    [
        ("3", [], "speculative_config: must be a mapping, got 3"),
        ("{decoding_type: Medusa}", [], f"speculative_config.decoding_type: must be one of {', '.join(METHODS)}"),
        ("{decoding_type: MTP, next: 1}", [], "speculative_config.next: is in no row of this worker's table"),
        (
            "{decoding_type: MTP, use_relaxed_acceptance_for_thinking: true}",
            [],
            "speculative_config.use_relaxed_acceptance_for_thinking: must be False, got True",
        ),
        (
            "{decoding_type: Eagle3, advanced_sampling_mode: no_topk}",
            [],
            "speculative_config.advanced_sampling_mode: must be 'full', got 'no_topk'",
        ),
        ("{decoding_type: MTP}", ["--disaggregation-mode", "decode"], "is served on aggregated workers alone"),
        (
            "{decoding_type: MTP}",
            ["--guided-decoding-backend", "outlines"],
            "guided_decoding_backend: must be one of llguidance, xgrammar, got 'outlines'",
        ),
    ],
)
def test_settings_that_may_change_tokens_are_refused(
    tmp_path: Path, config: str, argv: list[str], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(problem)):
        configured(tmp_path, f"speculative_config: {config}", *argv)


def test_settings_that_are_passed_on(tmp_path: Path) -> None:
    text = "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 1}\ndisable_overlap_scheduler: false\n"
    config = configured(tmp_path, text, "--guided-decoding-backend", "xgrammar")
    assert (config.drafts, config.guided_backend, config.notes) == (True, "xgrammar", ())
    assert config.options["disable_overlap_scheduler"] is False
    assert "disable_overlap_scheduler" not in configured(tmp_path, "speculative_config: {decoding_type: MTP}").options


# Grammars in the library's hands


@given(data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_masks_of_a_grammar_that_is_handed_over(vocabulary: Vocabulary, data: st.DataObject) -> None:
    """llguidance, given the tokenizer's file and one Lark text, leaves the tokens that the worker's
    compiled grammar leaves, end tokens aside, along random answers.
    """
    made, args = GUIDES[data.draw(st.sampled_from(sorted(GUIDES)))]
    source = made.grammar(made.Args.model_validate(args), vocabulary)
    tokenizer: Any = vocabulary.tokenizer
    theirs = LLMatcher(
        LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=NUM_IDS, eos_token=ENDS[0]),
        LLMatcher.grammar_from_lark(in_one(source)),
    )
    ours = compile_grammar(load_tokenizer(vocabulary.token_bytes), source)
    for _ in range(30):
        allowed = bits(ours.compute_bitmask(), NUM_IDS)
        if theirs.is_stopped() or not allowed:
            break
        assert bits(theirs.compute_bitmask(), NUM_IDS) - set(ENDS) == allowed - vocabulary.added_token_ids
        token_id = data.draw(st.sampled_from(sorted(allowed - vocabulary.added_token_ids)))
        assert theirs.consume_token(token_id)
        assert ours.consume_token(token_id)


def bits(mask: bytes, width: int) -> set[int]:
    number = int.from_bytes(mask, "little")
    return {index for index in range(width) if number >> index & 1}


PLAIN: Sequence[tuple[str, str]] = [
    ("a|b", "a|b"),
    ("(?:ab)+[x-z0]{2,3}", "(ab)+[x-z0]{2,3}"),
    ("\\/\\x{5B}\\.\\n", "/\\[\\.\\n"),
    ("[\\]\\-a]?", "[\\]\\-a]?"),
]


@pytest.mark.parametrize(("pattern", "spelled"), PLAIN)
def test_a_plain_regular_expression(pattern: str, spelled: str) -> None:
    assert plain_regex(pattern) == spelled
    assert plain_regex(spelled) == spelled


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            ".",
            "\\d",
            "\\w+",
            "\\b",
            "[^a]",
            "[a&&b]",
            "[[:alpha:]]",
            "a*?",
            "a+*",
            "(?i)a",
            "(?=a)",
            "^a",
            "a$",
            "(a",
            "a)",
        ),
        *("[a", "a{x}", "a{3,2}", "", "a|", "\\x41", "\\x{110000}", "\\p{L}", "[z-a]", "[]", "a\\", "\x00", "(" * 200),
    ],
)
def test_what_dialects_read_differently_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError):
        plain_regex(pattern)


@given(pattern=st.text("ab|()[]-?*+{},1^\\dx./", max_size=12))
@settings(max_examples=examples(500), deadline=None)
def test_a_plain_regular_expression_is_one_of_python_too(pattern: str) -> None:
    """Whatever is let through compiles in another dialect, and matches the same texts."""
    try:
        spelled = plain_regex(pattern)
    except ValueError:
        return
    for text in ("", "a", "b", "ab", "aab", "1", "-", "x", "/", ",", "a1", "bb"):
        assert bool(re.fullmatch(pattern, text)) == bool(re.fullmatch(spelled, text))
