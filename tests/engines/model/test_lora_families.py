"""LoRA adapters of every model type: logits of merged weights, and bits of a row alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_shapes import KINDS, write
from lora_adapters import linear_layers, merged_into, write_adapter
from model_runs import load_native

from worker.engines.embedded.adapters import LoadedAdapter
from worker.engines.embedded.model import HfModel
from worker.engines.embedded.plan import Chunk, Plan, Request
from worker.engines.weights import NotSupported
from worker.models.problems import ModelFileError
from worker.sampling import SamplingParams

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_thread")]

IN_CI = ("phi3", "glm4", "gpt_oss", "gemma3_text", "gpt2", "deepseek_v3")
"""Fused projections; fused gates; experts and sinks; norms behind; transposed weights; MLA."""

EVERY_KIND = [
    pytest.param(kind, marks=() if kind in IN_CI else pytest.mark.campaign)
    for kind in (*KINDS, "llama", "mistral", "qwen2", "qwen3")
]
TOKENS = torch.randint(300, (40,), generator=torch.Generator().manual_seed(5)).tolist()
ROWS = (("all", 40), (None, 23), ("few", 33), ("all", 7))

SETTINGS = (
    {"dtype": "bfloat16"},
    {"quantization": "int8"},
    {"quantization": "int4", "activation_dtype": "int8"},
    {"quantization": "int8", "dtype": "bfloat16"},
)

load = partial(load_native, dtype="float32", numerics="auto")


def layers_of(model: HfModel) -> Any:
    layers = model.network.adapted_layers
    assert layers is not None
    return layers


def request(adapter: LoadedAdapter | None, length: int, page: int) -> Request:
    tokens = TOKENS[:length]
    return Request(
        "", 0, SamplingParams(), tokens, length, 999, frozenset(), 0, pages=[page, page + 1], adapter=adapter
    )


def alone(model: HfModel, adapter: LoadedAdapter | None, length: int) -> torch.Tensor:
    one = request(adapter, length, 0)
    return model.forward(Plan((), (Chunk(one, 0, length),), (one,)))[0].clone()


def together(model: HfModel, adapters: dict[str | None, LoadedAdapter | None]) -> list[torch.Tensor]:
    """Logits of `ROWS`, whose prompts are computed in one step and their last tokens in another."""
    requests = [request(adapters[name], length, 2 * index) for index, (name, length) in enumerate(ROWS)]
    chunks = tuple(Chunk(one, 0, len(one.tokens) - 1) for one in requests)
    model.forward(Plan((), chunks, ()))
    return list(model.forward(Plan(tuple(requests), (), tuple(requests))))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_of_every_type(kind: str, tmp_path: Path) -> None:
    network = write(tmp_path / "model", kind, 0)
    shapes = linear_layers(network.base_model, f"{network.base_model_prefix}.")
    few = {name: shape for index, (name, shape) in enumerate(shapes.items()) if index % 3}
    model = load(tmp_path / "model")
    settings: dict[str, Any] = {"fan_in_fan_out": True} if layers_of(model).transposed else {}
    assert set(layers_of(model).places) == set(shapes), "linear layers that no adapter may change"
    read, found = model.adapter_loader(), dict[str | None, LoadedAdapter | None]({None: None})
    for seed, (name, layers, rank) in enumerate((("all", shapes, 5), ("few", few, 19))):
        own: dict[str, Any] = {"seed": seed, "rank": rank, "layers": layers, "targets": list(layers), "size": 0.03}
        path = write_adapter(tmp_path / name, tmp_path / "model", **own, **settings)
        found[name] = read(name, path)
        with merged_into(network, path), torch.no_grad():
            expected = network(torch.tensor([TOKENS])).logits[0, -1]
        difference = [
            (alone(model, found[each], 40) - expected).abs().max() / expected.abs().max() for each in (name, None)
        ]
        assert difference[0] < 1e-5
        assert difference[1] > 1e-3
    for row, (each, length) in zip(together(model, found), ROWS, strict=True):
        assert torch.equal(row, alone(model, found[each], length)), (each, length)


def adapters_of(folder: Path, model: HfModel) -> dict[str | None, LoadedAdapter | None]:
    """Adapters of the rows of `ROWS`, by name."""
    layers = layers_of(model)
    settings: dict[str, Any] = {"fan_in_fan_out": True} if layers.transposed else {}
    found: dict[str | None, LoadedAdapter | None] = {None: None}
    for name, part, rank in (("all", slice(None), 5), ("few", slice(None, None, 3), 19)):
        shapes = {layer: place.shape for layer, place in [*layers.places.items()][part]}
        own: dict[str, Any] = {"rank": rank, "layers": shapes, "targets": list(shapes), "size": 0.1}
        found[name] = model.adapter_loader()(name, write_adapter(folder / name, folder / "model", **own, **settings))
    return found


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings.values()))
@pytest.mark.parametrize("kind", ["phi3", "gpt2"])
def test_a_row_has_its_bits_in_every_format(kind: str, settings: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "model", kind, 1)
    model = load(tmp_path / "model", **settings)
    found = adapters_of(tmp_path, model)
    expected = [alone(model, found[name], length) for name, length in ROWS]
    assert not torch.equal(alone(model, found["all"], 40), alone(model, None, 40))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert all(torch.equal(*rows) for rows in zip(together(model, found), expected, strict=True)), threads
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("kind", "layers", "settings", "problem"),
    [
        ("mixtral", {"model.layers.0.mlp.experts.1.gate_proj": (8, 8)}, {}, "this model alone, and it changes model."),
        ("mixtral", {"model.layers.0.mlp.gate": (5, 64)}, {}, "adapts k_proj, o_proj, q_proj, v_proj of this model"),
        (
            "phi3",
            {"model.layers.0.self_attn.q_proj": (64, 64)},
            {},
            "an adapter of another model: model.layers.0.self_",
        ),
        ("phi3", {"model.layers.0.mlp.gate_up_proj": (7, 64)}, {}, "does not fit model.layers.0.mlp.gate_up_proj"),
        ("phi3", {"lm_head": (320, 64)}, {}, "adapts down_proj, gate_up_proj, o_proj, qkv_proj of this model alone"),
        ("phi3", {"model.layers.0.self_attn.o_proj": (64, 64)}, {"fan_in_fan_out": True}, "must be null or false: the"),
        ("gpt2", {"transformer.h.0.mlp.c_fc": (256, 64)}, {}, "fan_in_fan_out must be true: the weight of"),
        ("deepseek_v3", {"model.layers.1.mlp.experts.0.up_proj": (8, 8)}, {}, "of this model alone, and it changes"),
    ],
)
def test_what_an_adapter_may_not_change_is_named(
    kind: str, layers: dict[str, tuple[int, int]], settings: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    write(tmp_path / "model", kind, 0)
    path = write_adapter(tmp_path / "bad", tmp_path / "model", layers=layers, targets=list(layers), **settings)
    with pytest.raises(ModelFileError) as refused:
        load(tmp_path / "model").adapter_loader()("bad", path)
    assert problem in str(refused.value)


@pytest.mark.parametrize("kind", ["phi3", "gpt2"])
def test_torchs_kernels_compute_none(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "model", kind, 0)
    model = load(tmp_path / "model", kernels="torch")
    with pytest.raises(NotSupported, match=f"compute a model's linear layers; here torch kernels compute {kind}"):
        model.adapter_loader()
