"""Refusals of the frontend and of the worker as a client gets them: with the reason, which the
frontend loses in streams, in completions, and once an answer has begun, and with the client's own
field.
"""

from __future__ import annotations

import asyncio
from typing import Any

from worker.frontdoor.asking import Caller, Part, ask
from worker.frontdoor.errors import INVALID, FieldRefused, Refused, code_of
from worker.frontdoor.exchange import Exchange, Handler, error_event
from worker.frontdoor.fields import COMPLETIONS
from worker.frontdoor.frontend_errors import field_in, shortened
from worker.frontdoor.nvext import with_annotations, with_engine_data
from worker.requests.refusals import ONLY_CHECKED, REFUSAL, WANTS_REFUSAL
from worker.runtimes.direct.pictures import PART, is_picture, picture_places

_MOST_PROMPTS = 64
"""Prompts of a refused completion among which the refused one is looked for."""

_NOT_ASKED_AGAIN = ("stream_options",)
_NOT_CHECKED = (*_NOT_ASKED_AGAIN, "n")
"""Fields that are left out where a request is only prepared: its choices are prepared alike."""

REASON_S = 10.0
"""Seconds for which a request is computed again to learn why it failed."""

_TURN_S = 1.0
"""Seconds for which it waits for others that are computed again; see `FrontDoor.reasons`."""


def explaining(refused: Refused) -> Handler:
    """The handler of a chat or completion that a frontend has answered with an error."""

    async def answer(exchange: Exchange) -> None:
        raise await explained(exchange, exchange.json, exchange.path, refused)

    return answer


def ending(refused: Refused) -> Handler:
    """The handler of a chat or completion that has begun as a stream, and ends with an error."""

    async def answer(exchange: Exchange) -> None:
        exchange.continue_events()
        async with exchange.streaming(error_event):
            raise await explained(exchange, exchange.json, exchange.path, refused)

    return answer


async def explained(caller: Caller, fields: dict[str, Any], path: str, refused: Refused) -> Refused:
    """The error of a request that a frontend has answered with one, or with an answer that ended in
    one.

    Args:
        caller: Requester on whose behalf the frontend was asked.
        fields: The request as a client would write it.
        path: `CHAT` or `COMPLETIONS`.
        refused: Error that the frontend answered with.
    """
    if refused.status == 500:
        refused = await _reason(caller, fields, path) or await _picture(caller, fields, path) or refused
    if refused.status >= 500:
        return refused
    if refused.param is None:
        field = field_in(refused.message, path, fields)
        refused.message = shortened(refused.message)
        return refused.renamed(field)
    return refused.renamed(caller.door.names_of(path, fields, caller.request.head)(refused.param))


async def checked(caller: Caller, fields: dict[str, Any], path: str) -> None:
    """Have a worker prepare a request that is to be answered later.

    Raises:
        Refused: the frontend or the worker refuses it. Another failure is left to the answer.
    """
    try:
        refused = await _refusal(caller, fields, path, ONLY_CHECKED)
    except Refused as error:
        refused = error
    if refused is not None and refused.status < 500:
        raise await explained(caller, fields, path, refused)


async def _reason(caller: Caller, fields: dict[str, Any], path: str) -> Refused | None:
    """The worker's refusal of a request, which it is asked to prepare once more, or else the
    failure of its answer, which is computed once more. None if that does not tell.
    """
    prompts = fields.get("prompt")
    several = path == COMPLETIONS and isinstance(prompts, list) and not any(type(one) is int for one in prompts)
    requests = [{**fields, "prompt": one} for one in prompts[:_MOST_PROMPTS]] if several and prompts else [fields]
    try:
        async with asyncio.timeout(REASON_S):
            for request in requests:
                if (found := await _refusal(caller, request, path, ONLY_CHECKED)) is not None:
                    return found
            async with asyncio.timeout(_TURN_S):
                await caller.door.reasons.acquire()
            try:
                for request in requests:
                    if (found := await _refusal(caller, request, path)) is not None:
                        return found
            finally:
                caller.door.reasons.release()
    except Refused as refused:
        return refused if refused.status < 500 else None
    except TimeoutError:
        return None
    return None


async def _picture(caller: Caller, fields: dict[str, Any], path: str) -> Refused | None:
    """The refusal of a chat with pictures that the frontend fails on and takes without them: the
    model's chat template knows texts alone. None for another chat.
    """
    places = picture_places(fields.get("messages"))
    if not places:
        return None
    texts = {**fields, "messages": [_without_pictures(one) for one in fields["messages"]]}
    try:
        if await _refusal(caller, texts, path, ONLY_CHECKED) is not None:
            return None
    except Refused:
        return None
    return FieldRefused(f"{places[0]}.{PART}.url", "the chat template of this model takes text only")


def _without_pictures(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": "".join(part["text"] for part in message["content"] if not is_picture(part))}


async def _refusal(caller: Caller, fields: dict[str, Any], path: str, *annotations: str) -> Refused | None:
    """The refusal in a chunk of an answer.

    Raises:
        Refused: the answer is another error.
    """
    without = _NOT_CHECKED if ONLY_CHECKED in annotations else _NOT_ASKED_AGAIN
    again = {name: value for name, value in fields.items() if name not in without}
    again["nvext"] = with_annotations(with_engine_data(fields.get("nvext")), WANTS_REFUSAL, *annotations)
    other_id = Part(caller, caller.request.num_before + 1)  # a worker may still have the client's own in use
    chunks = await ask(other_id, again, path)
    try:
        async for chunk in chunks:
            found = ((chunk.get("nvext") or {}).get("engine_data") or {}).get(REFUSAL)
            if found is not None:
                message = found["message"]
                return Refused(400, message, found["field"], kind=INVALID, code=code_of(message))
            if ONLY_CHECKED in annotations:  # nothing comes behind the first chunk
                return None
    finally:
        chunks.close()
    return None
