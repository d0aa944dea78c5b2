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
from collections.abc import Collection, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import Field

from adapters.calls.xml_values import TagNotation
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
from adapters.grammars.compiler import byte_tables, load_tokenizer
from adapters.grammars.forced_text import MAX_ALLOWED, ForcedText
from adapters.grammars.json_schema import (
    MAX_GRAMMAR,
    SchemaRefused,
    arguments_grammar,
    lark_grammar,
    literal,
)
from adapters.grammars.kept import KeptGrammars
from adapters.grammars.lark import (
    as_grammar,
    check_options,
    regex_grammar,
    token_ranges,
    with_ids,
    with_schemas,
    without_literals,
)
from adapters.grammars.masks import Words
from adapters.grammars.request_matcher import RequestMatcher
from adapters.processors.arguments import MAX_LIST, MAX_TEXT
from adapters.vocabulary import Vocabulary, vocabulary_at

MAX_SOURCE = 1024 * 1024
"""Most characters of a grammar's source."""

_IGNORED_ATTRIBUTE = re.compile(r"\btemperature\s*=")
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
"""A rule of EBNF or GBNF, which vLLM, SGLang and llama.cpp take."""
_EBNF = "expected a grammar in Lark's syntax, whose rules are start: ..., got EBNF's start ::= ..."

_Words: TypeAlias = tuple[np.ndarray[Any, np.dtype[np.intp]], np.ndarray[Any, np.dtype[np.int32]]]
"""Indices of words of a mask, and a word for each."""


def grammar_cache(vocabulary: Vocabulary) -> GrammarCache:
    """The compiled grammars of ``vocabulary``.

    Raises:
        ValueError: it has no tokenizer.
    """
    tokens = _token_bytes(vocabulary)
    return vocabulary.derived("grammars", lambda: GrammarCache(lambda: load_tokenizer(tokens), -(-len(tokens) // 32)))


def tokenizer_tables(vocabulary: Vocabulary) -> dict[str, Any]:
    """Tokens as llguidance knows them, as JSON data for a sandbox.

    Raises:
        ValueError: there is no tokenizer.
    """
    return byte_tables(_token_bytes(vocabulary))


def _token_bytes(vocabulary: Vocabulary) -> Sequence[bytes]:
    if vocabulary.tokenizer is None:
        raise ValueError("a grammar needs a tokenizer, and this model was loaded without one")
    return vocabulary.token_bytes


class GrammarProcessor(SteeringProcessor):
    """Allows exactly the tokens that can continue a text of the grammar.

    A token is text where it has bytes (`Vocabulary.token_bytes`): it is allowed where they can
    follow, however the tokenizer itself would split the text. Any other one is allowed only where
    the grammar names it. An end token is allowed exactly where the text so far is complete, and
    only end tokens are allowed where nothing can follow, so a complete answer ends. Subclasses
    define the grammar.
    """

    version = 4  # a multiple of a step is written with as many digits as it has
    stage = Stage.MASK
    reads = Reads.GENERATED
    scopes: ClassVar[tuple[Scope, ...]] = ("all", "answer")  # in a thinking section an end token would end the answer
    argument: ClassVar[str]
    """Argument that holds the grammar."""

    _matcher: RequestMatcher

    def __init__(self, args: Any, context: Context) -> None:
        if not context.end_token_ids:
            raise ArgumentError(self.argument, "needs an end token, and this request has none")
        self._grammar = self.kept_grammar(args, context.vocabulary)
        self._end = tuple(sorted(context.end_token_ids))
        vocabulary = context.vocabulary
        # A grammar can name any id, or all.
        self._padding = vocabulary.gap_ids.union(range(vocabulary.num_tokens, vocabulary.size))
        self._address = vocabulary.address
        self._num_lexers = 1
        try:
            self._use(vocabulary)
        except ValueError as error:
            raise ArgumentError(self.argument, str(error)) from error
        self._check_named(context)

    @classmethod
    @abstractmethod
    def grammar(cls, args: Any, vocabulary: Vocabulary) -> str:
        """The grammar in llguidance's JSON form.

        Raises:
            ArgumentError: it is malformed.
        """

    @classmethod
    def kept_grammar(cls, args: ProcessorArgs, vocabulary: Vocabulary) -> str:
        """`grammar`, which is kept for requests that send the same arguments.

        Raises:
            ArgumentError: it is malformed.
        """
        kept = vocabulary.derived("grammars' sources", KeptGrammars)
        try:
            key = json.dumps([cls.__module__, cls.__qualname__, args.model_dump()])
        except RecursionError:  # which it says with the argument's name
            return cls.grammar(args, vocabulary)
        try:
            return kept.grammar(key, lambda: cls.grammar(args, vocabulary))
        except SchemaRefused as error:
            raise ArgumentError(cls.argument, str(error)) from error

    @property
    def source(self) -> str:
        """The grammar in llguidance's JSON form."""
        return self._grammar

    @property
    def address(self) -> tuple[Any, ...] | None:
        """`Vocabulary.address` of its vocabulary."""
        return self._address

    @property
    def is_violated(self) -> bool:
        """Whether the tokens so far do not match the grammar; `catch_up` comes first."""
        return self._violated

    @property
    def compile_s(self) -> float:
        """Processor time that it took to compile the grammar, seconds."""
        return self._matcher.compiled.cpu_s

    def _use(self, vocabulary: Vocabulary) -> None:
        cache = grammar_cache(vocabulary)
        self._matcher = RequestMatcher(cache, self._grammar, self._num_lexers)
        self._masks, self._width, self._forced = cache.masks, vocabulary.size, ForcedText(vocabulary)
        self._never, self._ends = _end_words(vocabulary.size, self._padding, self._end)
        self.reset()

    def _check_named(self, context: Context) -> None:
        """Raise `ArgumentError` if the grammar names a token that is never sampled where it is."""
        if "<[" not in self._grammar:
            return
        never = context.end_token_ids.union(self._padding)
        for grammar in json.loads(self._grammar)["grammars"]:
            for ranges in token_ranges(grammar.get("lark_grammar") or ""):
                if all(token_id in never for ids in ranges for token_id in ids):
                    problem = _never_sampled(ranges[0].start, context)
                    raise ArgumentError(self.argument, f"names the token {problem}")

    def reset(self) -> None:
        self._matcher.reset()
        self._forced.forget()
        self._edit: Allow | None = None
        self._num_outside = 0
        self._violated = False

    def advance(self, token_id: int, index: int) -> None:
        self._edit = None
        self._forced.take(token_id)
        if self._num_outside or (token_id in self._end and self._matcher.is_complete):
            self._num_outside += 1
        elif not self._matcher.take(token_id, lambda: self.generated[:index]):
            self._num_outside = 1
            self._violated = True

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        self._edit = None
        self._forced.forget()
        outside = min(len(token_ids), self._num_outside)
        self._num_outside -= outside
        if self._violated:  # which left the matcher in an error: only a new one takes other tokens
            return self._num_outside > 0
        return self._matcher.rewind(len(token_ids) - outside)

    def edit(self) -> Edit:
        if self._violated:
            raise Unsatisfiable("the tokens so far do not match the grammar")
        if self._edit is None:
            masks, is_complete = self._masks.own, True
            if self._num_outside:  # the answer has ended
                masks.clear()
            else:
                self._matcher.compute(masks, lambda: self.generated)
                is_complete = self._matcher.is_complete
            self._edit = masks.edit(is_complete, self._end, self._correct)
        return self._edit

    def usual_token(self) -> int | None:
        """See `SteeringProcessor.usual_token`; of the text that the grammar forces."""
        if self._edit is None or self._num_outside:
            return None
        allowed = self._edit.unpacked(self._width).kept
        if allowed is None or not 0 < allowed.shape[0] < MAX_ALLOWED:
            return None
        if allowed.shape[0] == 1:
            return int(allowed)
        return self._forced.first_token(self._matcher.copy, allowed.tolist())

    def sure_token(self) -> int | None:
        """See `SteeringProcessor.sure_token`; within a text that the grammar forces."""
        if self._num_outside or self._violated:
            return None
        found = self._forced.sure_token()
        return None if found is None or found in self._padding or found in self._end else found

    def foresee(self, limit: int) -> Sequence[int]:
        """The tokens of the text that the grammar forces, as the tokenizer writes it."""
        return () if self._num_outside or self._violated else self._forced.tokens(self._matcher.copy, limit)

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
        for name in ("_matcher", "_masks", "_forced", "_edit"):
            del state[name]
        state["_num_lexers"] = self._matcher.num_lexers
        state["_consumed"] = -1  # the history is replayed at the next step
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        assert self._address is not None
        self._use(vocabulary_at(*self._address))


def _end_words(width: int, never: Collection[int], ends: Sequence[int]) -> tuple[_Words, _Words]:
    """Mask words to ``&`` (clears ``never`` and ``ends``) and to ``|`` (sets ``ends``)."""
    cleared, words = _words(width, [*never, *ends])
    return (cleared, ~words), _words(width, ends)


def _never_sampled(token_id: int, context: Context) -> str:
    """A token and why it cannot stand in an answer."""
    if token_id in context.end_token_ids:
        name = json.dumps(context.vocabulary.decode([token_id]), ensure_ascii=False)
        return f"{name} (id {token_id}), which ends the answer: nothing can follow it"
    return f"of id {token_id}, which this model does not have"


def _words(width: int, token_ids: Sequence[int]) -> _Words:
    bits = bitmask_of((token_id for token_id in token_ids if token_id < width), width).numpy()
    words = np.flatnonzero(bits)
    return words, bits[words]


class JsonSchema(GrammarProcessor):
    """Restricts the answer to JSON that a JSON Schema describes.

    Source: JSON Schema, draft 4 to 2020-12. A schema is enforced exactly, or refused with the
        place of the keyword (`adapters.grammars.json_schema`).
    """

    name = "json_schema"
    version = 5  # texts of schemas with look-around, or with members that cannot end, have changed
    argument = "schema"

    class Args(ProcessorArgs):
        schema_: Annotated[
            dict[str, Any] | bool,
            Field(alias="schema", description="A JSON Schema; true allows any JSON."),
        ]
        compact: bool = Field(
            default=True, description="No whitespace between tokens of the JSON, no fraction of an integer."
        )

    @classmethod
    def grammar(cls, args: Args, vocabulary: Vocabulary) -> str:
        """See `GrammarProcessor.grammar`."""
        _check_length("schema", _dumped(args.schema_))
        try:
            return as_grammar(lark_grammar(args.schema_, compact=args.compact))
        except SchemaRefused as error:
            raise ArgumentError("schema", str(error)) from error


def arguments_of_call(schema: Any, notation: Literal["python", "keywords"] | TagNotation) -> str:
    """The grammar, in llguidance's JSON form, of arguments that are written one by one.

    Raises:
        ArgumentError: the schema cannot be enforced in that notation.
    """
    text = _dumped(schema)
    _check_length("schema", text)
    try:
        return as_grammar(arguments_grammar(json.loads(text), notation))
    except SchemaRefused as error:
        raise ArgumentError("schema", str(error)) from error


def _dumped(schema: Any) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
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
        try:
            return regex_grammar(args.pattern)
        except ValueError as error:
            raise ArgumentError("pattern", str(error)) from error


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
        return regex_grammar(pattern)


class Grammar(GrammarProcessor):
    """Restricts the answer to what a context-free grammar describes.

    Source: Lark's grammar syntax as llguidance implements it; ``%json`` and ``%regex`` are allowed,
    and tokens that the tokenizer has as one (``<|python_tag|>``), special or not.
    """

    name = "grammar"
    version = 5  # texts of schemas with look-around, or with members that cannot end, have changed
    argument = "lark"

    class Args(ProcessorArgs):
        lark: str = Field(min_length=1, max_length=MAX_SOURCE, description="A Lark grammar with a rule named start.")

    @classmethod
    def grammar(cls, args: Args, vocabulary: Vocabulary) -> str:
        """See `GrammarProcessor.grammar`."""
        if args.lark.lstrip().startswith("{"):
            raise ArgumentError("lark", "expected a grammar in Lark's syntax, got JSON")
        try:
            rules = without_literals(args.lark)
            if _EBNF_RULE.search(rules):
                raise ArgumentError("lark", _EBNF)
            if _IGNORED_ATTRIBUTE.search(rules):
                raise ArgumentError("lark", "a rule's temperature cannot be honoured")
            check_options(args.lark)
            source = with_ids(args.lark, lambda name: next(iter(vocabulary.tag(name)), None))
            return as_grammar(*with_schemas(source, lark_grammar, MAX_GRAMMAR))
        except ArgumentError:
            raise
        except RecursionError:  # of the reader that refuses keys that are there twice, which goes deeper
            raise ArgumentError("lark", "its JSON is nested too deeply") from None
        except ValueError as error:  # GBNF's classes of characters may have one quote
            raise ArgumentError("lark", _EBNF if _EBNF_RULE.search(args.lark) else str(error)) from error


def _check_length(argument: str, source: str) -> None:
    if len(source) > MAX_SOURCE:
        raise ArgumentError(argument, f"expected at most {MAX_SOURCE} characters, got {len(source)}")
