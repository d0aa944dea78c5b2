"""The smoke test: an environment variable makes every request answer ``Hello world!``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from worker.errors import ConfigurationError, StartupError, one_line

SMOKE_VARIABLES = ("DYNAMO_ENABLE_TEST_LOGITS_PROCESSOR", "DYN_ENABLE_TEST_LOGITS_PROCESSOR")
"""Dynamo's name up to 1.2.1, and its name since; both work here."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def smoke_enabled(environ: Mapping[str, str]) -> bool:
    """Whether the smoke test is on.

    Raises:
        ConfigurationError: a value is neither true nor false, or the two names contradict each
            other.
    """
    values = {name: _truth(name, environ[name]) for name in SMOKE_VARIABLES if environ.get(name)}
    if len(set(values.values())) > 1:
        raise ConfigurationError(" and ".join(f"{n}={environ[n]}" for n in values) + " contradict each other")
    return any(values.values())


def _truth(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ConfigurationError(f"{name} must be true or false, got {text!r}")
    return word in _TRUE


class SmokeTest:
    """Makes the logits processors of one request. Reads the tokenizer once.

    Raises:
        StartupError: the checkpoint's tokenizer cannot be read or cannot say ``Hello world!``.
    """

    def __init__(self, model_path: str, eos_token_id: int | None) -> None:
        from transformers import AutoTokenizer

        from adapters import HelloWorldProcessor

        try:
            path = Path(model_path)
            tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            processor = HelloWorldProcessor(tokenizer, eos_id=eos_token_id)
        except (OSError, ValueError) as error:
            raise StartupError(f"smoke test: {one_line(error)}") from None
        self._token_ids = processor.token_ids
        self._eos_id = processor.eos_id

    def processors(self, num_prompt_tokens: int) -> list[Callable[..., None]]:
        """Callables for `SamplingParams.logits_processor` of one request."""
        from adapters import ForcedSequenceProcessor, create_trtllm_adapters

        forced = ForcedSequenceProcessor(self._token_ids, self._eos_id, prompt_length=num_prompt_tokens)
        return list(create_trtllm_adapters([forced], end_id=self._eos_id))
