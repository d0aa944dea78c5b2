"""A message of a client → the requests of `worker.server` that answer it, one per choice.

The message has the fields of docs/request.md, and those of `PROMPTS` and `OWN_FIELDS` instead of
what Dynamo's frontend would have made of a client's request.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapters.catalog import ANNOTATION, MAX_CHOICES
from worker.errors import InvalidRequest, path_within, shown
from worker.requests.fields import SEED_BITS, boolean, stop_strings, text
from worker.runtimes.direct.contents import fitted, normalised
from worker.runtimes.direct.openai_fields import with_objects
from worker.runtimes.direct.pictures import add_pictures, taken_out, told_path

PROMPTS = ("messages", "prompt", "token_ids")
"""The prompt: a chat, a text, or token ids; exactly one of them."""

OWN_FIELDS = (*PROMPTS[:2], "chat_template_args", "tools", "logits_processors", "text")
"""Fields that requests from Dynamo do not have."""


@dataclass(frozen=True, slots=True)
class DirectRequest:
    """The request in a message.

    Attributes:
        fields: Fields of `worker.requests.fields`, the same for each choice.
        num_choices: Number of answers, at least one.
        stops: Stop strings at which the text is cut; the answer ends at those in `fields`.
        include_stop: Whether an answer shows the stop string that ends it.
        min_tokens: Tokens before which stop strings do not end an answer.
        wants_text: Whether answers come as text too.
        skip_special_tokens: Whether that text leaves out special tokens.
        prompt_field: Field of the message that the prompt is in, one of `PROMPTS`.
        pictured: Messages of a chat with pictures, None for others.
    """

    fields: dict[str, Any]
    num_choices: int
    stops: tuple[str, ...]
    include_stop: bool
    min_tokens: int
    wants_text: bool
    skip_special_tokens: bool
    prompt_field: str
    pictured: Any = None

    def told(self, field: str) -> str:
        """The name in the client's message of one of `fields`, which an error is about."""
        if path_within(field, "token_ids") is not None:
            return self.prompt_field
        return told_path(field, self.pictured)

    @property
    def num_generated(self) -> int:
        """Tokens at the end of ``token_ids`` that another worker has generated."""
        continues = self.fields.get("continues")
        return 0 if continues is None else int(continues["generated_tokens"])

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.fields["token_ids"]) - self.num_generated


def parse(
    message: Mapping[str, Any],
    tokenizer: Any,
    template: str | None = None,
    *,
    one_seed: bool = True,
    takes_texts: bool | None = None,
) -> DirectRequest:
    """The request in ``message``, its prompt as token ids.

    Args:
        message: JSON data that the client sent.
        tokenizer: Tokenizer of the checkpoint, None if it has none.
        template: Chat template that replaces the model's own.
        one_seed: Whether several choices without a seed are given one, by which they differ in
            their index alone. Else each draws as a request without a seed does.
        takes_texts: Whether the template takes contents of messages that are texts, rather than
            lists of parts; None leaves them as they are.

    Raises:
        InvalidRequest: one of the fields that only this runtime has, or that it takes care of
            itself, is malformed. The others are checked where the request is served.
    """
    fields = {name: value for name, value in message.items() if name not in OWN_FIELDS and value is not None}
    own = {name: message[name] for name in OWN_FIELDS if message.get(name) is not None}
    urls: list[str] = []
    if "messages" in own:
        own["messages"], urls = taken_out(normalised(with_objects(own["messages"])))
        add_pictures(fields, urls)
        if takes_texts is not None:
            own["messages"] = fitted(own["messages"], takes_texts)
    fields["token_ids"] = _prompt(message, own, tokenizer, template)
    if "logits_processors" in own:
        _select(fields, own["logits_processors"])
    sampling, stopping = _section(fields, "sampling_options"), _section(fields, "stop_conditions")
    num_choices = _choices(sampling.pop("n", None))
    if one_seed and num_choices > 1 and sampling.get("seed") is None:
        sampling["seed"] = secrets.randbits(SEED_BITS)  # one for all choices, which differ in their numbers
    stops = _stops(stopping)
    wants_text = boolean("text", own.get("text", tokenizer is not None))
    if tokenizer is None and (stops or wants_text):
        raise InvalidRequest("stop_conditions.stop" if stops else "text", "the model has no tokenizer")
    output = _section(fields, "output_options")
    if output.get("no_stop_trim") is True and sampling.get("include_stop_str_in_output") is None:
        sampling["include_stop_str_in_output"] = True
    return DirectRequest(
        fields,
        num_choices,
        stops,
        include_stop=sampling.get("include_stop_str_in_output") is True,
        min_tokens=_fewest(stopping),
        wants_text=wants_text,
        skip_special_tokens=output.get("skip_special_tokens") is not False,
        prompt_field=next(name for name in PROMPTS if message.get(name) is not None),
        pictured=message["messages"] if urls else None,
    )


def _fewest(stopping: Mapping[str, Any]) -> int:
    """Tokens before which no stop string counts; the fewest of an answer are its most at most."""
    least, most = stopping.get("min_tokens"), stopping.get("max_tokens")
    if type(least) is not int:
        return 0
    return min(least, most) if type(most) is int else least


def _section(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """A copy of a section of the request, put in its place."""
    section = fields.get(name)
    if section is not None and not isinstance(section, Mapping):
        raise InvalidRequest(name, f"must be a mapping, got {shown(section)}")
    fields[name] = dict(section or {})
    copy: dict[str, Any] = fields[name]
    return copy


def _stops(stopping: dict[str, Any]) -> tuple[str, ...]:
    """The stop strings. They stay fields of the request, whose answer the worker ends where they
    do, with its receipt and the usage of its tokens.
    """
    stops = stop_strings("stop_conditions.stop", stopping.pop("stop", None) or ())
    for index, stop in enumerate(stops):
        if not stop:
            raise InvalidRequest(f"stop_conditions.stop[{index}]", "must be a text that is not empty")
    if stops:
        stopping["stop"] = list(stops)
    return stops


def _choices(value: Any) -> int:
    if value is None:
        return 1
    if type(value) is not int or not 1 <= value <= MAX_CHOICES:
        raise InvalidRequest("sampling_options.n", f"must be an integer from 1 to {MAX_CHOICES}, got {shown(value)}")
    return value


def _prompt(message: Mapping[str, Any], own: Mapping[str, Any], tokenizer: Any, template: str | None) -> Any:
    given = [name for name in PROMPTS if message.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            "request", f"must have exactly one of {', '.join(PROMPTS)}, got {' and '.join(given) or 'none'}"
        )
    for name in ("chat_template_args", "tools"):
        if name in own and given != ["messages"]:
            raise InvalidRequest(name, "belongs to messages")
    if given == ["token_ids"]:
        return message["token_ids"]
    if tokenizer is None:
        raise InvalidRequest(given[0], "is text, and the model has no tokenizer; give token_ids")
    if given == ["prompt"]:
        # Without special tokens that it does not have in it, as in Dynamo's frontends.
        return list(tokenizer.encode(text("prompt", own["prompt"]), add_special_tokens=False))
    return _chat(own, tokenizer, template)


def _chat(own: Mapping[str, Any], tokenizer: Any, template: str | None) -> list[int]:
    messages, options, tools = own["messages"], own.get("chat_template_args", {}), own.get("tools")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, Mapping) for one in messages):
        raise InvalidRequest("messages", f"must be a list of messages, at least one, got {shown(messages)}")
    if not isinstance(options, Mapping) or not options.keys().isdisjoint(_RESERVED):
        raise InvalidRequest("chat_template_args", "must be a mapping of the template's own variables")
    if tools is not None and not isinstance(tools, list):
        raise InvalidRequest("tools", f"must be a list, got {shown(tools)}")
    options = {"add_generation_prompt": not options.get("continue_final_message"), **options}
    try:
        made = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False, **options)
        return list(tokenizer.encode(made, add_special_tokens=False))
    except Exception as error:  # the boundary of the checkpoint's chat template
        raise InvalidRequest("messages", f"the chat template failed: {str(error)[:200]}") from None


_RESERVED = {"conversation", "messages", "tools", "chat_template", "tokenize", "return_dict"}


def _select(fields: dict[str, Any], chosen: Any) -> None:
    """Turn the plain field into the annotation that the worker reads."""
    if isinstance(chosen, list):
        chosen = {"processors": chosen}
    if not isinstance(chosen, Mapping):
        raise InvalidRequest("logits_processors", "must be a list of processors, or an object that has one")
    annotations = fields.get("annotations") or []
    if not isinstance(annotations, list):
        raise InvalidRequest("annotations", f"must be a list of texts, got {shown(annotations)}")
    if any(isinstance(one, str) and one.startswith(ANNOTATION) for one in annotations):
        raise InvalidRequest("logits_processors", "processors are selected more than once; give the field alone")
    fields["annotations"] = [*annotations, ANNOTATION + json.dumps({"version": 1, **chosen}, separators=(",", ":"))]
