"""``POST /generate`` as SGLang's clients, and trainers with them, send it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from worker.engines.weights import ABORTED
from worker.frontdoor.asking import Caller, Part
from worker.frontdoor.completions.handler import AT_ONCE
from worker.frontdoor.completions.prompt_scores import PromptScores
from worker.frontdoor.encoding import FEW
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.exchange import DONE, Exchange, error_event
from worker.frontdoor.rollouts.generation import Generated, generate, served_model
from worker.frontdoor.rollouts.sglang_request import SglangBatch, SglangRequest, read
from worker.frontdoor.rollouts.tables import renamed
from worker.requests.rollout import ABORT, TOP

Answer = dict[str, Any]

T = TypeVar("T")


async def answer_generate(exchange: Exchange) -> None:
    """Answer ``POST /generate``, whole or as a stream of events whose texts are cumulative.

    Raises:
        Refused: before the answer has begun.
    """
    fields = exchange.fields()
    batch = await exchange.read(read)
    model = await served_model(exchange, batch.model, "lora_path" if fields.get("lora_path") is not None else "model")
    if not batch.streams:
        answers = await _whole(exchange, batch, model)
        await exchange.answer(200, answers if batch.is_batch else answers[0])
        return
    stream = exchange.streaming(lambda refused: error_event(refused) + DONE)
    async with stream, aclosing(_together(exchange, batch, model)) as events:
        async for index, answer in events:
            await exchange.send_event({**answer, "index": index} if batch.is_batch else answer)
        await exchange.send(DONE)


async def _whole(exchange: Exchange, batch: SglangBatch, model: str) -> list[Answer]:
    last: dict[int, Answer] = {}
    async with aclosing(_together(exchange, batch, model)) as events:
        async for index, answer in events:
            last[index] = answer
    return [last[index] for index in sorted(last)]


async def _together(exchange: Exchange, batch: SglangBatch, model: str) -> AsyncGenerator[tuple[int, Answer], None]:
    """The answers to all prompts as they grow, each with its place among all.

    Raises:
        Refused: one of them failed, and the others have been given up.
    """
    queue: asyncio.Queue[tuple[int, Answer] | None] = asyncio.Queue(AT_ONCE)
    limit = asyncio.Semaphore(AT_ONCE)

    async def follow(number: int, request: SglangRequest) -> None:
        before = sum(one.num_choices for one in batch.requests[:number])
        async with limit, aclosing(_answers(Part(exchange, before), request, model, batch)) as answers:
            async for index, answer in answers:
                await queue.put((before + index, answer))

    async def run() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number, request in enumerate(batch.requests):
                    group.create_task(follow(number, request))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await queue.put(None)

    running = asyncio.get_running_loop().create_task(run())
    try:
        while (event := await queue.get()) is not None:
            yield event
        await running
    finally:
        running.cancel()
        while not queue.empty():  # else its last event waits for room
            queue.get_nowait()


async def _answers(
    caller: Caller, request: SglangRequest, model: str, batch: SglangBatch
) -> AsyncGenerator[tuple[int, Answer], None]:
    started = time.monotonic()
    fields = {**request.completion, "model": model}
    form = _Form(caller, request, has_texts=batch.has_texts)
    if request.scores_from > 0 and isinstance(fields["prompt"], list) and request.scores_from >= len(fields["prompt"]):
        raise FieldRefused("logprob_start_len", f"must be below the {len(fields['prompt'])} tokens of the prompt")
    try:
        async with aclosing(generate(caller, fields, top=request.top)) as choices:
            async for index, generated in choices:
                if batch.streams or generated.usage:
                    yield index, await form.answer(index, generated, time.monotonic() - started)
    except Refused as refused:
        raise renamed(refused, request.names) from None


@dataclass(slots=True)
class _Scores:
    """Log probabilities of one choice in SGLang's form, as far as they have been made.

    Attributes:
        output: Entry of each token of the answer.
        output_top: Entries of its alternatives.
        input: Fields about the prompt, None before they are made.
    """

    output: list[list[Any]] = field(default_factory=list)
    output_top: list[list[list[Any]]] = field(default_factory=list)
    input: Answer | None = None

    def keep(self, num_tokens: int) -> None:
        """Keep the entries of the first tokens alone: an answer that is not wanted is dropped."""
        del self.output[num_tokens:], self.output_top[num_tokens:]


class _Form:
    """Puts answers to one prompt into SGLang's form.

    Args:
        caller: Requester; the choices before its own are counted in the ids of answers.
        request: The prompt.
        has_texts: Whether log probabilities have the texts of tokens.
    """

    def __init__(self, caller: Caller, request: SglangRequest, *, has_texts: bool) -> None:
        self._caller = caller
        self._request = request
        self._has_texts = has_texts
        self._made: dict[int, _Scores] = {}

    async def answer(self, index: int, generated: Generated, seconds: float) -> Answer:
        """The answer of one choice so far."""
        versions, admitted = generated.weight_versions, self._caller.request
        details = generated.usage.get("prompt_tokens_details") or {}
        meta = {
            "id": self._request.rid or f"{admitted.request_id.decode()}-{admitted.num_before + index}",
            "finish_reason": _finish(generated),
            "prompt_tokens": len(generated.prompt_token_ids),
            "completion_tokens": generated.num_tokens,
            "cached_tokens": details.get("cached_tokens") or 0,
            "weight_version": versions[-1]["version"] if versions else "default",
            "e2e_latency": seconds,
        }
        if self._request.top is not None:
            meta |= await self._logprobs(index, generated)
        return {"text": generated.text, "output_ids": list(generated.token_ids), "meta_info": meta}

    async def _logprobs(self, index: int, generated: Generated) -> Answer:
        """The log probabilities of a choice so far, of which those in earlier events are kept."""
        made, top = self._made.setdefault(index, _Scores()), self._request.top
        ids, tempered = generated.token_ids, generated.per_token["tempered"]
        made.keep(len(ids))
        for place in range(len(made.output), len(ids)):
            made.output.append(await self._entry(tempered[place], ids[place]))
        found: Answer = {"output_token_logprobs": list(made.output)}
        if top:
            for position in generated.per_token[TOP][len(made.output_top) : len(ids)]:
                made.output_top.append([await self._entry(logprob, id_) for id_, logprob in position])
            found["output_top_logprobs"] = list(made.output_top)
        if self._request.scores_from < 0 or generated.scores is None:
            return {"input_token_logprobs": [], **({"input_top_logprobs": []} if top else {}), **found}
        if made.input is None:
            made.input = await self._input(generated.scores)
        return {**found, **made.input}

    async def _input(self, scores: PromptScores) -> Answer:
        """The log probabilities of the prompt."""
        start, top = self._request.scores_from, self._request.top
        if start >= len(scores.tokens):
            raise FieldRefused("logprob_start_len", f"must be below the {len(scores.tokens)} tokens of the prompt")
        own = [await self._entry(own, int(id_)) async for own, id_ in _in_turns(_own(scores, start))]
        found: Answer = {"input_token_logprobs": own}
        if top:
            found["input_top_logprobs"] = [
                None if entries is None else [await self._entry(one["logprob"], int(id_)) for id_, one in entries]
                async for entries in _in_turns(_ranked(scores, start, top))
            ]
        return found

    async def _entry(self, logprob: float | None, token_id: int) -> list[Any]:
        text = await self._caller.door.texts.token_text(token_id) if self._has_texts else None
        return [logprob, token_id, text]


async def _in_turns(items: Iterable[T]) -> AsyncGenerator[T, None]:
    """The items; others have a turn behind some of them, of which a long prompt has many."""
    for number, item in enumerate(items, 1):
        yield item
        if number % FEW == 0:
            await asyncio.sleep(0)


def _own(scores: PromptScores, start: int) -> Iterator[tuple[float | None, int]]:
    """Log probability and id of each token from `start` on; the first has none, as in SGLang."""
    for place in range(start, len(scores.tokens)):
        token_id, entries = scores.tokens[place]["token_id"], scores.positions[place]
        own = None if entries is None or place == start else float(entries[str(token_id)]["logprob"])
        yield own, token_id


def _ranked(scores: PromptScores, start: int, top: int) -> Iterator[list[tuple[str, Any]] | None]:
    for place in range(start, len(scores.tokens)):
        entries = scores.positions[place]
        if entries is None or place == start:
            yield None
            continue
        ranked = sorted(entries.items(), key=lambda item: item[1]["rank"])
        yield [item for item in ranked if item[1]["rank"] <= top]


def _finish(generated: Generated) -> Answer | None:
    if generated.finish_reason is None:
        return None
    if generated.finish_reason == "stop":
        return {"type": "stop", "matched": generated.matched}
    if generated.finish_reason == ABORT:
        return {"type": "abort", "message": ABORTED}
    return {"type": "length", "length": generated.num_tokens}
