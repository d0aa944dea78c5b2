"""Citations: a boost of the tokens of the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from adapters.contract import Bias, Context, Edit, ProcessorArgs, Reads, Stage, SteeringProcessor
from adapters.processors.arguments import Boost


class CiteFromPrompt(SteeringProcessor):
    """Boosts the tokens of the prompt, and those that follow the newest token there.

    Source: CiteFromPrompt of NVIDIA's logits-processor-zoo. ``z_t <- z_t + boost`` for every
    distinct token t of the prompt and for the request's end tokens; ``z_t <- z_t +
    conditional_boost`` for every distinct t that follows the newest generated token somewhere in
    the prompt. Before the first generated token only ``boost`` applies.
    """

    name = "cite_from_prompt"
    stage = Stage.SOFT
    reads = Reads.PROMPT_AND_GENERATED

    class Args(ProcessorArgs):
        boost: Annotated[Boost, Field(description="Added to the logit of every token of the prompt.")] = 1.0
        conditional_boost: Annotated[
            Boost, Field(description="Added to the logit of what follows the newest token in the prompt.")
        ] = 0.0

    def __init__(self, args: Args, context: Context) -> None:
        self._boost, self._conditional = args.boost, args.conditional_boost
        self._ends, self._num_tokens = context.end_token_ids, context.vocabulary.num_tokens
        self.reset()

    def reset(self) -> None:
        key = (CiteFromPrompt, self._num_tokens, self._ends)
        self._prompt_tokens = self.from_prompt(key, lambda: _Cited(self.prompt, self._num_tokens, self._ends))
        ids = self._prompt_tokens.token_ids
        self._base = Bias(ids, torch.full(ids.shape, self._boost, dtype=torch.float32))

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        return True  # only the newest token is read

    def edit(self) -> Edit | None:
        follows = self.num_generated and self._conditional
        follower_indices = self._prompt_tokens.followers(self._tokens[-1]) if follows else None
        if self._boost == 0:
            if follower_indices is None:
                return None
            return Bias(self._base.token_ids[follower_indices], torch.full((len(follower_indices),), self._conditional))
        if follower_indices is None:
            return self._base
        values = self._base.values.clone()
        values[follower_indices] += self._conditional
        return Bias(self._base.token_ids, values)


class _Cited:
    """The distinct tokens of a prompt and their successors. Immutable.

    Attributes:
        token_ids: int64 ``[n]``, rising: the prompt's, below ``num_tokens``, and the end tokens.
    """

    def __init__(self, prompt: Sequence[int], num_tokens: int, ends: Iterable[int]) -> None:
        tokens = np.array(prompt, dtype=np.int64)
        ids = np.union1d(tokens[tokens < num_tokens], np.array(sorted(ends), dtype=np.int64))
        self.token_ids = torch.from_numpy(ids)
        is_known = tokens[1:] < num_tokens
        before, after = tokens[:-1][is_known], tokens[1:][is_known]
        order = np.lexsort((after, before))
        before, after = before[order], after[order]
        is_first = np.ones(len(order), dtype=np.bool_)
        is_first[1:] = (before[1:] != before[:-1]) | (after[1:] != after[:-1])
        self._before = before[is_first]
        self._follower_indices = torch.from_numpy(np.searchsorted(ids, after[is_first]))

    def followers(self, token_id: int) -> torch.Tensor | None:
        """Indices into `token_ids` (int64 ``[m]``, rising) of the token's followers, or None."""
        low, high = np.searchsorted(self._before, [token_id, token_id + 1]).tolist()
        return self._follower_indices[low:high] if low < high else None
