"""Speculative decoding of TensorRT-LLM: the settings that leave tokens what they would be without.

Beside drafts TensorRT-LLM calls no logits processors. So the worker serves what the library does
itself: sampling by temperature, top-k and top-p, and guides (`native_guides`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.engines.trtllm.given import GivenArguments
from worker.errors import ConfigurationError

SECTION = "speculative_config"
BACKEND = "guided_decoding_backend"

BACKENDS = ("llguidance", "xgrammar")
"""Values of ``guided_decoding_backend``."""

METHODS = ("AUTO", "Draft_Target", "Eagle", "Eagle3", "MTP", "NGram", "PARD", "SA")
"""Values of ``decoding_type`` whose drafts are accepted where the target's own token is the same,
or by rejection sampling.
"""

EXACT: Mapping[str, tuple[Any, ...]] = {
    "advanced_sampling_mode": ("full", "FULL"),
    "greedy_sampling": (True, None),
    "posterior_threshold": (None,),
    "use_relaxed_acceptance_for_thinking": (False,),
}
"""Settings with the values that keep the target's distribution: the others accept drafts that it
would not sample, or leave out top-k or top-p.
"""

PASSED = frozenset(
    {
        "acceptance_length_threshold",
        "acceptance_rate_threshold",
        "acceptance_rate_window_size",
        "acceptance_window",
        "allow_advanced_sampling",
        "begin_thinking_phase_token",
        "decoding_type",
        "draft_len_schedule",
        "dynamic_tree_max_topK",
        "eagle3_layers_to_capture",
        "eagle3_model_arch",
        "eagle3_one_model",
        "eagle_choices",
        "enable_penalty",
        "end_thinking_phase_token",
        "is_keep_all",
        "is_public_pool",
        "is_use_oldest",
        "load_format",
        "max_concurrency",
        "max_draft_len",
        "max_matching_ngram_size",
        "max_non_leaves_per_layer",
        "max_total_draft_tokens",
        "mtp_eagle_one_model",
        "num_eagle_layers",
        "num_nextn_predict_layers",
        "num_nextn_predict_layers_from_model_config",
        "relaxed_delta",
        "relaxed_topk",
        "sa_config",
        "sa_spec_threshold",
        "speculative_model",
        "speculative_model_dir",
        "use_dynamic_tree",
        "use_mtp_vanilla",
        "use_rejection_sampling",
        "use_sa_spec",
    }
)
"""Settings of what is drafted, when, and how it is verified without a change to what is sampled."""


def asks_for_drafts(values: Mapping[str, Any]) -> bool:
    """Whether arguments of ``LLM`` ask for speculative decoding."""
    return values.get(SECTION) is not None


def check_drafts(given: GivenArguments, *, role: str, has_adapters: bool) -> None:
    """Check the settings of speculative decoding.

    Args:
        given: Arguments of ``LLM``.
        role: Role of the worker.
        has_adapters: Whether it serves LoRA adapters.

    Raises:
        ConfigurationError: one may change what is sampled, or speculation does not go with the
            worker's other options.
    """
    config, source = given.values[SECTION], given.source(SECTION)
    if not isinstance(config, dict):
        raise ConfigurationError(f"{source}: {SECTION}: must be a mapping, got {config!r}")
    method = config.get("decoding_type")
    if method not in METHODS:
        problem = (
            f"must be one of {', '.join(METHODS)}, got {method!r}: others are not known to keep the model's tokens"
        )
        raise ConfigurationError(f"{source}: {SECTION}.decoding_type: {problem}")
    for name, value in config.items():
        if name in EXACT and value not in EXACT[name]:
            problem = f"must be {EXACT[name][0]!r}, got {value!r}: with another value tokens are not the model's own"
            raise ConfigurationError(f"{given.source(SECTION, name)}: {SECTION}.{name}: {problem}")
        if name not in EXACT and name not in PASSED:
            problem = "is in no row of this worker's table, so whether tokens stay the model's own is unknown"
            raise ConfigurationError(f"{given.source(SECTION, name)}: {SECTION}.{name}: {problem}")
    backend = given.values.get(BACKEND)
    if backend not in (None, *BACKENDS):
        problem = f"must be one of {', '.join(BACKENDS)}, got {backend!r}"
        raise ConfigurationError(f"{given.source(BACKEND)}: {BACKEND}: {problem}")
    if role != "aggregated":
        raise ConfigurationError(f"{source}: {SECTION}: is served on aggregated workers alone")
    if has_adapters:
        raise ConfigurationError(f"--lora-modules: adapters are not served with {SECTION}")
