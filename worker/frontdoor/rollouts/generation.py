"""Answers to prompts as lists of tokens, for endpoints whose clients want ids rather than text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from worker.frontdoor.asking import Caller
from worker.frontdoor.chat_stream import chat
from worker.frontdoor.completions.prompt_scores import PromptScores, WorkerData
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.fields import COMPLETIONS
from worker.frontdoor.nvext import with_annotations, with_engine_data
from worker.frontdoor.returned_tokens import Body, joined_versions, taken_data
from worker.frontdoor.summaries import served_models
from worker.frontdoor.translated import is_zero
from worker.frontdoor.values import model_name
from worker.requests.request import LOGPROBS_MODE, RETURN_TOKEN_IDS, TOP_LOGPROBS
from worker.requests.rollout import ABORT, MATCHED, PROMPT_TOKEN_IDS, RANK, TOKEN_IDS, TOP, TRAIN_KEYS
from worker.requests.token_weights import WEIGHTS

_PER_TOKEN = (*TRAIN_KEYS, RANK, TOP)


@dataclass(slots=True)
class Generated:
    """The answer of one choice so far.

    Attributes:
        text: Text without the stop string or end token.
        token_ids: Ids that were sampled, with an end token that the text does not show.
        per_token: Lists with an entry for each of them: those of `TRAIN_KEYS`, `RANK` and `TOP`, if
            log probabilities were asked for.
        prompt_token_ids: Ids of the prompt.
        scores: Log probabilities of the prompt, None without.
        finish_reason: ``stop``, ``length`` or ``abort``, None until it ends.
        matched: Stop string or token that ended it.
        weight_versions: See docs/weights.md; empty where weights do not change.
        usage: OpenAI's usage of the request, once it has come.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    per_token: dict[str, list[Any]] = field(default_factory=lambda: {key: [] for key in _PER_TOKEN})
    prompt_token_ids: list[int] = field(default_factory=list)
    scores: PromptScores | None = None
    finish_reason: str | None = None
    matched: int | str | None = None
    weight_versions: list[Mapping[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, chunk: dict[str, Any], choice: dict[str, Any]) -> None:
        """Add a chunk of the choice, which is changed."""
        data = taken_data(chunk)
        self.scores = self.scores or WorkerData.taken_from(chunk).scores
        engine_data = (chunk.get("nvext") or {}).get("engine_data") or {}
        self.weight_versions = joined_versions(self.weight_versions, engine_data.get(WEIGHTS) or [])
        self.text += choice.get("text") or ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason  # behind `taken_data`
        self.token_ids += data.get(TOKEN_IDS, ())
        for key, values in self.per_token.items():
            values += data.get(key, ())
        self.prompt_token_ids = data.get(PROMPT_TOKEN_IDS, self.prompt_token_ids)
        if data.get(MATCHED) is not None:
            self.matched = data[MATCHED]

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled."""
        return len(self.token_ids)

    def drop_answer(self) -> None:
        """Leave the prompt alone: the answer's one token was asked for since there is no less."""
        self.text, self.token_ids, self.matched = "", [], None
        self.per_token = {key: [] for key in _PER_TOKEN}
        if self.finish_reason != ABORT:
            self.finish_reason = self.finish_reason and "length"


async def generate(
    caller: Caller, fields: Body, *, top: int | None = None
) -> AsyncGenerator[tuple[int, Generated], None]:
    """The choices of the answer to one prompt: the index of each, and it, whenever it has grown.

    All have their `Generated.usage` when the last is yielded again.

    Args:
        caller: Requester on whose behalf a frontend is asked.
        fields: A completion; its ``max_tokens`` may be 0 for the prompt's log probabilities alone.
        top: Alternatives per token, None for no log probabilities.

    Raises:
        Refused: a field is refused, or the answer ends before its end.
    """
    is_scored_only = is_zero(fields.get("max_tokens"))
    annotations = [RETURN_TOKEN_IDS]
    if top is not None:
        annotations += [f"{LOGPROBS_MODE}train", f"{TOP_LOGPROBS}{top}"]
    nvext = with_engine_data(with_annotations(fields.get("nvext"), *annotations))
    asked = {**fields, "nvext": nvext, **({"max_tokens": 1} if is_scored_only else {})}
    found: dict[int, Generated] = {}
    async with aclosing(chat(caller, asked, path=COMPLETIONS)) as chunks:
        async for chunk in chunks:
            for one in found.values() if chunk.get("usage") else ():
                one.usage = chunk["usage"]
            for choice in chunk.get("choices") or ():
                one = found.setdefault(choice["index"], Generated())
                one.take(chunk, choice)
                if is_scored_only:
                    one.drop_answer()
                yield choice["index"], one
    for index, one in found.items():
        yield index, one


async def served_model(caller: Caller, named: Any, path: str = "model") -> str:
    """The model that a request is for: the one that it names, or the only one that is served.

    Args:
        caller: Requester on whose behalf the frontend is asked.
        named: Value of the field, None if it is not given.
        path: Name of the field.

    Raises:
        Refused: it is no name, several are served and none is named, none is served, or the
            frontend does not say.
    """
    if named is not None:
        return model_name(path, named)
    names = list(await served_models(caller.door.upstreams))
    if not names:
        raise Refused(503, "the frontend serves no model", kind="server_error")
    if len(names) > 1:
        raise FieldRefused(path, f"must be one of {', '.join(names)}: several are served")
    return names[0]


def spans(versions: Sequence[Mapping[str, Any]], num_tokens: int) -> list[dict[str, Any]]:
    """The weight versions of an answer in vLLM's form: ``version``, ``start`` and ``end``."""
    starts = [one["from_token"] for one in versions]
    return [
        {"version": one["version"], "start": start, "end": end}
        for one, start, end in zip(versions, starts, [*starts[1:], num_tokens], strict=False)
    ]
