"""The prompt of a receipt, from a file of token ids, of a request body or of text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from adapters.strict_json import has_half_a_pair
from worker.arguments import Arguments
from worker.errors import ConfigurationError, shown
from worker.replay.recorded import RecordedReceipt
from worker.requests.receipts import TokenDigest
from worker.runtimes.direct.contents import fitted, normalised, takes_texts
from worker.runtimes.direct.openai_fields import with_objects


def read_template(arguments: Arguments) -> str | None:
    """The chat template of ``--custom-jinja-template``, None without one.

    Raises:
        ConfigurationError: it cannot be read.
    """
    path = arguments.custom_jinja_template
    try:
        return None if path is None else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--custom-jinja-template {path}: {error}") from None


def default_thinking(arguments: Arguments) -> dict[str, Any]:
    """Variables that ``--dyn-default-thinking-mode`` gives the chat template of a request that says
    nothing of thinking.
    """
    return _of_mode(arguments.dyn_default_thinking_mode)


def read_prompt(path: Path, receipt: RecordedReceipt, tokenizer: Any, arguments: Arguments | None = None) -> list[int]:
    """The prompt's token ids, of the digest in the receipt.

    Args:
        path: A JSON list of token ids; or a JSON object with ``messages`` or ``prompt``, as it was
            sent; or the text itself.
        receipt: Receipt of the answer.
        tokenizer: Tokenizer of the checkpoint.
        arguments: Options of the worker, whose chat template and thinking count.

    Raises:
        ConfigurationError: it cannot be read, or is another prompt.
    """
    try:
        content = path.read_bytes().decode("utf-8")  # with the ends of lines that the text has
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--prompt-file {path}: {error}") from None
    found = [list(ids) for ids in _encodings(path, content, tokenizer, arguments)]
    for ids in found:
        if str(TokenDigest(ids)) == receipt.prompt_digest:
            return ids
    problem = _problem_of_fields(content)
    if problem is not None:
        raise ConfigurationError(f"--prompt-file {path}: {problem}")
    numbers = " or ".join(dict.fromkeys(str(len(ids)) for ids in found)) or "no"
    raise ConfigurationError(
        f"prompt_digest: the receipt is of another prompt: it had {receipt.prompt_length} tokens of digest "
        f"{receipt.prompt_digest}, --prompt-file {path} has {numbers} tokens; give the token ids as a JSON list"
    )


def _encodings(path: Path, content: str, tokenizer: Any, arguments: Arguments | None) -> list[Sequence[int]]:
    """The token ids that a prompt file may stand for."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        data = content
    if _are_ids(data):
        return [data]
    texts = _saved(content)
    if isinstance(data, dict) and _are_ids(data.get("prompt")):
        return [data["prompt"]]
    if isinstance(data, dict) and isinstance(data.get("prompt"), str):
        texts = [data["prompt"]]
    elif isinstance(data, dict) and isinstance(data.get("messages"), list):
        texts = _rendered(data, tokenizer, arguments)
    if any(map(has_half_a_pair, texts)):
        raise ConfigurationError(f"--prompt-file {path}: a text has half of a surrogate pair")
    return [tokenizer.encode(text, add_special_tokens=special) for text in texts for special in (False, True)]


def _saved(content: str) -> list[str]:
    """The texts that a file may be of: editors add a line's end, or change all of them."""
    texts = (content, content.replace("\r\n", "\n"))
    return list(dict.fromkeys(text.removesuffix(end) for text in texts for end in ("", "\n", "\r\n")))


def _rendered(body: Mapping[str, Any], tokenizer: Any, arguments: Arguments | None) -> list[str]:
    """The prompts that the chat template may have made of a body: of its messages as the front door
    or a frontend alone gives them to the template, and as they are.
    """
    for name, (kinds, wanted) in _TEMPLATE_FIELDS.items():
        if body.get(name) is not None and not isinstance(body[name], kinds):
            raise ConfigurationError(f"--prompt-file: {name} must be {wanted}, got {shown(body[name])}")
    template = None if arguments is None else read_template(arguments)
    thinking = {} if arguments is None or body.get("thinking") is not None else default_thinking(arguments)
    messages = fitted(with_objects(body["messages"]), takes_texts(tokenizer, template))
    options = {"tools": body.get("tools"), "chat_template": template, "tokenize": False}
    texts, problem = list[str](), ""
    by_default: list[dict[str, Any]] = [{}, thinking, {name: thinking[name] for name in _THINKING if thinking}]
    for given, default in product((normalised(messages), messages, body["messages"]), by_default):
        try:
            variables = default | _template_variables(body)
            texts.append(tokenizer.apply_chat_template(given, **options, **variables))
        except Exception as error:  # the boundary of the checkpoint's chat template
            problem = str(error)
    if not texts:
        raise ConfigurationError(f"--prompt-file: the chat template failed: {problem}")
    return list(dict.fromkeys(texts))


def _problem_of_fields(content: str) -> str | None:
    """The field of a body that should be the prompt and is none, and what it must be, if so."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or _are_ids(body.get("prompt")) or isinstance(body.get("prompt"), str):
        return None
    if body.get("prompt") is not None:
        return f"prompt must be a text or a list of token ids, got {shown(body['prompt'])}"
    if body.get("messages") is not None and not isinstance(body["messages"], list):
        return f"messages must be a list of messages, got {shown(body['messages'])}"
    return None


_TEMPLATE_FIELDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "tools": ((list,), "a list of tools"),
    "chat_template_args": ((dict,), "an object"),
    "chat_template_kwargs": ((dict,), "an object"),
    "thinking": ((bool, dict), "true, false or an object"),
}
"""Types of a body's fields that the chat template is given, and what they must be."""

_THINKING = ("thinking", "enable_thinking")
"""Variables of chat templates that say whether the model thinks."""

_OF_THE_END = ("add_generation_prompt", "continue_final_message")
"""Fields of a body that say how the prompt of a chat ends."""


def _template_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template's own variables, as Dynamo's frontend makes them of a body's fields."""
    given = {name: body[name] for name in _OF_THE_END if body.get(name) is not None}
    given |= body.get("chat_template_args") or body.get("chat_template_kwargs") or {}
    variables = {"add_generation_prompt": not given.get("continue_final_message"), **given}
    thinking = body.get("thinking")
    mode = (
        thinking.get("type")
        if isinstance(thinking, dict)
        else {True: "enabled", False: "disabled", None: None}[thinking]
    )
    variables |= _of_mode(mode)
    if body.get("reasoning_effort") is not None:
        variables["reasoning_effort"] = body["reasoning_effort"]
    return variables


def _of_mode(mode: str | None) -> dict[str, Any]:
    """The chat template's variables for a mode of thinking, None for none."""
    switches = dict.fromkeys(_THINKING, mode == "enabled") if mode in ("enabled", "disabled") else {}
    return {} if mode is None else {**switches, "thinking_mode": mode}


def _are_ids(data: object) -> bool:
    return isinstance(data, list) and bool(data) and all(type(one) is int and 0 <= one < 2**31 for one in data)
