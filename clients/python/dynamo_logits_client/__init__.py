"""Client of dynamo-logits-worker: logits processors by name, receipts, replays.

    from dynamo_logits_client import Client, logits_processors, processors as p

    answer = Client().chat(
        model=..., messages=...,
        **logits_processors(p.min_tokens(n=8), receipt=True),
    )

Needs the standard library alone; `AsyncClient` needs httpx. With the ``openai`` package the same
selection is ``extra_body``, and `receipt_of` reads its answers.
"""

from typing import TYPE_CHECKING

from dynamo_logits_client import processors
from dynamo_logits_client.answers import Answer, Chunk, StreamReader
from dynamo_logits_client.client import Client, Stream
from dynamo_logits_client.errors import AnswerFailed, ClientError, Refused, TimedOut, Unreachable
from dynamo_logits_client.receipts import Receipt, last_receipts, parse_receipt, receipt_of, receipts_of
from dynamo_logits_client.replay import ReplayRequest, digest, replay_request
from dynamo_logits_client.selections import (
    from_openai_logit_bias,
    from_openai_tools,
    healed,
    logits_processors,
    processor,
    selection,
)
from dynamo_logits_client.version import __version__

if TYPE_CHECKING:
    from dynamo_logits_client.async_client import AsyncClient as AsyncClient
    from dynamo_logits_client.async_client import AsyncStream as AsyncStream

__all__ = [
    "Answer",
    "AnswerFailed",
    "Chunk",
    "Client",
    "ClientError",
    "Receipt",
    "Refused",
    "ReplayRequest",
    "Stream",
    "StreamReader",
    "TimedOut",
    "Unreachable",
    "__version__",
    "digest",
    "from_openai_logit_bias",
    "from_openai_tools",
    "healed",
    "last_receipts",
    "logits_processors",
    "parse_receipt",
    "processor",
    "processors",
    "receipt_of",
    "receipts_of",
    "replay_request",
    "selection",
]


def __getattr__(name: str) -> object:
    """`AsyncClient` and `AsyncStream`, which import httpx; ``import *`` leaves them out."""
    if name not in ("AsyncClient", "AsyncStream"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from dynamo_logits_client import async_client
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        problem = f"{name} needs httpx: pip install 'dynamo-logits-client[httpx]'"
        raise ModuleNotFoundError(problem, name="httpx") from None
    return getattr(async_client, name)
