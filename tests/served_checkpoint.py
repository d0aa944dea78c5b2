"""Checkpoints loaded as a worker starts on them, and their logits beside transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import HfModel, check_first_pass, load_model
from worker.engines.embedded.plan import Chunk, Plan, Request
from worker.errors import StartupError
from worker.sampling import SamplingParams

PROMPT = [5, 300, 17, 42, 7, 255, 31, 9, 120, 64, 3, 11]


def load(path: Path, **changes: Any) -> HfModel:
    """The model loaded as by a worker, with the first forward pass."""
    config = EmbeddedConfig(model_path=path, **({"device": "cpu", "packed_copy": "off", "dtype": "float32"} | changes))
    model = load_model(config)
    model.allocate_kv(4, 32)
    check_first_pass(model, path)
    return model


def prompt_of(vocab_size: int, context_length: int) -> list[int]:
    return [token % vocab_size for token in PROMPT[:context_length]]


def logits(model: HfModel) -> torch.Tensor:
    """Logits of the token behind the prompt."""
    prompt = prompt_of(model.vocab_size, model.context_length)
    request = Request("", 0, SamplingParams(), prompt, len(prompt), 999, frozenset(), 0, pages=[1])
    return model.forward(Plan((), (Chunk(request, 0, len(prompt)),), (request,)))


def expected(path: Path) -> torch.Tensor:
    """The same by transformers."""
    network: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    prompt = prompt_of(network.config.vocab_size, network.config.max_position_embeddings)
    with torch.inference_mode():
        found: torch.Tensor = network.eval()(torch.tensor([prompt]), use_cache=False).logits[:, -1]
    return found


def complaint(error: StartupError, path: Path) -> str:
    """The one line, without the directory."""
    message = str(error)
    assert message.startswith(f"--model-path {path}: "), message
    assert "\n" not in message
    assert len(message) < 1000
    return message.removeprefix(f"--model-path {path}: ")


def served_or_refused(path: Path, compares: bool = True) -> str | None:
    """The refusal; None for a model whose logits are finite and, if it `compares`, transformers'
    own.
    """
    try:
        found = logits(load(path))
    except StartupError as error:
        return complaint(error, path)
    assert found.isfinite().all()
    assert not compares or torch.allclose(found, expected(path), atol=2e-3, rtol=2e-3)
    return None
