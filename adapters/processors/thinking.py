"""A budget for thinking: the section is closed when it is spent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from adapters.contract import ArgumentError, Context, ProcessorArgs, Reads, Stage, SteeringProcessor
from adapters.edits import Edit, Force
from adapters.processors.arguments import Count, encode
from adapters.processors.text_match import TextMatcher
from adapters.token_bytes import byte_index
from adapters.vocabulary import Vocabulary

_Tag = Annotated[str, Field(min_length=1, max_length=256)]


class _State(NamedTuple):
    """Where the answer stands.

    Attributes:
        inside: In a thinking section.
        used: Thinking tokens so far, over all sections of the answer; tags are not counted once they are complete.
        spent: The section must be closed now. Stays true until it is.
        opening: Symbols of the opening tag at the end of the history.
        closing: Symbols of the closing tag at the end of the history.
    """

    inside: bool
    used: int
    spent: bool
    opening: int
    closing: int


class ThinkingBudget(SteeringProcessor):
    """Closes the thinking section when its budget is spent.

    Source: the budget of NVIDIA NIM and Dynamo (a grace to the next newline) and SGLang's, counted from history.
    Counted are the tokens between the tags, those of the prompt included if the prompt leaves a section open, but not
    sections that the prompt closes. The budget is one for the whole answer: a section opened again goes on with what
    is left, and is closed at once if nothing is. With ``tokens`` 0 every section is closed at once.

    When ``tokens`` are used the closing tag is forced, token by token. With ``grace`` the model has that many tokens
    more to end a line; the tag is forced behind the first token that ends one, or when the grace is used up too. A
    closing tag that the model has begun is continued, not begun again, and a tag it has completed is never doubled.

    A tag of one token is that token. A tag of several is a text: it is found in the bytes of the tokens however the
    model splits it, and its rest is forced from the byte where the model stands.
    """

    name = "thinking_budget"
    version = 1
    stage = Stage.FORCE
    reads = Reads.PROMPT_AND_GENERATED
    scopes = ("all",)  # the other scopes hide the tags, which it lives by

    class Args(ProcessorArgs):
        tokens: Annotated[Count, Field(description="Most thinking tokens of the answer; 0 closes a section at once.")]
        grace: Annotated[Count, Field(description="Tokens more, to reach the end of a line.")] = 0
        start: Annotated[_Tag | None, Field(description="Tag that opens a section; the model's own by default.")] = None
        end: Annotated[_Tag | None, Field(description="Tag that closes a section; the model's own by default.")] = None

    def __init__(self, args: Args, context: Context) -> None:
        self._tokens_allowed, self._grace = args.tokens, args.grace
        self._opening = _matcher(context.vocabulary, _tag_ids("start", args.start, context.think_start, context))
        end = _tag_ids("end", args.end, context.think_end, context)
        self._closing = _matcher(context.vocabulary, end)
        self._forces = tuple(map(Force, _continuations(context.vocabulary, end, self._closing)))
        self._newlines = _newlines(context) if args.grace else frozenset()
        self.reset()

    def reset(self) -> None:
        self._state = self._after_prompt(self.prompt)
        self._earlier: list[_State] = []

    def advance(self, token_id: int, index: int) -> None:
        self._earlier.append(self._state)
        self._state = self._next(self._state, token_id, self._prompt_length + index)

    def retract(self, token_ids: Sequence[int]) -> bool:
        self._state = self._earlier[-len(token_ids)]
        del self._earlier[-len(token_ids) :]
        return True

    def edit(self) -> Edit | None:
        return self._forces[self._state.closing] if self._state.spent else None

    def _after_prompt(self, prompt: Sequence[int]) -> _State:
        """The last opening tag counts: an earlier turn may have been cut off inside its section."""
        tags = self._opening.pieces.keys() | self._closing.pieces.keys()
        opened = -1
        opening = closing = 0
        for index, token_id in enumerate(prompt):
            if token_id not in tags:
                opening = closing = 0
                continue
            opening, before = self._opening.step(opening, token_id)
            if before >= 0:
                opened, closing = index + 1, 0
                continue
            closing, before = self._closing.step(closing, token_id)
            if before >= 0:
                opened, opening = -1, 0
        if opened < 0:
            return _State(False, 0, False, opening, 0)
        used = len(prompt) - opened
        return _State(True, used, self._is_spent(used, prompt[-1] if used else None), 0, closing)

    def _next(self, state: _State, token_id: int, position: int) -> _State:
        if not state.inside:
            opening, before = self._opening.step(state.opening, token_id)
            if before < 0:
                return state._replace(opening=opening)
            return _State(True, state.used, self._is_spent(state.used, None), 0, 0)
        closing, before = self._closing.step(state.closing, token_id)
        if before < 0:
            used = state.used + 1
            return _State(True, used, state.spent or self._is_spent(used, token_id), 0, closing)
        used = state.used
        while before > 0:  # the tokens in which the closing tag began
            position -= 1
            before -= len(self._closing.pieces[self._tokens[position]])
            used -= 1
        return _State(False, used, False, 0, 0)

    def _is_spent(self, used: int, newest: int | None) -> bool:
        """Whether to close after ``newest``, a token of the section; None where the section has just been opened."""
        left = self._tokens_allowed - used
        return left <= 0 and (newest is None or newest in self._newlines or left + self._grace <= 0)


def _tag_ids(argument: str, text: str | None, own: Sequence[int], context: Context) -> list[int]:
    if text is not None:
        return encode(context, argument, text)
    if not own:
        raise ArgumentError(argument, "this model has no thinking tags of its own; give start and end")
    return list(own)


def _matcher(vocabulary: Vocabulary, tag: Sequence[int]) -> TextMatcher:
    if len(tag) == 1 or vocabulary.tokenizer is None:
        return TextMatcher.of_ids(tag)
    pieces = [byte_index(vocabulary)[token_id] for token_id in tag]
    if not all(pieces):
        return TextMatcher.of_ids(tag)
    text = b"".join(pieces)
    # SentencePiece puts a space before a text; the model need not write one before a tag.
    return TextMatcher.of_text(vocabulary, text.lstrip(b" ") or text)


def _continuations(vocabulary: Vocabulary, tag: Sequence[int], matcher: TextMatcher) -> list[int]:
    """For each number of symbols that the history ends with, the token that goes on with the tag."""
    size = len(matcher.pattern)
    # Where each token of the tag begins in the pattern; a leading space may lie before it.
    lengths = [len(matcher.pieces[token_id]) for token_id in tag]
    begins = {size - sum(lengths[k:]): token_id for k, token_id in enumerate(tag)} | {0: tag[0]}
    return [
        begins[n] if n in begins else _spelling(vocabulary, bytes(matcher.pattern[n:]), tag)[0] for n in range(size)
    ]


def _spelling(vocabulary: Vocabulary, rest: bytes, tag: Sequence[int]) -> Sequence[int]:
    """Tokens with exactly the bytes ``rest``, or else the whole tag."""
    return byte_index(vocabulary).spell(rest) or tag


def _newlines(context: Context) -> frozenset[int]:
    """Tokens that end a line; spaces may follow."""
    try:
        index = byte_index(context.vocabulary)
    except ValueError as error:
        raise ArgumentError("grace", str(error)) from error
    return context.vocabulary.derived(
        "thinking.newlines",
        lambda: frozenset(i for i in index.containing(b"\n") if index[i].rstrip(b" \t").endswith(b"\n")),
    )
