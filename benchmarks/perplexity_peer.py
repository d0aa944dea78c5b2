"""Log probabilities of llama.cpp or OpenVINO in `perplexity.py`, each in its own environment:
``python perplexity_peer.py FILE llama.cpp``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from workload import serve

Logits = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens of a text; every one but the first is predicted from all before it."""

    tokens: list[int]


@dataclass(slots=True)
class Scores:
    """Predictions of a window's tokens but the first.

    Attributes:
        logprobs: Natural logarithms of the tokens' probabilities.
        likeliest: The most likely token at each position.
    """

    logprobs: list[float] = field(default_factory=list)
    likeliest: list[int] = field(default_factory=list)


def scores_of(logits: Logits, tokens: list[int]) -> Scores:
    """Scores of logits ``[n, V]`` after each token, in float64."""
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    told = rows[np.arange(len(rows)), tokens[1:]] - np.log(np.exp(rows).sum(-1))
    return Scores(told.tolist(), rows.argmax(-1).tolist())


def llama(path: str, threads: int) -> Callable[[list[int]], Logits]:
    """llama.cpp's logits ``[n, V]`` of n tokens, by the context of `decode_llama.py`."""
    from decode_llama import Llama

    model = Llama(Path(path), threads)
    return model.logits


def openvino(path: str, threads: int) -> Callable[[list[int]], Logits]:
    """OpenVINO's logits ``[n, V]`` of n tokens, by the model that it writes of a GGUF file."""
    import openvino  # type: ignore[import-not-found]
    import openvino_genai  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as directory:  # it writes beside the file
        link = Path(directory) / "model.gguf"
        link.symlink_to(Path(path).resolve())
        openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
        compiled = openvino.Core().compile_model(
            str(Path(directory) / "openvino_model.xml"), "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
    request = compiled.create_infer_request()

    def logits(tokens: list[int]) -> Logits:
        request.reset_state()
        ids = np.array([tokens], np.int64)
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(len(tokens))[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        found: Logits = request.infer(inputs)["logits"][0]
        return found

    return logits


def main() -> None:
    def start() -> Callable[[Window], Scores]:
        kinds = {"llama.cpp": llama, "OpenVINO": openvino}
        logits = kinds[sys.argv[2]](sys.argv[1], int(os.environ["OMP_NUM_THREADS"]))
        return lambda window: scores_of(logits(window.tokens), window.tokens)

    serve(start, Window)


if __name__ == "__main__":
    main()
