"""``POST /inference/v1/generate``: token ids in, token ids out, as vLLM's clients send it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from worker.frontdoor.asking import Caller
from worker.frontdoor.completions.chat_scores import in_vllm_form
from worker.frontdoor.errors import Refused
from worker.frontdoor.exchange import DONE, Exchange, error_event, server_sent
from worker.frontdoor.rollouts.generation import Generated, generate, served_model, spans
from worker.frontdoor.rollouts.inference_request import NAMES, InferenceRequest, read
from worker.frontdoor.rollouts.tables import renamed
from worker.frontdoor.usage import usage_of_choices, usage_without_answer
from worker.requests.rollout import RANK, TOP

Answer = dict[str, Any]


async def answer_inference(exchange: Exchange) -> None:
    """Answer ``POST /inference/v1/generate``, whole or as a stream of deltas.

    Raises:
        Refused: before the answer has begun.
    """
    request = await exchange.read(read)
    model = await served_model(exchange, request.model)
    same = {"request_id": request.request_id or exchange.request_id, "output_mode": _mode(request)}
    try:
        async with aclosing(generate(exchange, {**request.completion, "model": model}, top=request.top)) as choices:
            if request.streams:
                await _stream(exchange, request, choices, same)
                return
            found: dict[int, Generated] = {}
            async for index, generated in choices:
                found[index] = generated
    except Refused as refused:
        raise renamed(refused, NAMES) from None
    whole = await _whole(exchange, request, found)
    await exchange.answer(200, {**same, "model": model, "created": int(time.time()), **whole})


def _mode(request: InferenceRequest) -> str:
    return "text" if request.has_text else "tokens"


async def _whole(caller: Caller, request: InferenceRequest, found: Mapping[int, Generated]) -> Answer:
    first = found[min(found)]
    scores = first.scores
    answer: Answer = {
        "choices": [_choice(request, index, found[index], _START) for index in sorted(found)],
        "usage": _usage(found),
        "prompt_logprobs": None,
        "prompt_token_ids": first.prompt_token_ids if request.has_prompt else None,
    }
    if scores is not None and request.num_scores is not None:
        answer["prompt_logprobs"] = await in_vllm_form(caller, scores, request.num_scores)
    return answer


_START = (0, 0)


async def _stream(exchange: Exchange, request: InferenceRequest, choices: Any, same: Answer) -> None:
    sent: dict[int, tuple[int, int]] = {}
    ended: dict[int, Generated] = {}
    async with exchange.streaming(lambda refused: error_event(renamed(refused, NAMES)) + DONE):
        async for index, generated in choices:
            if generated.usage:
                ended[index] = generated
                continue
            event = {**same, "choices": [_choice(request, index, generated, sent.get(index, _START))], "usage": None}
            if request.has_prompt and not sent:
                event["prompt_token_ids"] = generated.prompt_token_ids
            sent[index] = generated.num_tokens, len(generated.text)
            await exchange.send(server_sent(event))
        if request.has_usage:
            await exchange.send(server_sent({**same, "choices": [], "usage": _usage(ended)}))
        await exchange.send(DONE)


def _choice(request: InferenceRequest, index: int, generated: Generated, sent: tuple[int, int]) -> Answer:
    """The choice from its first `sent` tokens and characters on."""
    first, length = sent
    is_end = generated.finish_reason is not None
    versions = spans(generated.weight_versions, generated.num_tokens) if is_end and generated.weight_versions else None
    choice: Answer = {
        "index": index,
        "finish_reason": generated.finish_reason,
        "stop_reason": _stop_reason(request, generated),
        "token_ids": generated.token_ids[first:],
        "logprobs": None if request.top is None else {"content": _content(generated, first)},
        "weight_versions": versions,
    }
    return {**choice, "text": generated.text[length:]} if request.has_text else choice


def _usage(found: Mapping[int, Generated]) -> Answer:
    """The usage of all choices, whose tokens are those of ``token_ids``: a frontend counts no end
    token, and one token where none was wanted.
    """
    usages, count = [one.usage for one in found.values()], sum(one.num_tokens for one in found.values())
    if not count:
        return usage_without_answer(usages[0])
    usage = usage_of_choices(usages)
    return {**usage, "completion_tokens": count, "total_tokens": usage.get("prompt_tokens", 0) + count}


def _stop_reason(request: InferenceRequest, generated: Generated) -> int | str | None:
    """The stop string, or the token of the request's own that ended it, not one of the model's."""
    matched = generated.matched
    own = isinstance(matched, str) or matched in (request.completion.get("stop_token_ids") or ())
    return matched if own else None


def _content(generated: Generated, first: int) -> list[Answer]:
    """The sampled token of each position from `first` on, raw, with itself and its alternatives."""
    lists = generated.per_token
    content = []
    for place in range(first, generated.num_tokens):
        own = {
            "token_id": generated.token_ids[place],
            "logprob": lists["raw"][place],
            "rank": lists[RANK][place],
        }
        top = lists[TOP][place] if lists[TOP] else []
        others = [
            {"token_id": token_id, "logprob": logprob, "rank": rank}
            for rank, (token_id, logprob) in enumerate(top, start=1)
            if token_id != own["token_id"]
        ]
        content.append({**own, "top_logprobs": [own, *others]})
    return content
