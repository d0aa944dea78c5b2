"""Repetition, presence and frequency penalties of one request."""

from __future__ import annotations

import torch

from worker.engines.embedded.plan import Request


class Penalties:
    """Token counts of one request, kept up to date from its history.

    The repetition penalty r divides positive and multiplies negative logits of ids in prompt + generated (Keskar et
    al., "CTRL", 2019). After it, ``frequency * count`` and ``presence`` are taken off ids in generated alone.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._num_seen = 0

    def apply(self, logits: torch.Tensor, request: Request) -> None:
        """Edit the request's row, float32 ``[V]``, in place."""
        self._catch_up(request)
        params = request.params
        repetition = params.repetition_penalty
        if repetition is not None and repetition != 1:
            penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits.copy_(torch.where(self._seen, penalised, logits))
        if params.frequency_penalty:
            logits.sub_(self._counts * params.frequency_penalty)
        if params.presence_penalty:
            logits.sub_((self._counts > 0) * params.presence_penalty)

    def _catch_up(self, request: Request) -> None:
        new = torch.tensor(request.tokens[self._num_seen :], dtype=torch.long, device=self._seen.device)
        generated = torch.tensor(
            request.tokens[max(self._num_seen, request.prompt_length) :], dtype=torch.long, device=self._seen.device
        )
        self._seen[new] = True
        self._counts.index_add_(0, generated, torch.ones_like(generated, dtype=torch.float32))
        self._num_seen = len(request.tokens)


def wants_penalties(request: Request) -> bool:
    """Whether any penalty of the request does something."""
    params = request.params
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty not in (None, 1))
