"""Fields of `SamplingParams` that an engine does not serve, and the refusal of a request that
sets one.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from worker.errors import InvalidRequest
from worker.sampling import SamplingParams

_BEAMS = "this worker has no beam search"
_OUTPUT = "this worker returns token ids and log probabilities only"
_TEXT = "the engine works on token ids; the runtime applies it"
_DECAY = "this worker does not decay top_p"

REFUSED_EVERYWHERE = {
    "use_beam_search": _BEAMS,
    "beam_search_diversity_rate": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "beam_width_array": _BEAMS,
    "stop": _TEXT,
    "bad": "the engine works on token ids; name them in bad_token_ids",
    "truncate_prompt_tokens": _TEXT,
    "top_p_min": _DECAY,
    "top_p_reset_ids": _DECAY,
    "top_p_decay": _DECAY,
    "prompt_ignore_length": "the presence and frequency penalties count generated tokens alone",
    "prompt_logprobs": "this worker reports log probabilities of generated tokens alone",
    "logprobs_simple_format": _OUTPUT,
    "prompt_logprobs_simple_format": _OUTPUT,
    "return_context_logits": _OUTPUT,
    "return_generation_logits": _OUTPUT,
    "exclude_input_from_output": _OUTPUT,
    "return_encoder_output": _OUTPUT,
    "return_perf_metrics": _OUTPUT,
    "additional_model_outputs": _OUTPUT,
    "guided_decoding": "grammars reach the engine as a logits_processor",
    "thinking_token_budget": "thinking budgets reach the engine as a logits_processor",
}
"""What no engine serves to a client, with the reason; refused where it differs from its default."""

_DEFAULTS = SamplingParams()


def check_refused(params: SamplingParams, refused: Mapping[str, str], allowed: AbstractSet[str] = frozenset()) -> None:
    """Refuse what an engine does not serve.

    Args:
        params: What is asked for.
        refused: Fields that are not served, with the reason.
        allowed: Of these, fields that the caller takes care of itself.

    Raises:
        InvalidRequest: naming the first such field that differs from its default.
    """
    for name, reason in refused.items():
        if name not in allowed and getattr(params, name) != getattr(_DEFAULTS, name):
            raise InvalidRequest(f"sampling_params.{name}", reason)
