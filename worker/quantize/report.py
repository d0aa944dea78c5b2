"""Effect of quantisation on a model's predictions: perplexity, and agreement of greedy tokens."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from pathlib import Path

from worker.engines.embedded import Engine
from worker.engines.embedded.offline.results import Result
from worker.errors import StartupError
from worker.quantize.text import PASSAGES
from worker.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Predictions:
    """A model's predictions of every token of `PASSAGES` but the first ones.

    Attributes:
        logprobs: Natural logarithms of the tokens' probabilities.
        most_likely: Most likely token at each position.
    """

    logprobs: list[float]
    most_likely: list[int]

    def add(self, result: Result) -> None:
        """Append those of a result with ``prompt_logprobs`` of 1."""
        for entry in (result.prompt_logprobs or [])[1:]:
            assert isinstance(entry, list)
            self.logprobs.append(entry[0].logprob)
            self.most_likely.append(max(entry, key=lambda one: one.logprob).token_id)

    @property
    def perplexity(self) -> float:
        """e to the mean negative log probability."""
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: Predictions) -> float:
        """The share of positions with the same most likely token."""
        pairs = zip(self.most_likely, other.most_likely, strict=True)
        return sum(one == another for one, another in pairs) / len(self.most_likely)


def predict(
    model_path: Path,
    dtype: str,
    quantization: str = "none",
    activation_dtype: str = "auto",
    kv_cache_dtype: str = "auto",
) -> Predictions:
    """The predictions of the model on a CPU, in the settings of `EmbeddedConfig`.

    Raises:
        StartupError: the model cannot be served, or has no tokenizer.
    """
    engine = Engine(
        model_path,
        device="cpu",
        dtype=dtype,
        quantization=quantization,
        activation_dtype=activation_dtype,
        kv_cache_dtype=kv_cache_dtype,
        packed_copy="off",
        context_length=512,
        kv_blocks=128,
        max_num_seqs=4,
    )
    if engine.tokenizer is None:
        raise StartupError(f"{model_path}: it has no tokenizer, which the text of the report needs")
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, top_k=1)
    found = Predictions([], [])
    for result in engine.generate(list(PASSAGES), params, progress=False):
        found.add(result)
    del engine
    gc.collect()
    return found


def report(model_path: Path, to: str | None, activation_dtype: str, kv_cache_dtype: str, dtype: str) -> list[str]:
    """Lines for people; errors as `predict`. Weights are not quantised if `to` is None, and the KV
    cache is only in ``int8`` or ``int16``.
    """
    kv_cache_dtype = "none" if kv_cache_dtype == "auto" else kv_cache_dtype
    before = predict(model_path, dtype)
    after = predict(model_path, dtype, to or "none", activation_dtype, kv_cache_dtype)
    change = after.perplexity / before.perplexity - 1
    what = [to] if to is not None else []
    rounding = "int8" if activation_dtype == "auto" else activation_dtype
    what += [f"{rounding} activations"] if to is not None and rounding != "none" else []
    what += [f"{kv_cache_dtype} KV cache"] if kv_cache_dtype != "none" else []
    return [
        f"perplexity on {len(before.logprobs)} tokens of plain English: {before.perplexity:.3f} unquantised, "
        f"{after.perplexity:.3f} {', '.join(what)} ({change:+.2%})",
        f"the same likeliest token: {after.agreement(before):.1%} of positions",
    ]
