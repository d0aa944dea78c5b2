"""The endpoints of the Responses API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from worker.frontdoor.encoding import encoded
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.exchange import Exchange, Handler
from worker.frontdoor.field_checks import Body
from worker.frontdoor.fields import CHAT
from worker.frontdoor.query import integer_in, is_descending
from worker.frontdoor.refusal_reading import checked
from worker.frontdoor.requests import TOO_DEEP
from worker.frontdoor.responses.answer import Answer
from worker.frontdoor.responses.fields import INPUT_TOKENS, RESPONSES, check_fields
from worker.frontdoor.responses.generation import Generation, as_sent
from worker.frontdoor.responses.items import new_id
from worker.frontdoor.responses.kinds import INCLUDES, kind_at
from worker.frontdoor.responses.response import new_response
from worker.frontdoor.responses.service import Prepared, responses_of
from worker.frontdoor.responses.store import StoredItem, is_stored, not_found
from worker.frontdoor.responses.translation import PREVIOUS
from worker.frontdoor.rewriting import AT_ONCE
from worker.frontdoor.tokens import num_prompt_tokens
from worker.frontdoor.values import printable

ONE = RESPONSES + "/{id}"
CANCEL = ONE + "/cancel"
INPUT_ITEMS = ONE + "/input_items"

_MAX_ITEMS = 100


async def create(exchange: Exchange) -> None:
    """``POST /v1/responses``."""
    fields = exchange.fields()
    check_fields(RESPONSES, fields)
    _check_given(fields, "model", "input")
    service = responses_of(exchange.door)
    stored = is_stored(fields, service.store)
    made = await _prepared(exchange, fields)
    answer = Answer(new_response(fields, new_id("resp"), stored=stored))
    store = service.store if stored else None
    generation = Generation(exchange, exchange.owner, made.request, answer, made.context, store)
    if fields.get("background"):
        await _create_in_background(exchange, generation, fields)
    elif fields.get("stream"):
        await _send_as_generated(exchange, generation)
    else:
        await _answer_whole(exchange, generation)


async def _prepared(exchange: Exchange, fields: Body) -> Prepared:
    """See `Responses.prepared`; a long conversation is read beside the event loop."""
    service = responses_of(exchange.door)
    earlier = service.previous(exchange.owner, fields.get(PREVIOUS))
    prepare = partial(service.prepared, exchange.owner, fields, earlier)
    size = len(exchange.body) + sum(len(each.data) for each in earlier)
    return await exchange.door.rewriting.by_size(exchange.request.label, size, prepare)


async def _answer_whole(exchange: Exchange, generation: Generation) -> None:
    """Answer with the finished response; an error is the answer, with its status."""
    async with aclosing(generation.events()) as batches:
        async for events in batches:
            if generation.answer.problem is not None:
                raise generation.answer.problem
            if generation.answer.is_over:
                generation.keep(events)
    await exchange.answer(200, generation.answer.response)


async def _send_as_generated(exchange: Exchange, generation: Generation) -> None:
    """Stream the events; the first ones come with the first chunk, so that errors have a status."""
    first = [*generation.answer.created()]
    async with aclosing(generation.events()) as batches:
        async for events in batches:
            if not exchange.has_begun:
                await exchange.send(b"".join(map(as_sent, first)))
            if generation.answer.is_over:
                generation.keep(events)
            await exchange.send(b"".join(map(as_sent, events)))
    await exchange.end()


async def _create_in_background(exchange: Exchange, generation: Generation, fields: Body) -> None:
    """Answer with the response as it begins, or stream it; it is generated in any case."""
    await _check_chat(exchange, generation)
    is_streamed = fields.get("stream") is True
    run = responses_of(exchange.door).run(generation, exchange.take_room, keeps_events=is_streamed)
    if is_streamed:
        await _send(exchange, run.follow())
    else:
        await exchange.answer(200, run.response)


async def _check_chat(exchange: Exchange, generation: Generation) -> None:
    """Raise `Refused` for what the front door or a worker refuses, while it can be the answer."""
    try:
        body = encoded(generation.request.fields)
        check = partial(exchange.door.rewrite, CHAT, body, exchange.head)
        await exchange.door.rewriting.by_size(exchange.request.label, len(body), check)
        await checked(exchange, generation.request.fields, CHAT)
    except RecursionError:
        raise Refused(400, TOO_DEEP) from None
    except Refused as refused:
        raise generation.request.origins.of_client(refused) from None


async def _send(exchange: Exchange, events: AsyncIterator[bytes]) -> None:
    await exchange.begin_events()
    async for event in events:
        await exchange.send(event)
    await exchange.end()


async def count_input_tokens(exchange: Exchange) -> None:
    """``POST /v1/responses/input_tokens``: the prompt's tokens, as the frontend counts them."""
    fields = exchange.fields()
    check_fields(INPUT_TOKENS, fields)
    _check_given(fields, "model")
    request = (await _prepared(exchange, fields)).request
    try:
        number = await num_prompt_tokens(exchange, request.fields)
    except Refused as refused:
        raise request.origins.of_client(refused) from None
    await exchange.answer(200, {"object": "response.input_tokens", "input_tokens": number})


def _check_given(fields: Body, *names: str) -> None:
    for name in names:
        if fields.get(name) is None:
            raise FieldRefused(name, "must be given", code="missing_required_parameter")


async def retrieve(exchange: Exchange) -> None:
    """``GET /v1/responses/{id}``."""
    query = _query(exchange, "stream", "starting_after", "include_obfuscation")
    if _truth(query, "include_obfuscation"):
        raise FieldRefused("include_obfuscation", "is not supported")
    if _truth(query, "stream"):
        await _stream_again(exchange, query)
        return
    if "starting_after" in query:
        raise FieldRefused("starting_after", "needs stream=true")
    service, owner, response_id = responses_of(exchange.door), exchange.owner, exchange.names["id"]
    stored = None if service.running(owner, response_id) is not None else service.store.get(owner, response_id)
    if stored is None:
        await exchange.answer(200, service.response(owner, response_id))
    else:
        size = stored.num_bytes + sum(each.num_bytes for each in stored.output)
        await _answer_read(exchange, stored.read, size)


async def _answer_read(exchange: Exchange, read: Callable[[], Any], size: int) -> None:
    """Answer with what is read of the store; a large one is read and written beside the event loop,
    in which all other clients would wait.
    """
    if size <= AT_ONCE:
        await exchange.answer(200, read())
    else:
        label = exchange.request.label
        await exchange.answer(200, await exchange.door.rewriting.aside(label, lambda: encoded(read())))


async def _stream_again(exchange: Exchange, query: Mapping[str, str]) -> None:
    owner, response_id = exchange.owner, exchange.names["id"]
    after = integer_in(query, "starting_after", 0, 999_999_999, -1)
    service = responses_of(exchange.door)
    run = service.running(owner, response_id)
    if run is not None and run.keeps_events:
        await _send(exchange, run.follow(after))
        return
    stored = service.store.get(owner, response_id)
    if stored is None and run is None:
        raise not_found(response_id)
    if stored is None or not stored.events:
        raise FieldRefused(
            "stream", "only a response that was created with background: true and stream: true is streamed again"
        )
    await exchange.begin_events()
    for event in stored.events[after + 1 :]:
        await exchange.send(event)
    await exchange.end()


async def delete(exchange: Exchange) -> None:
    """``DELETE /v1/responses/{id}``."""
    _query(exchange)
    response_id = exchange.names["id"]
    await responses_of(exchange.door).delete(exchange.owner, response_id)
    await exchange.answer(200, {"id": response_id, "object": "response", "deleted": True})


async def cancel(exchange: Exchange) -> None:
    """``POST /v1/responses/{id}/cancel``; a response that has ended is the answer as it is."""
    _query(exchange)
    for name in exchange.fields() if exchange.body else ():
        raise FieldRefused(printable(name), "is not a field of this path", code="unknown_parameter")
    owner, response_id = exchange.owner, exchange.names["id"]
    service = responses_of(exchange.door)
    if not service.response(owner, response_id)["background"]:
        raise Refused(
            400, f"{response_id} cannot be cancelled: it was not created with background: true", "response_id"
        )
    run = service.running(owner, response_id)
    if run is not None:
        await run.cancel()
    await exchange.answer(200, service.response(owner, response_id) if run is None else run.response)


async def list_input_items(exchange: Exchange) -> None:
    """``GET /v1/responses/{id}/input_items``: those of previous responses too, the newest first."""
    query = _query(exchange, "limit", "order", "after")
    descending, limit = is_descending(query), integer_in(query, "limit", 1, _MAX_ITEMS, 20)
    items = list(responses_of(exchange.door).context(exchange.owner, exchange.names["id"]))
    if descending:
        items.reverse()
    items = _after(items, query.get("after"))
    page, has_more = items[:limit], len(items) > limit
    await _answer_read(exchange, partial(_page, page, has_more=has_more), sum(each.num_bytes for each in page))


def _page(items: Sequence[StoredItem], *, has_more: bool) -> dict[str, Any]:
    first, last = (items[0].item_id, items[-1].item_id) if items else (None, None)
    data = [each.read() for each in items]
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}


def _after(items: Sequence[StoredItem], item_id: str | None) -> list[StoredItem]:
    if item_id is None:
        return list(items)
    places = [place for place, each in enumerate(items) if each.item_id == item_id]
    if not places:
        raise FieldRefused("after", f"no item of the response has the id {printable(item_id)}")
    return list(items[places[-1] + 1 :])


def _query(exchange: Exchange, *known: str) -> Mapping[str, str]:
    """The parameters of the query. Raises `FieldRefused` for unknown ones."""
    for name, value in exchange.query.items():
        if name in ("include", "include[]"):
            for each in value.split(","):
                kind_at("include", each, INCLUDES)
        elif name not in known:
            raise FieldRefused(printable(name), "is not a parameter of this path", code="unknown_parameter")
    return exchange.query


def _truth(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "false")
    if value not in ("true", "false"):
        raise FieldRefused(name, f"must be true or false, got {printable(value)}")
    return value == "true"


HANDLERS: Mapping[tuple[str, str], Handler] = {
    ("POST", RESPONSES): create,
    ("POST", INPUT_TOKENS): count_input_tokens,
    ("GET", ONE): retrieve,
    ("DELETE", ONE): delete,
    ("POST", CANCEL): cancel,
    ("GET", INPUT_ITEMS): list_input_items,
}
