"""Trials at start before numerics are called exact: whole layers, and the LM head."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_checkpoints import MIXTURE, TYPES, write

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import HfModel, decoder, load_model
from worker.engines.embedded.model.activations import name_of
from worker.engines.embedded.model.batch_packing import Batch
from worker.engines.embedded.model.decoder import DecoderNetwork
from worker.engines.embedded.model.kernels import TORCH
from worker.engines.embedded.model.layer_trial import LayerTrial, num_trial_pages, trial_ids
from worker.engines.embedded.model.llama import LlamaNetwork, _RmsNorm
from worker.engines.embedded.model.mlp import GatedMlp
from worker.engines.embedded.model.moe import Experts
from worker.engines.embedded.model.transformers_modules import Norm
from worker.engines.embedded.model.transformers_network import TransformersNetwork
from worker.errors import StartupError

pytestmark = pytest.mark.usefixtures("one_thread")

ONE_DENSE = ("qwen3_moe", {**MIXTURE, "norm_topk_prob": True, "mlp_only_layers": [0]})
WINDOWS = ("qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1})


def loaded(path: Path, numerics: str) -> HfModel:
    model = load_model(EmbeddedConfig(model_path=path, device="cpu", numerics=numerics))
    model.allocate_kv(8, 48)
    return model


def depends_on_the_batch(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`compute`, whose results depend on the number of rows in their last bits."""

    def changed(self: Any, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return compute(self, x, *more) * (1 + len(rows) * 2**-18)

    return changed


@pytest.mark.parametrize(
    ("kind", "owner", "name", "message"),
    [
        (("gemma3_text", TYPES["gemma3_text"]), GatedMlp, "forward", "layer 0 has other bits in another batch"),
        (("gemma2", TYPES["gemma2"]), Norm, "forward", "layer 0 has other bits in another batch"),
        (("gemma2", TYPES["gemma2"]), TransformersNetwork, "logits", "the LM head has other bits in another batch"),
        (("llama", {}), LlamaNetwork, "logits", "the LM head has other bits in another batch"),
        (("gemma2", TYPES["gemma2"]), DecoderNetwork, "logits", "the LM head has other bits in another batch"),
        (ONE_DENSE, Experts, "forward", "layer 1 has other bits in another batch"),
    ],
    ids=["mlp", "norm", "head", "llama's head", "native head", "experts"],
)
@pytest.mark.native
def test_what_depends_on_the_batch_is_not_called_exact(
    kind: tuple[str, dict[str, Any]],
    owner: type,
    name: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(tmp_path, *kind)
    if owner is not DecoderNetwork:
        monkeypatch.setattr(decoder, "TWISTS", {})
    assert loaded(tmp_path, "auto").numerics == "exact"
    monkeypatch.setattr(owner, name, depends_on_the_batch(getattr(owner, name)))
    with pytest.raises(StartupError, match=f"--numerics exact: {message}; use fast or auto"):
        loaded(tmp_path, "exact")
    assert loaded(tmp_path, "fast").numerics == "fast"
    with caplog.at_level(logging.WARNING):
        model = loaded(tmp_path, "auto")
    assert model.made_by == "fast"
    assert f"numerics are fast: {message}" in caplog.text


def test_layers_that_python_calls_are_tried_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "llama", {})
    monkeypatch.setattr(LlamaNetwork, "_native", None)
    monkeypatch.setattr("worker.engines.embedded.model.llama._native_layers", lambda layers: None)
    assert loaded(tmp_path, "exact").numerics == "exact"
    monkeypatch.setattr(_RmsNorm, "__call__", depends_on_the_batch(_RmsNorm.__call__))
    with pytest.raises(StartupError, match="layer 0 has other bits"):
        loaded(tmp_path, "exact")


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        (("llama", {}), [0]),
        (WINDOWS, [0, 1]),
        (("gemma2", TYPES["gemma2"]), [0, 1]),
        (("gemma3_text", TYPES["gemma3_text"]), [0, 1]),
        (ONE_DENSE, [0, 1]),
        (("qwen3_moe", TYPES["qwen3_moe"]), [0]),
    ],
)
def test_a_layer_of_each_kind_is_tried(kind: tuple[str, dict[str, Any]], kinds: list[int], tmp_path: Path) -> None:
    write(tmp_path, *kind)
    model = loaded(tmp_path, "fast")
    assert model._network.layer_kinds() == kinds
    assert model._network.has_windows == (kind[0] in ("qwen3", "gemma2", "gemma3_text"))


def test_a_trial_is_cheap() -> None:
    """About three times the prompt, in one layer."""
    computed: list[int] = []

    class Network:
        def layer_kinds(self) -> list[int]:
            return [4]

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            computed.append(len(hidden))
            return hidden

    def compute(batch: Batch, layer: int) -> torch.Tensor:
        assert layer == 4
        assert max(batch.pages) < num_trial_pages(ids, 48)
        computed.append(len(batch.ids))
        return torch.tensor(batch.ids)[:, None].float()

    ids = trial_ids(576, 8192, 1000)
    assert 64 <= len(ids) <= 128
    assert LayerTrial(Network(), compute, 48, ids).difference() is None  # type: ignore[arg-type]
    assert sum(computed) <= 2 * len(ids) + 20
    assert len(trial_ids(8192, 8192, 9)) == 64
    assert len(trial_ids(64, 8192, 9)) == 512
    assert len(trial_ids(64, 40, 9)) == 40


def test_an_activation_that_is_not_ours_is_not_called_exact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "llama", {"hidden_act": "mish"})
    with pytest.raises(StartupError, match="nothing is known of the bits of mish"):
        loaded(tmp_path, "exact")
    with caplog.at_level(logging.WARNING):
        assert loaded(tmp_path, "auto").made_by == "fast"


@pytest.mark.parametrize(
    ("transformers_name", "ours"),
    [
        *(("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_python", "gelu"), ("relu", "relu")),
        *(("gelu_new", "gelu_tanh"), ("gelu_fast", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh")),
        *(("quick_gelu", None), ("relu2", None), ("linear", None), ("gelu_10", None), ("relu6", None)),
    ],
)
def test_activations_are_told_by_their_values(transformers_name: str, ours: str | None) -> None:
    from transformers.activations import ACT2FN

    assert name_of(ACT2FN[transformers_name]) == ours


def test_experts_have_the_activation_of_their_model(tmp_path: Path) -> None:
    expected = write(tmp_path, "qwen3_moe", {**TYPES["qwen3_moe"], "hidden_act": "gelu"})
    tokens = torch.randint(3, 320, (1, 20), generator=torch.Generator().manual_seed(0))
    model = loaded(tmp_path, "exact")
    batch = Batch()
    batch.append([0], 0, tokens[0].tolist(), 48)
    with torch.inference_mode():
        found = model._network.logits(model._hidden(batch, model.kv_store))
        torch.testing.assert_close(found, expected(tokens).logits[0], atol=2e-4, rtol=2e-4)


def test_a_norm_of_another_kind_is_left_to_transformers() -> None:
    class CenteredRMSNorm(torch.nn.LayerNorm):
        pass

    assert Norm.of(CenteredRMSNorm(16), TORCH) is None
