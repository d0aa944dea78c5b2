"""Verification and rollback of drafts, as plain functions.

`agreeing_rows` is what the engine's step uses. The others are the same decisions in the shapes of
Megatron-Core 0.17's ``TextGenerationController`` (``_get_required_logit_indices``,
``_verify_speculative_tokens``, ``_rewind_kv_cache``), whose worked examples are tests here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from worker.engines.embedded.plan import Output, Plan


def agreeing_rows(plan: Plan, depth: int, rows: Sequence[int], outputs: Sequence[Output]) -> list[int]:
    """The decode rows whose next position can be sampled from this step's logits, too.

    Args:
        plan: Plan of the step.
        depth: Positions of `rows` that have been sampled before the last one.
        rows: Indices of decode rows.
        outputs: Outputs of the last position of each of `rows`.
    """
    return [
        row
        for row, output in zip(rows, outputs, strict=True)
        if output.finish_reason is None
        and output.rewound_to is None
        and depth < len(plan.drafts[row])
        and plan.decode[row].tokens[-1] == plan.drafts[row][depth]
    ]


def required_logit_indices(lengths: Sequence[int], is_prefill: Sequence[bool]) -> list[int]:
    """Indices, among the tokens of a step, whose logits are needed.

    Those of a decoding request are all of its tokens, the newest one and its draft; of a request in
    prefill it is the last token.

    Args:
        lengths: Tokens of each request in the step.
        is_prefill: Whether it is in prefill.
    """
    ends = list(accumulate(lengths))
    found: list[int] = []
    for end, length, prefill in zip(ends, lengths, is_prefill, strict=True):
        found += [end - 1] if prefill else range(end - length, end)
    return found


def accepted_mask(inputs: Sequence[int], sampled: Sequence[int], lengths: Sequence[int]) -> list[bool]:
    """Whether each token of a step is one of the answer: the first of a request always.

    A drafted token is accepted if it is what was sampled from the row before it, and all drafted
    tokens before it are accepted.

    Args:
        inputs: The tokens that were computed, request by request.
        sampled: Tokens that were sampled from the logits of each.
        lengths: Tokens of each request.
    """
    mask: list[bool] = []
    for length in lengths:
        start = len(mask)
        mask.append(True)
        for index in range(start + 1, start + length):
            mask.append(mask[-1] and inputs[index] == sampled[index - 1])
    return mask


def last_accepted(mask: Sequence[bool], lengths: Sequence[int]) -> list[int]:
    """Index of each request's last accepted token, whose row gives its next token."""
    starts = accumulate(lengths, initial=0)
    return [start + sum(mask[start : start + length]) - 1 for start, length in zip(starts, lengths, strict=False)]


def rewind(offset: int, num_blocks: int, num_rejected: int, block_size: int) -> tuple[int, int]:
    """Offset in the last block, and number of blocks, once rejected tokens are rolled back.

    Args:
        offset: Offset of the newest token in the last block.
        num_blocks: Blocks of the sequence.
        num_rejected: Tokens to roll back.
        block_size: Tokens per block.
    """
    released, offset = divmod(offset - num_rejected, block_size)
    return offset, num_blocks + released
