"""OpenAI's requests of a batch → messages of this runtime, and answers → lines of results.

Every field is honoured, without effect by nature, or refused with its name.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from adapters.client import from_openai_logit_bias
from worker.engines import LEAST_LOGPROB
from worker.errors import InvalidRequest, ServingError, path_within, shown
from worker.requests.prompt_scores import END_TOKEN, TokenText
from worker.runtimes.direct.openai_fields import guide_of, places
from worker.runtimes.nats import protocol
from worker.runtimes.nats.batch.layout import URLS, QueuedRequest, request_digest
from worker.sampling import SamplingParams

CHAT, COMPLETIONS = URLS

_NO_EFFECT = frozenset({"model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})
_OWN = {
    CHAT: frozenset(
        {
            *("messages", "max_completion_tokens", "logprobs", "top_logprobs", "stop", "stream", "logit_bias"),
            *("response_format", "logits_processors", "chat_template_args", "tools", "tool_choice"),
        }
    ),
    COMPLETIONS: frozenset({"prompt", "logprobs", "stop", "stream", "logit_bias", "logits_processors"}),
}

_SECTIONS = ("sampling_options", "stop_conditions", "output_options")
_ENTRY = re.compile(r"logits_processors\.processors\[(\d+)\](.*)", re.DOTALL)

Message = dict[str, Any]


def message_of(url: str, body: Any, digest: str, record: type[SamplingParams] = SamplingParams) -> Message:
    """The message that asks this runtime for the answer to a body.

    Args:
        url: One of `URLS`.
        body: JSON data of the request.
        digest: Hexadecimal digest of the request; the seed is made of it, unless the body has one.
        record: Class whose controls are known; see `places`.

    Raises:
        InvalidRequest: a field is unknown or cannot be honoured.
    """
    if url not in URLS:
        raise InvalidRequest("url", f"must be one of {', '.join(URLS)}, got {shown(url)}")
    if not isinstance(body, Mapping):
        raise InvalidRequest("body", f"must be an object, got {shown(body)}")
    given = {name: value for name, value in body.items() if value is not None and name not in _NO_EFFECT}
    message: Message = {section: {} for section in _SECTIONS}
    sections = places(record)
    for name, value in given.items():
        section = sections.get(name)
        if section is not None:
            message[section][name] = value
        elif name not in _OWN[url]:
            raise InvalidRequest(f"body.{name[:60]}", f"is not a field of {url} in batches")
    message["sampling_options"].setdefault("seed", int(digest[:13], 16))
    _add_prompt(message, url, given)
    _add_stops(message, given)
    _add_logprobs(message, url, given)
    _add_processors(message, given)
    if given.get("stream", False) is not False:
        raise InvalidRequest("body.stream", "must be false: the answer comes as a line of the results")
    return message


def _add_prompt(message: Message, url: str, given: Mapping[str, Any]) -> None:
    name = "messages" if url == CHAT else "prompt"
    prompt = given.get(name)
    if prompt is None:
        raise InvalidRequest(f"body.{name}", "is missing")
    if url == CHAT:
        message["messages"] = prompt
        message["chat_template_args"] = given.get("chat_template_args")
        tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
        if tools and choice != "none":
            raise InvalidRequest("body.tools", "are supported only with tool_choice none: no tool call is parsed here")
        if choice not in ("none", "auto"):
            raise InvalidRequest("body.tool_choice", f"must be none or auto without tools, got {shown(choice)}")
        message["tools"] = None if tools == [] else tools
        return
    message["prompt" if isinstance(prompt, str) else "token_ids"] = prompt


def _add_stops(message: Message, given: Mapping[str, Any]) -> None:
    stop = given.get("stop")
    if stop is not None:
        message["stop_conditions"]["stop"] = [stop] if isinstance(stop, str) else stop
    if "max_completion_tokens" in given:
        if "max_tokens" in given:
            raise InvalidRequest("body.max_tokens", "is given beside max_completion_tokens; give one of them")
        message["stop_conditions"]["max_tokens"] = given["max_completion_tokens"]


def _add_logprobs(message: Message, url: str, given: Mapping[str, Any]) -> None:
    wanted = given.get("logprobs")
    if url == COMPLETIONS:
        if wanted is not None:
            message["output_options"]["logprobs"] = wanted
        return
    if wanted is not None and not isinstance(wanted, bool):
        raise InvalidRequest("body.logprobs", f"must be true or false, got {shown(wanted)}")
    if wanted:
        message["output_options"]["logprobs"] = given.get("top_logprobs", 0)
    elif given.get("top_logprobs"):
        raise InvalidRequest("body.top_logprobs", "needs logprobs")


def _add_processors(message: Message, given: Mapping[str, Any]) -> None:
    chosen, bias = given.get("logits_processors"), given.get("logit_bias")
    if bias is not None:
        if not isinstance(bias, Mapping):
            raise InvalidRequest("body.logit_bias", f"must be an object of token ids and numbers, got {shown(bias)}")
        try:
            made = from_openai_logit_bias(bias)
        except ValueError as error:
            raise InvalidRequest("body.logit_bias", str(error).removeprefix("logit_bias: ")) from None
        if bias:
            chosen = _joined(chosen, made)
    if chosen is not None:
        message["logits_processors"] = chosen
    form = given.get("response_format")
    if form is not None:
        try:
            guide = guide_of(form)
        except InvalidRequest as error:
            raise InvalidRequest(f"body.{error.field}", error.problem) from None
        if guide is not None:
            message["sampling_options"]["guided_decoding"] = guide


def _joined(chosen: Any, processor: Message) -> Any:
    """``logits_processors`` with one more; one of another form stays, and is refused where it is
    read.
    """
    options = {"processors": chosen} if isinstance(chosen, list) else {} if chosen is None else chosen
    listed = options.get("processors", []) if isinstance(options, Mapping) else None
    return {**options, "processors": [*listed, processor]} if isinstance(listed, list) else chosen


def told(error: InvalidRequest, url: str, body: Mapping[str, Any]) -> InvalidRequest:
    """The refusal of the message that `message_of` made of a body as one of the body.

    Args:
        error: The refusal; one that is of the body already stays as it is.
        url: One of `URLS`.
        body: JSON data of the request.
    """
    name = _name(error.field, url, body)
    is_of_body = re.split(r"[.\[]", name, maxsplit=1)[0] in body
    return InvalidRequest(f"body.{name}", error.problem) if is_of_body else error


def _name(field: str, url: str, body: Mapping[str, Any]) -> str:
    """The field of a body that a field of its message is made of."""
    entry = _ENTRY.fullmatch(field)
    if entry is not None:
        chosen = body.get("logits_processors")
        listed = chosen.get("processors") if isinstance(chosen, Mapping) else chosen
        if int(entry[1]) >= len(listed or ()):
            return "logit_bias"
        return f"logits_processors[{entry[1]}]{entry[2]}" if isinstance(chosen, list) else field
    if path_within(field, "token_ids") is not None:
        return "messages" if url == CHAT else field.replace("token_ids", "prompt", 1)
    section, _, name = field.partition(".")
    if section not in _SECTIONS:
        return field
    if path_within(name, "guided_decoding") is not None:
        return "response_format"
    renamed = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}.get(name, name)
    return name if body.get(renamed) is None else renamed


def response_body(
    request: QueuedRequest,
    body: Mapping[str, Any],
    chunks: Iterable[Message],
    token_text: TokenText | None,
    special_ids: Collection[int] = (),
) -> Any:
    """The response to a request, as OpenAI's endpoint would give it.

    Nothing in it depends on when and beside what it was computed: ids are made of the request,
    ``created`` is 0, and of the usage cached tokens are left out.

    Args:
        request: The request.
        body: JSON data of it.
        chunks: Chunks of the answer.
        token_text: Texts of tokens, None without a tokenizer.
        special_ids: Ids of special tokens, which texts leave out unless they are asked for.
    """
    hidden = () if body.get("skip_special_tokens") is False else special_ids
    text_of = cache(token_text or (lambda token_id: b""))  # most tokens come again and again
    choices: dict[int, Message] = {}
    prompt_tokens = completion_tokens = 0
    for chunk in chunks:
        choice = choices.setdefault(
            chunk["index"],
            {"texts": [], "ids": [], "logprobs": [], "tops": [], "reason": None, "data": None, "end": None},
        )
        choice["texts"].append(chunk.get("text", ""))
        choice["ids"] += chunk["token_ids"]
        choice["logprobs"] += chunk.get("log_probs", ())
        choice["tops"] += chunk.get("top_logprobs", ())
        choice["reason"] = chunk.get("finish_reason", choice["reason"])
        data = dict(chunk.get("engine_data") or {})
        choice["end"] = data.pop(END_TOKEN, None)
        choice["data"] = data or choice["data"]
        if "completion_usage" in chunk:
            prompt_tokens = chunk["completion_usage"]["prompt_tokens"]
            completion_tokens += chunk["completion_usage"]["completion_tokens"]
    is_chat = request.url == CHAT
    made = [_choice(index, choices[index], is_chat, text_of, hidden) for index in sorted(choices)]
    name = "chatcmpl" if is_chat else "cmpl"
    response = {
        "id": f"{name}-{request_digest(request.custom_id, request.url, body)}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,
        "model": body.get("model", ""),
        "choices": made,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    found = [choices[index]["data"] for index in sorted(choices)]
    extensions = [None if data is None else {"engine_data": data} for data in found]
    if not any(extensions):
        return response
    return {**response, "nvext": extensions[0] if len(extensions) == 1 else {"choices": extensions}}


def _choice(index: int, choice: Message, is_chat: bool, text_of: TokenText, hidden: Collection[int]) -> Message:
    text = "".join(choice["texts"])
    logprobs = _logprobs(choice, text_of) if choice["logprobs"] else None
    if is_chat:
        content = None if logprobs is None else {"content": logprobs, "refusal": None}
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": content, "finish_reason": choice["reason"]}
    hides = [token_id in hidden for token_id in choice["ids"]]
    if choice["end"] is not None:  # log probabilities were asked for
        logprobs, hides = [*(logprobs or ()), _end(choice["end"])], [*hides, True]
    lists = None if logprobs is None else _of_completion(logprobs, hides, len(text))
    return {"index": index, "text": text, "logprobs": lists, "finish_reason": choice["reason"]}


def _logprobs(choice: Message, text_of: TokenText) -> list[Message]:
    """The log probabilities in the form of OpenAI's chats."""
    tops = choice["tops"] or [[]] * len(choice["ids"])
    found = []
    for token_id, logprob, top in zip(choice["ids"], choice["logprobs"], tops, strict=True):
        entry = _token(text_of(token_id), logprob)
        entry["top_logprobs"] = [_token(text_of(each["token_id"]), each["logprob"]) for each in top]
        found.append(entry)
    return found


def _token(text: bytes, logprob: float) -> Message:
    return {"token": text.decode(errors="replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(text)}


def _end(token: Mapping[str, Any]) -> Message:
    """The same of the token that ended an answer without being shown, as the worker tells it."""
    found: Mapping[str, Any] = token["logprobs"]
    entries = {
        token_id: _token(bytes(one.get("bytes", one.get("decoded_token", "").encode())), one["logprob"])
        for token_id, one in found.items()
    }
    return {**entries[str(token["token_id"])], "top_logprobs": list(entries.values())}


def _of_completion(entries: Iterable[Message], hides: Iterable[bool], end: int) -> Message:
    """The same in the form of OpenAI's completions; `hides` tells which tokens the text leaves out,
    and `end` is its length.

    A token that is part of a character begins where that does. Of alternatives with the same text
    there is the most likely one's.
    """
    decoder, length = getincrementaldecoder("utf-8")("replace"), 0
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry, is_hidden in zip(entries, hides, strict=True):
        top = {entry["token"]: entry["logprob"]}
        for other in entry["top_logprobs"]:
            top[other["token"]] = max(other["logprob"], top.get(other["token"], other["logprob"]))
        lists["tokens"].append(entry["token"])
        lists["token_logprobs"].append(entry["logprob"])
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(min(length, end))
        length += 0 if is_hidden else len(decoder.decode(bytes(entry["bytes"])))
    return lists


def result_line(request: QueuedRequest, status: int, body: Any) -> Message:
    """A line of the results: OpenAI's output format."""
    made_of = digest_of(request)
    response = {"status_code": status, "request_id": f"req_{made_of}", "body": body}
    return {"id": f"batch_req_{made_of}", "custom_id": request.custom_id, "response": response, "error": None}


def failed_line(request: QueuedRequest, error: ServingError) -> Message:
    """The line of a request that was refused or has failed."""
    body = protocol.error_body(error)
    shown_error = {"message": body["message"], "type": body["type"], "param": body.get("field"), "code": body["code"]}
    return result_line(request, body["code"], {"error": shown_error})


def unanswered_line(request: QueuedRequest, code: str, message: str) -> Message:
    """The line of a request that was never answered."""
    error = {"code": code, "message": message}
    line = result_line(request, 0, None)
    return {**line, "response": None, "error": error}


def digest_of(request: QueuedRequest) -> str:
    """Digest for the ids of a request, whether its body is in the message or not."""
    return request_digest(request.custom_id, request.url, request.body_digest or request.body)
