"""The interface of engines: an `EngineRequest` in, a stream of `TokenDelta` out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from adapters.chain import ProcessorFailed, Receipt
from worker.engines.request import NO_HINTS, EngineRequest, KeepKv, KvPart, LocalPrefill, ReadKv, RequestHints
from worker.engines.weights import WeightVersion
from worker.sampling import MAX_LOGPROBS

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = [
    "BATCH_SIZES",
    "LEAST_LOGPROB",
    "NO_HINTS",
    "Collecting",
    "EngineInfo",
    "EngineLoad",
    "EngineRequest",
    "FinishReason",
    "KeepKv",
    "KeepsAlive",
    "KeepsReceipts",
    "KvEventSink",
    "KvPart",
    "LocalPrefill",
    "Measured",
    "QueueTimes",
    "ReadKv",
    "RequestHints",
    "SelfReporting",
    "ServingEngine",
    "StopsLoading",
    "TokenDelta",
    "TokenLogprob",
]

FinishReason = Literal["stop", "length", "abort", "cancelled", "error"]
"""``abort``: an operator has ended the answer, whose tokens so far are to be gone on with."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Description of a loaded engine.

    Attributes:
        name: ``embedded``, ``trtllm`` or ``vllm``.
        version: Version of the library that decodes.
        context_length: Longest prompt + answer, in tokens.
        vocab_size: Width of a row of logits; token ids are below it.
        eos_token_ids: Ids that end an answer unless ``ignore_eos`` is set.
        kv_block_size: Tokens per KV block.
        total_kv_blocks: KV blocks that the engine owns.
        max_num_seqs: Requests decoded in one step at most.
        max_num_batched_tokens: Tokens computed in one step at most.
        draws_by_seed: Draws cost nothing extra when they are fixed by a seed; else only a client's
            seed is passed on.
        numerics: ``exact`` if tokens are batch-invariant, bit for bit, else ``fast``.
        computed_by: Everything beside model and tokens that the bits of a logit depend on: device,
            data type, numerics, kernels, threads.
        made_by: Part of it in which workers of a pool may differ; KV transfers and migrations
            compare it.
        kv_dtype: Data type of the stored keys and values, and that in which they were computed if
            it is another one; compared likewise.
        adapters: Digests of the LoRA adapters that requests may choose, by name; those of now,
            where the engine loads and unloads them.
        draft_model: Digest of the draft model, with which a processor may compute, and what it is
            computed by; empty for none.
        honours_priority: The waiting queue is ordered by the requests' priorities.
        reports_blocks: `ServingEngine.report_blocks` tells of the cached blocks.
        takes_images: Requests with pictures are served.
        max_logprobs: Most likely tokens that may be reported beside each token of an answer, None
            where no log probabilities of it are.
        scores_prompts: Log probabilities of a prompt's tokens are served.
        honours_cache_salt: Requests share the KV of equal beginnings by their salts.
        runs_all_processors: Processors that take tokens back, or need a second row of logits, run
            too.
        native_guides: Grammar processors that the engine enforces itself, where it calls no logits
            processors; None where it calls them.
        num_dp_ranks: Data parallel ranks, each with a batch and KV blocks of its own: the sizes
            above are those of one.
    """

    name: str
    version: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_block_size: int
    total_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    draws_by_seed: bool = True
    numerics: str = "fast"
    computed_by: str = ""
    made_by: str = ""
    kv_dtype: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)
    draft_model: str = ""
    honours_priority: bool = False
    reports_blocks: bool = True
    takes_images: bool = False
    max_logprobs: int | None = MAX_LOGPROBS
    scores_prompts: bool = True
    honours_cache_salt: bool = True
    runs_all_processors: bool = True
    native_guides: frozenset[str] | None = None
    num_dp_ranks: int = 1

    @property
    def num_slots(self) -> int:
        """Requests decoded at the same time at most, by all data parallel ranks."""
        return self.max_num_seqs * self.num_dp_ranks


LEAST_LOGPROB = -9999.0
"""Log probability for minus infinity, as vLLM and TensorRT-LLM say it: JSON has none."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of one token's probability, and its rank in the vocabulary from 1.

    Attributes:
        processed: Natural logarithm of a sampled token's probability in the distribution that it
            was sampled from, after processors, temperature and truncation, normalised; this and
            those below are reported with ``logprobs_mode="train"`` alone.
        tempered: Natural logarithm of its probability in the model's own distribution at the
            request's temperature; `logprob` if that is 1.
        log_mass: Natural logarithm of the probability that the model alone, at the request's
            temperature, gives to all tokens that could be sampled.
    """

    token_id: int
    logprob: float
    rank: int
    processed: float | None = None
    tempered: float | None = None
    log_mass: float | None = None


@dataclass(frozen=True, slots=True)
class QueueTimes:
    """Times at which a request left the waiting queue; seconds of `time.monotonic`.

    Attributes:
        allocated_s: Time at which its KV pages were allocated.
        admitted_s: Time at which it joined the batch; later than `allocated_s` where its prompt's
            KV came from a prefill worker: that was read, and then it waited for a slot.
        received_s: Time at which that KV had been read; None where none was.
    """

    allocated_s: float
    admitted_s: float
    received_s: float | None = None

    @property
    def ready_s(self) -> float:
        """Time from which on it waited for nothing but a slot."""
        return self.allocated_s if self.received_s is None else self.received_s


BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Buckets of `EngineLoad.steps_by_batch_size`: at most so many rows; one more has no limit."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Queues and batch of an engine, and counts of its steps.

    Attributes:
        num_waiting: Requests in the waiting queue, or held back before it.
        num_running: Requests in the batch.
        num_used_blocks: KV blocks that requests own: running, or pinned for transfer.
        num_preemptions: Preemptions since the start.
        steps_by_batch_size: Steps since the start by number of sampled rows, one count for each of
            `BATCH_SIZES`, and one for more.
        num_rows: Sampled rows of all steps.
        drafted: Drafted tokens so far by proposer: those computed, and those of them accepted.
    """

    num_waiting: int
    num_running: int
    num_used_blocks: int
    num_preemptions: int
    steps_by_batch_size: Sequence[int]
    num_rows: int
    drafted: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class TokenDelta:
    """Output of an engine for one choice of one request since its last delta.

    Attributes:
        token_ids: New tokens, oldest first. Stop tokens that a request asked to hide are not among
            them.
        index: The choice, 0 unless ``n`` > 1.
        logprobs: Log probabilities per new token, of the sampled token and then of the top-n; None
            unless they were asked for.
        finish_reason: Set on the last delta of the choice, and only there.
        stop_reason: The stop token id that ended the choice, if one did.
        error: Reason why the choice failed, exactly when ``finish_reason`` is ``error``.
        num_cached_tokens: Prompt tokens of the prefix hit.
        num_prompt_tokens: Tokens of the prompt as the engine computes it, None for those of the
            request: a picture becomes many.
        num_preemptions: Preemptions of the request so far, None where the engine reports none.
        queue_times: Times at which the request left the waiting queue, None while it has not, and
            where the engine reports none.
        prompt_logprobs: Log probabilities per token of the prompt, of the token itself and then of
            the top-n, None for the first token; on the delta of the first token alone, and only if
            they were asked for.
        engine_data: Cumulative extra data for the response (the receipt), or None.
        receipt: Record of the request's logits processors, if it has any; on its last delta, and
            where it counts on while later tokens are sampled on all.
        failure: The processor that failed, where that is why the choice failed.
        kv: Handle of the leased KV, JSON data; on the last delta of a request with `KeepKv`.
        end_logprobs: Log probabilities of the end token that is not among `token_ids`, as an entry
            of `logprobs`; None where the engine reports none.
        weights: Versions of weights, each with the index in the answer of the first token that is
            sampled from it; where tokens were rewound, a later entry takes the place of those from
            its index on. Empty where weights do not change.
    """

    token_ids: list[int] = field(default_factory=list)
    index: int = 0
    logprobs: list[list[TokenLogprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_prompt_tokens: int | None = None
    num_preemptions: int | None = None
    queue_times: QueueTimes | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    engine_data: dict[str, object] | None = None
    receipt: Receipt | None = None
    failure: ProcessorFailed | None = None
    kv: dict[str, Any] | None = None
    end_logprobs: list[TokenLogprob] | None = None
    weights: list[tuple[int, WeightVersion]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether it has no output, and only keeps the stream alive."""
        return not self.token_ids and self.finish_reason is None and self.engine_data is None

    @property
    def sampled_ids(self) -> list[int]:
        """The ids that were sampled, with the end token that the answer does not show."""
        end = self.stop_reason if self.finish_reason == "stop" else None
        return self.token_ids if end is None or self.token_ids[-1:] == [end] else [*self.token_ids, end]

    def stop_after(self, count: int) -> None:
        """End the choice, as ``stop``, after the first `count` of the new tokens."""
        del self.token_ids[count:]
        if self.logprobs is not None:
            del self.logprobs[count:]
        self.end_logprobs = self.failure = None
        self.finish_reason, self.stop_reason, self.error = "stop", None, None

    def parts(self) -> list[TokenDelta]:
        """The delta; an error by itself, behind the tokens before it: they are the answer's however
        many of them were taken at once.
        """
        if self.finish_reason != "error" or not self.token_ids:
            return [self]
        before = replace(self, finish_reason=None, error=None, failure=None)
        self.token_ids, self.logprobs, self.prompt_logprobs, self.weights = [], None, None, []
        return [before, self]

    def prepend(self, earlier: TokenDelta) -> None:
        """Put the tokens of the choice's delta before this one in front; the rest is cumulative."""
        self.token_ids = earlier.token_ids + self.token_ids
        if earlier.logprobs is not None or self.logprobs is not None:
            self.logprobs = [*(earlier.logprobs or ()), *(self.logprobs or ())]
        self.weights = earlier.weights + self.weights
        self.num_cached_tokens = max(earlier.num_cached_tokens, self.num_cached_tokens)
        if earlier.prompt_logprobs is not None:
            self.prompt_logprobs = earlier.prompt_logprobs
        self.engine_data = self.engine_data if self.engine_data is not None else earlier.engine_data


class KvEventSink(Protocol):
    """Receiver of the blocks that an engine caches, for a router.

    Called by the engine's own thread; must not block.
    """

    def stored(
        self,
        parent_hash: int | None,
        block_hashes: Sequence[int],
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Consecutive blocks of a sequence are cached now.

        Args:
            parent_hash: Hash of the block before the first one, None if it begins a sequence.
            block_hashes: 64 bits each, unsigned, made of the block's tokens and of all before them.
            token_ids: Tokens of all these blocks.
            cache_salt: Salt of the request that they come from, None if it has none or the engine
                reports none.
            lora_name: LoRA adapter of the request, None for the model itself.
        """

    def removed(self, block_hashes: Sequence[int]) -> None:
        """Blocks were evicted."""


class ServingEngine(Protocol):
    """A decoding engine for one event loop; `start` comes first, `stop` last."""

    async def start(self) -> EngineInfo:
        """Load the model. Raises `StartupError` with one clear line; `stop` is safe afterwards."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Decode one request.

        The request is admitted when the first item is awaited. The stream ends after a delta with a
        `finish_reason`. Several tokens share a delta only when the consumer is behind.

        Raises:
            InvalidRequest: the request cannot be served by this engine; no other request is
                touched.
            Overloaded: the queue is full.
            Draining: `migrate_all` has ended the request.
            EngineBroken: the engine died.
        """

    def abort(self, request_id: str) -> None:
        """Free a request's slot and KV; its stream ends as ``cancelled``. Ignores unknown ids."""

    def num_unfinished(self) -> int:
        """Requests admitted and not yet finished."""

    def num_leased(self) -> int:
        """Prompts whose KV is leased to decode workers."""

    def report_blocks(self, sink: KvEventSink) -> None:
        """Tell `sink` of the cached blocks, and then of blocks cached and evicted; once."""

    def transfers(self) -> Mapping[str, float]:
        """KV transfers so far by outcome; empty for an engine that has none."""

    def migrate_all(self) -> int:
        """End every unfinished request with `Draining`, so that it migrates; returns how many.

        New requests are refused the same way.
        """

    async def stop(self) -> None:
        """Stop and release the device. Idempotent, and safe after a failed or missing `start`."""


@runtime_checkable
class KeepsAlive(Protocol):
    """An engine that can keep a stream alive that has no output for long."""

    def keep_alive(self) -> None:
        """Give an empty delta to each stream that has had none since the last call."""


@runtime_checkable
class KeepsReceipts(Protocol):
    """An engine whose process has the receipts: of its deltas only the last one has it."""

    async def add_receipt(self, request_id: str, delta: TokenDelta, position: int) -> None:
        """Add the receipt to a delta with which somebody else ends an unfinished answer.

        Args:
            request_id: Id of the request; of unknown ones nothing is added.
            delta: The delta.
            position: Absolute index of the delta's last token.
        """


class LoadSink(Protocol):
    """Receiver of an engine's own counts of its KV blocks."""

    def __call__(self, used: int, total: int, dp_rank: int = 0) -> None:
        """Take the used and total KV blocks of one data parallel rank."""


@runtime_checkable
class DataParallel(Protocol):
    """An engine with data parallel ranks, which cache blocks each for itself."""

    def report_blocks_of_ranks(self, sinks: Sequence[KvEventSink]) -> None:
        """Tell a sink for each rank of its cached blocks; once, like `report_blocks`."""


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine that counts its KV blocks itself."""

    def tell_load(self, callback: LoadSink) -> None:
        """Call ``callback``, in the event loop, with used and total KV blocks whenever the engine
        reports them.
        """


@runtime_checkable
class SelfReporting(Protocol):
    """An engine that reports its own failure, because another process does the work."""

    def tell_broken(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the reason when the engine dies, also without a request."""


@runtime_checkable
class StopsLoading(Protocol):
    """An engine whose start can be ended."""

    def stop_loading(self) -> None:
        """End a `ServingEngine.start` under way, which then raises. Nothing without one."""


@runtime_checkable
class ReleasesKv(Protocol):
    """An engine that can end a prefill worker's lease on KV that nobody will read."""

    def release_kv(self, kv: ReadKv, num_tokens: int) -> None:
        """End the lease on the KV of `num_tokens` tokens; one that cannot be ended times out."""


@runtime_checkable
class Measured(Protocol):
    """An engine that knows its queues, batches and drafted tokens."""

    def load(self) -> EngineLoad:
        """The load now; may be called by any thread."""


@runtime_checkable
class Collecting(Protocol):
    """An engine whose library has metrics of its own, beside the worker's."""

    def collect(self) -> Iterable[Metric]:
        """The library's metrics of now, under its names; `prometheus_client` calls it."""
