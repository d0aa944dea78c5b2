"""Requests of the front door's own to a frontend, on behalf of a client's."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Protocol

from worker.frontdoor.chunks import Chunks
from worker.frontdoor.encoding import encoded_in_turns
from worker.frontdoor.errors import Refused
from worker.frontdoor.fields import CHAT
from worker.frontdoor.request_intake import AdmittedRequest
from worker.frontdoor.requests import HALF_A_PAIR, TOO_DEEP
from worker.frontdoor.server import FrontDoor


class Caller(Protocol):
    """Requester on whose behalf a frontend is asked: an `Exchange`, or a batch.

    Attributes:
        door: State that all connections share.
        request: The request whose headers are sent on.
    """

    door: FrontDoor
    request: AdmittedRequest


class Part:
    """A `Caller` for some of the choices of another; the first of all has the id that its client
    chose.

    Args:
        caller: Requester for all choices.
        num_before: Choices before these.
    """

    def __init__(self, caller: Caller, num_before: int) -> None:
        self.door = caller.door
        self.request = replace(caller.request, num_before=num_before)


async def ask(caller: Caller, fields: dict[str, Any], path: str = CHAT) -> Chunks:
    """Send a chat or completion to a frontend, after all checks; the caller closes the chunks.

    Raises:
        Refused: a field is refused.
    """
    options = fields.get("stream_options")
    if options is None or isinstance(options, dict):  # otherwise it is refused
        options = {**(options or {}), "include_usage": True}
    streamed = {**fields, "stream": True, "stream_options": options}
    return Chunks(caller.door.upstreams, caller.request.translated(path, await _bodies(caller, streamed, path)))


async def _bodies(caller: Caller, fields: dict[str, Any], path: str) -> tuple[bytes, ...]:
    """The bodies of the requests for each choice. Raises `Refused`."""
    try:
        # `fields` may be large, and are changed
        text = await encoded_in_turns(fields)
        return await caller.door.rewriting.by_size(
            caller.request.label,
            len(text),
            lambda: caller.door.rewrite_fields(path, json.loads(text), caller.request.head),
        )
    except RecursionError:
        raise Refused(400, TOO_DEEP) from None
    except UnicodeEncodeError:
        raise Refused(400, HALF_A_PAIR) from None
