"""The token history of a chain: every processor, the thinking section and the bans follow it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from adapters.chain.backtracking import Backtracking
from adapters.chain.failures import Failures
from adapters.chain.members import Member
from adapters.chain.thinking_scope import ThinkingScope
from adapters.contract import BacktrackingProcessor


class History:
    """Prompt and generated tokens of one choice, which the members of its chain share.

    Args:
        tokens: The list that is extended and shortened; shared with the chain and its processors.
        members: Members of the chain, which may get more.
        scope: The thinking section, if a member is scoped.
        failures: Recorder of a member's failures.

    Attributes:
        prompt_length: Number of tokens of the prompt.
        backtracking: The backtracking processors, None if there are none.
    """

    def __init__(
        self, tokens: list[int], members: Sequence[Member], scope: ThinkingScope | None, failures: Failures
    ) -> None:
        self.tokens, self._members, self._scope, self._failures = tokens, members, scope, failures
        self.prompt_length = 0
        self.backtracking: Backtracking | None = None
        self._derived: dict[Hashable, Any] = {}

    def start(self, prompt: Sequence[int]) -> None:
        """Begin after ``prompt``.

        Raises:
            ProcessorFailed: a processor raised.
        """
        self.tokens[:] = prompt
        self.prompt_length = len(prompt)
        self._derived = {}
        if self._scope is not None:
            self._scope.start(prompt)
        for member in self._members:
            self.show(member)
        self._start_backtracking()

    def show(self, member: Member) -> None:
        """Let a member begin with this history.

        Raises:
            ProcessorFailed: the processor raised.
        """
        member.same_until = 0
        shared = self.tokens if member.scope == "all" else None
        try:
            with member.kept():
                member.processor.start(self.tokens[: self.prompt_length], shared=shared, derived=self._derived)
        except BaseException as error:  # the processor boundary: third-party code
            raise self._failures.raised(member, error) from error

    def _start_backtracking(self) -> None:
        able = [member for member in self._members if isinstance(member.processor, BacktrackingProcessor)]
        self.backtracking = Backtracking(able, self.tokens, self.prompt_length, self._failures) if able else None

    def append(self, token_id: int) -> None:
        """Take the next token.

        Raises:
            ProcessorFailed: a backtracking processor raised.
        """
        self.tokens.append(token_id)
        if self._scope is not None:
            self._scope.append(token_id)
        if self.backtracking is not None:
            self.backtracking.note()

    def rewind(self, position: int) -> None:
        """Rewind to the tokens before ``position``; processors catch up at their next step.

        Raises:
            ValueError: the position is inside the prompt or in the future.
        """
        if not self.prompt_length <= position <= len(self.tokens):
            raise ValueError(f"cannot rewind to {position}: not between {self.prompt_length} and {len(self.tokens)}")
        for member in self._members:
            member.same_until = 0
            if member.scope == "all":
                member.processor.rewind_lazily(position)
        if self._scope is not None:
            self._scope.rewind(position - self.prompt_length)
        if self.backtracking is not None:
            self.backtracking.rewind(position)
        del self.tokens[position:]

    def replay(self) -> None:
        """Rewind to the prompt and append the tokens again, for backtracking that has joined.

        Raises:
            ProcessorFailed: a processor raised.
        """
        generated = self.tokens[self.prompt_length :]
        self.rewind(self.prompt_length)
        self._start_backtracking()
        for token_id in generated:
            self.append(token_id)

    def catch_up(self) -> None:
        """Let every member take the tokens that its state has not seen yet.

        Raises:
            ProcessorFailed: a processor raised.
        """
        for member in self._members:
            try:
                with member.kept():
                    member.processor.catch_up()
            except BaseException as error:  # the processor boundary: third-party code
                raise self._failures.raised(member, error) from error

    def num_equal(self, tokens: Sequence[int], start: int) -> int:
        """Length of the prefix that ``tokens`` share with the history, at least ``start``."""
        end = min(len(tokens), len(self.tokens))
        while start < end:
            stop = min(start + 1024, end)
            if list(tokens[start:stop]) != self.tokens[start:stop]:
                return next(i for i in range(start, stop) if tokens[i] != self.tokens[i])
            start = stop
        return end
