"""vLLM in `decode.py`, in its own environment: ``python decode_vllm.py CHECKPOINT``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from workload import LONGEST, MOST_ROWS, Reply, Task, serve

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def start() -> Callable[[Task], Reply]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=LONGEST,
        max_num_seqs=MOST_ROWS,
        enable_prefix_caching=False,
    )

    def params(task: Task, row: int) -> Any:
        controls = task.controls_of(row) or {"temperature": 0.0}
        return SamplingParams(max_tokens=task.new, ignore_eos=True, detokenize=False, **controls)

    def answer(task: Task) -> Reply:
        prompts = [{"prompt_token_ids": ids} for ids in task.prompts()]
        found = engine.generate(prompts, [params(task, row) for row in range(task.rows)], use_tqdm=False)
        tokens = [result.outputs[0].token_ids for result in found]
        return Reply(sum(map(len, tokens)), [row[0] for row in tokens])

    return answer


if __name__ == "__main__":
    serve(start)
