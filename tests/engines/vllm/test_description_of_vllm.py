"""What the description of a loaded vLLM says, by which workers of a pool are compared."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from fake_vllm import CONFIG

from worker.engines.vllm.description import describe

KINDS: dict[str, tuple[str, str, Any]] = {
    "dtype": ("model_config", "dtype", torch.bfloat16),
    "quantisation": ("model_config", "quantization", "fp8"),
    "KV cache": ("cache_config", "cache_dtype", "fp8"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_computes_otherwise_is_told(kind: str) -> None:
    """An answer goes on where numerics and the type of the KV are equal."""
    section, name, value = KINDS[kind]
    other = deepcopy(CONFIG)
    setattr(getattr(other, section), name, value)
    here, there = (describe(config, "0.32", 100, (2,), {}) for config in (CONFIG, other))
    assert (here.made_by, here.kv_dtype) != (there.made_by, there.kv_dtype)


@pytest.mark.parametrize("cache_dtype", ["auto", "float32"])
def test_the_models_own_type_of_kv_is_not_told(cache_dtype: str) -> None:
    """Workers of versions that told none have this one: their answers go on here."""
    config = deepcopy(CONFIG)
    config.cache_config.cache_dtype = cache_dtype
    assert describe(config, "0.32", 100, (2,), {}).kv_dtype == ""
