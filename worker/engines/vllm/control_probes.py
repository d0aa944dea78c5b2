"""Tries which of its own sampling controls the loaded vLLM applies, with short requests at once.

A version may take a control and mean something else by it. One that fails its probe runs in the
chain, which is always exact. What no chain can do, a failed probe ends the start for: greedy
tokens, stop tokens, log probabilities.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from worker.engines import EngineInfo
from worker.engines.vllm.package import Package
from worker.errors import StartupError

NUM_TOKENS = 3
STRONG = 1000.0
HOT = 50.0
"""Temperature at which three sampled tokens are not by chance the most likely ones."""

ONE_LEFT = {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}
"""Truncation that leaves the most likely token alone, however hot."""

UNSEEN = frozenset({"frequency_penalty", "presence_penalty"})
"""Controls that are too weak within vLLM's bounds to be seen in three tokens; they are trusted."""


@dataclass(slots=True)
class _Answer:
    """The whole answer to a probe."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    stop_reason: Any = None


class _Probes:
    """Runs a prompt of one token twice.

    Args:
        llm: The library's ``AsyncLLM``.
        package: The installed package.
        token_id: The token.
    """

    def __init__(self, llm: Any, package: Package, token_id: int) -> None:
        self.prompt = [token_id, token_id]
        self._llm = llm
        self._package = package
        self._numbers = count()

    async def ask(self, **fields: Any) -> _Answer:
        """The answer with fields of ``SamplingParams``; greedy unless they say otherwise."""
        given = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False, **fields}
        params = self._package.sampling_params(**given, output_kind=self._package.delta)
        prompt = self._package.tokens_prompt(prompt_token_ids=list(self.prompt))
        found = _Answer()
        async for output in self._llm.generate(prompt, params, f"control-probe-{next(self._numbers)}"):
            (choice,) = output.outputs
            found.tokens += choice.token_ids
            found.logprobs += choice.logprobs or []
            found.prompt_logprobs = found.prompt_logprobs or list(output.prompt_logprobs or [])
            found.stop_reason = choice.stop_reason
        return found

    async def keeps_stop_tokens_away(self, token_id: int) -> bool:
        """Whether ``min_tokens`` does, of the token that would come first."""
        tokens = (await self.ask(stop_token_ids=[token_id], min_tokens=NUM_TOKENS)).tokens
        return len(tokens) == NUM_TOKENS and token_id not in tokens

    async def penalises_repetition(self) -> bool:
        """An engine that ignores the penalty gives one answer twice, which cannot be both."""
        more, less = [await self.ask(repetition_penalty=penalty) for penalty in (1 / STRONG, STRONG)]
        return self._repeats(more) and not self._repeats(less)

    def _repeats(self, answer: _Answer) -> bool:
        seen = [self.prompt[0], *answer.tokens]
        return len(set(seen)) < len(seen)


async def find_native(llm: Any, package: Package, info: EngineInfo) -> frozenset[str]:
    """Names of the controls that vLLM applies with the worker's own meaning.

    Args:
        llm: The library's ``AsyncLLM``.
        package: The installed package.
        info: Description of the engine.

    Raises:
        StartupError: a request fails, greedy tokens are not the most likely ones, an answer goes on
            after a stop token, or log probabilities are missing.
    """
    probes = _Probes(llm, package, next(each for each in range(info.vocab_size) if each not in info.eos_token_ids))
    try:
        return await _find_native(probes)
    except StartupError as error:
        raise StartupError(f"vLLM {info.version}: {error}") from None
    except Exception as error:  # the start-up boundary
        problem = " ".join(str(error).split())
        raise StartupError(f"vLLM {info.version} failed on its first requests: {problem}") from error


async def _find_native(probes: _Probes) -> frozenset[str]:
    base = await probes.ask(logprobs=1, prompt_logprobs=1)
    _check_greedy(base, probes.prompt)
    asked: list[dict[str, Any]] = [{"stop_token_ids": base.tokens[:1]}, {"temperature": HOT}]
    asked += [{"temperature": HOT, name: value} for name, value in ONE_LEFT.items()]
    (stopped, hot, *cut), is_long, repeats = await asyncio.gather(
        asyncio.gather(*(probes.ask(**fields) for fields in asked)),
        probes.keeps_stop_tokens_away(base.tokens[0]),
        probes.penalises_repetition(),
    )
    if (stopped.tokens, stopped.stop_reason) != (base.tokens[:1], base.tokens[0]):
        raise StartupError(f"an answer goes on after the stop token {base.tokens[0]}: {stopped.tokens}")
    found = set(UNSEEN)
    found |= {name for name, holds in (("min_tokens", is_long), ("repetition_penalty", repeats)) if holds}
    if hot.tokens != base.tokens:  # else truncation could not be told from a sampler that is always greedy
        found |= {"temperature"}
        found |= {name for name, answer in zip(ONE_LEFT, cut, strict=True) if answer.tokens == base.tokens}
    return frozenset(found)


def _check_greedy(base: _Answer, prompt: list[int]) -> None:
    """Raises `StartupError` unless the tokens are the most likely ones, with their ranks."""
    ranks = [found[token].rank for token, found in zip(base.tokens, base.logprobs, strict=False) if token in found]
    if len(base.tokens) != NUM_TOKENS or ranks != [1] * NUM_TOKENS:
        problem = f"greedy tokens {base.tokens} must have rank 1 in the raw log probabilities, got {ranks}"
        raise StartupError(problem)
    scores = base.prompt_logprobs
    if len(scores) != len(prompt) or prompt[1] not in (scores[1] or {}):
        raise StartupError("the log probabilities of a prompt's tokens are not reported")
