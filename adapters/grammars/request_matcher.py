"""The position of one request in a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llguidance import LLMatcher

from adapters.contract import Unsatisfiable
from adapters.grammars.cache import GrammarCache
from adapters.grammars.compiler import UNWRITABLE, short_reason
from adapters.grammars.masks import ThreadMasks

MAX_LEXERS = 4
"""Times that a request may compile its grammar: see `GrammarCache.renewed`."""


class RequestMatcher:
    """A matcher that gets a new lexer where the one that requests share has failed.

    `reset` brings it to the beginning of the grammar, also the first time.

    Args:
        cache: Cache of the vocabulary's grammars.
        grammar: The grammar in llguidance's JSON form.
        num_lexers: Times that the request has compiled it, this one included.

    Attributes:
        compiled: The grammar, shared by requests.
        num_lexers: Times that the request has compiled it.

    Raises:
        GrammarRefused: it is malformed, matches no text, or exceeded a limit.
        SandboxBusy, SandboxUnavailable: the sandbox could not compile it.
    """

    _matcher: LLMatcher

    def __init__(self, cache: GrammarCache, grammar: str, num_lexers: int) -> None:
        self.compiled = cache.compiled(grammar)
        self.num_lexers = num_lexers
        self._cache, self._grammar = cache, grammar

    def reset(self) -> None:
        """Begin at the beginning of the grammar."""
        self._matcher = self.compiled.matcher.deep_copy()
        self._renew(list)

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is complete."""
        return bool(self._matcher.is_accepting())

    def take(self, token_id: int, taken: Callable[[], Sequence[int]]) -> bool:
        """Advance by one token; False if the grammar forbids it.

        Args:
            token_id: The token.
            taken: Returns the tokens before it, for a new lexer.
        """
        if self._matcher.consume_tokens([token_id]):
            return True
        return self._renew(taken) and bool(self._matcher.consume_tokens([token_id]))

    def rewind(self, count: int) -> bool:
        """Go back by ``count`` tokens; False if that is not possible."""
        return bool(self._matcher.rollback(count))

    def copy(self) -> LLMatcher:
        """A copy to look ahead with."""
        return self._matcher.deep_copy()

    def compute(self, masks: ThreadMasks, taken: Callable[[], Sequence[int]]) -> None:
        """Compute the mask of the next token.

        Args:
            masks: Receives it.
            taken: Returns the tokens so far, for a new lexer.

        Raises:
            Unsatisfiable: the grammar exceeded a limit, or no token can continue the text.
        """
        masks.compute(self._matcher)
        if not self._matcher.is_error():
            return
        if self._renew(taken):
            masks.compute(self._matcher)
        if self._matcher.is_error():
            reason = short_reason(self._matcher.get_error(), "")
            raise Unsatisfiable(f"the grammar exceeded its limits ({reason})" if reason else UNWRITABLE)

    def _renew(self, taken: Callable[[], Sequence[int]]) -> bool:
        """Take the tokens again with a new lexer, if the one that requests share has failed.

        Only a few times: it compiles the grammar.
        """
        if self.num_lexers == MAX_LEXERS or not self.compiled.is_broken:
            return False
        renewed = self._cache.renewed(self._grammar, self.compiled)
        if renewed is None:
            return False
        self.compiled = renewed
        self.num_lexers += 1
        self._matcher = renewed.matcher.deep_copy()
        return bool(self._matcher.consume_tokens(list(taken())))
