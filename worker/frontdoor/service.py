"""Handlers of the small paths that evaluation harnesses, clients and load balancers ask for."""

from __future__ import annotations

from typing import Any

from worker import __version__
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.exchange import Exchange
from worker.frontdoor.fields import CHAT, COMPLETIONS
from worker.frontdoor.summaries import Source, reply_of, served_models
from worker.frontdoor.tokens import prompt_tokens
from worker.frontdoor.values import model_name, printable, truth
from worker.runtimes.direct.pictures import picture_places

_OF_PROMPTS = ("model", "prompt", "add_special_tokens", "return_token_strs")
_OF_CHATS = (
    "model",
    "messages",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "chat_template_args",
    "add_generation_prompt",
    "continue_final_message",
    "return_token_strs",
)
_OF_TOKENS = ("model", "tokens")
MAX_TOKENS = 1_000_000
"""Token ids of one request to ``/detokenize``: about as many as a body has room for."""


async def version(exchange: Exchange) -> None:
    """Answer ``GET /version``, in vLLM's form."""
    await exchange.answer(200, {"version": __version__})


async def ping(exchange: Exchange) -> None:
    """Answer ``/ping`` as SageMaker wants it: an empty 200 where models are served, else 503."""
    upstreams = exchange.door.upstreams
    reply = await reply_of(upstreams, Source(upstreams.in_turn(), "/health", "The frontend"))
    await exchange.answer(200 if reply.status == 200 else 503, b"")


async def tokenize(exchange: Exchange) -> None:
    """Answer ``POST /tokenize``, in vLLM's form: the token ids of a prompt, or of a chat.

    Raises:
        Refused: a field is refused.
    """
    fields = exchange.fields()
    is_chat = "messages" in fields
    if is_chat and "prompt" in fields:
        raise FieldRefused("prompt", "cannot be given beside messages; give one of them")
    _check_names(fields, _OF_CHATS if is_chat else _OF_PROMPTS, "/tokenize")
    with_texts, special = (fields.pop(name, None) for name in ("return_token_strs", "add_special_tokens"))
    truth("return_token_strs", with_texts)
    if special is not None and not truth("add_special_tokens", special):
        raise FieldRefused("add_special_tokens", "false is not supported: ids are those of a request with this prompt")
    for place in picture_places(fields.get("messages")):
        raise FieldRefused(place, "must be of type text: the engine alone knows which tokens a picture becomes")
    model = model_name("model", fields.get("model"))
    entry = await _served(exchange, model)
    if not is_chat and not isinstance(fields.get("prompt"), str):
        raise FieldRefused("prompt", "must be a text; with messages, those of a chat are counted")
    ids = [] if fields.get("prompt") == "" else await prompt_tokens(exchange, fields, CHAT if is_chat else COMPLETIONS)
    texts = {"token_strs": await exchange.door.texts.token_texts(ids)} if with_texts else {}
    await exchange.answer(
        200,
        {"count": len(ids), "max_model_len": entry.get("context_window"), "tokens": ids, "token_strs": None, **texts},
    )


async def detokenize(exchange: Exchange) -> None:
    """Answer ``POST /detokenize``, in vLLM's form: the text of token ids, special ones among it.

    Raises:
        Refused: a field is refused.
    """
    fields = exchange.fields()
    _check_names(fields, _OF_TOKENS, "/detokenize")
    ids = await exchange.read(_token_ids)
    await _served(exchange, model_name("model", fields.get("model")))
    texts = exchange.door.texts
    await texts.tokenizer()
    await exchange.answer(200, {"prompt": await exchange.read(lambda _: texts.text(ids))})


def _token_ids(fields: dict[str, Any]) -> list[int]:
    ids = fields.get("tokens")
    if not isinstance(ids, list) or len(ids) > MAX_TOKENS or not all(type(each) is int for each in ids):
        raise FieldRefused("tokens", f"must be a list of at most {MAX_TOKENS} token ids")
    return ids


def _check_names(fields: dict[str, Any], known: tuple[str, ...], path: str) -> None:
    for name in fields:
        if name not in known:
            raise FieldRefused(printable(name), f"is not a field of {path}", code="unknown_parameter")


async def _served(exchange: Exchange, model: str) -> dict[str, Any]:
    """The entry of a model in the frontend's list.

    Raises:
        Refused: 404, it is not served; 503, the frontend does not answer.
    """
    found = await served_models(exchange.door.upstreams)
    if model not in found:
        raise Refused(
            404,
            f"model: {printable(model)} is not served; /v1/models lists those that are",
            "model",
            code="model_not_found",
        )
    return dict(found[model])
