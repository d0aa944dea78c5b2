"""Modules of transformers on a GPU, a pretended one: what computes them makes its tensors there."""

from __future__ import annotations

from typing import Any

import torch
from pretend_gpu import OnGpu, PretendGpu
from torch.nn import functional
from transformers.activations import ACT2CLS, ACT2FN

from worker.engines.embedded.model.activations import name_of
from worker.engines.embedded.model.kernels import TORCH
from worker.engines.embedded.model.row_functions import RowFunctions


def test_an_rms_norm_without_weights() -> None:
    """DiffLlama has one for its pairs of heads."""
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
    expected = functional.rms_norm(x, (16,), eps=1e-5)
    with PretendGpu(), RowFunctions([], TORCH):
        found = functional.rms_norm(x.as_subclass(OnGpu), (16,), eps=1e-5)
    assert torch.equal(found.as_subclass(torch.Tensor), expected)


def test_an_activation_with_weights_is_none_of_ours() -> None:
    """Those of Apertus lie where the model does, and numbers to try it with do not."""
    with_weights: Any = ACT2CLS["xielu"]
    assert name_of(with_weights(dtype=torch.float32).to("meta")) is None
    assert name_of(ACT2FN["silu"]) == "silu"
