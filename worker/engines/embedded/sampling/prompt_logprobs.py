"""Prompt log probabilities and logits, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.engines import TokenLogprob
from worker.engines.embedded.logits_tap import LogitsTap
from worker.engines.embedded.sampling.logprobs import text_logprobs

_ROWS_AT_ONCE = 32
"""Rows converted to float64 log probabilities at a time; a whole chunk would not fit in memory."""


class LogitsCollector(LogitsTap):
    """A `LogitsTap` that keeps what one answer's result is made of.

    Args:
        prompt: Token ids of the prompt.
        top_n: Alternatives per prompt token, 0 for the tokens themselves alone, None for no log
            probabilities.
        never: Ids that are never sampled; see `token_logprobs`.
        keep_prompt: Keep the logits of the prompt.
        keep_generated: Keep the logits that tokens are sampled from.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        top_n: int | None = None,
        never: Sequence[int] = (),
        keep_prompt: bool = False,
        keep_generated: bool = False,
    ) -> None:
        self.wants_generated = keep_generated
        self._prompt = list(prompt)
        self._top_n = top_n
        self._never = torch.tensor(never) if never else None
        self._keep_prompt = keep_prompt
        self._num_seen = 0
        self._logprobs: list[list[TokenLogprob] | None] = [None]
        self._prompt_logits: list[torch.Tensor] = []
        self._generated: dict[int, torch.Tensor] = {}

    @property
    def wants_prompt(self) -> bool:
        """Whether prompt rows are still wanted; recomputed ones are not."""
        return (self._keep_prompt or self._top_n is not None) and self._num_seen < len(self._prompt)

    def see_prompt(self, start: int, logits: torch.Tensor) -> None:
        """Take rows ``[n, V]`` from `start` on; rows seen before or past the prompt are skipped."""
        rows = logits[: max(0, len(self._prompt) - start)]
        if not len(rows) or start + len(rows) <= self._num_seen:
            return
        assert start <= self._num_seen, f"logits of prompt tokens {self._num_seen} to {start} were never shown"
        rows = rows[self._num_seen - start :]
        if self._top_n is not None:
            self._score(rows)
        if self._keep_prompt:
            self._prompt_logits.append(rows.float().cpu().clone())
        self._num_seen += len(rows)

    def start_over(self) -> None:
        """Forget the prompt's rows: all come again, of other weights."""
        self._num_seen, self._logprobs, self._prompt_logits = 0, [None], []

    def see_generated(self, position: int, logits: torch.Tensor) -> None:
        """The row ``[V]`` from which the token at `position` is sampled."""
        self._generated[position] = logits.float().cpu().clone()

    def _score(self, rows: torch.Tensor) -> None:
        assert self._top_n is not None
        followed = self._prompt[self._num_seen + 1 : self._num_seen + 1 + len(rows)]  # the last token is not followed
        for start in range(0, len(followed), _ROWS_AT_ONCE):
            tokens, first = followed[start : start + _ROWS_AT_ONCE], self._num_seen + 1 + start
            self._logprobs += text_logprobs(rows[start : start + len(tokens)], tokens, self._top_n, first, self._never)

    @property
    def prompt_logprobs(self) -> list[list[TokenLogprob] | None] | None:
        """Log probabilities of each prompt token and then of the top-n; None for the first."""
        return None if self._top_n is None else self._logprobs

    @property
    def prompt_logits(self) -> torch.Tensor | None:
        """float32 ``[prompt tokens, V]`` on the CPU, None if they were not requested."""
        return torch.cat(self._prompt_logits) if self._keep_prompt and self._prompt_logits else None

    def generated_logits(self, count: int) -> torch.Tensor | None:
        """float32 ``[count, V]`` on the CPU of the first `count` generated tokens, or None."""
        if not self.wants_generated or not count:
            return None
        first = len(self._prompt)
        return torch.stack([self._generated[position] for position in range(first, first + count)])
