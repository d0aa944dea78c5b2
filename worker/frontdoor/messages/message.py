"""The whole message that the events of a stream put together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from worker.frontdoor.errors import Refused
from worker.frontdoor.messages.events import Event
from worker.frontdoor.values import Object

_TOO_DEEP, _TOO_LARGE = "is nested too deep for JSON", "has a number that is too large for JSON here"


def whole_message(events: Iterable[Event]) -> Object:
    """The message of all events of an answer: streamed or not, an answer is the same."""
    message: Object = {}
    blocks: list[Object] = []
    texts: dict[tuple[int, str], list[str]] = {}  # parts by the block's index and the name
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = dict(event["message"])
        elif kind == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            for name, value in event["delta"].items():
                if name != "type":
                    texts.setdefault((event["index"], name), []).append(value)
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
            if "nvext" in event:
                message["nvext"] = event["nvext"]
    for (index, name), parts in texts.items():
        block = blocks[index]
        if name == "partial_json":
            block["input"] = input_of("".join(parts))
        else:
            block[name] = parts[-1] if name == "signature" else block[name] + "".join(parts)
    message["content"] = blocks
    return message


def input_of(text: str) -> Any:
    """The input of a call; of one that was cut, what of it is complete, as the client's library
    makes it of a stream.

    Raises:
        Refused: 500, it is nested too deep, or has an integer of too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise _only_as_text(_TOO_DEEP) from None
    except json.JSONDecodeError:
        pass
    except ValueError:  # of `int`, which reads so many digits and no more
        raise _only_as_text(_TOO_LARGE) from None
    try:
        found = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def written(message: Object) -> bytes:
    """A whole message as it is sent.

    Raises:
        Refused: 500, the input of a call is nested too deep, or has a number beyond float64.
    """
    try:
        return json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    except RecursionError:
        raise _only_as_text(_TOO_DEEP) from None
    except ValueError:
        raise _only_as_text(_TOO_LARGE) from None


def _only_as_text(problem: str) -> Refused:
    return Refused(500, f"the input of a call {problem}; a stream has it as text", kind="server_error")


def server_sent(events: Iterable[Event]) -> bytes:
    """Events as they are sent."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dumps(event, separators=(",", ":")).encode())
        for event in events
    )
