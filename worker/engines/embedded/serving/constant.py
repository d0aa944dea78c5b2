"""``--engine constant``: the embedded engine around a model that computes nothing, and says one
token at a set pace. For tests and for planning a fleet: what it answers means nothing.

Processors, penalties, log probabilities and stop conditions are applied to its logits as to any
model's; only the forward pass is missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sized
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from worker.engines import EngineInfo
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.plan import Model, Plan
from worker.engines.embedded.scored_rows import show_scored
from worker.engines.embedded.serving.engine import Load, load_for_serving
from worker.engines.embedded.step import Stepper
from worker.errors import StartupError, one_line

logger = logging.getLogger(__name__)

WORD = "a"
"""The token is the first one of this text."""

LIKELY = 100.0
"""Logit of the token; all others have 0, so that their share at temperature 1 is below 1e-38."""

CONTEXT_LENGTH = 131_072


class ConstantModel:
    """Implements `worker.engines.embedded.Model`.

    Args:
        model_path: Checkpoint whose tokenizer names the tokens; its weights are not read.
        step_s: Seconds that a step takes at least: the time between two tokens of a stream.
        prompt_rate: Tokens of prompts that are computed in a second; they make a step longer.
    """

    eos_token_ids: tuple[int, ...] = ()
    undecodable_ids: tuple[int, ...] = ()
    context_length = CONTEXT_LENGTH
    kv_bytes_per_token = 0
    wants_dense_kv = False
    numerics = "exact"

    def __init__(self, model_path: str | Path, step_s: float, prompt_rate: float) -> None:
        tokenizer = Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())  # ids may have gaps
        self.device = torch.device("cpu")
        self._row = torch.zeros(self.vocab_size)
        self._row[tokenizer.encode(WORD, add_special_tokens=False).ids[0]] = LIKELY
        self._step_s, self._prompt_rate = step_s, prompt_rate
        self._ends_s = 0.0

    def allocate_kv(self, num_pages: int, page_size: int) -> None:
        """Allocate nothing: there is no KV."""

    def forward(self, plan: Plan) -> torch.Tensor:
        """Logits ``[n, vocab_size]`` once the step's time is over. Steps that follow each other
        begin when the one before should have ended, so that waking up late costs no pace.
        """
        num_prompt_tokens = plan.num_tokens - plan.num_decode_tokens
        takes_s = self._step_s + num_prompt_tokens / self._prompt_rate
        now = time.monotonic()
        begins_s = self._ends_s if now - self._ends_s < self._step_s else now
        self._ends_s = begins_s + takes_s
        time.sleep(max(0.0, self._ends_s - now))
        if plan.scored:
            show_scored(plan, torch.empty(plan.num_tokens), self._rows)
        return self._rows(plan.places())

    def late_logits(self, rows: Sized) -> torch.Tensor:
        """See `Model.late_logits`."""
        return self._rows(rows)

    def _rows(self, tokens: Sized) -> torch.Tensor:
        return self._row.repeat(len(tokens), 1)

    def spoiled(self, plan: Plan) -> tuple[()]:
        """Never any."""
        return ()


def load_constant(step_s: float, prompt_rate: float) -> Load:
    """Makes the engine of a `ConstantModel`, in the place of `load_for_serving`."""

    def load(config: EmbeddedConfig, model: Model | None = None) -> tuple[Stepper, EngineInfo]:
        try:
            model = ConstantModel(config.model_path, step_s, prompt_rate)
        except Exception as error:  # of the tokenizer's own class
            raise StartupError(f"--model-path {config.model_path}: no tokenizer: {one_line(error)}") from None
        logger.warning("--engine constant: no model is computed, and answers mean nothing")
        plain = {"method": "none"}  # its tokens repeat themselves, and a step is to give one of each stream
        stepper, info = load_for_serving(replace(config, speculative_config=plain), model)
        return stepper, replace(info, name="constant", computed_by="constant, no model")

    return load
