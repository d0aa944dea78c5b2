"""Completions with all their scores, asked of a front door and computed by the engine alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai
from e2e_stack import MODEL

from worker.engines.embedded.offline import Engine
from worker.sampling import SamplingParams

TOP = 3
CLIENTS = 20
PROMPTS = [[5 + (number + 1) * place * place % 900 for place in range(200 + number)] for number in range(CLIENTS)]


@dataclass(frozen=True)
class Scored:
    """An answer with ``echo``, ``logprobs`` and ``prompt_logprobs``.

    Attributes:
        token_logprobs: Log probabilities of prompt and answer, the first one None.
        prompt_logprobs: In vLLM's form.
        rest: Text, finish reason, and the other lists of the log probabilities.
    """

    token_logprobs: list[float | None]
    prompt_logprobs: list[Any]
    rest: tuple[Any, ...]


def in_vllm_form(engine: Engine, scores: Any) -> list[Any]:
    """Log probabilities of a prompt, as the field ``prompt_logprobs`` of an answer has them."""
    text = engine.tokenizer.decode
    return [
        None
        if entries is None
        else {
            str(one.token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": text([one.token_id])}
            for one in entries
        }
        for entries in scores
    ]


def computed(engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> list[tuple[Any, Any]]:
    """`Scored.token_logprobs` and `Scored.prompt_logprobs` of greedy answers of some length.

    Those of the answer are float32, as the frontend has them.
    """
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=0, prompt_logprobs=TOP)
    found = []
    for result in engine.generate(prompts, params, progress=False):
        prompt: Any = result.prompt_logprobs
        answer: Any = result.outputs[0].logprobs
        of_prompt = [None if entries is None else entries[0].logprob for entries in prompt]
        of_answer = [float(np.float32(entries[0].logprob)) for entries in answer]
        found.append(([*of_prompt, *of_answer], in_vllm_form(engine, prompt)))
    return found


async def scored(
    client: openai.AsyncOpenAI, prompt: list[int], num_tokens: int, begun: asyncio.Event | None = None
) -> Scored:
    """A streamed answer; ``begun`` is set at its third event, or at its end."""
    lists: dict[str, list[Any]] = {name: [] for name in ("token_logprobs", "top_logprobs", "tokens", "text_offset")}
    text, ends, prompts = "", [], []
    extra = {"prompt_logprobs": TOP, "ignore_eos": True}
    asked: Any = {"prompt": prompt, "echo": True, "logprobs": TOP, "max_tokens": num_tokens, "temperature": 0}
    try:
        num_events = 0
        async for chunk in await client.completions.create(model=MODEL, stream=True, extra_body=extra, **asked):
            num_events += 1
            if begun is not None and num_events == 3:
                begun.set()
            (choice,) = chunk.choices
            text += choice.text
            ends += [choice.finish_reason] if choice.finish_reason else []
            prompts += [choice.prompt_logprobs] if "prompt_logprobs" in choice.model_extra else []
            for name, values in lists.items():
                values += getattr(choice.logprobs, name)
    finally:
        if begun is not None:
            begun.set()
    (prompt_logprobs,) = prompts
    rest = (text, ends, lists["tokens"], lists["top_logprobs"], lists["text_offset"])
    return Scored(lists["token_logprobs"], prompt_logprobs, rest)
