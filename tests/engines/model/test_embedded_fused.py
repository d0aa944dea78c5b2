"""MAX's surface over the sampler: shapes, asserted errors, and none of its faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_doubles import END, WIDTH, ScriptedModel, request, run_alone

from adapters.chain import ProcessorChain
from adapters.contract import Context, bitmask_of
from adapters.processors.forcing import ForcedSequence
from adapters.vocabulary import Vocabulary
from worker.engines.embedded.fused import NO_TOKEN, FusedSamplingProcessor
from worker.engines.embedded.sampling.sampler import Sampler
from worker.sampling import SamplingParams

PROMPT = [5, 6, 7]
MODEL = ScriptedModel()
CPU = torch.device("cpu")


def processor(*params: SamplingParams, **changes: Any) -> FusedSamplingProcessor:
    sampler = Sampler(WIDTH, MODEL.undecodable_ids)
    requests = [request(MODEL, str(i), PROMPT, one) for i, one in enumerate(params)]
    return FusedSamplingProcessor(sampler, requests, CPU, **changes)


def hot(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 5.0, "seed": 3, "max_tokens": 20, "ignore_eos": True} | changes))


def level(rows: int) -> torch.Tensor:
    return torch.zeros(rows, WIDTH)


def test_shapes() -> None:
    sampling = processor(hot(), hot(seed=4))
    assert sampling.generated_tokens.shape == (2, 0)
    assert sampling.new_tokens is None
    for count in (1, 2, 3):
        sampling(level(2))
        assert sampling.generated_tokens.shape == (2, count)
        assert sampling.generated_tokens.dtype == torch.int64
        assert torch.equal(sampling.generated_tokens[:, -1], sampling.new_tokens)  # type: ignore[arg-type]


def test_it_samples_what_the_engine_samples() -> None:
    params = hot(repetition_penalty=1.5, top_k=20)
    expected = run_alone(MODEL, PROMPT, params).token_ids
    sampling = processor(params)
    tokens = list(PROMPT)
    for _ in expected:
        sampling(MODEL.row(tokens)[None])
        tokens.append(int(sampling.get_new_tokens_numpy()[0]))
    assert tokens[len(PROMPT) :] == expected
    assert sampling.generated_tokens.tolist() == [expected]


def test_draws_move_on_from_call_to_call() -> None:
    sampling = processor(hot())
    for _ in range(8):
        sampling(level(1))
    assert len(set(sampling.generated_tokens[0].tolist())) > 4


def test_swapped_slots_swap_the_tokens() -> None:
    here, there = processor(hot(seed=1), hot(seed=2)), processor(hot(seed=2), hot(seed=1))
    for _ in range(4):
        here(level(2))
        there(level(2))
    assert torch.equal(here.generated_tokens, there.generated_tokens.flip(0))


def test_no_limit_on_top_k_is_not_a_batch_mates() -> None:
    logits = level(2)
    logits[:, 9] = 1.0
    alone, beside = processor(hot(top_k=0)), processor(hot(top_k=0), SamplingParams())
    for _ in range(8):
        alone(logits[:1].clone())
        beside(logits.clone())
    assert torch.equal(alone.generated_tokens[0], beside.generated_tokens[0])
    assert set(beside.generated_tokens[1].tolist()) == {9}


def test_more_than_255_tokens_can_be_drawn() -> None:
    wide = Sampler(4096, ())
    requests = [request(MODEL, str(seed), PROMPT, hot(seed=seed)) for seed in range(600)]
    sampling = FusedSamplingProcessor(wide, requests, CPU)
    sampling(torch.arange(4096.0).mul(-1e-4).expand(600, -1))
    assert len(set(sampling.get_new_tokens_numpy().tolist())) > 400


def test_min_p_holds_on_the_cpu() -> None:
    logits = level(1)
    logits[0, [4, 5]] = 8.0
    sampling = processor(hot(min_p=0.9))
    for _ in range(10):
        sampling(logits.clone())
    assert set(sampling.generated_tokens[0].tolist()) == {4, 5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_stay_as_they_are(dtype: torch.dtype) -> None:
    """One buffer may be sampled from again, and then has no penalties and masks of before."""
    logits = torch.randn(WIDTH, 2, generator=torch.Generator().manual_seed(1)).to(dtype).T
    before = logits.clone()
    packed = torch.stack([bitmask_of(range(0, WIDTH, 2), WIDTH)] * 2)
    sampling = processor(hot(repetition_penalty=1.5, top_k=20), SamplingParams(), bitmask=packed)
    sampling(logits)
    sampling(logits)
    assert torch.equal(logits, before)


# -- rows


def test_logits_as_they_are() -> None:
    logits, offsets = level(2), torch.tensor([0, 1])
    sampling = processor(hot())
    assert sampling.logits_for_sampling(logits) == (logits, None)
    assert sampling.logits_for_sampling(logits, None, offsets) == (logits, offsets)


def test_next_token_logits_come_first() -> None:
    later = level(1)
    assert processor(hot()).logits_for_sampling(level(3), later) == (later, None)


def test_identity_offsets() -> None:
    identity = FusedSamplingProcessor.allocate_identity_logit_offsets(True, CPU, 4)
    assert identity is not None
    assert identity.dtype == torch.uint32
    assert identity.tolist() == [0, 1, 2, 3, 4]
    sampling = processor(hot(), hot(), identity_logit_offsets=identity)
    later = level(2)
    found, offsets = sampling.logits_for_sampling(level(5), later, torch.tensor([0, 2, 5]))
    assert found is later
    assert offsets is not None
    assert offsets.tolist() == [0, 1, 2]
    assert FusedSamplingProcessor.allocate_identity_logit_offsets(False, CPU, 4) is None


def test_identity_offsets_are_required_with_both() -> None:
    with pytest.raises(AssertionError, match="identity_logit_offsets is required when sampling from next_token_logits"):
        processor(hot()).logits_for_sampling(level(2), level(1), torch.tensor([0, 2]))


def test_too_few_identity_offsets() -> None:
    identity = FusedSamplingProcessor.allocate_identity_logit_offsets(True, CPU, 1)
    sampling = processor(hot(), hot(), identity_logit_offsets=identity)
    with pytest.raises(AssertionError, match="smaller than the current batch: offsets_len=2, required=3"):
        sampling.logits_for_sampling(level(4), level(2), torch.tensor([0, 2, 4]))


def test_the_last_row_of_each_request_is_sampled() -> None:
    logits = level(5)
    logits[[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]] = 1.0
    sampling = processor(SamplingParams(), SamplingParams())
    sampling(logits, None, torch.tensor([0, 2, 5]).to(torch.uint32))
    assert sampling.get_new_tokens_numpy().tolist() == [11, 14]


@pytest.mark.parametrize("offsets", [[0, 2], [0, 2, 2], [0, 3, 2], [0, 2, 6], [-3, -2, 2]])
def test_offsets_that_do_not_fit(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="logit_offsets must be 3 numbers that rise to at most 5"):
        processor(hot(), hot())(level(5), None, torch.tensor(offsets))


# -- the bitmask


def test_the_bitmask_holds_until_the_next() -> None:
    packed = torch.stack([bitmask_of({3}, WIDTH), bitmask_of({4}, WIDTH)])
    sampling = processor(hot(), SamplingParams(), bitmask=packed)
    packed.zero_()  # ours is a copy
    sampling(level(2))
    sampling(level(2))
    sampling.update_bitmask(torch.stack([bitmask_of({7}, WIDTH), bitmask_of({8}, WIDTH)]).numpy())
    sampling(level(2))
    assert sampling.generated_tokens.tolist() == [[3, 3, 7], [4, 4, 8]]


def test_a_bitmask_as_wide_as_the_vocabulary_is_not_ignored() -> None:
    sampling = processor(hot(), bitmask=torch.ones(1, WIDTH).int())
    with pytest.raises(ValueError, match=r"the bitmask must be int32 of shape \(1, 3\)"):
        sampling(level(1))


def test_an_empty_bitmask_and_nan_give_no_token_and_a_reason() -> None:
    sampling = processor(hot(), hot(), hot(), bitmask=torch.tensor([[0] * 3, [-1] * 3, [-1] * 3]).int())
    logits = level(3)
    logits[1, 5] = torch.nan
    sampling(logits)
    assert sampling.get_new_tokens_numpy().tolist()[:2] == [NO_TOKEN, NO_TOKEN]
    assert sampling.errors.keys() == {0, 1}
    assert "unsatisfiable" in sampling.errors[0]
    assert "NaN" in sampling.errors[1]
    assert sampling.new_tokens is not None
    assert sampling.new_tokens[2] >= 0


def test_a_forced_token_that_the_bitmask_masks_is_refused() -> None:
    context = Context(Vocabulary(WIDTH), frozenset({END}))
    packed = torch.stack([bitmask_of({3}, WIDTH), bitmask_of({7}, WIDTH)])
    sampling = processor(hot(), hot(), bitmask=packed)
    for one in sampling._requests:
        one.chain = ProcessorChain([ForcedSequence(ForcedSequence.Args(token_ids=[7]), context)], context)
        one.chain.start(PROMPT)
    sampling(level(2))
    assert sampling.get_new_tokens_numpy().tolist() == [NO_TOKEN, 7]
    assert sampling.errors.keys() == {0}
    assert "forces token 7, which the bitmask masks, at position 3" in sampling.errors[0]


# -- tokens on the host


def test_tokens_on_the_host() -> None:
    sampling = processor(hot(), hot(seed=9))
    for count in (1, 2):
        sampling(level(2))
        sampling.start_async_token_copy()
        tokens = sampling.get_new_tokens_numpy()
        assert tokens.dtype == np.int64
        assert tokens.tolist() == sampling.generated_tokens[:, count - 1].tolist()


def test_no_tokens_before_the_first_call() -> None:
    with pytest.raises(RuntimeError, match="no token has been sampled yet"):
        processor(hot()).get_new_tokens_numpy()
