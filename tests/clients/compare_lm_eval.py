"""lm-evaluation-harness's ``local-completions`` beside its own ``hf`` model, on the same weights.

``compare_lm_eval.py URL MODEL CHECKPOINT`` prints a JSON object: pairs of log likelihoods, greedy
flags, texts and metrics, the served one first.
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


def number(found: Any) -> float:
    """A log likelihood, which some models return in a tuple."""
    return float(found[0] if isinstance(found, list | tuple) else found)


def metrics(found: dict[str, Any], task: str) -> dict[str, float]:
    """The metrics of a task that are numbers."""
    return {name: value for name, value in found["results"][task].items() if isinstance(value, float)}


def main() -> None:
    url, model, checkpoint = sys.argv[1:]
    os.environ.update(HF_HUB_OFFLINE="1", OPENAI_API_KEY="unused")
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
    pairs = {task: list(zip(responses(served, task), responses(local, task), strict=True)) for task in TASKS}
    report = {
        "choices": [[float(found[0]) for found in pair] for pair in pairs["dlw_choice"]],
        "greedy": [[bool(found[1]) for found in pair] for pair in pairs["dlw_choice"]],
        "texts_scored": [[number(found) for found in pair] for pair in pairs["dlw_perplexity"]],
        "texts_generated": pairs["dlw_generate"],
        "metrics": {task: [metrics(found, task) for found in (served, local)] for task in TASKS},
    }
    json.dump(report, sys.stdout, default=str)


if __name__ == "__main__":
    main()
