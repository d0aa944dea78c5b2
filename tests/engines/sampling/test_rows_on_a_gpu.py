"""What becomes of rows of logits that are on a GPU, a pretended one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pretend_gpu import OnGpu, PretendGpu

from worker.engines.embedded.model import kernels
from worker.engines.embedded.plan import Edits, Plan, Request
from worker.engines.embedded.sampling import LogitsCollector, sampler, truncation
from worker.engines.embedded.sampling.sampler import Sampler
from worker.sampling import SamplingParams

WIDTH = 5003
CONTROLS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 3.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 5.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 2000, "top_p": 0.5},
    {"temperature": 1.5, "min_p": 0.0001},
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendGpu]:
    """A GPU on which Triton's kernels do not compute."""
    monkeypatch.setattr(kernels, "no_triton", lambda device: "triton is not installed")
    monkeypatch.setattr(sampler, "launching_on", lambda device: nullcontext())
    truncation._weighs.cache_clear()
    with PretendGpu() as gpu:
        yield gpu
    truncation._weighs.cache_clear()


def test_without_triton_tokens_are_those_of_the_cpu(gpu: PretendGpu) -> None:
    """Rows that such kernels would weigh are copied, those with the same controls and others."""
    logits = torch.randn(len(CONTROLS), WIDTH, generator=torch.Generator().manual_seed(3)) * 3
    params = [SamplingParams(seed=7, **controls) for controls in CONTROLS]
    for some in (list(range(len(CONTROLS))), [1, 2], [4, 5]):
        requests = tuple(Request(str(row), row, params[row], [1, 2, 3], 3, 99, frozenset(), 11 + row) for row in some)
        plan = Plan(requests, (), requests)
        expected = Sampler(WIDTH, (17,)).sample(logits[some].clone(), Edits(), plan)
        found = Sampler(WIDTH, (17,)).sample(logits[some].clone().as_subclass(OnGpu), Edits(), plan)
        assert (found.token_ids, found.errors) == (expected.token_ids, {})
    assert "amax" in gpu.computed


def test_prompt_logprobs_have_the_bits_of_answers(gpu: PretendGpu) -> None:
    """Those of an answer are computed on the CPU, whose functions have other bits than a GPU's."""
    prompt = [5, 9, 700, 3, 3]
    logits = torch.randn(len(prompt), WIDTH, generator=torch.Generator().manual_seed(3))
    expected = LogitsCollector(prompt, top_n=3, never=(9,))
    expected.see_prompt(0, logits)
    found = LogitsCollector(prompt, top_n=3, never=(9,))
    found.see_prompt(0, logits.as_subclass(OnGpu))
    assert found.prompt_logprobs == expected.prompt_logprobs
    assert gpu.computed.isdisjoint({"double", "log_softmax"}), "the GPU computes them"
