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
from worker.engines.vllm.params import MOST_TEMPERATURE
from worker.errors import StartupError, one_line

NUM_TOKENS = 3
STRONG = 1000.0
NUM_SAMPLES = 2
"""Answers at vLLM's highest temperature."""

LIKELY = 4
"""Tokens that may share the highest logit, in bfloat16; sampled ones rank far behind."""

ONE_LEFT = {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}
"""Truncation that leaves the most likely token alone, however hot."""

UNSEEN = frozenset({"frequency_penalty", "presence_penalty"})
"""Controls that are too weak within vLLM's bounds to be seen in three tokens; they are trusted."""

INEXACT = frozenset({"top_p"})
"""Controls that vLLM's kernels for other devices than a CPU keep only nearly, whatever the probes
see: in a batch of over 64 rows, one of them greedy, a search with 18 halvings takes the place of
sorting (vLLM 0.32). Of 131,072 tokens it has left a mass of 0.96 for 0.9, and of 0.92 for 0.95.
"""


@dataclass(slots=True)
class _Answer:
    """The whole answer to a probe."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    stop_reason: Any = None

    @property
    def ranks(self) -> list[int]:
        """Ranks of the tokens."""
        return [found[token].rank for token, found in zip(self.tokens, self.logprobs, strict=True)]

    @property
    def is_greedy(self) -> bool:
        """Whether no token is more likely than the one that was chosen."""
        pairs = list(zip(self.tokens, self.logprobs, strict=False))
        return len(pairs) == NUM_TOKENS and all(
            token in found and found[token].logprob == max(each.logprob for each in found.values())
            for token, found in pairs
        )


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

    async def keeps_away(self, token_ids: list[int]) -> bool:
        """Whether ``min_tokens`` keeps stop tokens away, one of which would come first."""
        tokens = (await self.ask(stop_token_ids=token_ids, min_tokens=NUM_TOKENS)).tokens
        return len(tokens) == NUM_TOKENS and not set(token_ids) & set(tokens)

    async def wanders(self, **cut: Any) -> bool:
        """Whether hot answers have tokens that are not among the most likely ones."""
        answers = await asyncio.gather(
            *(self.ask(temperature=MOST_TEMPERATURE, logprobs=1, **cut) for _ in range(NUM_SAMPLES))
        )
        return any(rank > LIKELY for answer in answers for rank in answer.ranks)

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
        return await _find_native(probes) - (frozenset() if package.is_cpu else INEXACT)
    except StartupError as error:
        raise StartupError(f"vLLM {info.version}: {error}") from None
    except Exception as error:  # the start-up boundary
        raise StartupError(f"vLLM {info.version} failed on its first requests: {one_line(error)}") from error


async def _find_native(probes: _Probes) -> frozenset[str]:
    base = await probes.ask(logprobs=LIKELY, prompt_logprobs=1)
    _check_greedy(base, probes.prompt)
    first = sorted(base.logprobs[0])
    cuts: list[dict[str, Any]] = [{name: value} for name, value in ONE_LEFT.items()]
    stopped, is_long, repeats, (is_hot, *cut) = await asyncio.gather(
        probes.ask(stop_token_ids=first),
        probes.keeps_away(first),
        probes.penalises_repetition(),
        asyncio.gather(*(probes.wanders(**cut) for cut in [{}, *cuts])),
    )
    if len(stopped.tokens) != 1 or stopped.stop_reason != stopped.tokens[0]:
        raise StartupError(f"an answer goes on after a stop token of {first}: {stopped.tokens}")
    found = set(UNSEEN)
    found |= {name for name, holds in (("min_tokens", is_long), ("repetition_penalty", repeats)) if holds}
    if is_hot:  # else truncation could not be told from a sampler that is always greedy
        found |= {"temperature"}
        found |= {name for name, wanders in zip(ONE_LEFT, cut, strict=True) if not wanders}
    return frozenset(found)


def _check_greedy(base: _Answer, prompt: list[int]) -> None:
    """Raises `StartupError` unless tokens are the most likely ones, and scores are reported."""
    if not base.is_greedy:
        raise StartupError(f"greedy tokens {base.tokens} are not the most likely ones of the log probabilities")
    scores = base.prompt_logprobs
    if len(scores) != len(prompt) or prompt[1] not in (scores[1] or {}):
        raise StartupError("the log probabilities of a prompt's tokens are not reported")
