"""`Asked`: the fields of a completion that the front door answers itself, and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker.frontdoor import field_checks, values
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.field_checks import Body
from worker.frontdoor.nvext import with_engine_data
from worker.frontdoor.returned_tokens import Returned
from worker.frontdoor.translated import is_zero
from worker.sampling import MAX_LOGPROBS

MAX_COMPLETION_LOGPROBS = 5
"""Alternatives per token of a completion, in OpenAI's API and in Dynamo's frontend."""

MAX_PROMPTS = 1024
"""Prompts of one request."""

Prompt = str | list[int]

_WITHOUT_RUNNING_USAGE = (
    *("echo", "logprobs", "prompt_logprobs", "return_token_ids", "logprobs_mode", "token ids of nvext.extra_fields"),
    *("max_tokens: 0", "several prompts"),
)
"""Reasons for which a completion is answered here."""

_READ_HERE = ("prompt", "echo", "prompt_logprobs", "stream", "stream_options")


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion, with what the front door reads of it.

    Attributes:
        fields: The other fields, for a frontend.
        returned: Token ids, and log probabilities for a trainer, that it asks back for.
        prompts: The prompts.
        echo: Whether a choice begins with its prompt.
        logprobs: Alternatives per token of prompt and answer, None for no log probabilities.
        prompt_logprobs: The same of the prompt alone, in vLLM's form.
        is_scored_only: No token is wanted.
        num_choices: Choices per prompt.
        is_streamed: Whether the answer is a stream of events.
        has_usage: Whether the last event has the usage.
    """

    fields: Body
    returned: Returned
    prompts: list[Prompt]
    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None
    is_scored_only: bool
    num_choices: int
    is_streamed: bool
    has_usage: bool

    @classmethod
    def completion(cls, fields: Body) -> Asked:
        """A completion. Raises `FieldRefused` for a field that is read here."""
        logprobs = _count("logprobs", fields, MAX_COMPLETION_LOGPROBS)
        is_streamed, n = values.truth("stream", fields.get("stream")), fields.get("n")
        returned, prompts = Returned.of(fields), _prompts(fields.get("prompt"))
        if returned.extra and len(prompts) > 1:
            raise FieldRefused("nvext.extra_fields", f"{min(returned.extra)} needs one prompt, got {len(prompts)}")
        echo, nvext = values.truth("echo", fields.get("echo")), fields.get("nvext")
        if isinstance(nvext, dict) and nvext.get("token_data") is not None:
            if len(prompts) > 1:
                raise FieldRefused("nvext.token_data", f"needs one prompt, got {len(prompts)}")
            if echo:
                raise FieldRefused("echo", "cannot be given beside nvext.token_data; give the ids as prompt")
        own = {name: value for name, value in fields.items() if name not in _READ_HERE}
        return cls(
            fields=returned.request(own),
            returned=returned,
            prompts=prompts,
            echo=echo,
            logprobs=logprobs,
            prompt_logprobs=num_prompt_logprobs(fields),
            is_scored_only=is_zero(fields.get("max_tokens")),
            num_choices=n if type(n) is int else 1,
            is_streamed=is_streamed,
            has_usage=_usage(fields, is_streamed),
        )

    @property
    def names_ids(self) -> bool:
        """Whether the texts of tokens are ``token_id:`` and the id."""
        return self.fields.get("return_tokens_as_token_ids") is True

    def num_alternatives(self, prompt: Prompt) -> int | None:
        """Alternatives per token of the prompt that the worker is asked for, None if it is not."""
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        if self.echo and isinstance(prompt, list):
            counts.append(0)  # for the text of its tokens
        return max((count for count in counts if count is not None), default=None)

    def request(self, prompt: Prompt) -> Body:
        """The request to a frontend for one prompt."""
        made = {**self.fields, "prompt": prompt}
        if self.is_scored_only:
            made["max_tokens"] = 1  # the frontend knows no less; it is left out of the answer
        count = self.num_alternatives(prompt)
        if count is not None:
            made["prompt_logprobs"] = count
        if count is not None or self.logprobs is not None:
            made["nvext"] = with_engine_data(made.get("nvext"))
        return made


def num_prompt_logprobs(fields: Body) -> int | None:
    """The field ``prompt_logprobs``. Raises `FieldRefused`."""
    return _count("prompt_logprobs", fields, MAX_LOGPROBS)


def _count(name: str, fields: Body, most: int) -> int | None:
    value = fields.get(name)
    return None if value is None else values.integer(name, value, 0, most)


def _usage(fields: Body, is_streamed: bool) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not is_streamed:
        raise FieldRefused("stream_options", "needs stream: true")
    field_checks.stream_options(options, fields)
    if options.get("continuous_usage_stats"):
        problem = f"is not supported beside {', '.join(_WITHOUT_RUNNING_USAGE)}"
        raise FieldRefused("stream_options.continuous_usage_stats", problem)
    return bool(options.get("include_usage"))


def _prompts(value: Any) -> list[Prompt]:
    given: list[Any] = value if isinstance(value, list) and not _are_ids(value) else [value]
    if not given:
        raise FieldRefused("prompt", "must not be empty")
    if len(given) > MAX_PROMPTS:
        raise FieldRefused("prompt", f"must be at most {MAX_PROMPTS} prompts, got {len(given)}")
    for index, one in enumerate(given):
        if not isinstance(one, str) and not _are_ids(one):
            place = f"prompt[{index}]" if given is value else "prompt"
            raise FieldRefused(place, "must be a text, or a list of token ids that is not empty")
    return given


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)
