"""Paths of a chat request's fields back to those of the Responses request that it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.frontdoor.errors import Refused

RENAMED: Mapping[str, str] = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "logprobs": "include",
    "tool_choice.function": "tool_choice",
}
"""Fields of chat → the fields of Responses that they are made of, wherever the names differ."""


class Origins:
    """Map from parts of a chat request to the client's own paths.

    Args:
        found: Path in the chat request → path in the client's request.
        chosen: The client's own ``logits_processors``.
    """

    def __init__(self, found: Mapping[str, str], chosen: Any = None) -> None:
        self._found = {**RENAMED, **found}
        if isinstance(chosen, list):
            self._found["logits_processors.processors"] = "logits_processors"

    def client_path(self, path: str) -> str:
        """The client's own path of ``path``, a field of the chat request: its longest beginning
        that has one decides, and the rest is kept.
        """
        end = len(path)
        while end > 0:
            if path[:end] in self._found:
                return self._found[path[:end]] + path[end:]
            end = max(path.rfind(".", 0, end), path.rfind("[", 0, end))
        return path

    def of_client(self, refused: Refused) -> Refused:
        """The refusal of a chat request as one of the client's request."""
        return refused if refused.param is None else refused.renamed(self.client_path(refused.param))
