"""Model types that run transformers' code with our attention and linear layers in it;
checkpoints are made here.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import grid
from model_runs import greedy_answers
from random_checkpoints import COMMON, MIXTURE, TYPES, write

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import load_model
from worker.errors import StartupError

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, changes) for kind, changes in TYPES.items()},
    "qwen3_moe, one layer dense, weights as they are": ("qwen3_moe", {**MIXTURE, "mlp_only_layers": [1]}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with scaled rotation": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen3 with windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "llama with another activation": ("llama", {"hidden_act": "gelu"}),
}
LENGTHS = (1, 5, 33, 90)
NEW_TOKENS = 24

pytestmark = pytest.mark.usefixtures("one_thread")


def prompts() -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(3, COMMON["vocab_size"]) for _ in range(length)] for length in LENGTHS]


def answers_of(network: Any) -> list[list[int]]:
    answers = []
    for prompt in prompts():
        with torch.inference_mode():
            found = network.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
        answers.append(found[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("kind", grid(KINDS, fast=3))
def test_greedy_answers_are_transformers_own(kind: str, tmp_path: Path) -> None:
    model_type, settings = KINDS[kind]
    expected = answers_of(write(tmp_path, model_type, settings))
    assert all(len(set(answer)) > 3 for answer in expected), "a network this dull would prove nothing"
    model = load_model(EmbeddedConfig(model_path=tmp_path, device="cpu"))
    for budget, together in ((512, 1), (7, 4), (512, 4)):
        assert greedy_answers(model, prompts(), NEW_TOKENS, budget=budget, together=together) == expected


def test_layers_with_batch_dependent_rope_are_refused(tmp_path: Path) -> None:
    model_type, settings = KINDS["gemma3_text"]
    rotation = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    by_layer = {"sliding_attention": plain, "full_attention": rotation}
    write(tmp_path, model_type, {**settings, "rope_parameters": by_layer})
    with pytest.raises(StartupError, match="'dynamic'"):
        load_model(EmbeddedConfig(model_path=tmp_path, device="cpu"))
