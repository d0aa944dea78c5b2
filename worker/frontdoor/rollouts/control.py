"""SGLang's routes that pause, abort, update and put to sleep: each is passed on to all workers.

Trainers whose engines are SGLang's servers ask them at the address that generates; a worker takes
them at its ``--engine-port``. The answer is that of the first worker, or the first error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from worker.frontdoor.encoding import encoded
from worker.frontdoor.errors import Refused
from worker.frontdoor.exchange import Exchange
from worker.frontdoor.summaries import Reply, Source, reply_of

TIMEOUT_S = 600.0
"""Seconds that a worker may take: an update reads a checkpoint."""

_VERSION = "weight_version"


async def control(exchange: Exchange) -> None:
    """Answer one of `worker.frontdoor.routes.CONTROLS`.

    Raises:
        Refused: a worker has refused it, does not answer, or has other weights than another one.
    """
    method = exchange.head.method.decode()
    body = b"" if method == "GET" else encoded(exchange.fields() if exchange.body else {})
    headers = b"authorization: Bearer %b\r\ncontent-type: application/json\r\n" % exchange.door.engine_key.encode()
    target = exchange.head.target.decode("latin-1")
    engines = exchange.door.options.engine_url
    sources = [
        Source([engine], target, f"worker {number}", method, headers, body, TIMEOUT_S)
        for number, engine in enumerate(engines)
    ]
    replies = await asyncio.gather(*(reply_of(exchange.door.upstreams, source) for source in sources))
    answers = [_read(source.name, reply) for source, reply in zip(sources, replies, strict=True)]
    await exchange.answer(200, _together(answers))


def _read(worker: str, reply: Reply) -> Mapping[str, Any]:
    """The answer of a worker. Raises `Refused`."""
    try:
        answer = json.loads(reply.body)
        message = answer.get("message")
    except (ValueError, AttributeError):
        answer, message = {}, None
    if reply.status == 200:
        return dict(answer)
    kind = "server_error" if reply.status >= 500 else "invalid_request_error"
    raise Refused(reply.status, f"{worker}: {message or 'does not answer at its --engine-port'}", kind=kind)


def _together(answers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One answer of all workers. Raises `Refused`."""
    first = answers[0]
    versions = {answer.get(_VERSION) for answer in answers}
    if len(versions) > 1:
        raise Refused(409, f"{_VERSION}: workers have different weights: {', '.join(sorted(map(str, versions)))}")
    if "loads" in first:
        loads = [load for answer in answers for load in answer["loads"]]
        return {**first, "dp_rank_count": len(loads), "loads": [{**load, "dp_rank": i} for i, load in enumerate(loads)]}
    return first
