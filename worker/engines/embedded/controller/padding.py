"""Padded batches, for models that take them; this engine's own packs rows instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from worker.engines.embedded.controller.text import Texts
from worker.engines.embedded.controller.types import InferenceRequest, RequestId

_Key = TypeVar("_Key", bound=RequestId)


class PaddedBatches(Texts):
    """The part of `TextGenerationController` about rows padded to one length."""

    def pad_input_prompt_tokens(
        self, batch_prompt_tokens_list: Sequence[Sequence[int]], padded_batch_size: int, padded_sequence_length: int
    ) -> torch.Tensor:
        """int64 ``[padded_batch_size, padded_sequence_length]``, padded with ``eod``.

        The lists are not changed.

        Raises:
            ValueError: there are more prompts, or a prompt has more tokens.
        """
        longest = max(map(len, batch_prompt_tokens_list), default=0)
        if len(batch_prompt_tokens_list) > padded_batch_size or longest > padded_sequence_length:
            raise ValueError(
                f"{len(batch_prompt_tokens_list)} prompts of up to {longest} tokens do not fit into "
                f"[{padded_batch_size}, {padded_sequence_length}]"
            )
        padded = torch.full((padded_batch_size, padded_sequence_length), self.tokenizer.eod, dtype=torch.int64)
        for row, tokens in enumerate(batch_prompt_tokens_list):
            padded[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        return padded

    def unpad_input_prompt_tokens(
        self, padded_batch_prompt_tokens: torch.Tensor, original_batch_size: int
    ) -> torch.Tensor:
        """The first `original_batch_size` rows."""
        return padded_batch_prompt_tokens[:original_batch_size]

    def prep_inference_input(
        self,
        prompts_tokens: torch.Tensor,
        active_requests: Mapping[_Key, InferenceRequest],
        use_attention_mask: bool = False,
    ) -> dict[str, torch.Tensor | None]:
        """Input of a model that takes padded batches; this engine's own packs rows instead.

        Args:
            prompts_tokens: int64 ``[B, T]``, from `pad_input_prompt_tokens`.
            active_requests: Requests of the first rows, in their order; with prompt tokens.
            use_attention_mask: Whether a forward pass takes whole prompts of different lengths.

        Returns:
            ``tokens`` as given, ``position_ids`` int64 ``[B, T]``, and ``attention_mask``: None, or
            bool ``[B, 1, T, T]``, true where attention is masked: later tokens, and padding.
        """
        count, length = prompts_tokens.shape
        positions = torch.arange(length, device=prompts_tokens.device).expand(count, length)
        mask = None
        if use_attention_mask:
            lengths = [len(self._prompt_tokens(one)) for one in active_requests.values()]
            ends = torch.tensor([*lengths, *[length] * (count - len(lengths))]).to(positions.device)
            ahead = positions[0][None, :] > positions[0][:, None]
            mask = (ahead[None] | (positions[0][None, None, :] >= ends[:, None, None]))[:, None]
        return {"tokens": prompts_tokens, "position_ids": positions, "attention_mask": mask}

    def update_generation_status(
        self,
        updated_prompts_tokens: torch.Tensor,
        generation_started: torch.Tensor,
        current_context_end_position: int,
        is_generation_done_tensor: torch.Tensor,
        generated_sequence_lengths: torch.Tensor,
        termination_id: int | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that are done, and their generated lengths; the end token is not counted.

        Args:
            updated_prompts_tokens: int ``[B, T]``.
            generation_started: bool ``[B]``: rows past their prompt; no other can be done.
            current_context_end_position: Column of the newest tokens.
            is_generation_done_tensor: bool ``[B]``, before; not changed.
            generated_sequence_lengths: int ``[B]``, before; not changed.
            termination_id: End token of all rows, or int ``[B]``; the tokenizer's ``eod`` by
                default, -1: none.

        Returns:
            bool ``[B]`` and int32 ``[B]``.
        """
        ending = self.tokenizer.eod if termination_id is None else termination_id
        newest = updated_prompts_tokens[:, current_context_end_position]
        done = is_generation_done_tensor | ((newest == ending) & generation_started)
        lengths = generated_sequence_lengths + (~done & generation_started)
        return done, lengths.to(torch.int32)
