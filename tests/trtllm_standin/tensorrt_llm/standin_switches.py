"""Which TensorRT-LLM the stand-in is, and which of its troubles it shows: JSON in the variable
TRTLLM_STANDIN.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field

VARIABLE = "TRTLLM_STANDIN"
OLD, NEW = "1.2.0", "1.3.0rc29"

# What the PyTorch sampler of 1.2 took and did nothing about.
_IGNORED_BY_OLD = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
    "bad_token_ids",
    "no_repeat_ngram_size",
    "seed",
)


@dataclass(frozen=True)
class Switches:
    """
    Attributes:
        version: ``1.2.0`` or ``1.3.0rc29``.
        ignores: Fields of `SamplingParams` that have no effect; those of the version by default.
        hides_end_token: The token that ended an answer is not among its tokens.
        skips: Generated positions (0 is the first token) whose processors are not called, as after
            a preemption.
        dies_on_prompt: The executor's process ends at the second token of a prompt of more than two
            tokens; the worker's probes are shorter.
        lagging: Processors see an old history although the overlap scheduler is off.
        context_only_ends: Finish reason of a context-only request, whose length limit is always 1.
        passes_on: What a context-only request leaves for the generation phase is with its output;
            else nothing is.
        checks_transferred: The transferred token of a generation-only request counts for the length
            limit, and ends the answer if it is an end token.
        max_logprobs: Most likeliest tokens that may be asked for; versions of spring 2026 take 20.
        loses_logprobs: Log probabilities of the second token of a prompt of more than two tokens
            get lost on the way.
        odd_reason: A finish reason that the client's side does not know, for prompts of more than
            two tokens.
        tells_capacity: `LLM.get_kv_cache_capacity` says something.
        windows: Attention windows of the model's layers, in tokens; each has KV blocks and events
            of its own.
        lifecycle: `DisaggregatedParams` has the ids of a hand-off, which a context-only request's
            output sets.
        greedy_beside_drafts: Temperature, top-k and top-p are ignored with speculative decoding.
        loosens_guides_at: Generated position from which on guides are forgotten.
        health_blocks_s: Seconds that `LLM._check_health` blocks its caller.
        shutdown_blocks_s: Seconds that `LLM.shutdown` blocks its caller, as where the executor is
            dead.
    """

    version: str = NEW
    ignores: list[str] = field(default_factory=list)
    hides_end_token: bool = False
    skips: list[int] = field(default_factory=list)
    dies_on_prompt: bool = False
    lagging: bool = False
    context_only_ends: str = "length"
    passes_on: bool = True
    checks_transferred: bool = False
    max_logprobs: int = 100
    loses_logprobs: bool = False
    odd_reason: str | None = None
    tells_capacity: bool = True
    windows: list[int] = field(default_factory=lambda: [4096])
    lifecycle: bool = False
    greedy_beside_drafts: bool = False
    loosens_guides_at: int | None = None
    health_blocks_s: float = 0.0
    shutdown_blocks_s: float = 0.0

    @property
    def is_old(self) -> bool:
        return self.version == OLD

    def honours(self, name: str) -> bool:
        return name not in self.ignores and not (self.is_old and name in _IGNORED_BY_OLD)


def read() -> Switches:
    return Switches(**json.loads(os.environ.get(VARIABLE) or "{}"))


SWITCHES = read()
