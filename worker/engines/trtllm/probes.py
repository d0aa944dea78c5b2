"""Probes which controls the loaded engine honours, by a few short greedy requests at start.

Some versions silently ignore controls that they accept. Each probe compares answers that an engine
which ignores the control cannot give. An inconclusive probe counts as no: the control then runs as
a processor of this package, which is always exact.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adapters.processors.grammar import grammar_cache
from adapters.trtllm import Step, TrtllmAdapter
from adapters.trtllm.side_channel import Reporter
from adapters.vocabulary import Vocabulary, byte_index
from worker.engines.trtllm.capabilities import Package
from worker.errors import StartupError

NUM_TOKENS = 8
_STRONG = 1000.0

Tokens = list[int]
Ask = Callable[..., Awaitable[Any]]
"""Runs the probe prompt greedily with ``SamplingParams`` fields; the final ``RequestOutput``."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The engine's calling convention of logits processors.

    Attributes:
        vocab_size: Width of a row.
        lags: The token ids that it passes lack the newest token.
    """

    vocab_size: int
    lags: bool


class CallProbe(TrtllmAdapter):
    """A callable that reports how it was called, and forces one token.

    Args:
        reporter: Receives every call: position, and ``(width, dtype, leading dimensions)`` instead
            of edits.
        token_id: The token.
        vocabulary: Loaded in the engine's process, so that no request waits for its tokenizer.
    """

    def __init__(self, reporter: Reporter, token_id: int, vocabulary: Vocabulary | None = None) -> None:
        super().__init__(end_id=token_id, report=reporter)
        self._reporter = reporter
        self._token_id = token_id
        self._vocabulary = vocabulary

    def edit_row(self, req_id: int | str, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        if self._vocabulary is not None:
            byte_index(self._vocabulary)
            grammar_cache(self._vocabulary).tokenizer()
            self._vocabulary = None
        kind = str(logits.dtype).removeprefix("torch.")
        self._reporter.step(Step(len(token_ids), ((logits.shape[-1], kind, 1),)))
        logits.fill_(-torch.inf)
        logits[..., self._token_id] = 0.0


def judge_calls(steps: Sequence[Step], tokens: Tokens, token_id: int, prompt_length: int) -> Calls:
    """The calling convention seen by a `CallProbe`.

    Raises:
        StartupError: processors are not called, cannot report, or their edits have no effect.
    """
    if not steps:
        raise StartupError("logits processors of TensorRT-LLM were not called, or cannot reach the worker's socket")
    if tokens != [token_id] * len(tokens):
        raise StartupError("edits of logits processors do not reach TensorRT-LLM's sampler")
    positions = [step.position for step in steps]
    if max(positions) == prompt_length + len(tokens) - 1:
        lags = False
    elif max(positions) == prompt_length + len(tokens) - 2:
        lags = True
    else:
        raise StartupError(f"logits processors were called at positions {positions} for {len(tokens)} tokens")
    return Calls(steps[0].edits[0][0], lags)


async def find_honoured(ask: Ask, package: Package, prompt: Tokens, vocab_size: int) -> frozenset[str]:
    """Names of the engine-native controls that are exact.

    Besides fields of ``SamplingParams``: ``logprobs_of_sampled``, where ``logprobs=0`` reports the
    sampled token.
    """
    base = await _tokens(ask)
    honoured = set()
    for name in ("presence_penalty", "frequency_penalty"):
        if "prompt_ignore_length" in package.sampling_fields:  # the penalties are on generated tokens only
            more = await _tokens(ask, prompt_ignore_length=len(prompt), **{name: -_STRONG})
            less = await _tokens(ask, prompt_ignore_length=len(prompt), **{name: _STRONG})
            if _repeats(more) and more[:1] == base[:1] and _differ(less):
                honoured.add(name)
    more = await _tokens(ask, repetition_penalty=1 / _STRONG)
    less = await _tokens(ask, repetition_penalty=_STRONG)
    if _repeats(more) and _differ([*prompt, *less]):
        honoured.add("repetition_penalty")
    banned = await _tokens(ask, bad_token_ids=base[:1])
    if base and banned and base[0] not in banned:
        honoured.add("bad_token_ids")
    if await _honours_bias(ask, base, vocab_size):
        honoured.add("embedding_bias")
    if await _honours_min_p(ask, base):
        honoured.add("min_p")
    if await _reports_sampled(ask):
        honoured.add("logprobs_of_sampled")
    return frozenset(honoured)


async def find_sampling(ask: Ask) -> bool:
    """Whether the engine samples at a temperature; some versions are greedy beside drafts."""
    return await _tokens(ask, temperature=50.0) != await _tokens(ask)


async def _honours_bias(ask: Ask, base: Tokens, vocab_size: int) -> bool:
    target = (base[0] + 1) % vocab_size if base else 0
    bias = torch.zeros(vocab_size)
    bias[target] = _STRONG
    return await _tokens(ask, embedding_bias=bias) == [target] * NUM_TOKENS


async def _honours_min_p(ask: Ask, base: Tokens) -> bool:
    hot = {"temperature": 50.0}
    return await _tokens(ask, **hot, min_p=0.9999) == base != await _tokens(ask, **hot)


async def _reports_sampled(ask: Ask) -> bool:
    try:
        output = (await ask(logprobs=0)).outputs[0]
    except _REFUSALS:
        return False
    return len(output.logprobs or ()) == len(output.token_ids) > 0


async def _tokens(ask: Ask, **fields: Any) -> Tokens:
    """The answer, empty if the engine refuses the fields."""
    try:
        return list((await ask(**fields)).outputs[0].token_ids)
    except _REFUSALS:
        return []


class ProbeRefused(Exception):
    """The engine refused the fields of a probe."""


_REFUSALS = (ProbeRefused,)


def _repeats(tokens: Tokens) -> bool:
    return len(tokens) == NUM_TOKENS and len(set(tokens)) == 1


def _differ(tokens: Tokens) -> bool:
    return len(tokens) >= NUM_TOKENS and len(set(tokens)) == len(tokens)
