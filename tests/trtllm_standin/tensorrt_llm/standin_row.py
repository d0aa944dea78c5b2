"""Everything between the model's logits and the token of one sequence, in the order of the real
one's PyTorch backend.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from tensorrt_llm.standin_switches import SWITCHES


class Fatal(Exception):
    """What ends the real executor: a CUDA error."""


class Row:
    """Everything between the model's logits and the token of one sequence. The embedded engine
    calls it per token.
    """

    failure = None

    def __init__(
        self, number: int, choice: int, params: Any, prompt_length: int, settings: dict[str, Any], first: int
    ) -> None:
        self.number = number
        self.params = params
        self.prompt_length = prompt_length
        self.settings = settings
        self.first = first  # position of the first token that this executor generates
        self.logprobs: list[list[tuple[int, float, int]]] = []
        self.generator = torch.Generator().manual_seed((params.seed if _seeded(params) else 0) + choice)
        processors = params.logits_processor
        self.processors = processors if isinstance(processors, list) else [] if processors is None else [processors]
        self.matcher: Any = None
        self.matchers: Any = None
        self.guided = prompt_length  # position up to which the matcher has taken tokens
        self.raised: str | None = None
        self.fatal: str | None = None

    def __call__(self, number: int, logits: torch.Tensor, ids: list[list[int]], stream: Any, client: Any) -> None:
        tokens = ids[0]
        try:
            self._process(logits, tokens)
            row = logits[0, 0]
            self._guide(row, tokens)
            token = self._choose(row, tokens)
        except Fatal as error:
            self.fatal, token = str(error), 0
        except Exception as error:
            self.raised, token = f"Encountered an error in forward function: {error}", 0
        logits.fill_(-math.inf)
        logits[0, 0, token] = 0.0

    def _process(self, logits: torch.Tensor, tokens: list[int]) -> None:
        skips = SWITCHES.skips if self.prompt_length > 2 else []  # the worker's probes are shorter
        if self.settings["drafts"] or not self.processors or len(tokens) - self.prompt_length in skips:
            return
        is_context = len(tokens) == self.first and self.first == self.prompt_length
        shown = list(tokens)
        if (self.settings["overlap"] or SWITCHES.lagging) and len(tokens) > self.first:
            shown = tokens[:-1]
        if is_context and self.settings["chunked"]:
            for _ in range(math.ceil(self.prompt_length / self.settings["max_num_tokens"]) - 1):
                self._call(torch.zeros_like(logits), shown)
        self._call(logits, shown)

    def _call(self, logits: torch.Tensor, shown: list[int]) -> None:
        for processor in self.processors:
            assert 4 <= len(inspect.signature(processor).parameters) <= 5
            processor(self.number, logits, [list(shown)], None, None)

    def _guide(self, row: torch.Tensor, tokens: list[int]) -> None:
        loosened = SWITCHES.loosens_guides_at
        if self.params.guided_decoding is None or (
            loosened is not None and loosened <= len(tokens) - self.prompt_length
        ):
            return
        if self.matcher is None:
            self.matcher = self.matchers.create(self.params.guided_decoding)
        for token_id in tokens[self.guided :]:
            self.matcher.accept(token_id)
        self.guided = len(tokens)
        self.matcher.mask(row)

    def _choose(self, row: torch.Tensor, tokens: list[int]) -> int:
        params = self.params
        if not self.settings["drafts"]:  # nothing but temperature, top-k and top-p is looked at beside them
            if params.embedding_bias is not None:
                row.add_(params.embedding_bias)
            self._penalise(row, tokens)
            self._ban(row, tokens)
        if bool(row.isnan().any()):
            raise Fatal("CUDA error: device-side assert triggered")
        raw = row.double().log_softmax(-1)
        token, processed = self._sample(row)
        if wants_logprobs(params):
            mode = getattr(params, "logprobs_mode", "raw")
            self.logprobs.append(_entries(processed if mode == "processed" else raw, token, params.logprobs))
        return token

    def _penalise(self, row: torch.Tensor, tokens: list[int]) -> None:
        params = self.params
        ignored = getattr(params, "prompt_ignore_length", None) or 0
        if _honoured(params, "repetition_penalty"):
            seen = torch.tensor(sorted(set(tokens)))
            values = row[seen]
            row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        for name in ("frequency_penalty", "presence_penalty"):
            if _honoured(params, name) and tokens[ignored:]:
                counts = torch.bincount(torch.tensor(tokens[ignored:]), minlength=len(row)).to(row.dtype)
                row.sub_(getattr(params, name) * (counts if name == "frequency_penalty" else (counts > 0).to(row)))

    def _ban(self, row: torch.Tensor, tokens: list[int]) -> None:
        params = self.params
        generated = len(tokens) - self.prompt_length
        if params.min_tokens is not None and generated < params.min_tokens and params.end_id not in (None, -1):
            row[params.end_id] = -math.inf
        if _honoured(params, "bad_token_ids"):
            row[torch.tensor(params.bad_token_ids)] = -math.inf
        if _honoured(params, "no_repeat_ngram_size"):
            n = params.no_repeat_ngram_size
            tail = tokens[len(tokens) - n + 1 :]
            for i in range(len(tokens) - n + 1):
                if tokens[i : i + n - 1] == tail:
                    row[tokens[i + n - 1]] = -math.inf

    def _sample(self, row: torch.Tensor) -> tuple[int, torch.Tensor]:
        params = self.params
        if params._greedy_decoding or (self.settings["drafts"] and SWITCHES.greedy_beside_drafts):
            one = torch.full_like(row, -math.inf)
            one[int(row.argmax())] = 0.0
            return int(row.argmax()), one
        weights = (row.double() / (1.0 if params.temperature is None else params.temperature)).softmax(-1)
        if bool(weights.isnan().any()):
            raise Fatal("CUDA error: device-side assert triggered")
        if _honoured(params, "min_p"):
            weights[weights < params.min_p * weights.max()] = 0.0
        if params.top_k:
            weights[weights < weights.topk(params.top_k).values[-1]] = 0.0
        weights /= weights.sum()
        if params.top_p is not None and params.top_p < 1:
            values, order = weights.sort(descending=True)
            weights[order[values.cumsum(0) - values >= params.top_p]] = 0.0
        weights /= weights.sum()
        return int(torch.multinomial(weights, 1, generator=self.generator)), weights.log()


def _seeded(params: Any) -> bool:
    return params.seed is not None and SWITCHES.honours("seed")


def _honoured(params: Any, name: str) -> bool:
    return getattr(params, name) is not None and SWITCHES.honours(name)


def wants_logprobs(params: Any) -> bool:
    return bool(params.logprobs) if SWITCHES.is_old else params.logprobs is not None


def _entries(logprobs: torch.Tensor, token: int, top: int) -> list[tuple[int, float, int]]:
    """The sampled token first, then the likeliest."""
    entries = {token: (float(logprobs[token]), int((logprobs > logprobs[token]).sum()) + 1)}
    if top:
        found = logprobs.topk(top)
        for rank, (value, index) in enumerate(zip(found.values.tolist(), found.indices.tolist(), strict=True), 1):
            entries.setdefault(index, (value, rank))
    return [(token_id, value, rank) for token_id, (value, rank) in entries.items()]
