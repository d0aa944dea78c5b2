"""Thinking in Anthropic's form: its configuration, and signatures of thinking blocks.

A signature lets a client's copy of a thought be read again: with the text shown it is a digest, so
that a block that was changed is refused; with ``display: omitted`` it is the text itself. Blocks
that another server signed are taken as they are.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from dataclasses import dataclass
from typing import Any

from worker.frontdoor import values
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.values import Object

_DIGEST = "dlw.digest."
_OMITTED = "dlw.text."
MAX_OMITTED = 16 * 2**20
"""Characters of a thought that a signature holds at most."""

_KEYS = {
    "enabled": ("type", "budget_tokens", "display"),
    "disabled": ("type",),
    "adaptive": ("type", "display"),
}
_SWITCHES = ("enable_thinking", "thinking")
"""Arguments by which chat templates open or close a thinking section: Qwen's, and DeepSeek's."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """Configuration of thinking of one request.

    Attributes:
        is_on: Switch of the chat template; None leaves it to the template.
        budget: Tokens of a thinking section at most; None without a limit.
        is_shown: Whether the answer has the text.
    """

    is_on: bool | None = None
    budget: int | None = None
    is_shown: bool = True

    def add_to(self, chat: Object) -> None:
        """Set the fields of a chat that keep it. Raises `FieldRefused`."""
        if self.is_on is not None:
            name = "chat_template_args" if chat.get("chat_template_args") is not None else "chat_template_kwargs"
            given = values.object_of(name, {} if chat.get(name) is None else chat[name])
            chat[name] = dict.fromkeys(_SWITCHES, self.is_on) | given
        if self.budget is not None:
            nvext = values.object_of("nvext", {} if chat.get("nvext") is None else chat["nvext"])
            if nvext.get("max_thinking_tokens") is not None:
                raise FieldRefused("nvext.max_thinking_tokens", "cannot be given beside thinking")
            chat["nvext"] = {**nvext, "max_thinking_tokens": self.budget}


def thinking_of(given: Any, max_tokens: int | None, *, models_think: bool) -> Thinking:
    """The configuration that the field ``thinking`` of a request is.

    Args:
        given: The field.
        max_tokens: Limit of the answer, None where there is none.
        models_think: Whether the models are known to write thinking sections, which a switch of
            the template alone may not prevent.

    Raises:
        FieldRefused: it is malformed or asks for what there is not.
    """
    if given is None:
        return Thinking()
    fields = values.object_of("thinking", given)
    kind = values.one_of("thinking.type", fields.get("type"), _KEYS)
    values.keys_within("thinking", fields, _KEYS[kind])
    if kind == "disabled":
        return Thinking(False, 0 if models_think else None)
    display = fields.get("display")
    if display is not None:
        values.one_of("thinking.display", display, ("summarized", "omitted"))
    budget = None
    if kind == "enabled":
        budget = values.integer("thinking.budget_tokens", fields.get("budget_tokens"), 1)
        if max_tokens is not None and budget >= max_tokens:
            raise FieldRefused("thinking.budget_tokens", f"must be less than max_tokens, {max_tokens}; got {budget}")
    return Thinking(True, budget, display != "omitted")


def signature_of(thought: str, *, is_shown: bool) -> str:
    """The signature of a thinking block with this text, shown or left out."""
    if is_shown:
        return _DIGEST + _digest(thought)
    return _OMITTED + base64.b64encode(zlib.compress(thought.encode())).decode()


def thought_of(path: str, block: Object) -> str:
    """The text of a thinking block that a client sends back.

    Args:
        path: Path of the block.
        block: The block.

    Raises:
        FieldRefused: it is malformed, or not as it was signed here.
    """
    values.keys_within(path, block, ("type", "thinking", "signature"))
    thought = values.text(f"{path}.thinking", block.get("thinking"))
    signature = values.text(f"{path}.signature", "" if block.get("signature") is None else block["signature"])
    if signature.startswith(_OMITTED) and not thought:
        return _omitted(f"{path}.signature", signature.removeprefix(_OMITTED))
    changed = signature.startswith(_DIGEST) and signature.removeprefix(_DIGEST) != _digest(thought)
    if changed or signature.startswith(_OMITTED):
        raise FieldRefused(f"{path}.thinking", "is not the text that was signed; send blocks back as they came")
    return thought


def _digest(thought: str) -> str:
    return hashlib.sha256(thought.encode()).hexdigest()[:32]


def _omitted(path: str, data: str) -> str:
    try:
        reader = zlib.decompressobj()
        thought = reader.decompress(base64.b64decode(data, validate=True), MAX_OMITTED).decode()
        if not reader.eof:
            raise ValueError(data)
    except (ValueError, zlib.error):
        raise FieldRefused(path, "is not a signature that was given here") from None
    return thought
