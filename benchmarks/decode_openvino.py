"""OpenVINO GenAI in `quantised.py`, in its own environment: ``python decode_openvino.py FILE``.

Reads the GGUF file itself and keeps its blocks' bits as far as OpenVINO does; all rows of a task
are one batch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]
from workload import Reply, Task, serve


class OpenVino:
    """A loaded model that answers tasks greedily."""

    def __init__(self, path: str, threads: int) -> None:
        self._pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)

    def answer(self, task: Task) -> Reply:
        """One reply; nothing is kept for the next."""
        if task.controls != "greedy":
            raise SystemExit("OpenVINO is asked for greedy answers only")
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = task.new
        config.ignore_eos = True
        prompts = np.array(task.prompts(), np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(prompts), openvino.Tensor(np.ones_like(prompts)))
        results = self._pipeline.generate(inputs, config)
        metrics = results.perf_metrics
        decode_s = (metrics.get_generate_duration().mean - metrics.get_ttft().mean) / 1e3
        first = [tokens[0] for tokens in results.tokens]
        return Reply(task.rows * task.new, first, max(decode_s, 0.0), task.rows * (task.new - 1))


def main() -> None:
    def start() -> Callable[[Task], Reply]:
        return OpenVino(sys.argv[1], int(os.environ["OMP_NUM_THREADS"])).answer

    serve(start)


if __name__ == "__main__":
    main()
