"""Sampling from given logits, independent of the engine's requests."""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping, Sequence

import torch

from worker.engines.embedded.controller.state import entry
from worker.engines.embedded.controller.types import InferenceParams, TopN
from worker.engines.embedded.plan import Edits, Plan, Request, Samples
from worker.engines.embedded.sampling import Sampler, token_logprobs
from worker.sampling import SamplingParams

_NEEDS_HISTORY = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")


def sample_rows(
    logits: torch.Tensor, params: Sequence[InferenceParams], vocab_size: int | None, positions: Sequence[int] | None
) -> Samples:
    """Sample a token from each row ``[B, V]``, out of place; `check_sampling` checks arguments."""
    wanted = positions or [0] * len(params)
    requests = tuple(
        _row_request(row, one, position) for row, (one, position) in enumerate(zip(params, wanted, strict=True))
    )
    never = () if vocab_size is None else tuple(range(vocab_size, logits.shape[1]))
    sampler = Sampler(logits.shape[1], never)
    with torch.inference_mode():  # a copy, row by row in memory, as the sampler reads it
        rows = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        return sampler.sample(rows, Edits(), Plan(requests, (), requests))


def check_sampling(
    params: Sequence[InferenceParams],
    count: int,
    width: int,
    vocab_size: int | None,
    positions: Sequence[int] | None,
) -> None:
    """Raise `ValueError` for wrong shapes and positions, and for what needs a request's history."""
    default = InferenceParams()
    if positions is not None and not isinstance(positions, Sequence):  # a tensor has no truth value
        raise ValueError(f"positions must be a list of integers, got {type(positions).__name__}")
    if len(params) != count or (positions is not None and len(positions) != count):
        raise ValueError(f"there are {count} rows, {len(params)} sampling_params and {positions} as positions")
    if any(type(position) is not int or position < 0 for position in positions or ()):
        raise ValueError(f"positions must be integers of at least 0, got {positions}")
    if vocab_size is not None and not 0 < vocab_size <= width:
        raise ValueError(f"vocab_size must be from 1 to the {width} columns of the logits, got {vocab_size}")
    for name in _NEEDS_HISTORY:
        if any(getattr(one, name) != getattr(default, name) for one in params):
            raise ValueError(f"{name} needs the history of a request; it is applied in batches")
    if any(one.processors or one.logits_processor for one in params):
        raise ValueError("logits processors need the history of a request; they are applied in batches")


def add_top_n(
    params: Sequence[InferenceParams],
    samples: Samples,
    last: torch.Tensor,
    vocab_size: int | None,
    started: torch.Tensor | Sequence[bool] | None,
    target: MutableMapping[int, list[TopN]] | None,
    logits: torch.Tensor | None,
) -> None:
    """Add the top-n of each row that asks; see `TextGenerationController.sample_from_logits`.

    Args:
        params: Parameters of each row.
        samples: Result of `sample_rows`.
        last: Logits ``[B, V]`` of the rows.
        vocab_size: Ids from it on are never among the top-n.
        started: Whether each row is past its prompt; the top-n of others are the model's own.
        target: Lists by row.
        logits: Logits ``[B, S, V]`` of the prompts.

    Raises:
        ValueError: an argument is missing, or the prompt's logits are given and to be skipped.
    """
    if target is None or started is None:
        raise ValueError("top_n_logprobs needs generation_started and top_n_logprobs_dict")
    if logits is not None and any(one.top_n_logprobs and one.skip_prompt_log_probs for one in params):
        raise ValueError("logits of the prompt are given, and skip_prompt_log_probs is set")
    for row, one in enumerate(params):
        if not one.top_n_logprobs:
            continue
        if logits is not None:
            target.setdefault(row, []).extend(_top_n(logits[row], one.top_n_logprobs, vocab_size))
        elif bool(started[row]):
            target.setdefault(row, []).append(entry(samples.logprobs[row]))
        elif not one.skip_prompt_log_probs:
            target.setdefault(row, []).extend(_top_n(last[row : row + 1], one.top_n_logprobs, vocab_size))


def _top_n(rows: torch.Tensor, count: int, vocab_size: int | None) -> list[TopN]:
    """The top-n of each row of ``[S, V]``, the model's own."""
    tokens = rows.nan_to_num(-torch.inf)[:, :vocab_size].argmax(-1).tolist()
    never = None if vocab_size is None else slice(vocab_size, None)
    return [entry(one) for one in token_logprobs(rows, tokens, [count] * len(tokens), never)]


def _row_request(row: int, params: InferenceParams, position: int) -> Request:
    """A request of the engine with the controls of one row."""
    seed = secrets.randbits(64) if params.seed is None else params.seed
    controls = SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.to_sampling_params(1).top_p,
        min_p=params.min_p or None,
        logprobs=params.top_n_logprobs or None,
        logprobs_mode=params.logprobs_mode,
    )
    return Request(str(row), row, controls, [0] * position, position, position + 1, frozenset(), seed, choice=row)
