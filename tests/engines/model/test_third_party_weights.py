"""Checkpoints that other programs quantised: served as their formats define them, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_runs import last_logits
from third_party_checkpoints import FORMATS, write

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.model.linear import linears
from worker.engines.embedded.model.quantisation import QuantisedGemm

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.native]


def load(path: Path, **settings: str) -> HfModel:
    defaults = {"device": "cpu", "dtype": "float32", "kernels": "native"}
    model = load_model(EmbeddedConfig(model_path=path, **defaults | settings))  # type: ignore[arg-type]
    model.allocate_kv(8, 32)
    return model


def num_packed(model: HfModel) -> int:
    return sum(isinstance(layer.gemm, QuantisedGemm) for layer in linears(model._network))


@pytest.mark.parametrize("format", FORMATS)
def test_a_llama_is_what_its_format_means(format: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Bit by bit: the float32 kernels on the weights that the definition gives."""
    path = write(checkpoints["llama"], tmp_path / "it", format, files=2)
    model = load(path)
    found = last_logits(model)
    assert torch.equal(found, last_logits(load(path / "dense")))
    assert bool(num_packed(model)) == FORMATS[format][2]
    assert torch.equal(last_logits(model, (0, 33, 34, 89, 90))[-1:], found)
