"""`FusedSamplingProcessor`: the sampler behind the surface of MAX's class of that name.

One object serves one batch for as many steps as it is called. In contrast to MAX's: random numbers
advance from step to step, no row's top-k depends on another's, min-p is applied on every device, a
bitmask of the wrong width is an error rather than ignored, and rows that cannot be sampled report
why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from worker.engines.embedded.plan import Plan, Request
from worker.engines.embedded.sampling import Sampler
from worker.engines.embedded.step import plan_edits

NO_TOKEN = -1
"""Token id of a row that cannot be sampled; `FusedSamplingProcessor.errors` says why."""


class FusedSamplingProcessor:
    """Samples one token per request and call, and keeps them all.

    Args:
        sampler: Sampler of the model's vocabulary.
        requests: The batch. Their token lists are copied, so that the caller may extend its own;
            their chains of processors are shared, which is safe, because a chain accepts a position
            once.
        device: Device of the tokens.
        bitmask: First bitmask; see `update_bitmask`.
        identity_logit_offsets: Result of `allocate_identity_logit_offsets`; may exceed the batch.

    Raises:
        ValueError: a chain may take tokens back, or needs a second row of logits.

    Attributes:
        generated_tokens: int64 ``[B, number of calls]``.
        new_tokens: int64 ``[B]``, of the last call; None before the first.
        errors: Reasons by row, of the last call, for those not sampled.
    """

    def __init__(
        self,
        sampler: Sampler,
        requests: Sequence[Request],
        device: torch.device,
        bitmask: torch.Tensor | None = None,
        identity_logit_offsets: torch.Tensor | None = None,
    ) -> None:
        if any(request.chain is not None and request.chain.backtracks for request in requests):
            raise ValueError("a chain may take tokens back, which needs an engine")
        if any(request.companion is not None for request in requests):
            raise ValueError("a chain needs a second row of logits, which needs an engine")
        self._sampler = sampler
        self._device = device
        self._requests = tuple(replace(request, tokens=list(request.tokens)) for request in requests)
        self._identity_logit_offsets = identity_logit_offsets
        self._bitmask: torch.Tensor | None = None
        self._host_tokens: list[int] | None = None
        self.generated_tokens = torch.empty((len(self._requests), 0), dtype=torch.int64, device=device)
        self.new_tokens: torch.Tensor | None = None
        self.errors: dict[int, str] = {}
        if bitmask is not None:
            self.update_bitmask(bitmask)

    @staticmethod
    def allocate_identity_logit_offsets(
        enable_variable_logits: bool, device: torch.device, max_batch_size: int
    ) -> torch.Tensor | None:
        """uint32 ``[max_batch_size + 1]``, 0, 1, 2, ...; None without variable logits."""
        if not enable_variable_logits:
            return None
        return torch.arange(max_batch_size + 1, device=device).to(torch.uint32)

    def logits_for_sampling(
        self,
        logits: torch.Tensor,
        next_token_logits: torch.Tensor | None = None,
        logit_offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The logits to sample from and the offsets that go with them.

        Args:
            logits: ``[n, V]``, of all positions that the model computed.
            next_token_logits: ``[B, V]``, of each request's last position, if the model returned
                them apart.
            logit_offsets: ``[B + 1]``: rows ``offsets[i]`` to ``offsets[i + 1]`` of `logits` are
                request i's.

        Raises:
            AssertionError: both optional arguments are given, and there are no identity offsets, or
                too few.
        """
        if next_token_logits is None:
            return logits, logit_offsets
        if logit_offsets is None:
            return next_token_logits, None
        identity, required = self._identity_logit_offsets, len(self._requests) + 1
        if identity is None:
            raise AssertionError(
                "identity_logit_offsets is required when sampling from next_token_logits with variable-logit sampler "
                "offsets."
            )
        if len(identity) < required:
            raise AssertionError(
                f"identity_logit_offsets is smaller than the current batch: offsets_len={len(identity)}, "
                f"required={required}"
            )
        return next_token_logits, identity[:required]

    def __call__(
        self,
        logits: torch.Tensor,
        next_token_logits: torch.Tensor | None = None,
        logit_offsets: torch.Tensor | None = None,
    ) -> None:
        """Sample a token for each request, from its last row; arguments as `logits_for_sampling`.

        The logits are not changed.

        Raises:
            AssertionError: as `logits_for_sampling`.
            ValueError: the logits, the offsets or the bitmask do not fit the batch.
        """
        chosen, offsets = self.logits_for_sampling(logits, next_token_logits, logit_offsets)
        if offsets is not None:
            chosen = chosen[self._last_rows(chosen, offsets)]
        # a copy, row by row in memory: the sampler edits what it is given
        rows = chosen.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        plan = Plan(self._requests, (), self._requests)
        samples = self._sampler.sample(rows, plan_edits(plan), plan, bitmask=self._bitmask)
        self.errors = samples.errors
        for row, request in enumerate(self._requests):
            if row not in samples.errors:
                self._accept(request, samples.token_ids[row])
        tokens = [NO_TOKEN if row in self.errors else token for row, token in enumerate(samples.token_ids)]
        self._host_tokens = tokens
        self.new_tokens = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        self.generated_tokens = torch.cat((self.generated_tokens, self.new_tokens[:, None]), dim=1)

    def _last_rows(self, logits: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        bounds = offsets.to(torch.int64)
        fits = len(bounds) == len(self._requests) + 1 and int(bounds[-1]) <= len(logits)
        if not fits or int(bounds[0]) < 0 or bool((bounds[1:] <= bounds[:-1]).any()):
            raise ValueError(
                f"logit_offsets must be {len(self._requests) + 1} numbers that rise to at most {len(logits)}, "
                f"got {bounds.tolist()}"
            )
        return (bounds[1:] - 1).to(logits.device)

    @staticmethod
    def _accept(request: Request, token_id: int) -> None:
        request.tokens.append(token_id)
        if request.chain is not None:
            request.chain.accept(token_id, len(request.tokens) - 1)

    def update_bitmask(self, packed: torch.Tensor | np.ndarray[Any, Any]) -> None:
        """Copy the bitmask of the next calls, int32 ``[B, ceil(V / 32)]``; set bits are allowed."""
        self._bitmask = torch.as_tensor(packed).to("cpu", copy=True)

    def start_async_token_copy(self) -> None:
        """Does nothing: tokens are sampled on the host."""

    def get_new_tokens_numpy(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64 ``[B]`` of the last call.

        Raises:
            RuntimeError: before the first call.
        """
        if self._host_tokens is None:
            raise RuntimeError("no token has been sampled yet")
        return np.array(self._host_tokens, dtype=np.int64)
