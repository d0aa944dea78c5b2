"""Facts about the served model that are in vLLM's configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.vllm.model import ModelFacts


def facts(**fields: Any) -> ModelFacts:
    model = {
        "skip_tokenizer_init": False,
        "served_model_name": "served",
        "model": "acme/model",
        "tokenizer": "acme/model",
        "tokenizer_revision": None,
        "logprobs_mode": "raw_logprobs",
        "get_vocab_size": lambda: 64,
        "try_get_generation_config": lambda: {"eos_token_id": 1},
    }
    return ModelFacts.of(SimpleNamespace(model_config=SimpleNamespace(**model | fields), use_v2_model_runner=False))


def test_the_tokenizer_is_that_of_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has downloaded that one, and perhaps no other, or another one for another server."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commits = {"main": "a" * 40, "v1": "b" * 40}
    for revision, commit in commits.items():
        ref = tmp_path / "models--acme--model" / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
        snapshot = tmp_path / "models--acme--model" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "tokenizer.json").write_text("{}")
    found = facts(tokenizer_revision="v1").tokenizer
    assert found == str(tmp_path / "models--acme--model" / "snapshots" / commits["v1"])
    assert facts().tokenizer == "acme/model"
    assert facts(tokenizer=str(tmp_path), tokenizer_revision="v1").tokenizer == str(tmp_path)


def test_ids_beyond_the_vocabulary_end_no_answer() -> None:
    """vLLM refuses every request of the worker's with such a stop token."""
    told = {"eos_token_id": [1, 64, -1]}
    assert facts(try_get_generation_config=lambda: told).eos_token_ids == {1}
