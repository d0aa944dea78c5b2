"""Token ids of prompts, as the frontend makes them.

A prompt is turned into ids by the frontend that would serve it: it is asked for the request's
``token_ids`` before it generates anything, and then left. So ids and counts are those of the
request itself, chat template and all.
"""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

from worker.frontdoor.asking import Caller, ask
from worker.frontdoor.chat_stream import chat
from worker.frontdoor.errors import Refused
from worker.frontdoor.fields import CHAT
from worker.frontdoor.nvext import with_annotations
from worker.frontdoor.refusal_reading import explained
from worker.runtimes.direct.pictures import picture_places

_IDS = "token_ids"


async def prompt_tokens(caller: Caller, fields: dict[str, Any], path: str = CHAT) -> list[int]:
    """The token ids of the prompt of a chat or completion.

    Args:
        caller: Requester on whose behalf the frontend is asked.
        fields: The request as a client would write it; it is not answered.
        path: `CHAT` or `COMPLETIONS`.

    Raises:
        Refused: a field is refused, or the frontend refuses the request: a prompt beyond the
            model's context, for one.
    """
    asked = {**fields, "max_tokens": 1, "nvext": with_annotations(fields.get("nvext"), _IDS)}
    chunks = await ask(caller, asked, path)
    try:
        async for _ in chunks:
            break
    except Refused as refused:
        raise await explained(caller, asked, path, refused) from None
    finally:
        chunks.close()
    try:
        ids = json.loads(chunks.annotations[_IDS])
        return [int(each) for each in ids]
    except (KeyError, ValueError, TypeError):
        raise Refused(502, "the frontend does not tell the token ids of a prompt", kind="server_error") from None


async def num_prompt_tokens(caller: Caller, fields: dict[str, Any]) -> int:
    """The number of tokens of a chat's prompt; see `prompt_tokens`.

    The engine alone knows how many tokens a picture becomes. So a chat with pictures is answered,
    with one token, and the count is that of its usage.

    Raises:
        Refused: as `prompt_tokens`; the answer has no usage.
    """
    if not picture_places(fields.get("messages")):
        return len(await prompt_tokens(caller, fields))
    usage: dict[str, Any] = {}
    async with aclosing(chat(caller, {**fields, "max_tokens": 1})) as chunks:
        async for chunk in chunks:
            usage = chunk.get("usage") or usage
    if type(usage.get("prompt_tokens")) is not int:
        raise Refused(502, "the frontend does not tell the number of a prompt's tokens", kind="server_error")
    return int(usage["prompt_tokens"])
