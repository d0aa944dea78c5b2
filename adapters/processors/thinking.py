"""Thinking budget: closes the thinking section when the budget is used up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from adapters.contract import (
    ArgumentError,
    Context,
    Edit,
    Force,
    ProcessorArgs,
    Reads,
    Stage,
    SteeringProcessor,
    turn_begin,
)
from adapters.processors.arguments import Count, Text, check_no_end, encode
from adapters.processors.characters import MOST_MISSING, split_characters
from adapters.vocabulary import byte_index
from adapters.vocabulary.text_match import TextMatcher, continuations

_Tag = Annotated[str, Field(min_length=1, max_length=256)]


class _State(NamedTuple):
    """State of the answer.

    Attributes:
        inside: Whether a thinking section is open.
        used: Thinking tokens so far, over all sections of the answer, without complete tags.
        spent: The section must be closed now; true until it is.
        said: Tokens of the message since the budget was spent; all of them once it is abandoned.
        opening: Symbols of the opening tag at the end of the history.
        closing: Symbols of the closing tag at the end of the history.
    """

    inside: bool
    used: int
    spent: bool
    opening: int
    closing: int
    said: int = 0


class ThinkingBudget(SteeringProcessor):
    """Closes the thinking section when its token budget is used up.

    Source: the budgets of NVIDIA NIM and Dynamo (grace to the next newline) and SGLang, computed
    from history. Counts the tokens between the tags, including those of the prompt if its last turn
    leaves a section open, but not sections that the prompt closes. One budget serves the whole
    answer: a section opened again continues with the rest, and is closed at once if there is none.
    With ``tokens`` 0 every section is closed at once.

    When ``tokens`` are used the closing tag is forced, token by token. With ``grace`` the model has
    that many additional tokens to end a line; the tag is forced after the first token that ends
    one, or when the grace is used up. A closing tag that the model has begun is continued, not
    begun again, and a completed tag is never repeated.

    A ``message`` is written before the closing tag, unless the model has begun the tag by itself;
    its tokens are not counted in the budget.

    A tag that is an added token is matched as that token. Any other tag is a text: it is matched in
    the bytes of the tokens however the model splits it, and its rest is forced from the model's
    current byte.

    The tag never cuts a character: with fewer than four tokens left of budget and grace, tokens
    after which a character would lack more bytes than tokens are left are masked.
    """

    name = "thinking_budget"
    stage = Stage.FORCE
    reads = Reads.PROMPT_AND_GENERATED
    scopes = ("all",)  # the other scopes hide the tags

    class Args(ProcessorArgs):
        tokens: Annotated[Count, Field(description="Most thinking tokens of the answer; 0 closes a section at once.")]
        grace: Annotated[Count, Field(description="Additional tokens to reach the end of a line.")] = 0
        message: Annotated[
            Text | None, Field(description="Text to write before the closing tag when the budget is used up.")
        ] = None
        start: Annotated[_Tag | None, Field(description="Tag that opens a section; the model's own by default.")] = None
        end: Annotated[_Tag | None, Field(description="Tag that closes a section; the model's own by default.")] = None

    def __init__(self, args: Args, context: Context) -> None:
        self._tokens_allowed, self._grace = args.tokens, args.grace
        _, self._opening = _tag("start", args.start, context.think_start, context)
        end, self._closing = _tag("end", args.end, context.think_end, context)
        check_no_end(context, "end", end[:-1])  # an answer may end with its thinking
        self._forces = tuple(map(Force, continuations(context.vocabulary, end, self._closing)))
        self._message = _message(args.message, self._closing, context)
        self._says = tuple(map(Force, self._message))
        self._characters = split_characters(context.vocabulary)
        tags = self._opening.pieces.keys() | self._closing.pieces.keys()
        self._turn_marks = context.vocabulary.special_token_ids - tags
        self._newlines = _newlines(context) if args.grace else frozenset()
        self.reset()

    def reset(self) -> None:
        self._state = self._after_prompt(self.prompt)
        self._earlier: list[tuple[int, _State]] = []  # before each change, and the index of its token

    def advance(self, token_id: int, index: int) -> None:
        state = self._state
        if state.inside or state.opening or token_id in self._opening.pieces:  # else nothing changes
            self._earlier.append((index, state))
            self._state = self._next(state, token_id, self._prompt_length + index)

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        kept = self._consumed - len(token_ids) - self._prompt_length
        while self._earlier and self._earlier[-1][0] >= kept:
            self._state = self._earlier.pop()[1]
        return True

    def edit(self) -> Edit | None:
        state = self._state
        if not state.inside:
            return None
        if state.spent:
            return self._forced(state)
        left = self._tokens_allowed + self._grace - state.used
        if left > MOST_MISSING:
            return None
        return self._characters.room(self._characters.open_after(self._tokens, self._prompt_length), left)

    def _forced(self, state: _State) -> Force:
        """The next token of the message, or of the closing tag behind it."""
        return self._says[state.said] if state.said < len(self._says) else self._forces[state.closing]

    def foresee(self, limit: int) -> Sequence[int]:
        state, found = self._state, list[int]()
        while state.spent and len(found) < limit:
            token_id = self._forced(state).token_id
            found.append(token_id)
            if self._closing.step(state.closing, token_id)[1] >= 0:  # the tag is complete
                break
            state = self._next(state, token_id, len(self._tokens))
        return found

    def _after_prompt(self, prompt: Sequence[int]) -> _State:
        """State after the prompt: only the last opening tag of its last turn counts.

        Earlier turns, and a section, may have been cut off.
        """
        tags = self._opening.pieces.keys() | self._closing.pieces.keys()
        opened = -1
        opening = closing = 0
        for index in range(turn_begin(prompt, self._turn_marks), len(prompt)):
            token_id = prompt[index]
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
        return self._counted(_State(True, used, False, 0, closing), prompt[-1] if used else None)

    def _next(self, state: _State, token_id: int, position: int) -> _State:
        if not state.inside:
            opening, before = self._opening.step(state.opening, token_id)
            if before < 0:
                return state if opening == state.opening else state._replace(opening=opening)
            return self._counted(_State(True, state.used, False, 0, 0), None)
        closing, before = self._closing.step(state.closing, token_id)
        if before < 0:
            now = state._replace(used=state.used + 1, closing=closing)
            return self._heard(now, token_id) if state.spent else self._counted(now, token_id)
        used = state.used
        while before > 0:  # do not count the tokens of the closing tag
            position -= 1
            before -= len(self._closing.pieces[self._tokens[position]])
            used -= 1
        return _State(False, used, False, 0, 0)

    def _counted(self, state: _State, newest: int | None) -> _State:
        """``state``, spent if ``newest`` is the budget's last token.

        If the closing tag has begun, it is closed without the message.
        """
        if not self._is_spent(state.used, newest):
            return state
        return state._replace(spent=True, said=len(self._message) if state.closing else 0)

    def _heard(self, state: _State, token_id: int) -> _State:
        """``state`` after a token beyond the budget: the message's next, or else its end."""
        goes_on = state.said < len(self._message) and token_id == self._message[state.said]
        return state._replace(said=state.said + 1 if goes_on else len(self._message))

    def _is_spent(self, used: int, newest: int | None) -> bool:
        """Whether to close after ``newest``, a thinking token; None right after the opening tag."""
        left = self._tokens_allowed - used
        return left <= 0 and (newest is None or newest in self._newlines or left + self._grace <= 0)


def _tag(argument: str, text: str | None, own: Sequence[int], context: Context) -> tuple[list[int], TextMatcher]:
    """Ids of a tag, and what finds it."""
    if text is None and not own:
        raise ArgumentError(argument, "this model has no thinking tags of its own; give start and end")
    ids = list(own) if text is None else encode(context, argument, text)
    is_token = len(ids) == 1 and (text is None or ids[0] in context.vocabulary.added_token_ids)
    return ids, TextMatcher.of_ids(ids) if is_token else TextMatcher.of_tokens(context.vocabulary, ids)


def _message(text: str | None, closing: TextMatcher, context: Context) -> list[int]:
    """Ids of the message, which must not close the section itself."""
    if text is None:
        return []
    ids, matched = encode(context, "message", text), 0
    check_no_end(context, "message", ids)
    for token_id in ids:
        matched, before = closing.step(matched, token_id)
        if before >= 0:
            raise ArgumentError("message", "must not hold the closing tag")
    return ids


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
