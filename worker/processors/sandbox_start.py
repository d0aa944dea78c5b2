"""The start of the sandbox for grammars: where it can, while the worker imports torch.

Imported without torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from adapters.grammars.compiler import byte_tables
from adapters.grammars.sandbox import GrammarSandbox
from adapters.vocabulary import CopiedTokenizer, token_bytes
from worker.arguments import Arguments
from worker.models.tokenizer_copy import copied_tokenizer


class StartingSandbox:
    """A sandbox whose process starts now, and waits for the tokens.

    Args:
        timeout_s: Processor time per grammar, seconds.

    Attributes:
        sandbox: The sandbox.
        observe: Called with the outcome and the wall time of every grammar; to be set before the
            first one.
    """

    def __init__(self, timeout_s: float) -> None:
        self.observe: Callable[[str, float], None] | None = None
        self._tokens = Future[Sequence[bytes]]()
        self.sandbox = GrammarSandbox(
            lambda: byte_tables(self._tokens.result()), timeout_s=timeout_s, observe=self._observe
        )
        self.sandbox.start()  # imports its modules meanwhile

    def give(self, tokens: Sequence[bytes]) -> None:
        """Let it load the tokens (`Vocabulary.token_bytes`)."""
        self._tokens.set_result(tokens)

    def close(self) -> None:
        """End it."""
        self._tokens.cancel()  # before the sandbox, which waits for the thread that waits for them
        self.sandbox.close()

    def _observe(self, outcome: str, seconds: float) -> None:
        if self.observe is not None:
            self.observe(outcome, seconds)


@dataclass(frozen=True, slots=True)
class GrammarsAhead:
    """A sandbox that loads the tokens of the model which is likely served.

    Attributes:
        starting: The sandbox.
        tokenizer: The model's tokenizer.
        size: Width of a row of logits for which it has tokens.
    """

    starting: StartingSandbox
    tokenizer: CopiedTokenizer
    size: int


def grammars_ahead(arguments: Arguments) -> GrammarsAhead | None:
    """The sandbox of a worker that has not loaded its model; None if its tokenizer has no copy."""
    path = Path(arguments.model_path)
    tokenizer = copied_tokenizer(path, kept_tokenizers(arguments))
    if tokenizer is None:
        return None
    try:
        size = json.loads((path / "config.json").read_bytes())["vocab_size"]
    except (OSError, ValueError, LookupError, TypeError):  # the engine says what is wrong with it
        return None
    if type(size) is not int or not len(tokenizer.kept_token_bytes) <= size <= 2 * len(tokenizer.kept_token_bytes):
        return None
    starting = StartingSandbox(arguments.grammar_timeout_s)
    starting.give(token_bytes(tokenizer, size))
    return GrammarsAhead(starting, tokenizer, size)


def kept_tokenizers(arguments: Arguments, renders_templates: bool = False) -> str:
    """The place of copied tokenizers (`beside.copies_of`): ``off`` where a template or a third
    party's processor may use transformers' own.
    """
    runs_third_party = arguments.allow_logits_processors or arguments.logits_processor
    is_its_own = renders_templates or arguments.runtime == "nats" or runs_third_party
    return "off" if is_its_own else arguments.packed_copy
