"""Blocks of GGUF files of model types with a twist stay as they are, experts' too, and compute what
the dequantised checkpoint does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from gguf_twists import ARCHITECTURES, TwistedSource, write_checkpoint
from model_runs import last_logits, load_native
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.model.decoder import DecoderNetwork
from worker.engines.embedded.model.network import Network
from worker.engines.embedded.model.quantisation import StackedExperts
from worker.engines.embedded.model.stored_weights import Weight, weights_in
from worker.engines.embedded.model.updates import ReloadedUpdates
from worker.engines.weights import WeightsRefused
from worker.errors import StartupError
from worker.models import convert_gguf
from worker.models.quantised import CODES, format_of
from worker.tiny_model import write_tiny_model

MIXTURES = ("deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen3_moe")
STACKED = ("gpt_oss", "granitemoe")
"""Those whose checkpoints have one weight for all experts."""

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_thread")]


def some(cases: Iterable[object], *in_ci: object) -> list[Any]:
    """All cases, of which CI runs some."""
    return [pytest.param(*each, marks=() if each in in_ci else pytest.mark.campaign) for each in cases]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


def converted(source: TwistedSource, directory: Path) -> tuple[Path, Path]:
    """The checkpoint dequantised, and with its blocks."""
    for name, (value, kind) in source.tensors.items():
        if value.shape[-1] % 32 or "ffn_gate_inp" in name:  # no whole blocks, or a router
            source.tensors[name] = value, Kind.F32 if kind not in (Kind.F16, Kind.BF16) else kind
    file = source.write(directory / "model.gguf")
    dense, kept = (convert_gguf(file, directory / "cache", lambda line: None, keeps) for keeps in (False, True))
    return dense, kept


def stored(path: Path) -> dict[str, Weight]:
    return dict(weights_in(load_file(path / "model.safetensors")))


def dequantised(weight: Weight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantised()


def write_exact(kept: Path, dense: Path) -> dict[str, torch.Tensor]:
    """Put the very values of the blocks into the dequantised checkpoint, which rounds them."""
    exact = {name: dequantised(weight).contiguous() for name, weight in stored(kept).items()}
    save_file(exact, dense / "model.safetensors", {"format": "pt"})
    return exact


CASES = [
    *((kind, Kind.Q4_0) for kind in ARCHITECTURES),
    *((kind, Kind.Q8_0) for kind in ARCHITECTURES),
    *((kind, Kind.MXFP4) for kind in MIXTURES),
]
IN_CI = [("deepseek_v3", Kind.Q8_0), ("gpt_oss", Kind.MXFP4), ("granitemoe", Kind.Q4_0), ("mixtral", Kind.Q4_0)]
IN_CI += [("phi3", Kind.Q4_0), ("gemma3_text", Kind.Q8_0)]


@pytest.mark.parametrize(("kind", "type"), some(CASES, *IN_CI))
def test_blocks_are_kept(kind: str, type: Kind, tmp_path: Path, tiny: Path) -> None:
    """The values of the dequantised checkpoint, by native kernels, by torch and by transformers, and
    the bits of a row whole, in chunks and beside others.
    """
    write_checkpoint(tmp_path / "source", kind, tiny)
    dense, kept = converted(TwistedSource(tmp_path / "source", type), tmp_path)
    assert format_of(json.loads((kept / "config.json").read_text())) == type.name
    found, rounded = stored(kept), load_file(dense / "model.safetensors")
    assert found.keys() == rounded.keys()
    for name, value in rounded.items():
        assert torch.equal(dequantised(found[name]).to(value.dtype), value), name
    experts = [name for name in found if ".experts." in name or "put_linear" in name]
    assert bool(experts) == (kind in MIXTURES)
    for name in experts:
        assert isinstance(found[name], torch.Tensor) == name.endswith("_bias")
    assert any(isinstance(weight, StackedExperts) for weight in found.values()) == (kind in STACKED)
    write_exact(kept, dense)
    network = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    ids = torch.randint(300, (1, 90), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = network(ids, use_cache=False).logits[0, -1:]
    model = load_native(kept, dtype="float32", numerics="exact")
    assert isinstance(model._network, DecoderNetwork) == ("deepseek" not in kind)
    whole = last_logits(model)
    assert torch.equal(last_logits(model, (0, 7, 40, 41, 90))[-1:], whole)
    for exact in (load_native(dense, dtype="float32"), load_native(kept, dtype="float32", quantization="none")):
        assert torch.equal(last_logits(exact), whole) or "deepseek" in kind
        torch.testing.assert_close(last_logits(exact), whole, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(last_logits(loaded(kept, kernels="torch")), whole, atol=2e-4, rtol=2e-4)
    close = 1e-3 if kind == "deepseek_v2" else 2e-4  # see test_gguf_twists
    torch.testing.assert_close(whole, expected, atol=close, rtol=close)


def loaded(path: Path, **settings: Any) -> HfModel:
    model = load_model(EmbeddedConfig(model_path=path, device="cpu", dtype="float32", **settings))
    model.allocate_kv(8, 32)
    return model
