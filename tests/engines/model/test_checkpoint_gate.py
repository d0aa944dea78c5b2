"""A checkpoint is refused in one line that names file and key, or served as transformers computes
it: no crash, no endless loop, no number that is not finite.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from random_checkpoints import EVERY_TYPE
from safetensors.torch import load_file, save_file
from served_checkpoint import complaint, expected, load, logits, served_or_refused

from adapters.vocabulary import Vocabulary
from adapters.vocabulary.tokenizer_files import TokenizerDamaged
from worker.engines.embedded.attention import AttentionSizes
from worker.errors import StartupError
from worker.models.geometry import BOUNDS, Geometry, GeometryError
from worker.quantize.output import write_quantised

CONFIG = "config.json"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def checkpoint(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    return copied(checkpoints["llama"], tmp_path / "model")


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns(".packed"), dirs_exist_ok=True))


def edit(path: Path, **changes: Any) -> None:
    """Change keys of ``config.json``; `Ellipsis` takes one away."""
    found = json.loads((path / CONFIG).read_text()) | changes
    (path / CONFIG).write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def refusal(path: Path, **changes: Any) -> str:
    with pytest.raises(StartupError) as refused:
        load(path, **changes)
    return complaint(refused.value, path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"num_attention_heads": 8, "num_key_value_heads": 3, "head_dim": 8},
            "num_attention_heads must be a multiple of num_key_value_heads 3, got 8",
        ),
        ({"num_key_value_heads": 8}, "num_attention_heads must be a multiple of num_key_value_heads 8, got 4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be greater than or equal to 1, got 0"),
        ({"head_dim": 15}, "head_dim, the width of a head, must be even, as RoPE turns pairs, got 15"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "hidden_size must be a multiple of num_attention_heads 3",
        ),
        ({"hidden_size": 66}, "hidden_size must be a multiple of num_attention_heads 4, got 66"),
        ({"num_hidden_layers": 2**63}, "num_hidden_layers must be less than or equal to 1024, got 9223372036854775808"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a valid integer, got '2'"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a valid integer, got None"),
        ({"vocab_size": -1}, "vocab_size must be greater than or equal to 1, got -1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be greater than or equal to 2, got 0"),
        ({"rope_scaling": 2.0, "rope_parameters": ...}, "rope_scaling must be an object, got 2.0"),
        ({"rope_parameters": []}, "rope_parameters must be an object, got []"),
        ({"rope_theta": 0}, "rope_theta must be greater than 1, got 0"),
        ({"eos_token_id": ["4", "1"]}, "eos_token_id[0] must be a valid integer, got '4'"),
        ({"eos_token_id": "4"}, "eos_token_id must be a valid integer, got '4'"),
        ({"dtype": "float31"}, "dtype must be 'float32', 'float16', 'bfloat16' or 'float64', got 'float31'"),
        ({"torch_dtype": "int8", "dtype": ...}, "torch_dtype must be 'float32', 'float16', 'bfloat16' or 'float64'"),
        ({"hidden_act": "gulu"}, "hidden_act must be 'silu', "),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be greater than 0, got -1.0"),
        ({"is_causal": False}, "is_causal must be True, got False"),
        ({"pad_token_id": 5000}, "pad_token_id must be below vocab_size 1024, got 5000"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is known of gemma2 alone"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is known of gemma2 and gemma3_text alone"),
        ({"rope_scaling": {"rope_type": "su"}}, "rope_scaling.rope_type must be 'default', 'linear', 'yarn', "),
        ({"per_layer_config": {"0": {"rms_norm_eps": 0.1}}}, "per_layer_config must be empty: layers that are"),
        ({"per_layer_config": 3}, "per_layer_config must be an object, got 3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be a valid boolean, got 'yes'"),
    ],
)
def test_keys_of_the_configuration(checkpoint: Path, changes: dict[str, Any], said: str) -> None:
    edit(checkpoint, **changes)
    assert refusal(checkpoint).startswith(f"{CONFIG}: {said}")


def test_end_tokens_of_strings_in_the_generation_configuration(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    assert refusal(checkpoint) == "generation_config.json: eos_token_id[0] must be a valid integer, got '</s>'"


def test_generation_settings_that_are_not_read(checkpoint: Path) -> None:
    """transformers would load no model beside them."""
    file, settings = checkpoint / "generation_config.json", {"max_new_tokens": 0, "num_return_sequences": 3}
    file.write_text(json.dumps(settings | {"compile_config": {}, "eos_token_id": 4}))
    assert load(checkpoint).eos_token_ids == (4,)
    file.write_text("[" * 100_000)
    assert refusal(checkpoint) == "generation_config.json: is nested too deep"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
def test_a_tokenizer_whose_files_are_nested_too_deep(checkpoint: Path, name: str) -> None:
    """Ids are those of its ``tokenizer.json``; whoever reads the tokenizer refuses it."""
    expected = load(checkpoint).undecodable_ids
    (checkpoint / "tokenizer_config.json").write_text("{}")
    (checkpoint / name).write_text("[" * 100_000)
    assert load(checkpoint).undecodable_ids == expected
    with pytest.raises(TokenizerDamaged, match=f"{name}: is nested too deep"):
        Vocabulary.from_pretrained(str(checkpoint), 1024)


def test_a_configuration_that_names_another_file(checkpoint: Path) -> None:
    """Which transformers would read instead of the one that is checked."""
    config = json.loads((checkpoint / CONFIG).read_text())
    (checkpoint / "config.4.0.json").write_text(json.dumps(config | {"use_bidirectional_attention": True}))
    edit(checkpoint, configuration_files=["config.4.0.json"])
    assert refusal(checkpoint) == f"{CONFIG}: configuration_files must be None, got ['config.4.0.json']"


def test_end_tokens_are_tokens(checkpoint: Path) -> None:
    """A negative one would be counted from the vocabulary's end by whatever bans it."""
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [-1, 4, 1023, 1024]}')
    assert load(checkpoint).eos_token_ids == (4, 1023)


def test_a_configuration_in_which_a_key_stands_twice(checkpoint: Path) -> None:
    text = (checkpoint / CONFIG).read_text()
    (checkpoint / CONFIG).write_text(text.replace("{", '{"num_hidden_layers": 1,', 1))
    assert refusal(checkpoint) == f'{CONFIG}: the key "num_hidden_layers" occurs twice in one object'
    (checkpoint / CONFIG).write_text("[" * 100_000)
    assert refusal(checkpoint) == f"{CONFIG}: is nested too deep"
    (checkpoint / CONFIG).write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": NaN'))
    assert refusal(checkpoint) == f"{CONFIG}: is not JSON: NaN is not JSON"


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma2", "llama"])
def test_attention_in_both_directions(every_checkpoint: dict[str, Path], tmp_path: Path, model_type: str) -> None:
    path = copied(every_checkpoint[model_type], tmp_path / "model")
    edit(path, use_bidirectional_attention=True)
    assert refusal(path) == f"{CONFIG}: use_bidirectional_attention must be False, got True"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
@pytest.mark.native
def test_weights_that_are_no_numbers(checkpoint: Path, name: str, value: float) -> None:
    edit_weights(checkpoint, lambda weights: weights[name].view(-1).__setitem__(7, value))
    said = f"model.safetensors: tensor {name} holds a number that is infinite or not a number"
    assert refusal(checkpoint) == said
    assert refusal(checkpoint, kernels="torch") == said
    assert refusal(checkpoint, quantization="int8") == said
    assert refusal(checkpoint, dtype="bfloat16", packed_copy="auto") == said
    assert not (checkpoint / ".packed").exists()


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_weight_is_left_out(every_checkpoint: dict[str, Path], playground: Path, data: st.DataObject) -> None:
    """Each tensor of each model type is looked at, wherever the number is."""
    shutil.rmtree(playground, ignore_errors=True)
    copied(every_checkpoint[data.draw(st.sampled_from(EVERY_TYPE))], playground)
    value = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    weights = load_file(playground / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(weights)))
    weights[name].view(-1)[data.draw(st.integers(0, weights[name].numel() - 1))] = value
    save_file(weights, playground / "model.safetensors", metadata={"format": "pt"})
    assert refusal(playground).startswith(f"model.safetensors: tensor {name} holds a number that is")


@pytest.mark.parametrize("part", ["scales", "offsets"])
def test_quantised_weights_that_are_no_numbers(checkpoint: Path, tmp_path: Path, part: str) -> None:
    write_quantised(checkpoint, "int4", tmp_path / "quantised")
    name = f"model.layers.1.mlp.up_proj.weight.{part}"
    edit_weights(tmp_path / "quantised", lambda weights: weights[name].view(-1).__setitem__(3, float("nan")))
    said = f"model.safetensors: tensor {name} holds a number that is infinite or not a number"
    assert refusal(tmp_path / "quantised") == said


def test_weights_that_the_data_type_cannot_hold(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda weights: weights["model.norm.weight"].__setitem__(0, 3.4e38))
    said = "model.safetensors: tensor model.norm.weight holds 3.4e+38, which bfloat16 cannot; choose another --dtype"
    assert refusal(checkpoint, dtype="bfloat16") == said


def test_weights_that_overflow_together_fail_in_the_first_pass(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda weights: weights["model.norm.weight"].fill_(3e38))
    edit_weights(checkpoint, lambda weights: weights["lm_head.weight"].fill_(1e10))
    assert refusal(checkpoint).startswith("its first forward pass in float32 gives logits that are infinite or not")


def test_a_first_pass_touches_no_page_of_the_store(checkpoint: Path) -> None:
    model = load(checkpoint)
    assert not any(tensor.any() for tensor in model.kv_store.tensors)


def test_a_packed_copy_of_another_geometry_is_refused() -> None:
    """Where a copy is read, its geometry is made anew, and checks itself."""
    fits = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
    others = {"model_type": "llama", "vocab_size": 9, "intermediate_size": 8, "num_hidden_layers": 1}
    assert Geometry(**fits, **others, max_position_embeddings=64)  # type: ignore[arg-type]
    for changes in ({"num_attention_heads": 3}, {"head_dim": 15}, {"num_key_value_heads": 8}, {"vocab_size": True}):
        with pytest.raises(GeometryError, match=next(iter(changes))):
            Geometry(**(fits | others | changes), max_position_embeddings=64)  # type: ignore[arg-type]


def test_attention_is_never_made_for_heads_that_do_not_fit() -> None:
    for heads, kv_heads in ((8, 3), (4, 3), (2, 4), (0, 1), (4, 0)):
        with pytest.raises(ValueError, match="heads"):
            AttentionSizes(heads, kv_heads, 16, None, 16, torch.float32, torch.device("cpu"))


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda header: header[NORM].update(dtype="I32"), f"tensor {NORM} must be of type F32, F16, BF16, F64, got"),
        (lambda header: header[NORM].update(dtype="F33"), f"tensor {NORM}: dtype must be a type of safetensors"),
        (lambda header: header[NORM].update(dtype=["F32"]), f"tensor {NORM}: dtype must be a type of safetensors"),
        (lambda header: header[NORM].update(shape=[8, 8]), f"tensor {NORM} must be of shape [64], as config.json has"),
        (lambda header: header[NORM].update(shape=[-64]), f"tensor {NORM}: shape must be a list of sizes"),
        (lambda header: header[NORM].update(shape="64"), f"tensor {NORM}: shape must be a list of sizes"),
        (lambda header: header[NORM].update(data_offsets=[0]), f"tensor {NORM}: data_offsets must be two positions"),
        (lambda header: header[NORM].update(data_offsets=[0, 256]), "its tensors overlap, or leave bytes out"),
        (lambda header: header[NORM].update(data_offsets=[2**40, 2**40 + 256]), "is cut off: tensor"),
        (lambda header: header.update({NORM: 3}), f"tensor {NORM}: dtype must be a type of safetensors"),
        (lambda header: header.update({"x": header.pop(NORM)}), "weights are incomplete, tensor model.norm.weight of"),
    ],
)
def test_headers_of_the_weights(checkpoint: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    rewrite_header(checkpoint, change)
    assert refusal(checkpoint).startswith(f"model.safetensors: {said}")


def shards(path: Path) -> Path:
    """Split the weights into two files with an index."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: weights[name] for name in some}, path / file, metadata={"format": "pt"})
    placed = {name: file for file, some in parts.items() for name in some}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return path


def test_a_tensor_in_two_files(checkpoint: Path) -> None:
    path = shards(checkpoint)
    assert torch.allclose(logits(load(path)), expected(path), atol=1e-4)
    first, second = (load_file(path / name) for name in ("a.safetensors", "b.safetensors"))
    name = next(iter(first))
    save_file(second | {name: first[name]}, path / "b.safetensors", metadata={"format": "pt"})
    assert refusal(path) == f"b.safetensors: tensor {name} is in a.safetensors, too"
    save_file(second, path / "b.safetensors", metadata={"format": "pt"})
    (path / "a.safetensors").unlink()
    said = "model.safetensors.index.json: weight_map names 'a.safetensors', which is not there"
    assert refusal(path) == said
    for placed in ({}, [], {"x": 3}):  # type: ignore[var-annotated]
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
        assert refusal(path).startswith("model.safetensors.index.json: weight_map must be an object with a file for")


KEYS: dict[str, list[Any]] = {
    **{key: [1, 2, 3, 4, 5, 8, 15, 16, 17, 32, 64, 66, 96, 128, 320, 512, 1024] for key in BOUNDS},
    "hidden_act": ["silu", "gelu", "relu", "gelu_pytorch_tanh"],
    "hidden_activation": ["silu", "gelu", "relu", "gelu_pytorch_tanh"],
    "rms_norm_eps": [1e-6, 1e-5, 0.5, 1e-30],
    "rope_theta": [10_000.0, 1e6, 2, 1e30],
    "rope_scaling": [
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"type": "linear", "factor": 4},
        {"factor": 3.0},
    ],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "proportional"},
        {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
    "partial_rotary_factor": [1.0, 0.5, 0.25],
    "sliding_window": [4, 1, 100, None],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 2],
    "layer_types": [["full_attention"] * 3, ["sliding_attention"] * 3, ["full_attention"] * 2, None],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "tie_word_embeddings": [True, False],
    "query_pre_attn_scalar": [16, 4, 256],
    "attn_logit_softcapping": [None, 1.0, 50.0],
    "final_logit_softcapping": [None, 1.0, 30.0],
    "num_local_experts": [0, 1, 5, 8],
    "norm_topk_prob": [True, False],
    "mlp_only_layers": [[], [0], [0, 1, 2], [7]],
    "use_bidirectional_attention": [True, False, None],
    "is_causal": [True, False],
    "dtype": ["float32", "bfloat16", "float16", "float8", "float64"],
    "eos_token_id": [1, [1, 2], None, [], 10_000],
    "pad_token_id": [0, None, -1, 999, 10_000],
    "bos_token_id": [0, None, 5],
    "return_dict": [True, False],
    "output_attentions": [True, False],
    "output_hidden_states": [True, False],
    "attention_dropout": [0.0, 0.5],
    "is_decoder": [True, False],
    "architectures": [["LlamaForCausalLM"], ["Other"], []],
    "use_cache": [True, False],
    "transformers_weights": ["other.safetensors", None],
    "quantization_config": [None, {}, {"quant_method": "gptq"}, {"quant_method": "dynamo-logits-worker"}],
}
"""Values by key, most of which a model can have."""

ODD: list[Any] = [
    *(None, 0, -1, 2**31, 2**63, 2**200, -(2**63), 1.5, 1e308, -0.0, float("nan"), float("inf"), True, False),
    *("", "x", "1", [], [1], ["x"], [None], {}, {"x": 1}, {"rope_type": 3}, [[[]]], ...),
]
"""Values that none should have; `Ellipsis` takes the key away."""


@st.composite
def spoilt_configs(draw: st.DrawFn) -> dict[str, Any]:
    keys = draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=3, unique=True))
    return {key: draw(st.sampled_from(KEYS[key]) | st.sampled_from(ODD)) for key in keys}


@pytest.fixture(scope="module")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which one checkpoint after another is spoilt."""
    return tmp_path_factory.mktemp("spoilt") / "model"


@settings(max_examples=examples(400), deadline=None, suppress_health_check=list(HealthCheck))
@example("gemma3_text", {"attn_logit_softcapping": 1.0})  # stored by transformers and applied nowhere
@example("qwen2", {"head_dim": None})  # transformers computes with it
@given(model_type=st.sampled_from(EVERY_TYPE), changes=spoilt_configs())
def test_any_configuration_is_refused_by_key_or_computed(
    every_checkpoint: dict[str, Path], playground: Path, model_type: str, changes: dict[str, Any]
) -> None:
    shutil.rmtree(playground, ignore_errors=True)
    copied(every_checkpoint[model_type], playground)
    edit(playground, **changes)
    said = served_or_refused(playground)
    if said is None:
        return
    file, _, reason = said.partition(": ")
    if file == CONFIG:
        assert "is not JSON" in reason or any(key in reason for key in changes), (said, changes)
    else:
        assert file == "model.safetensors" or any(key in said for key in changes), (said, changes)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_header_of_weights_is_refused_by_name_or_computed(
    checkpoints: dict[str, Path], playground: Path, data: st.DataObject
) -> None:
    shutil.rmtree(playground, ignore_errors=True)
    copied(checkpoints["llama"], playground)
    path = playground / "model.safetensors"
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 8 + length) | st.integers(0, 12))
        content[at] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789"[]{},:'))
    path.write_bytes(content[: data.draw(st.sampled_from([len(content)] * 4 + [len(content) - 1, length, 7, 0]))])
    said = served_or_refused(playground)
    assert said is None or said.startswith(("model.safetensors: ", "its first forward pass"))


def test_the_fuzzed_configurations_are_of_both_kinds(every_checkpoint: dict[str, Path], tmp_path: Path) -> None:
    """Unspoilt, every type is served."""
    for model_type in EVERY_TYPE:
        assert served_or_refused(copied(every_checkpoint[model_type], tmp_path / model_type)) is None
