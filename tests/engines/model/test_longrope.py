"""LongRoPE: the factors are those of the worker's context, and equal to transformers' where it
chooses the same ones by the length of a batch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import decoder_shapes
import pytest
import random_checkpoints
import torch
from model_runs import last_logits
from served_checkpoint import expected, logits, served_or_refused

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.model.decoder import DecoderNetwork
from worker.engines.embedded.model.llama import LlamaNetwork
from worker.engines.embedded.model.transformers_network import TransformersNetwork

NETWORKS = {"llama": LlamaNetwork, "phi3": DecoderNetwork, "minicpm3": TransformersNetwork}
ORIGINAL = 80
"""Context of pretraining, in tokens: below the 90 of the prompt."""

pytestmark = pytest.mark.usefixtures("one_thread")


def longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * pair for pair in range(pairs)],
        "long_factor": [1.5 + 2.0 * pair for pair in range(pairs)],
        "original_max_position_embeddings": ORIGINAL,
    }


def write(path: Path, kind: str, original: int = ORIGINAL) -> Any:
    found = decoder_shapes.settings(kind, 0)
    rope = longrope(found["head_dim"] // 2) | {"original_max_position_embeddings": original}
    changes: dict[str, Any] = {"rope_parameters": rope}
    if kind == "phi3":  # the key stands beside the parameters, and a part of each head is rotated, as in Phi-4-mini
        rope |= longrope(found["head_dim"] // 4) | {"partial_rotary_factor": 0.5}
        changes["original_max_position_embeddings"] = original
    return random_checkpoints.write(path, kind, found | changes, common={})


def load(path: Path, **settings: Any) -> HfModel:
    config = EmbeddedConfig(model_path=path, device="cpu", dtype="float32", numerics="exact", **settings)
    model = load_model(config)
    model.allocate_kv(8, 32)
    return model


@pytest.mark.parametrize("kind", NETWORKS)
def test_factors_are_those_of_the_context(kind: str, tmp_path: Path) -> None:
    network = write(tmp_path, kind)
    short, long = load(tmp_path, context_length=ORIGINAL), load(tmp_path, context_length=ORIGINAL + 1)
    assert type(short._network) is NETWORKS[kind]
    torch.testing.assert_close(logits(short), expected(tmp_path), atol=2e-4, rtol=2e-4)
    assert (logits(long) - logits(short)).abs().max() > 0.01
    found, tokens = last_logits(long), torch.randint(300, (1, 90), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        torch.testing.assert_close(found, network(tokens, use_cache=False).logits[:, -1], atol=2e-4, rtol=2e-4)
    assert short.made_by == long.made_by.replace("long context", "short context") != long.made_by
    assert load(tmp_path).made_by == long.made_by  # the model's own limit is longer
    cached = last_logits(long, (0, 7, 70, ORIGINAL, 90))  # a prefix is cached before the sequence is long
    assert torch.equal(cached[-1:], found)


def test_factors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama", original=512)
    assert served_or_refused(tmp_path) is None  # short, as transformers of a short prompt
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for changes, said in (
        ({"long_factor": [1.0]}, "config.json: long_factor of RoPE must have 8 items, one for each pair"),
        ({"short_factor": "all"}, "config.json: rope_parameters.short_factor must be a valid list, got 'all'"),
        ({"long_factor": None}, "config.json: rope_parameters"),
        ({"long_factor": [0.0] * 8}, "config.json: rope_parameters.long_factor[0] must be greater than"),
        ({"original_max_position_embeddings": 1}, "config.json: rope_parameters: original_max_position_embeddings"),
    ):
        path.write_text(json.dumps(config | {"rope_parameters": config["rope_parameters"] | changes}))
        found = served_or_refused(tmp_path)
        assert found is not None
        assert found.startswith(said), found
