"""`PromptAnswer`: a frontend's chunks of the answer to one prompt, as a client gets them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from worker.frontdoor.completions.asked import Asked
from worker.frontdoor.completions.openai_logprobs import Offsets, empty_logprobs, extend, of_answer
from worker.frontdoor.completions.prompt_scores import EndToken, PromptScores, WorkerData
from worker.frontdoor.errors import Refused
from worker.frontdoor.returned_tokens import PROMPT_LOGPROBS, ReturnedData, empty_returned
from worker.frontdoor.usage import usage_without_answer
from worker.requests.rollout import ABORT

Chunk = dict[str, Any]


@dataclass(slots=True)
class _Choice:
    """State of one choice.

    Attributes:
        scores: Log probabilities of its prompt, None until they have come.
        waiting: Chunks of it until then.
        end: The end token that is not shown, once it has come.
        offsets: Offsets of its tokens, behind the prompt if that is shown.
        has_begun: Whether its first chunk has been made.
    """

    scores: PromptScores | None = None
    waiting: list[Chunk] = field(default_factory=list)
    end: EndToken | None = None
    offsets: Offsets = field(default_factory=Offsets)
    has_begun: bool = False


class PromptAnswer:
    """Makes the chunks of a completion for one of its prompts.

    Args:
        asked: The completion.
        index: Index of the prompt.

    Attributes:
        usage: OpenAI's usage of the prompt's answers, once it has come.
    """

    def __init__(self, asked: Asked, index: int) -> None:
        self.usage: dict[str, Any] = {}
        self._asked = asked
        self._index = index
        self._prompt = asked.prompts[index]
        self._is_scored = asked.num_alternatives(self._prompt) is not None
        self._choices: dict[int, _Choice] = {}
        self._data = ReturnedData(asked.returned, in_chat=False)

    def take(self, chunk: Chunk) -> Iterator[Chunk]:
        """The client's chunks for the next one of the frontend, which is changed."""
        self._data.take(chunk)
        found = WorkerData.taken_from(chunk)
        if self._asked.is_scored_only:
            empty_returned(chunk)
        if chunk.get("usage"):
            self.usage = self._own_usage(chunk["usage"])
            chunk["usage"] = None
        for choice in chunk.get("choices") or ():
            state = self._choices.setdefault(choice["index"], _Choice())
            state.scores = state.scores or found.scores
            state.end = state.end or found.end
            state.waiting.append({**chunk, "choices": [choice]})
            if state.scores is not None or not self._is_scored or choice.get("finish_reason") == ABORT:
                ready, state.waiting = state.waiting, []
                for one in ready:
                    self._adapt(one["choices"][0], state)
                    self._repeat_scores(one)
                    yield one

    def _repeat_scores(self, chunk: Chunk) -> None:
        """Put the log probabilities of the prompt where Dynamo's clients look for them, too."""
        scores = chunk["choices"][0].get("prompt_logprobs")
        if self._data.repeats_scores and scores is not None:
            chunk["nvext"] = {**(chunk.get("nvext") or {}), PROMPT_LOGPROBS: scores}

    def check_complete(self) -> None:
        """Raises `Refused` if the worker has not said what it was asked of the prompt."""
        if any(state.waiting for state in self._choices.values()):
            raise no_scores()

    def _own_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return usage_without_answer(usage) if self._asked.is_scored_only else usage

    def _adapt(self, choice: dict[str, Any], state: _Choice) -> None:
        """Make a choice of a frontend's chunk that of the client's."""
        asked, found = self._asked, choice.get("logprobs")
        text: str = choice.get("text") or ""
        if asked.is_scored_only:
            text, found, state.end = "", None, None
            if choice.get("finish_reason") != ABORT:
                choice["finish_reason"] = "length" if choice.get("finish_reason") else None
        choice["index"] += self._index * asked.num_choices
        choice["text"], logprobs = "", empty_logprobs()
        if not state.has_begun:
            state.has_begun = True
            self._begin(choice, logprobs, state)
        if found:
            extend(logprobs, of_answer(found, state.offsets))
        choice["text"] += text
        if asked.logprobs is not None and choice.get("finish_reason") and state.end is not None:
            end = state.end.in_openai_form(asked.logprobs, state.offsets.length, names_ids=asked.names_ids)
            extend(logprobs, end)
        choice["logprobs"] = None if asked.logprobs is None else logprobs

    def _begin(self, choice: dict[str, Any], logprobs: dict[str, list[Any]], state: _Choice) -> None:
        """Put the prompt in front of a choice, and its log probabilities beside it."""
        asked, scores = self._asked, state.scores
        if asked.prompt_logprobs is not None and scores is not None:
            choice["prompt_logprobs"] = scores.in_vllm_form(asked.prompt_logprobs)
        if not asked.echo:
            return
        if isinstance(self._prompt, str):
            choice["text"] = self._prompt
        elif scores is not None:  # else it was aborted before the ids were scored for their text
            choice["text"] = scores.text()
        state.offsets.length = len(choice["text"])
        if asked.logprobs is not None and scores is not None:
            extend(logprobs, scores.in_openai_form(asked.logprobs, choice["text"], names_ids=asked.names_ids))
            if asked.names_ids:
                state.offsets.length = sum(map(len, logprobs["tokens"]))


def no_scores() -> Refused:
    """The error where a worker does not answer with log probabilities of the prompt."""
    return Refused(502, "the worker sent no log probabilities of the prompt", kind="server_error")
