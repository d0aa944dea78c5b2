"""Blocks of GGUF files of model types with a twist stay as they are, experts' too, and compute what
the dequantised checkpoint does.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_twists import ARCHITECTURES, TwistedSource, write_checkpoint
from model_runs import last_logits, load_native
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.model.decoder import DecoderNetwork
from worker.engines.embedded.model.linear import linears
from worker.engines.embedded.model.quantisation import QuantisedGemm, StackedExperts
from worker.engines.embedded.model.stored_weights import Weight, weights_in
from worker.engines.embedded.model.updates import ReloadedUpdates
from worker.engines.weights import WeightsRefused
from worker.errors import StartupError
from worker.models import convert_gguf
from worker.models.gguf_file import GgufFile
from worker.models.quantised import format_of
from worker.models.weight_files import SINGLE
from worker.tiny_model import write_tiny_model

MIXTURES = ("deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen3_moe")
STACKED = ("gpt_oss", "granitemoe")
"""Those whose checkpoints have one weight for all experts."""

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_thread")]


def some(cases: Iterable[tuple[str, Kind]], *in_ci: tuple[str, Kind]) -> list[Any]:
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
    """The values of the dequantised checkpoint, by native kernels, torch and transformers, and the
    bits of a row whole and in chunks.
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


UPDATED = [("gpt_oss", Kind.MXFP4), ("granitemoe", Kind.Q4_0), ("mixtral", Kind.Q8_0), ("deepseek_v3", Kind.Q4_0)]


@pytest.mark.parametrize(("kind", "type"), some(UPDATED, *UPDATED[:3]))
def test_updates_are_rounded_as_the_file_was(kind: str, type: Kind, tmp_path: Path, tiny: Path) -> None:
    """Whole ones, which stay packed: the bits of a start from a file of the new weights."""
    write_checkpoint(tmp_path / "0", kind, tiny)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    new = {name: value.flip(0).contiguous() for name, value in load_file(tmp_path / "0" / SINGLE).items()}
    save_file(new, tmp_path / "1" / SINGLE, {"format": "pt"})
    paths = []
    for which in "01":
        source = TwistedSource(tmp_path / which, type)
        if "deepseek" in kind:
            source.as_older_file()  # newer ones have blocks along the other side of a weight
        (tmp_path / f"files-{which}").mkdir()
        paths.append(converted(source, tmp_path / f"files-{which}")[1])
    model, fresh = (load_native(path, dtype="float32", activation_dtype="int8") for path in paths)
    expected, packed = last_logits(fresh), count_packed(model)
    assert packed == count_packed(fresh) > 0
    config = EmbeddedConfig(model_path=paths[0], device="cpu", dtype="float32", activation_dtype="int8")
    updates = ReloadedUpdates(config, model)
    given = updates.check(new)
    assert set(given.formats.values()) == {type.name}
    assert {name for name in given.weights if not isinstance(given.weights[name], torch.Tensor)} == set(given.formats)
    for weights in (given, updates.check(stored(paths[1]))):
        model.replace_network(updates.network(weights))
        assert count_packed(model) == packed
        assert torch.equal(last_logits(model), expected)
    some_name = next(name for name in new if ".experts." in name or "put_linear" in name)
    with pytest.raises(WeightsRefused, match=f"tensor {re.escape(some_name)}: is missing"):
        updates.check({name: value for name, value in new.items() if name != some_name})


def count_packed(model: HfModel) -> int:
    return sum(isinstance(layer.gemm, QuantisedGemm) for layer in linears(model._network))


def test_tensors_of_two_types_are_dequantised(tmp_path: Path, tiny: Path) -> None:
    """Gates and up projections that one weight holds: both in one type, or neither in blocks."""
    write_checkpoint(tmp_path / "source", "granitemoe", tiny)
    source = TwistedSource(tmp_path / "source", Kind.Q4_0)
    for layer in range(source.config["num_hidden_layers"]):
        name = f"blk.{layer}.ffn_gate_exps.weight"
        source.tensors[name] = (source.tensors[name][0], Kind.Q8_0)
    found = stored(converted(source, tmp_path)[1])
    for name, weight in found.items():
        assert isinstance(weight, torch.Tensor) or "input_linear" not in name
    assert any(isinstance(weight, StackedExperts) for weight in found.values())


def test_exponents_that_float32_does_not_hold_are_refused(tmp_path: Path, tiny: Path) -> None:
    write_checkpoint(tmp_path / "source", "gpt_oss", tiny)
    source = TwistedSource(tmp_path / "source", Kind.MXFP4)
    file = GgufFile(source.write(tmp_path / "model.gguf"))
    tensor = file.tensor("blk.1.ffn_up_exps.weight")
    data = bytearray((tmp_path / "model.gguf").read_bytes())
    data[tensor.start] = 253
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(StartupError, match="holds a scale that is infinite or not a number"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "cache", lambda line: None, keeps_blocks=True)


def loaded(path: Path, **settings: Any) -> HfModel:
    model = load_model(EmbeddedConfig(model_path=path, device="cpu", dtype="float32", **settings))
    model.allocate_kv(8, 32)
    return model
