"""lm-evaluation-harness's ``local-completions`` beside its own ``hf`` model, on the same weights.

``compare_lm_eval.py URL MODEL CHECKPOINT`` prints a JSON object: the largest difference of a log
probability, how many were compared, and how many of the greedy flags, metrics and texts agree.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

TASKS = ("dlw_choice", "dlw_perplexity", "dlw_generate")
HERE = Path(__file__).parent / "lm_eval_tasks"


def evaluated(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Results and samples of all tasks."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(HERE), include_defaults=False)
    found: dict[str, Any] = simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=manager,
        batch_size=4,
        log_samples=True,
        bootstrap_iters=0,
        device="cpu",
    )
    return found


def responses(found: dict[str, Any], task: str) -> list[Any]:
    """The responses to all requests of a task, in the order of its documents."""
    samples = sorted(found["samples"][task], key=lambda sample: int(sample["doc_id"]))
    return [response for sample in samples for each in sample["resps"] for response in each]


def main() -> None:
    url, model, checkpoint = sys.argv[1:]
    os.chdir(HERE)  # the tasks name their files
    common = {"tokenizer": checkpoint}
    served = evaluated(
        "local-completions",
        {
            **common,
            "model": model,
            "base_url": f"{url}/completions",
            "tokenizer_backend": "huggingface",
            "num_concurrent": 4,
            "max_retries": 1,
            "max_length": 1024,
        },
    )
    local = evaluated("hf", {**common, "pretrained": checkpoint, "dtype": "float32", "max_length": 1024})
    pairs = list(zip(responses(served, "dlw_choice"), responses(local, "dlw_choice"), strict=True))
    sums = list(zip(responses(served, "dlw_perplexity"), responses(local, "dlw_perplexity"), strict=True))
    texts = list(zip(responses(served, "dlw_generate"), responses(local, "dlw_generate"), strict=True))
    logprobs = [(float(one[0]), float(other[0])) for one, other in pairs]
    metrics = {task: [found["results"][task] for found in (served, local)] for task in TASKS}
    report = {
        "compared": len(logprobs),
        "largest_difference": max(abs(one - other) for one, other in logprobs),
        "greedy_equal": sum(bool(one[1]) == bool(other[1]) for one, other in pairs),
        "rolling": [[float(value[0] if isinstance(value, list | tuple) else value) for value in pair] for pair in sums],
        "texts": texts,
        "metrics": metrics,
    }
    json.dump(report, sys.stdout, default=str)


if __name__ == "__main__":
    main()
