"""`EngineRequest`: one record of a request, from its preparation to the engine's first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adapters.chain import ProcessorChain
from worker.engines.images import ImageInput
from worker.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class KeepKv:
    """Asks a prefill worker's engine to compute a prompt, sample nothing, and lease its KV."""


@dataclass(frozen=True, slots=True)
class ReadKv:
    """Tells a decode worker's engine to read the prompt's KV from a prefill worker.

    Attributes:
        handle: The `TokenDelta.kv` of the prefill worker's engine.
        num_cached_tokens: Prompt tokens of the prefill worker's prefix hit.
    """

    handle: Mapping[str, Any]
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    """Tells a decode worker's engine to compute the prompt itself.

    Attributes:
        reason: ``missing`` if no KV transfer came with the request, ``late`` if its lease is over.
    """

    reason: str


KvPart = KeepKv | ReadKv | LocalPrefill
"""An engine's part in a KV transfer."""


@dataclass(frozen=True, slots=True)
class RequestHints:
    """Facts about a request that change no token; an engine without a use ignores them.

    Attributes:
        trace_headers: W3C trace context that its spans belong to.
        priority: Urgency beside other requests: more is sooner, 0 is usual.
        client: Label of the client that it comes from, among whom an engine with a queue of its own
            takes turns; None is one client.
        dp_rank: Data parallel rank that the router chose, None where it chose none.
        conversation: Label of the conversation that it belongs to, None where the client says none.
        prediction: Token ids of a text that much of the answer is likely to be, from which tokens
            are drafted.
    """

    trace_headers: Mapping[str, str] = field(default_factory=dict)
    priority: float = 0
    client: str | None = None
    dp_rank: int | None = None
    conversation: str | None = None
    prediction: Sequence[int] = ()


NO_HINTS = RequestHints()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One answer to generate, or in disaggregated serving one worker's part of it.

    Attributes:
        id: Id that no unfinished request of the engine has.
        prompt_token_ids: Prompt, at least one token.
        params: Sampling controls. ``logits_processor`` holds third-party callables alone; fields
            that the engine refuses as processors are in `chain` already.
        chain: The request's logits processors, None without any. An engine starts it, unless it
            stands after the prompt, or after the prompt and `generated_token_ids`.
        generated_token_ids: Tokens of a migrated request's answer so far. The stream begins after
            them; everything else, ``max_tokens`` too, is as if they had been generated here, and a
            KV transfer covers them.
        seed: Seed of the chain's random numbers; the sampler's is ``params.seed``.
        choice: Index of this answer among several to one prompt: requests with one seed that differ
            in it have different random numbers.
        hidden_end_ids: End tokens that are not part of the answer though ``params`` shows others,
            for an engine that rewinds tokens: the text of these is none of the answer's.
        kv: The engine's part in a KV transfer, None where it computes the whole request.
        cache_salt: Requests share the KV of a common prefix only if they have the same salt.
        lora_name: LoRA adapter, one of `EngineInfo.adapters`; None for the model itself.
        images: Pictures of the prompt, only where `EngineInfo.takes_images`.
        lora_digest: Digest of the adapter that was meant: an engine that does not have it any more
            refuses the request.
        draft_model: `EngineInfo.draft_model` where a processor computes with it, else None.
        hints: Facts that change no token.
        defaulted: Names of the fields of `params` whose values are the model's, since the request
            leaves them unset.
    """

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    chain: ProcessorChain | None = None
    generated_token_ids: Sequence[int] = ()
    seed: int = 0
    choice: int = 0
    hidden_end_ids: frozenset[int] = frozenset()
    kv: KvPart | None = None
    cache_salt: str | None = None
    lora_name: str | None = None
    images: Sequence[ImageInput] = ()
    lora_digest: str | None = None
    draft_model: str | None = None
    hints: RequestHints = NO_HINTS
    defaulted: frozenset[str] = frozenset()

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer so far."""
        return [*self.prompt_token_ids, *self.generated_token_ids]
