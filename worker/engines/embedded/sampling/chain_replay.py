"""Chains of migrated requests: the answer's tokens so far are replayed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapters.chain import ProcessorChain, apply_chain


def resume(
    chain: ProcessorChain, tokens: list[int], prompt_length: int, undecodable_ids: Sequence[int]
) -> ChainReplay | None:
    """Bring a chain to the end of ``tokens``, prompt and answer so far of a migrated request.

    Args:
        chain: Begun after the prompt; it may have been given the whole answer already.
        tokens: Token ids.
        prompt_length: Tokens of the prompt.
        undecodable_ids: Never sampled; see `Model`.

    Returns:
        What has to see the logits of the answer first, if some state depends on logits: the
        request's tap. Else None.

    Raises:
        ProcessorFailed: a processor raised.
    """
    if chain.observes_logits:
        return ChainReplay(chain, tokens, prompt_length, undecodable_ids)
    if chain.receipt.mode != "migrated" or chain.tokens != tokens:
        chain.start(tokens[:prompt_length], tokens[prompt_length:], mode="migrated")
    return None


class ChainReplay:
    """A `LogitsTap` that replays a chain on the logits that the answer's tokens were sampled from.

    The prefill computes them again. Arguments as `resume`.
    """

    wants_generated = False

    def __init__(
        self, chain: ProcessorChain, tokens: Sequence[int], prompt_length: int, undecodable_ids: Sequence[int]
    ) -> None:
        self._chain = chain
        self._tokens = list(tokens)
        self._never = list(undecodable_ids)
        self.first_wanted = prompt_length - 1
        chain.start(tokens[:prompt_length], mode="migrated")

    @property
    def wants_prompt(self) -> bool:
        """Whether a token is left to replay."""
        return self._chain.position < len(self._tokens)

    def see_prompt(self, start: int, logits: torch.Tensor) -> None:
        """Take rows ``[n, V]`` of the tokens from ``start`` on; those seen before are skipped.

        Raises:
            ProcessorFailed: a processor raised.
        """
        for position, row in enumerate(logits, start + 1):
            if self.wants_prompt and position == self._chain.position:
                self._replay(self._tokens[position], row.float().clone())

    def see_generated(self, position: int, logits: torch.Tensor) -> None:
        """Not wanted."""

    def _replay(self, token_id: int, row: torch.Tensor) -> None:
        row[self._never] = -torch.inf
        apply_chain(self._chain, row)
        self._chain.replay_token(token_id)
