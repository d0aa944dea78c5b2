"""Grammars: JSON Schema, regular expressions, choices and Lark grammars, enforced by llguidance.

A grammar is compiled at admission, off the step, within the limits of `adapters.grammars`, and
advanced on trial there, so that one that explodes is refused before the first token. Compiled
grammars are cached per vocabulary.
"""

from __future__ import annotations

import json
import pickle
import re
from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Annotated, Any, ClassVar, TypeAlias

import numpy as np
from llguidance import LLMatcher
from pydantic import Field

from adapters.contract import (
    Allow,
    ArgumentError,
    Context,
    Edit,
    ProcessorArgs,
    Reads,
    Scope,
    Stage,
    SteeringProcessor,
    Unsatisfiable,
    bitmask_of,
)
from adapters.grammars.cache import GrammarCache
from adapters.grammars.compiler import byte_tables, hugging_face_tables, load_tokenizer, short_reason
from adapters.grammars.masks import ThreadMasks, Words
from adapters.processors.arguments import MAX_LIST, MAX_TEXT
from adapters.vocabulary import Vocabulary, vocabulary_at

MAX_SOURCE = 1024 * 1024
"""Most characters of a grammar's source."""

_LITERALS = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*|#[^\n]*')
_IGNORED_ATTRIBUTE = re.compile(r"\btemperature\s*=")


_Words: TypeAlias = tuple[np.ndarray[Any, np.dtype[np.intp]], np.ndarray[Any, np.dtype[np.int32]]]
"""Indices of words of a mask, and a word for each."""


def grammar_cache(vocabulary: Vocabulary) -> GrammarCache:
    """The compiled grammars of ``vocabulary``.

    Raises:
        ValueError: it has no tokenizer that llguidance can read.
    """
    return vocabulary.derived("grammars", lambda: GrammarCache(load_tokenizer(tokenizer_tables(vocabulary))))


def tokenizer_tables(vocabulary: Vocabulary) -> dict[str, Any]:
    """The tokenizer as JSON data for llguidance, in this process or a sandbox.

    Raises:
        ValueError: there is no tokenizer.
    """
    if vocabulary.tokenizer is None:
        raise ValueError("a grammar needs a tokenizer, and this model was loaded without one")
    tokenizer: Any = vocabulary.tokenizer
    # If ids have gaps, llguidance's own reading of a tokenizer allows ids beyond their number, and
    # then refuses them.
    if not hasattr(tokenizer, "backend_tokenizer") or vocabulary.gap_ids:
        special = sorted(vocabulary.special_token_ids)
        return byte_tables(vocabulary.token_bytes, special, sorted(vocabulary.eos_token_ids))
    backend = tokenizer.backend_tokenizer
    if backend.padding is not None or backend.truncation is not None:
        backend = copy(backend)  # takes long
        backend.no_padding()
        backend.no_truncation()
    own_end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return hugging_face_tables(backend.to_str(), vocabulary.size, sorted(vocabulary.eos_token_ids) or own_end)


class GrammarProcessor(SteeringProcessor):
    """Allows exactly the tokens that can continue a text of the grammar.

    An end token is allowed exactly where the text so far is complete, and only end tokens are
    allowed where nothing can follow, so a complete answer ends. Subclasses define the grammar.
    """

    stage = Stage.MASK
    reads = Reads.GENERATED
    scopes: ClassVar[tuple[Scope, ...]] = ("all", "answer")  # in a thinking section an end token would end the answer
    argument: ClassVar[str]
    """Argument that holds the grammar."""

    _matcher: LLMatcher

    def __init__(self, args: Any, context: Context) -> None:
        if not context.end_token_ids:
            raise ArgumentError(self.argument, "needs an end token, and this request has none")
        self._grammar = self.grammar(args, context.vocabulary)
        self._end = tuple(sorted(context.end_token_ids))
        vocabulary = context.vocabulary
        # A negated terminal would match llguidance's spelling of them.
        self._padding = [*vocabulary.gap_ids, *range(vocabulary.num_tokens, vocabulary.size)]
        self._address = vocabulary.address
        try:
            self._use(grammar_cache(vocabulary))
        except ValueError as error:
            raise ArgumentError(self.argument, str(error)) from error

    @classmethod
    @abstractmethod
    def grammar(cls, args: Any, vocabulary: Vocabulary) -> str:
        """The grammar in llguidance's JSON form.

        Raises:
            ArgumentError: it is malformed.
        """

    def _use(self, cache: GrammarCache) -> None:
        self._width = cache.tokenizer.vocab_size
        self._compiled = cache.compiled(self._grammar)
        self._masks = cache.masks
        self._never, self._ends = _end_words(self._width, [*cache.tokenizer.eos_tokens, *self._padding], self._end)
        self.reset()

    def reset(self) -> None:
        self._matcher = self._compiled.matcher.deep_copy()
        self._edit: Allow | None = None
        self._num_outside = 0
        self._violated = False

    def advance(self, token_id: int, index: int) -> None:
        self._edit = None
        if self._num_outside or (token_id in self._end and self._matcher.is_accepting()):
            self._num_outside += 1
        elif not self._matcher.consume_tokens([token_id]):  # the grammar forbids it
            self._num_outside = 1
            self._violated = True

    def retract(self, token_ids: Sequence[int]) -> bool:
        self._edit = None
        outside = min(len(token_ids), self._num_outside)
        self._num_outside -= outside
        if self._violated:  # which left the matcher in an error: only a new one takes other tokens
            return self._num_outside > 0
        return bool(self._matcher.rollback(len(token_ids) - outside))

    def edit(self) -> Edit:
        if self._violated:
            raise Unsatisfiable("the tokens so far do not match the grammar")
        if self._edit is None:
            masks = self._masks.own
            self._edit = masks.edit(self._compute(masks), self._end, self._correct)
        return self._edit

    def foresee(self, limit: int) -> Sequence[int]:
        """The tokens of the text that the grammar forces, as the tokenizer writes it."""
        if self._num_outside or self._violated:
            return ()
        found: list[int] = self._matcher.compute_ff_tokens()
        if self._matcher.is_error():  # the limits of a step were for its mask alone: start over
            self._consumed = -1
            return ()
        return found[:limit]

    def _compute(self, masks: ThreadMasks) -> bool:
        """Compute the mask of the next token; whether the text so far is complete."""
        if self._num_outside:  # the answer has ended
            masks.clear()
            return True
        matcher = self._matcher
        masks.compute(matcher)
        if matcher.is_error():
            raise Unsatisfiable(f"the grammar exceeded its limits ({short_reason(matcher.get_error())})")
        return bool(matcher.is_accepting())

    def _correct(self, mask: Words, complete: bool) -> None:
        """Clear the ids that are never sampled; set the end tokens if the text is ``complete``."""
        words, never = self._never
        mask[words] &= never
        if complete:
            words, ends = self._ends
            mask[words] |= ends

    def __getstate__(self) -> dict[str, Any]:
        if self._address is None:
            raise pickle.PicklingError(f"{self.name} can only be rebuilt elsewhere if its vocabulary has a path")
        state = dict(self.__dict__)
        for name in ("_compiled", "_matcher", "_masks", "_edit"):
            del state[name]
        state["_consumed"] = -1  # the history is replayed at the next step
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        assert self._address is not None
        self._use(grammar_cache(vocabulary_at(*self._address)))


def _end_words(width: int, never: Sequence[int], ends: Sequence[int]) -> tuple[_Words, _Words]:
    """Mask words to ``&`` (clears ``never`` and ``ends``) and to ``|`` (sets ``ends``)."""
    cleared, words = _words(width, [*never, *ends])
    return (cleared, ~words), _words(width, ends)


def _words(width: int, token_ids: Sequence[int]) -> _Words:
    bits = bitmask_of((token_id for token_id in token_ids if token_id < width), width).numpy()
    words = np.flatnonzero(bits)
    return words, bits[words]


class JsonSchema(GrammarProcessor):
    """Restricts the answer to JSON that a JSON Schema describes.

    Source: JSON Schema draft 2020-12 as llguidance implements it; a keyword that it does not
        implement is an error.
    """

    name = "json_schema"
    argument = "schema"

    class Args(ProcessorArgs):
        schema_: Annotated[
            dict[str, Any] | bool,
            Field(alias="schema", description="A JSON Schema; true allows any JSON."),
        ]
        compact: bool = Field(default=True, description="No whitespace between tokens of the JSON.")

    @classmethod
    def grammar(cls, args: Args, vocabulary: Vocabulary) -> str:
        """See `GrammarProcessor.grammar`."""
        if args.schema_ is False:
            raise ArgumentError("schema", "false matches no JSON")
        options: Any = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": not args.compact}
        options["lenient"] = False  # a keyword that cannot be enforced is an error
        schema = {} if args.schema_ is True else args.schema_
        try:
            text = json.dumps(schema)
        except RecursionError:
            raise ArgumentError("schema", "is nested too deeply") from None
        _check_length("schema", text)
        try:
            return str(LLMatcher.grammar_from_json_schema(text, overrides=options))
        except ValueError:  # it parses the text again, up to 128 levels
            raise ArgumentError("schema", "is nested too deeply") from None


class Regex(GrammarProcessor):
    """Restricts the answer to what a regular expression matches as a whole.

    Source: the regex syntax of Rust's ``regex`` crate, as llguidance implements it: no look-around,
        no back-references.
    """

    name = "regex"
    argument = "pattern"

    class Args(ProcessorArgs):
        pattern: str = Field(min_length=1, max_length=MAX_SOURCE, description="Matches the whole answer.")

    @classmethod
    def grammar(cls, args: Args, vocabulary: Vocabulary) -> str:
        """See `GrammarProcessor.grammar`."""
        return str(LLMatcher.grammar_from_regex(args.pattern))


class Choice(GrammarProcessor):
    """Restricts the answer to one of several texts.

    Source: a union of literals, as vLLM's ``guided_choice``.
    """

    name = "choice"
    argument = "choices"

    class Args(ProcessorArgs):
        choices: list[Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]] = Field(
            min_length=1, max_length=MAX_LIST, description="The texts; one of them is the whole answer."
        )

    @classmethod
    def grammar(cls, args: Args, vocabulary: Vocabulary) -> str:
        """See `GrammarProcessor.grammar`."""
        pattern = "|".join(map(literal, args.choices))
        _check_length("choices", pattern)
        return str(LLMatcher.grammar_from_regex(pattern))


class Grammar(GrammarProcessor):
    """Restricts the answer to what a context-free grammar describes.

    Source: Lark's grammar syntax as llguidance implements it; ``%json`` and ``%regex`` are allowed.
    """

    name = "grammar"
    argument = "lark"

    class Args(ProcessorArgs):
        lark: str = Field(min_length=1, max_length=MAX_SOURCE, description="A Lark grammar with a rule named start.")

    @classmethod
    def grammar(cls, args: Args, vocabulary: Vocabulary) -> str:
        """See `GrammarProcessor.grammar`."""
        if args.lark.lstrip().startswith("{"):
            raise ArgumentError("lark", "expected a grammar in Lark's syntax, got JSON")
        if _IGNORED_ATTRIBUTE.search(_LITERALS.sub("", args.lark)):
            raise ArgumentError("lark", "a rule's temperature cannot be honoured")
        return str(LLMatcher.grammar_from_lark(args.lark))


def literal(text: str) -> str:
    """A regular expression that matches ``text`` and nothing else."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _check_length(argument: str, source: str) -> None:
    if len(source) > MAX_SOURCE:
        raise ArgumentError(argument, f"expected at most {MAX_SOURCE} characters, got {len(source)}")
