"""The LM head's logits are float32: tokens that are not equally likely do not tie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from worker.engines.embedded import native
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import load_model
from worker.engines.embedded.model.kernels import TORCH, KernelBackend, native_kernels
from worker.engines.embedded.model.linear import Linear, Projection, lm_head
from worker.engines.embedded.plan import Chunk, Plan, Request
from worker.sampling import SamplingParams

BACKENDS = [TORCH, *(native_kernels(path) for path in native.PATHS if not native.unavailable(torch.bfloat16, path))]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=BACKENDS, ids=lambda kernels: kernels.name)
def kernels(request: pytest.FixtureRequest) -> KernelBackend:
    found: KernelBackend = request.param
    if found is not TORCH:
        native.choose_path(torch.bfloat16, found.name.removeprefix("native-"))
    return found


def head_of(weight: torch.Tensor, kernels: KernelBackend) -> Linear:
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    module.weight = torch.nn.Parameter(weight)
    head = lm_head(Projection.of(module))
    head.pack(kernels)
    return head


@torch.inference_mode()
def test_logits_nearer_than_bfloat16_are_told_apart(kernels: KernelBackend) -> None:
    """Forty logits between 16 and 16.04, where the next bfloat16 after 16 is 16.125."""
    weight = torch.zeros(40, 64, dtype=torch.bfloat16)
    weight[:, 0] = 16.0
    weight[:, 1] = torch.arange(40) / 1024
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    x[:, :2] = 1.0
    found = head_of(weight, kernels)(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, (16.0 + torch.arange(40) / 1024).expand(3, 40))


@torch.inference_mode()
def test_they_are_sums_in_float32(kernels: KernelBackend) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((5, 300), (70, 300)))
    expected = x.double() @ weight.double().T
    found = head_of(weight, kernels)(x)
    assert ((found.double() - expected).abs() <= 1e-4).all()
    assert not torch.equal(found, found.bfloat16().float())


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_a_models_logits(kernels: KernelBackend, numerics: str, arch: str, every_checkpoint: dict[str, Path]) -> None:
    config = EmbeddedConfig(
        model_path=every_checkpoint[arch], device="cpu", dtype="bfloat16", kernels=kernels.name, numerics=numerics
    )
    model = load_model(config)
    model.allocate_kv(4, 32)
    tokens = list(range(5, 45))
    request = Request("", 0, SamplingParams(), tokens, len(tokens), 999, frozenset(), 0, pages=[2, 0])
    logits = model.forward(Plan((), (Chunk(request, 0, 40),), (request,)))
    assert (logits.dtype, model.numerics) == (torch.float32, numerics)
    assert not torch.equal(logits, logits.bfloat16().float())
