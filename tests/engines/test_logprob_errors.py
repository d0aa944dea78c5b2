"""Log probabilities in float32 against a forward pass in float64 of the same model."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from worker.engines.embedded.training import ExactLogprobs, Rollout

pytestmark = pytest.mark.usefixtures("one_thread")

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
errors: Any = importlib.import_module("logprob_errors")

IDS = [5, 300, 17, 42, 7, 255, 31, 9, 120, 64, 3, 250, 11, 77, 130, 41, 12, 9, 30]

Rows = NDArray[np.float64]


def policy_of(path: Path) -> Any:
    maker: Any = AutoModelForCausalLM
    return maker.from_pretrained(path, dtype=torch.float32).eval()


def llama(path: Path, ids: list[int]) -> Rows:
    """Log probabilities of ``ids[1:]`` by a checkpoint of type ``llama``, in numpy's float64."""
    config = json.loads((path / "config.json").read_text())
    weights = {name: each.double().numpy() for name, each in load_file(path / "model.safetensors").items()}
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    width, count = config["hidden_size"] // heads, len(ids)
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    frequencies = (1 / theta ** torch.arange(0, width, 2).div(width)).double().numpy()  # float32 in the model
    angles = np.outer(np.arange(count), frequencies)
    turn = np.exp(1j * angles)[:, None]

    def norm(x: Rows, name: str) -> Rows:
        scale: Rows = weights[name] / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return x * scale

    def rotated(x: Rows) -> Rows:
        pairs = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * turn
        return np.concatenate((pairs.real, pairs.imag), -1)

    x: Rows = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        own = {name.removeprefix(at): each for name, each in weights.items() if name.startswith(at)}
        y = norm(x, f"{at}input_layernorm.weight")
        q, k, v = ((y @ own[f"self_attn.{one}_proj.weight"].T).reshape(count, -1, width) for one in "qkv")
        q, k = rotated(q), np.repeat(rotated(k), heads // shared, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width) + np.triu(np.full((count, count), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, np.repeat(v, heads // shared, 1)).reshape(count, -1)
        x = x + mixed @ own["self_attn.o_proj.weight"].T
        y = norm(x, f"{at}post_attention_layernorm.weight")
        gate = y @ own["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits = norm(x, "model.norm.weight") @ head.T
    logits -= logits.max(-1, keepdims=True)
    found: Rows = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return found[np.arange(count - 1), ids[1:]]


def test_the_reference_is_in_float64(every_checkpoint: dict[str, Path]) -> None:
    """Which transformers' code of a model in float64 alone is not."""
    path = every_checkpoint["llama"]
    double, expected = policy_of(path).double(), torch.from_numpy(llama(path, IDS))
    assert torch.allclose(errors.exact_forward(double, IDS), expected, rtol=0, atol=1e-12)
    assert (errors.plain_forward(double, IDS) - expected).abs().max() > 1e-9


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_errors_are_those_of_float32(kind: str, every_checkpoint: dict[str, Path]) -> None:
    """Of a small model ours and transformers' are below 1e-5, and so is the difference."""
    path = every_checkpoint[kind]
    policy = policy_of(path)
    truth = errors.exact_forward(copy.deepcopy(policy).double(), IDS)
    (found,) = ExactLogprobs(policy, path).values([Rollout(IDS[:1], IDS[1:])])
    ours, theirs = torch.tensor(found, dtype=torch.float64), errors.plain_forward(policy, IDS)
    for one, other in ((ours, truth), (theirs, truth), (ours, theirs)):
        assert (one - other).abs().max() < 1e-5


def test_one_operation_of_a_model_is_computed_in_float32(every_checkpoint: dict[str, Path]) -> None:
    double = policy_of(every_checkpoint["llama"]).double()
    truth = errors.exact_forward(double, IDS)
    for kind in errors.KINDS:
        for kernels in ("torch", "ours") if errors.ours_can(kind) else ("torch",):
            with errors.replaced(double, kind, kernels):
                error = (errors.exact_forward(double, IDS) - truth).abs().max()
            assert 0 < error < 1e-5, (kind, kernels)
    assert torch.equal(errors.exact_forward(double, IDS), truth)
