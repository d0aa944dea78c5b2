"""Whatever one field of a request is: the answer is no 5xx, and a 4xx names the field."""

from __future__ import annotations

import asyncio
import json

from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mutated_requests import mutated_requests, problem
from test_frontdoor_exchange import STREAM_HEAD, as_refused, event
from test_frontdoor_server import house, post

MODELS = b'{"object": "list", "data": [{"id": "m", "object": "model", "context_window": 64}]}'
ELSEWHERE = ("/detokenize", "/v1/batches")
"""Paths that need a tokenizer, or a store; they are in `tests/e2e/`."""

FIELDS = ("token_ids", "sampling_options.guided_decoding.args.schema", "logits_processors.processors[0].args.n")


@given(st.lists(mutated_requests("m", without=ELSEWHERE), min_size=6, max_size=6), st.sampled_from(FIELDS))
@settings(max_examples=examples(60), deadline=None)
def test_a_bad_field_is_named(requests: list[tuple[str, bytes]], field: str) -> None:
    """Behind the front door everything is refused, and the frontend loses why, as 1.4.2 does."""

    async def run() -> None:
        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            request = at.frontends[0].requests[-1]
            if request.startswith(b"POST"):
                asked = json.loads(request.partition(b"\r\n\r\n")[2])
                writer.write(STREAM_HEAD + event(as_refused(asked, field, "is bad")) + b"0\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
            await writer.drain()

        async with house(say) as at:
            for path, body in requests:
                head, _, text = (await at.ask(post(body, path=path))).partition(b"\r\n\r\n")
                assert problem(int(head.split()[1]), text.decode()) is None, (path, body, head, text)

    asyncio.run(run())
