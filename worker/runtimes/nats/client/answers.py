"""Answers of workers, chunk by chunk and whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROLLOUT = "rollout"
"""Key of the JSON text about tokens in the ``engine_data`` of a chunk."""

Chunk = dict[str, Any]


@dataclass(slots=True)
class ChoiceAnswer:
    """One complete answer.

    Attributes:
        text: Text of the answer, empty if none was asked for.
        token_ids: Generated tokens.
        finish_reason: ``stop``, ``length``, ``abort`` or ``cancelled``.
        log_probs: Log probability of each token, if they were asked for.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    log_probs: list[float] = field(default_factory=list)
    _data: dict[str, Any] | None = field(default=None, repr=False)
    _told: dict[str, list[Any]] = field(default_factory=dict, repr=False)  # of tokens, by the names of its lists

    @property
    def engine_data(self) -> dict[str, Any] | None:
        """Data of the worker beside the tokens, if some were asked for: the newest value of each
        key, and under ``rollout`` the lists of all tokens, as JSON text.
        """
        if self._data is None or not self._told:
            return self._data
        return {**self._data, ROLLOUT: json.dumps(self._told, separators=(",", ":"))}

    def take_data(self, data: Mapping[str, Any]) -> None:
        """Take the data of the next chunk."""
        self._data = {**(self._data or {}), **data}
        for name, values in json.loads(data.get(ROLLOUT, "{}")).items():
            self._told.setdefault(name, []).extend(values)


@dataclass(slots=True)
class Answer:
    """All answers to a request, complete or as far as they have come.

    Attributes:
        choices: Answers in the order of their index.
        usage: Tokens of the prompt, and of all choices.
    """

    choices: list[ChoiceAnswer] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=lambda: {"prompt_tokens": 0, "completion_tokens": 0})

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
        while len(self.choices) <= chunk["index"]:
            self.choices.append(ChoiceAnswer())
        choice = self.choices[chunk["index"]]
        choice.text += chunk.get("text", "")
        choice.token_ids += chunk["token_ids"]
        choice.log_probs += chunk.get("log_probs", ())
        if "engine_data" in chunk:
            choice.take_data(chunk["engine_data"])
        choice.finish_reason = chunk.get("finish_reason", choice.finish_reason)
        if "completion_usage" in chunk:
            self.usage["prompt_tokens"] = chunk["completion_usage"]["prompt_tokens"]
            self.usage["completion_tokens"] += chunk["completion_usage"]["completion_tokens"]
