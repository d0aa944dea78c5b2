"""The data types of a step: requests, plans, samples and outputs; and the model's protocol."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch

from adapters.chain import Planned, ProcessorChain, ProcessorFailed
from worker.engines import FinishReason, TokenLogprob
from worker.sampling import SamplingParams

if TYPE_CHECKING:
    from worker.engines.embedded.kv_cache import Block

logger = logging.getLogger(__name__)

SCORED_AT_ONCE = 64
"""Prompt tokens whose logits are in memory at a time: those of a whole chunk take gigabytes with a
large vocabulary.
"""

TILE = 32
"""Tokens that a GEMM computes together; a mixed batch is a multiple of it where it is bounded."""


class LogitsTap(Protocol):
    """Is shown a request's logits as the model computed them, before any control.

    It must not keep or change the tensors. What it raises ends its own request with an error, and
    nothing else.

    Attributes:
        wants_generated: Whether it is shown the row of each token that is sampled.
    """

    wants_generated: bool

    @property
    def wants_prompt(self) -> bool:
        """Whether rows of prompt tokens are still wanted; until then there is no prefix hit."""

    def see_prompt(self, start: int, logits: torch.Tensor) -> None:
        """Rows ``[n, V]`` of the tokens from `start` on, few at a time.

        After a preemption they come from the first token again, and go on beyond the prompt where
        the tokens of a step do.
        """

    def see_generated(self, position: int, logits: torch.Tensor) -> None:
        """The row ``[V]`` from which the token at `position` is sampled."""


@dataclass(eq=False)
class Request:
    """One admitted request, owned by the step thread.

    Attributes:
        id: The caller's id, unique among live requests.
        number: The engine's own id, which logits processors see.
        params: What is left to the sampler and the scheduler; the rest of what was asked for is in
            `chain`.
        tokens: Prompt and generated token ids, oldest first.
        prompt_length: Tokens of the prompt.
        limit: Length of `tokens` at which the answer ends.
        end_ids: Ids that end the answer.
        seed: Seed of the draws, 64 bits.
        chain: Its logits processors, in the order law's order, over its own history; None if it has
            none.
        choice: Which of several answers to one prompt this is; part of what its draws are made of.
        tap: What is shown its logits, None for nothing.
        tap_error: What `tap` has failed with; the request then ends with the next token that it
            would get.
        keeps_kv: Whether its pages are pinned for transfer when it ends; see `KvConnector.lease`.
        cache_salt: It shares KV only with requests of the same salt.
        speculates: Whether tokens may be drafted for it.
        arrival: Number in the order of arrival, given by the scheduler.
        pages: Its page table, while it runs: position p is in ``pages[p // page_size]`` at slot
            ``p % page_size``.
        num_computed: Tokens, from the first on, whose KV is in `pages`.
        num_cached_tokens: Prompt tokens of the prefix hit at its first admission; None before.
        num_preemptions: How often it has been preempted.
        block_hashes: Of its full blocks, as far as they have been needed; see `blocks.hash_block`.
        cached_blocks: Its prefix hit, as `KvCache.match_prefix` found it last.
    """

    id: str
    number: int
    params: SamplingParams
    tokens: list[int]
    prompt_length: int
    limit: int
    end_ids: frozenset[int]
    seed: int
    chain: ProcessorChain | None = None
    choice: int = 0
    tap: LogitsTap | None = None
    tap_error: str | None = None
    keeps_kv: bool = False
    cache_salt: str | None = None
    speculates: bool = True
    arrival: int = -1
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    block_hashes: list[int] = field(default_factory=list)
    cached_blocks: list[Block] = field(default_factory=list)

    def cut_off(self, position: int, block_size: int) -> None:
        """Forget the tokens from `position` on, and the blocks that hold any of them."""
        num_blocks = position // block_size
        del self.tokens[position:], self.block_hashes[num_blocks:], self.cached_blocks[num_blocks:]

    def show_prompt(self, start: int, logits: torch.Tensor) -> None:
        """Show the tap rows of the prompt; see `LogitsTap.see_prompt`."""
        if self.tap is not None and self.tap.wants_prompt:
            self._show(self.tap.see_prompt, start, logits)

    def show_generated(self, logits: torch.Tensor) -> None:
        """Show the tap the next token's row; see `LogitsTap.see_generated`."""
        if self.tap is not None and self.tap.wants_generated:
            self._show(self.tap.see_generated, len(self.tokens), logits)

    def _show(self, see: Callable[[int, torch.Tensor], None], position: int, logits: torch.Tensor) -> None:
        if self.tap_error is not None:
            return
        try:
            see(position, logits)
        except Exception as error:  # the request's boundary: the rest of the step is other requests'
            logger.exception("request %s: its logits from position %d on could not be kept", self.id, position)
            self.tap_error = f"its logits could not be kept: {type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a prefill: tokens ``[start, stop)``; after a preemption of the answer too."""

    request: Request
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the tokens end here, so that the next one can be sampled."""
        return self.stop == len(self.request.tokens)

    @property
    def is_scored(self) -> bool:
        """Whether the logits of every token are wanted."""
        tap = self.request.tap
        return tap is not None and tap.wants_prompt and self.request.tap_error is None


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the first `num_tokens` slots of page `source` to the same slots of page `target`."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one step.

    Attributes:
        decode: Decode rows: requests whose newest token is computed.
        chunks: Chunks of prompts.
        sampled: Requests that get a token: those of `decode`, then those whose tokens end in
            `chunks`. The same tuple object in consecutive steps means the same rows.
        copies: Copies within the store, in this order, before anything is written.
        drafts: Of each decode row the drafted tokens that are computed behind its newest one; empty
            where no row has any.
    """

    decode: tuple[Request, ...]
    chunks: tuple[Chunk, ...]
    sampled: tuple[Request, ...]
    copies: tuple[PageCopy, ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()

    @property
    def scored(self) -> tuple[Chunk, ...]:
        """Chunks of which the logits of every token are wanted."""
        return tuple(chunk for chunk in self.chunks if chunk.is_scored)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the decode rows, drafted ones among them."""
        return len(self.decode) + sum(map(len, self.drafts))

    def decode_tokens(self) -> Iterator[tuple[Request, list[int]]]:
        """Each decode row, and its tokens that are computed: the newest one and its draft."""
        drafts = self.drafts or ((),) * len(self.decode)
        for request, draft in zip(self.decode, drafts, strict=True):
            yield request, [request.tokens[-1], *draft]

    def first_rows(self) -> list[int]:
        """The index of the first row of logits of each request of `sampled`."""
        counts = [1 + len(draft) for draft in self.drafts] or [1] * len(self.decode)
        counts += [1] * (len(self.sampled) - len(self.decode))
        return list(accumulate(counts, initial=0))[:-1]

    def logit_rows(self) -> list[int]:
        """The indices, among the step's tokens (`decode`, then `chunks`), of the rows of logits."""
        rows = range(self.num_decode_tokens)
        ends = accumulate((chunk.stop - chunk.start for chunk in self.chunks), initial=len(rows))
        return [*rows, *(end - 1 for chunk, end in zip(self.chunks, list(ends)[1:], strict=True) if chunk.is_last)]

    def show_scored(self, rows: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Show the taps of `scored` the logits of every token, few at a time.

        Args:
            rows: Of each of the step's tokens ``[T, ...]``, what its logits are made of.
            logits: Makes logits ``[n, V]`` of n of them.
        """
        first = self.num_decode_tokens
        for chunk in self.chunks:
            if chunk.is_scored:
                for start in range(chunk.start, chunk.stop, SCORED_AT_ONCE):
                    stop = min(start + SCORED_AT_ONCE, chunk.stop)
                    some = rows[first + start - chunk.start : first + stop - chunk.start]
                    chunk.request.show_prompt(start, logits(some))
            first += chunk.stop - chunk.start

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return self.num_decode_tokens + sum(chunk.stop - chunk.start for chunk in self.chunks)


class Model(Protocol):
    """What the engine needs of a model. `HfModel` is the real one; a benchmark may bring its own.

    Attributes:
        vocab_size: Width of a row of logits.
        context_length: Longest sequence that the model was made for.
        eos_token_ids: Ids that end an answer.
        undecodable_ids: Ids below `vocab_size` that the tokenizer does not know; never sampled.
        device: Where logits are.
        kv_bytes_per_token: Size of the KV of one token, 0 if there is none.
        wants_dense_kv: Whether a step is faster where the pages that it reads lie densely.
        numerics: ``exact`` if rows of logits are batch-invariant, else ``fast``; known after
            `allocate_kv`.
    """

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    undecodable_ids: tuple[int, ...]
    device: torch.device
    kv_bytes_per_token: int
    wants_dense_kv: bool
    numerics: str

    def allocate_kv(self, num_pages: int, page_size: int) -> None:
        """Allocate a KV store of `num_pages` pages of `page_size` tokens; see `Request.pages`."""

    def forward(self, plan: Plan) -> torch.Tensor:
        """Logits ``[n, vocab_size]`` of ``plan.sampled``, of a floating dtype.

        A decode row with a draft has one row for its newest token and one for each drafted token,
        in order; every other request has one. The sampler may write into them. Those of the chunks
        of ``plan.scored`` go to the taps of their requests; see `Plan.show_scored`.
        """


@dataclass(slots=True)
class Edits:
    """What the chains ask of the rows of one step.

    Attributes:
        planned: Row, chain and plan, for the rows whose chain asks for anything.
        failures: Rows whose chain failed.
    """

    planned: list[Planned] = field(default_factory=list)
    failures: dict[int, ProcessorFailed] = field(default_factory=dict)


@dataclass(slots=True)
class Samples:
    """What the sampler chose, by row of ``plan.sampled``.

    Attributes:
        token_ids: One id per row; meaningless for rows in `errors`.
        errors: Why a row has no token.
        logprobs: Sampled token first, then the top-n; only for rows that asked.
    """

    token_ids: list[int]
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)


@dataclass(slots=True)  # not frozen: one is made per token, and frozen ones take three times as long
class Output:
    """What one step has to say about one request.

    Attributes:
        token_id: None if it shows no token.
        num_cached_tokens: Prompt tokens of the prefix hit; said with the first token.
        rolled_back_to: Position of the token that is sampled again, once a processor has taken it
            and those behind it back.
        is_too_short: Whether the answer must not end at this token, at a stop string either.
        chain: The request's processors, when it ends.
        kv: Handle of its leased KV, when it ends; see `handle.handle_as_json`.
    """

    request_id: str
    token_id: int | None = None
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    rolled_back_to: int | None = None
    is_too_short: bool = False
    engine_data: dict[str, object] | None = None
    chain: ProcessorChain | None = None
    kv: dict[str, Any] | None = None
