"""``--speculative-config``: how the embedded engine drafts, in vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from adapters.strict_json import decoder
from worker.errors import StartupError

FLAG = "--speculative-config"

METHODS = ("none", "ngram", "suffix", "draft_model")

_HEADS = "needs heads that are trained with the model, which no checkpoint served here has"

REFUSED = {
    "eagle": _HEADS,
    "eagle3": _HEADS,
    "medusa": _HEADS,
    "mlp_speculator": _HEADS,
    "mtp": _HEADS,
    "deepseek_mtp": _HEADS,
}
"""Methods of vLLM that are not served, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Settings of drafts. What a request's chain forces is drafted with every method.

    Attributes:
        method: ``ngram`` (prompt lookup), ``suffix`` or ``draft_model``; ``none``: chains and
            predictions alone.
        num_speculative_tokens: Tokens of a draft at most; fewer are drafted where fewer pay.
        prompt_lookup_min: ``ngram`` and ``suffix``: tokens that must have occurred before.
        prompt_lookup_max: ``ngram``: tokens of the longest n-gram that is looked up.
        suffix_cache_tokens: ``suffix``: tokens of earlier answers that are searched, for each cache
            salt; 0 for the request's own tokens alone.
        model: Directory of the draft model's checkpoint. It drafts with the method ``draft_model``,
            and computes the companions of requests that need another model with every method.
        chain: Whether the chain drafts.
    """

    method: str = "none"
    num_speculative_tokens: int = 6
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    suffix_cache_tokens: int = 32768
    model: str | None = None
    chain: bool = True

    @classmethod
    def parse(cls, given: Mapping[str, Any] | str | None, method: str = "none") -> SpeculativeConfig:
        """The settings that `given` holds, JSON text or its data; the defaults for None.

        Args:
            given: The value of ``--speculative-config``.
            method: Method where it names none.

        Raises:
            StartupError: naming the key, and what was expected.
        """
        data = _load(given) if isinstance(given, str) else {} if given is None else given
        if not isinstance(data, Mapping):
            raise StartupError(f"{FLAG} must be a JSON object, got {type(data).__name__}")
        known = {one.name for one in fields(cls)}
        for key, value in data.items():
            if key not in known:
                raise StartupError(f"{FLAG}: unknown key {key!r}; known are {', '.join(sorted(known))}")
            expected, is_right = _EXPECTED[key]
            if not is_right(value):
                raise StartupError(f"{FLAG}: {key} must be {expected}, got {value!r}")
        config = cls(**{"method": method, **data})
        config._check()
        return config

    def _check(self) -> None:
        if self.method in REFUSED:
            raise StartupError(f"{FLAG}: method {self.method!r} is not served: it {REFUSED[self.method]}")
        if self.method not in METHODS:
            raise StartupError(f"{FLAG}: method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise StartupError(
                f"{FLAG}: prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max "
                f"{self.prompt_lookup_max}"
            )
        if self.model is None and self.method == "draft_model":
            raise StartupError(f"{FLAG}: method draft_model needs model, the directory of the draft model")


def _load(text: str) -> Any:
    try:
        return decoder().decode(text)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{FLAG} must be JSON, got {text[:80]!r}: {error}") from None


def _integer(low: int, high: int) -> tuple[str, Callable[[Any], bool]]:
    return f"an integer from {low} to {high}", lambda value: type(value) is int and low <= value <= high


_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "method": ("a text", lambda value: isinstance(value, str)),
    "num_speculative_tokens": _integer(1, 64),
    "prompt_lookup_min": _integer(1, 64),
    "prompt_lookup_max": _integer(1, 64),
    "suffix_cache_tokens": _integer(0, 2**24),
    "model": ("the path of a checkpoint", lambda value: isinstance(value, str) and bool(value)),
    "chain": ("true or false", lambda value: isinstance(value, bool)),
}
