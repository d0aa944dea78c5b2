"""Architectures with a twist on native kernels: the bits of a row depend on nothing else, in every
data type, path of instructions and number of threads.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import random_checkpoints
import torch
from decoder_shapes import settings, write
from model_runs import last_logits, load_native
from served_checkpoint import served_or_refused

from worker.engines.embedded import native
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.model.decoder import DecoderNetwork
from worker.engines.embedded.model.transformers_network import TransformersNetwork
from worker.errors import StartupError

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_thread")]

KINDS = [
    pytest.param("gpt_oss"),  # sinks, windows, biases, clamped experts
    *(pytest.param(kind, marks=pytest.mark.campaign) for kind in ("gemma3_text", "glm4", "granitemoe", "olmo2")),
]
CUTS = (0, 7, 40, 41, 88, 89, 90)


load = partial(load_native, dtype="float32", numerics="exact")


def checked(model: HfModel) -> torch.Tensor:
    """Logits of the last token, which has the same bits in chunks."""
    assert isinstance(model._network, DecoderNetwork)
    whole = last_logits(model)
    assert torch.equal(last_logits(model, CUTS)[-1:], whole)
    assert whole.isfinite().all()
    return whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_its_bits_however_it_is_computed(kind: str, tmp_path: Path) -> None:
    write(tmp_path, kind, 0)
    expected = checked(load(tmp_path))
    for path in native.PATHS:
        if native.unavailable(torch.float32, path) is None:
            assert torch.equal(checked(load(tmp_path, kernels=f"native-{path}")), expected), path
    model = load(tmp_path)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(checked(model), expected), threads
    torch.set_num_threads(1)
    if native.unavailable(torch.bfloat16) is None:
        assert (checked(load(tmp_path, dtype="bfloat16")) - expected).abs().max() < 1.0
    for options in (
        {"quantization": "int4", "activation_dtype": "int8"},
        {"quantization": "int8", "dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "int16"},
    ):
        checked(load(tmp_path, **options))


def test_what_kernels_lack_is_computed_by_transformers_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    write(tmp_path, "gpt_oss", 0)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"swiglu_limit": 7.0', '"swiglu_limit": 5.0'))
    model = load_model(EmbeddedConfig(model_path=tmp_path, device="cpu", dtype="float32"))
    assert isinstance(model._network, TransformersNetwork)
    assert "the native kernels alone: experts clamped to 5.0 with a factor of 1.702" in caplog.text


@pytest.mark.parametrize("bases", [[0.0, 10_000.0, 300.0], [0.0, 0.0, 0.0], [500.0, 500.0, 500.0]])
def test_a_layer_has_the_rope_of_its_own_base(bases: list[float], tmp_path: Path) -> None:
    """Granite with windows; a base of 0 is no RoPE."""
    random_checkpoints.write(
        tmp_path, "granite_swa", settings("granite_swa", 0) | {"layer_rope_theta": bases}, common={}
    )
    assert served_or_refused(tmp_path) is None  # computed as transformers does
    assert len(checked(load(tmp_path))) == 1


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("mixtral", {"num_experts_per_tok": 9}), ("glm4", {"partial_rotary_factor": 1.5})],
)
def test_sizes_that_do_not_fit_reach_no_kernel(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, kind, 0)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"].pop("partial_rotary_factor", None)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(StartupError, match="config"):
        load_model(EmbeddedConfig(model_path=tmp_path, device="cpu", dtype="float32"))


def test_norms_that_do_not_fit_reach_no_kernel(tmp_path: Path) -> None:
    """OLMoE's are as wide as hidden states, whatever its heads are together."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    random_checkpoints.write(tmp_path, "olmoe", settings("olmoe", 0) | heads, common={})
    with pytest.raises(StartupError, match="a norm of 64 elements cannot be that of rows of 128"):
        load_model(EmbeddedConfig(model_path=tmp_path, device="cpu", dtype="float32"))
