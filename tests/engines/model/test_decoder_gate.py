"""The gate for model types whose tensors transformers alone knows: refused in one line that names
file and key or tensor, or computed as transformers does.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import random_checkpoints
import torch
from decoder_shapes import settings as settings_of
from decoder_shapes import write
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from served_checkpoint import load, served_or_refused
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from worker.engines.embedded.model.decoder import DecoderNetwork

KINDS = ("falcon", "gpt2", "gpt_oss", "granite", "phi")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, path in found.items():
        write(path, kind, 0)
    return found


def edited(source: Path, path: Path, changes: dict[str, Any]) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("falcon", {"alibi": True}, "config.json: alibi must be False, got True"),
        ("gpt2", {"add_cross_attention": True}, "config.json: add_cross_attention must be False, got True"),
        ("gpt2", {"n_layer": 2**63}, "config.json: n_layer must be less than or equal to 1024"),
        ("gpt2", {"n_embd": 66}, "`embed_dim` must be divisible by num_heads"),
        ("gpt_oss", {"use_bidirectional_attention": True}, "config.json: use_bidirectional_attention must be False"),
        ("gpt_oss", {"num_local_experts": 7}, "weights are incomplete, mismatched_keys: "),
        ("gpt_oss", {"quantization_config": {"quant_method": "bitsandbytes"}}, "config.json: quantization_config"),
        ("phi", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "config.json: rope_parameters: "),
        ("phi", {"num_hidden_layers": 5}, "weights are incomplete, missing_keys: "),
        ("phi", {"vocab_size": "many"}, "config.json: vocab_size must be a valid integer, got 'many'"),
        ("phi", {"sliding_window": 0, "use_sliding_window": True}, "config.json: sliding_window must be null or "),
        ("granite", {"sliding_window": 9}, "config.json: sliding_window must be null in a model of type granite"),
        ("granite", {"attention_multiplier": "x"}, "config.json: "),
        ("gpt_oss", {"sliding_window": None}, "config.json: sliding_window must be at least 1 where layer_types has"),
        ("phi", {"per_layer_config": {"1": {"layer_norm_eps": 0.1}}}, "config.json: per_layer_config must be empty"),
    ],
)
def test_what_is_not_computed_is_refused_by_key(
    decoders: dict[str, Path], tmp_path: Path, kind: str, changes: dict[str, Any], said: str
) -> None:
    found = served_or_refused(edited(decoders[kind], tmp_path / "model", changes))
    assert found is not None
    assert said in found


@pytest.mark.parametrize("key", ["clip_qkv", "embedding_multiplier", "final_logit_softcapping", "logits_scaling"])
def test_keys_of_other_model_types_change_nothing(decoders: dict[str, Path], tmp_path: Path, key: str) -> None:
    path = edited(decoders["gpt_oss"], tmp_path / "model", {key: 3.0})
    assert served_or_refused(path) is None  # computed as transformers does
    assert isinstance(load(path)._network, DecoderNetwork)


def test_weights_of_sigmoids_are_normalised(tmp_path: Path) -> None:
    """By a sum whose argument has numpy's name."""
    changes = {"expert_selection_fn": "sigmoid", "norm_topk_prob": True}
    random_checkpoints.write(tmp_path, "cohere2_moe", settings_of("cohere2_moe", 0) | changes, common={})
    assert served_or_refused(tmp_path) is None


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_shared_experts": 0}, "makes no model: a linear layer of shape [0, 64] has no elements"),
        ({"topk_method": "noaux_tc"}, "makes no model: cannot access local variable 'topk_weights'"),
    ],
)
def test_routing_that_is_not_computed(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    random_checkpoints.write(tmp_path, "deepseek_v2", settings_of("deepseek_v2", 0) | changes, common={})
    found = served_or_refused(tmp_path)
    assert found is not None
    assert said in found


@pytest.mark.parametrize(("kind", "key"), [("deepseek_v3", "n_routed_experts"), ("beam", "num_experts")])
def test_groups_of_experts_of_unlike_sizes(kind: str, key: str, tmp_path: Path) -> None:
    """The first pass took experts of several tokens for a group, or failed, as the tokens were."""
    random_checkpoints.write(tmp_path, kind, settings_of(kind, 0) | {key: 8, "n_group": 3}, common={})
    said = f"config.json: {key} must be a multiple of n_group 3, got 8"
    assert served_or_refused(tmp_path) == said


def test_mixtures_need_transformers_that_say_where_gates_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lower bound of this package is that of dense models."""

    def get(module: Any, name: str) -> Any:
        if name == "is_concatenated":
            raise AttributeError(name)
        return object.__getattribute__(module, name)

    random_checkpoints.write(tmp_path, "mixtral", settings_of("mixtral", 0), common={})
    monkeypatch.setattr(MixtralExperts, "__getattribute__", get, raising=False)
    found = served_or_refused(tmp_path)
    version = importlib.metadata.version("transformers")
    assert found == f"config.json: mixtures of experts need transformers 5.7 or newer, got {version}"


def test_a_window_that_attention_is_not_told(tmp_path: Path) -> None:
    """The attention of qwen2_moe has it, and does not hand it on."""
    changes = {"use_sliding_window": True, "sliding_window": 5}
    random_checkpoints.write(tmp_path, "qwen2_moe", settings_of("qwen2_moe", 0) | changes, common={})
    assert served_or_refused(tmp_path) is None  # computed as transformers does
    assert load(tmp_path)._network.has_windows


def test_windows_that_would_be_in_masks_alone(tmp_path: Path) -> None:
    random_checkpoints.write(tmp_path, "smollm3", settings_of("smollm3", 0) | {"use_sliding_window": False}, common={})
    found = served_or_refused(tmp_path)
    assert found == "config.json: use_sliding_window must be true where layer_types has sliding_attention"


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_no_code_that_a_configuration_names_is_fetched(decoders: dict[str, Path], tmp_path: Path, key: str) -> None:
    path = edited(decoders["gpt_oss"], tmp_path / "model", {key: "acme/kernels"})
    assert served_or_refused(path, compares=False) is None


@pytest.mark.parametrize("kind", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
def test_a_base_that_is_stretched_once_is_served(tmp_path: Path, kind: str) -> None:
    """All of HunYuan's checkpoints have it, under the name of a RoPE that changes with the text."""
    rope = {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 10_000.0}
    random_checkpoints.write(tmp_path, kind, settings_of(kind, 0) | {"rope_parameters": rope}, common={})
    assert served_or_refused(tmp_path) is None
    found = served_or_refused(edited(tmp_path, tmp_path / "other", {"rope_parameters": rope | {"alpha": None}}))
    assert found is not None
    assert "rope type 'dynamic' is not served" in found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: weights["model.norm.weight"].fill_(float("nan")), "tensor model.norm.weight holds a number"),
        (lambda weights: weights.pop("model.layers.1.self_attn.sinks"), "model.layers.1.self_attn.sinks"),
        (lambda weights: weights.update({"lm_head.weight": torch.ones(9, 64)}), "lm_head.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    decoders: dict[str, Path], tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], said: str
) -> None:
    path = edited(decoders["gpt_oss"], tmp_path / "model", {})
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    found = served_or_refused(path)
    assert found is not None
    assert said in found


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_a_weight_of_a_type_that_holds_none(decoders: dict[str, Path], tmp_path: Path, dtype: torch.dtype) -> None:
    """Codes of a quantised weight, for example, whose configuration does not say so."""
    path = edited(decoders["granite"], tmp_path / "model", {})
    weights = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(dtype)}, path / "model.safetensors", metadata={"format": "pt"})
    found = served_or_refused(path)
    assert found is not None
    assert found.startswith(f"model.safetensors: tensor {name} must be of type F32, F16, BF16, F64, got ")


def test_a_buffer_of_integers_is_no_weight(decoders: dict[str, Path], tmp_path: Path) -> None:
    """As the masks in old checkpoints of GPT-2."""
    path = edited(decoders["gpt2"], tmp_path / "model", {})
    weights = load_file(path / "model.safetensors") | {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8).bool()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert served_or_refused(path) is None


KEYS: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "silu", "relu2", "quick_gelu"],
    "activation_function": ["relu", "gelu_new", "mish"],
    "sliding_window": [1, 7, None],
    "layer_norm_epsilon": [1e-3],
    "rms_norm_eps": [1e-2],
    "logits_scaling": [2.0],
    "attention_multiplier": [0.05, 1.0],
    "residual_multiplier": [0.1],
    "embedding_multiplier": [0.5],
    "tie_word_embeddings": [True, False],
    "partial_rotary_factor": [0.25, 0.5],
    "attention_bias": [True, False],
    "scale_attn_weights": [False],
    "scale_attn_by_inverse_layer_idx": [True],
    "reorder_and_upcast_attn": [True],
    "num_experts_per_tok": [1, 3],
    "num_attention_heads": [2, 8],
    "num_key_value_heads": [1, 4],
    "head_dim": [8],
    "qk_layernorm": [True],
    "parallel_attn": [False],
    "new_decoder_architecture": [True],
    "multi_query": [False],
    "layer_types": [["full_attention"] * 3, ["chunked_attention"] * 3],
    "swiglu_limit": [0.5],
    "use_cache": [False],
    "rope_theta": [500.0],
    "rope_scaling": [{"rope_type": "linear", "factor": 2.0}],
    "is_causal": [False],
    "output_router_logits": [True],
    "output_attentions": [True],
    "n_inner": [96, 64],
    "is_decoder": [True],
}
"""Values by key, of which a model type has some."""


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(KINDS),
    changes=st.sampled_from(sorted(KEYS)).flatmap(lambda key: st.fixed_dictionaries({key: st.sampled_from(KEYS[key])})),
)
def test_any_key_is_refused_or_computed(
    decoders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, kind: str, changes: dict[str, Any]
) -> None:
    path = edited(decoders[kind], tmp_path_factory.getbasetemp() / "edited", changes)
    said = served_or_refused(path)  # compares logits with transformers' own
    assert said is None or said.startswith(
        ("config.json: ", "cannot load it: ", "weights are incomplete", "model.safe")
    )
