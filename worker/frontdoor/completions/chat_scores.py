"""Log probabilities of a chat's prompt (``prompt_logprobs``), in vLLM's form."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from worker.frontdoor.asking import Caller
from worker.frontdoor.completions.asked import num_prompt_logprobs
from worker.frontdoor.completions.prompt_answer import Chunk, no_scores
from worker.frontdoor.completions.prompt_scores import SCORE_BYTES, PromptScores, WorkerData
from worker.frontdoor.field_checks import Body
from worker.frontdoor.nvext import with_engine_data
from worker.frontdoor.returned_tokens import PROMPT_LOGPROBS, ReturnedData
from worker.requests.rollout import ABORT


def scored_request(fields: Body) -> Body:
    """The fields of a chat that asks the worker for what ``prompt_logprobs`` needs.

    Raises:
        FieldRefused: ``prompt_logprobs`` is no number of alternatives.
    """
    if num_prompt_logprobs(fields) is None:
        return fields
    return {**fields, "nvext": with_engine_data(fields.get("nvext"))}


async def in_vllm_form(caller: Caller, scores: PromptScores, count: int) -> list[dict[str, Any] | None]:
    """See `PromptScores.in_vllm_form`; that of a long prompt is made beside the event loop."""
    size, make = SCORE_BYTES * len(scores.tokens), partial(scores.in_vllm_form, count)
    return await caller.door.rewriting.by_size(caller.request.label, size, make)


async def with_scores(
    caller: Caller, chunks: AsyncGenerator[Chunk, None], fields: Body, data: ReturnedData
) -> AsyncGenerator[Chunk, None]:
    """The chunks of a chat; the one with the prompt's log probabilities has ``prompt_logprobs``.

    Args:
        caller: Requester of the chat.
        chunks: Chunks of the answer to `scored_request`.
        fields: The client's fields.
        data: Puts token ids into them.

    Raises:
        Refused: no chunk has the log probabilities that were asked for.
    """
    count = num_prompt_logprobs(fields)
    is_scored = count is None
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            data.take(chunk)
            scores = None if count is None else WorkerData.taken_from(chunk).scores
            if scores is not None and count is not None and not is_scored:
                chunk["prompt_logprobs"], is_scored = await in_vllm_form(caller, scores, count), True
                if data.repeats_scores:
                    chunk["nvext"] = {**(chunk.get("nvext") or {}), PROMPT_LOGPROBS: chunk["prompt_logprobs"]}
            is_scored = is_scored or any(one.get("finish_reason") == ABORT for one in chunk.get("choices") or ())
            yield chunk
    if not is_scored:
        raise no_scores()
