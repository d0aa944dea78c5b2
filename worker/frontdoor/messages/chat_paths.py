"""Paths of a chat's fields → those of the request in Anthropic's form that the chat is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from worker.frontdoor.errors import Refused


@dataclass(frozen=True, slots=True)
class ChatPaths:
    """Names of a request's fields for errors that name those of its chat.

    Attributes:
        messages: Path of the client's message for each of the chat.
        pictures: See `Conversation.pictures`.
        format: Path of the format of the answer, if the request has one.
        thinks: Whether the request has ``thinking``.
    """

    messages: Sequence[str] = ()
    pictures: Mapping[str, str] = field(default_factory=dict)
    format: str | None = None
    thinks: bool = False

    def renamed(self, refused: Refused) -> Refused:
        """An error of the chat as one of the request."""
        return refused if refused.param is None else refused.renamed(self.path(refused.param))

    def path(self, path: str) -> str:
        """The path of the request for one of the chat."""
        for pattern, name in self._rules():
            found = pattern.fullmatch(path)
            if found is not None:
                return name(found)
        return path

    def _rules(self) -> Sequence[_Rule]:
        rules: list[_Rule] = [
            (_MESSAGE, self._message),
            (_PROMPT, lambda found: "messages"),
            (_PARAMETERS, lambda found: f"tools[{found[1]}].input_schema{found[2]}"),
            (_FUNCTION, lambda found: f"tools[{found[1]}]{found[2]}"),
            (_CHOICE, lambda found: f"tool_choice{found[1]}"),
            (_PARALLEL, lambda found: "tool_choice.disable_parallel_tool_use"),
            (_STOP, lambda found: "stop_sequences" + found[1]),
            (_EFFORT, lambda found: "output_config.effort"),
            (_CONTINUED, lambda found: self.messages[-1] if self.messages else "messages"),
        ]
        if self.format is not None:
            format = self.format
            rules += [(_SCHEMA, lambda found: f"{format}.schema{found[1]}"), (_FORMAT, lambda found: format)]
        if self.thinks:
            rules.append((_BUDGET, lambda found: "thinking.budget_tokens"))
        return rules

    def _message(self, found: re.Match[str]) -> str:
        index = int(found[1])
        message = self.messages[index] if index < len(self.messages) else found[0]
        return self.pictures.get(f"messages[{index}]{found[2]}", message)


_Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


_MESSAGE = _compiled(r"messages\[(\d+)\](\.content\[\d+\])?.*")
_PROMPT = _compiled(r"token_ids")
_PARAMETERS = _compiled(r"tools\[(\d+)\]\.function\.parameters(.*)")
_FUNCTION = _compiled(r"tools\[(\d+)\]\.function(.*)")
_CHOICE = _compiled(r"tool_choice(?:\.function)?(.*)")
_PARALLEL = _compiled(r"parallel_tool_calls")
_SCHEMA = _compiled(r"(?:response_format\.json_schema|sampling_options\.guided_decoding\.args)\.schema(.*)")
_FORMAT = _compiled(r"response_format.*")
_STOP = _compiled(r"(?:stop_conditions\.)?stop((?:\[.*)?)")
_EFFORT = _compiled(r"reasoning_effort")
_CONTINUED = _compiled(r"continue_final_message|add_generation_prompt")
_BUDGET = _compiled(r"(?:nvext|stop_conditions)\.max_thinking_tokens.*|thinking_token_budget")
