"""`Returned`: token ids, and log probabilities for a trainer, that a request asks back for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.nvext import taken_entries, with_annotations, with_engine_data
from worker.frontdoor.values import shown, truth
from worker.requests.request import LOGPROBS_MODE, RETURN_TOKEN_IDS
from worker.requests.rollout import ABORT, MATCHED, PROMPT_TOKEN_IDS, ROLLOUT, TOKEN_IDS, TRAIN_KEYS
from worker.requests.token_weights import WEIGHTS
from worker.sampling import LOGPROBS_MODES

COMPLETION_TOKEN_IDS = "completion_token_ids"
PROMPT_LOGPROBS = "prompt_logprobs"
EXTRA_FIELDS = (COMPLETION_TOKEN_IDS, PROMPT_TOKEN_IDS, PROMPT_LOGPROBS)
"""Values of ``nvext.extra_fields`` that are answered here: 1.4.2 knows only the first, which is
without the end token there.
"""

TRAIN_LOGPROBS = "train_logprobs"
"""Key of a choice: an object of the lists of `TRAIN_KEYS`, beside ``token_ids``."""

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Returned:
    """Fields of a chat or completion about its tokens.

    Attributes:
        token_ids: The ids, in vLLM's form.
        mode: Value of ``logprobs_mode``, None if it is not given.
        extra: The `EXTRA_FIELDS` that it asks for.
    """

    token_ids: bool = False
    mode: str | None = None
    extra: frozenset[str] = frozenset()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Returned:
        """The fields of a request. Raises `FieldRefused`."""
        token_ids, mode = truth("return_token_ids", fields.get("return_token_ids")), fields.get("logprobs_mode")
        if mode is not None and mode not in LOGPROBS_MODES:
            problem = f"must be one of {', '.join(LOGPROBS_MODES)}, got {shown(mode)}"
            raise FieldRefused("logprobs_mode", problem)
        extra = frozenset(EXTRA_FIELDS).intersection(_extra_fields(fields))
        if extra and fields.get("n") not in (None, 1):
            raise FieldRefused(
                "nvext.extra_fields", f"{min(extra)} needs n: 1; return_token_ids has them of each choice"
            )
        if PROMPT_LOGPROBS in extra and fields.get(PROMPT_LOGPROBS) is None:
            raise FieldRefused("nvext.extra_fields", f"{PROMPT_LOGPROBS} needs the field {PROMPT_LOGPROBS}")
        return cls(token_ids, mode, extra)

    @property
    def is_anything(self) -> bool:
        """Whether the request asks for any of it."""
        return self.token_ids or self.mode is not None or bool(self.extra)

    @property
    def trains(self) -> bool:
        """Whether the log probabilities are for a trainer."""
        return self.mode == "train"

    def request(self, fields: Body) -> Body:
        """The fields for a frontend: the worker is asked by annotations."""
        if not self.is_anything:
            return fields
        made = {name: value for name, value in fields.items() if name not in ("return_token_ids", "logprobs_mode")}
        nvext = made.get("nvext")
        if self.extra and nvext is not None:
            nvext = {**nvext, "extra_fields": [one for one in nvext["extra_fields"] if one not in EXTRA_FIELDS]}
        annotations = [] if self.mode is None else [LOGPROBS_MODE + self.mode]
        if self.token_ids or self.extra:
            annotations.append(RETURN_TOKEN_IDS)
        made["nvext"] = with_engine_data(with_annotations(nvext, *annotations))
        return made


def asks_back(fields: Mapping[str, Any]) -> bool:
    """Whether a request has one of the fields that `Returned` reads."""
    given = fields.get("return_token_ids") is not None or fields.get("logprobs_mode") is not None
    return given or not frozenset(EXTRA_FIELDS).isdisjoint(_extra_fields(fields))


def _extra_fields(fields: Mapping[str, Any]) -> list[str]:
    """The values of ``nvext.extra_fields``; none of a malformed one, which is refused elsewhere."""
    nvext = fields.get("nvext")
    given = nvext.get("extra_fields") if isinstance(nvext, dict) else None
    return [one for one in given if isinstance(one, str)] if isinstance(given, list) else []


class ReturnedData:
    """Puts what the worker says of tokens into the chunks of one answer.

    Args:
        returned: Fields of the request.
        in_chat: The prompt's ids are the answer's, not the choice's.
    """

    def __init__(self, returned: Returned, *, in_chat: bool) -> None:
        self._returned = returned
        self._in_chat = in_chat
        self._has_prompt = False

    @property
    def repeats_scores(self) -> bool:
        """Whether ``nvext`` has the log probabilities of the prompt, too."""
        return PROMPT_LOGPROBS in self._returned.extra

    def take(self, chunk: dict[str, Any]) -> None:
        """Change a chunk: the worker's text is taken out, and what was asked for put in."""
        data, returned = taken_data(chunk), self._returned
        if TOKEN_IDS not in data or not chunk.get("choices"):
            return
        choice, prompt = chunk["choices"][0], data.get(PROMPT_TOKEN_IDS)
        if returned.token_ids or returned.trains:
            choice[TOKEN_IDS] = data[TOKEN_IDS]
            if prompt is not None and not (self._in_chat and self._has_prompt):
                self._has_prompt = True
                (chunk if self._in_chat else choice)[PROMPT_TOKEN_IDS] = prompt
        if returned.trains:
            choice[TRAIN_LOGPROBS] = {key: data[key] for key in TRAIN_KEYS}
        extension = {}
        if COMPLETION_TOKEN_IDS in returned.extra:
            extension[COMPLETION_TOKEN_IDS] = data[TOKEN_IDS]
        if PROMPT_TOKEN_IDS in returned.extra and prompt is not None:
            extension[PROMPT_TOKEN_IDS] = prompt
        if extension:
            chunk["nvext"] = {**(chunk.get("nvext") or {}), **extension}


def taken_data(chunk: dict[str, Any]) -> dict[str, Any]:
    """The worker's data about a chunk's tokens, and about the end of the answer, taken out of the
    chunk, which then says whether it was aborted; empty if there are none.

    The keys are those of `worker.requests.rollout`.
    """
    text, matched, is_aborted = taken_entries(chunk, ROLLOUT, MATCHED, ABORT)
    for choice in chunk.get("choices") or () if is_aborted else ():
        choice["finish_reason"] = ABORT
    data = {} if text is None else json.loads(text)
    return data if matched is None else {**data, MATCHED: matched}


def empty_returned(chunk: dict[str, Any]) -> None:
    """Take out of a chunk what it has of the tokens of an answer that is not wanted."""
    for choice in chunk.get("choices") or ():
        if TOKEN_IDS in choice:
            choice[TOKEN_IDS] = []
        if TRAIN_LOGPROBS in choice:
            choice[TRAIN_LOGPROBS] = {key: [] for key in TRAIN_KEYS}
    if COMPLETION_TOKEN_IDS in (chunk.get("nvext") or {}):
        chunk["nvext"][COMPLETION_TOKEN_IDS] = []


def join_returned(choice: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add to a choice of a whole answer, whose lists grow, what a chunk's choice has of tokens."""
    for name in (PROMPT_TOKEN_IDS, TOKEN_IDS):
        if name in delta:
            choice.setdefault(name, []).extend(delta[name])
    if TRAIN_LOGPROBS in delta:
        so_far = choice.setdefault(TRAIN_LOGPROBS, {key: [] for key in TRAIN_KEYS})
        for key in TRAIN_KEYS:
            so_far[key].extend(delta[TRAIN_LOGPROBS][key])


def joined_nvext(so_far: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    """``nvext`` of two chunks of a choice: the ids of both, of the rest the later; the versions
    of the weights of both where another worker has gone on.

    Args:
        so_far: The result for the chunks before, whose list grows; None for the first chunk.
        more: ``nvext`` of the next chunk.
    """
    earlier = so_far or {}
    joined = {**earlier, **more}
    if COMPLETION_TOKEN_IDS in joined:
        joined[COMPLETION_TOKEN_IDS] = earlier.get(COMPLETION_TOKEN_IDS, [])
        joined[COMPLETION_TOKEN_IDS].extend(more.get(COMPLETION_TOKEN_IDS, ()))
    data = joined.get("engine_data")
    versions = joined_versions(*((one.get("engine_data") or {}).get(WEIGHTS) or [] for one in (earlier, more)))
    if data and versions:
        joined["engine_data"] = {**data, WEIGHTS: versions}
    return joined


def joined_versions(
    earlier: Sequence[Mapping[str, Any]], later: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The versions of an answer's weights; one that goes on names its own tokens' alone.

    Args:
        earlier: The versions of a chunk, as in docs/weights.md; empty for none.
        later: The versions of a later chunk.
    """
    if not later:
        return list(earlier)
    before = [one for one in earlier if one["from_token"] < later[0]["from_token"]]
    goes_on = before and before[-1]["version"] == later[0]["version"]
    return [*before, *(later[1:] if goes_on else later)]
