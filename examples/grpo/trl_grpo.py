"""The same with TRL's trainer (1.16): rollouts from workers, exact log probabilities.

.venv/bin/python examples/grpo/trl_grpo.py --model DIR --engine-url URL --engine-key KEY \\
    --output RUN

TRL wants accelerate and datasets beside it. ``rollout_func`` is experimental there, and the method
that is replaced below is private: another version may need other code.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error.name} is not installed: pip install trl accelerate datasets") from None
import torch
from grpo import checkpoint
from tasks import TASKS, Question
from transformers import AutoModelForCausalLM, AutoTokenizer
from workers import WorkerError, Workers, address, checkpoint_directory

from worker.engines.embedded.training import ExactLogprobs, Rollout
from worker.errors import ServingError


class ExactGrpoTrainer(GRPOTrainer):
    """TRL's GRPO trainer with the engine's log probabilities.

    Args:
        exact: Log probabilities of the model that is trained.
        given: Arguments of TRL's trainer.

    Attributes:
        differences: Largest |trainer - rollout| log probability of each step.
    """

    def __init__(self, exact: ExactLogprobs, **given: Any) -> None:
        self._exact = exact
        self.differences: list[float] = []
        super().__init__(**given)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Log probabilities ``[B, logits_to_keep]`` of the answers, which stand on the right; their
        entropies, which TRL reports, are not computed: NaN.
        """
        rollouts = []
        for ids, mask in zip(input_ids, attention_mask.bool(), strict=True):
            prompt, answer = ids[:-logits_to_keep], ids[-logits_to_keep:]
            kept = mask[:-logits_to_keep], mask[-logits_to_keep:]
            rollouts.append(Rollout(prompt[kept[0]].tolist(), answer[kept[1]].tolist()))
        found = torch.nn.utils.rnn.pad_sequence(self._exact(rollouts), batch_first=True)
        found = torch.nn.functional.pad(found, (0, logits_to_keep - found.shape[1])).float()
        return found, torch.full_like(found, torch.nan), None

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        mask, theirs = inputs["completion_mask"].bool(), inputs["sampling_per_token_logps"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            ours, _, _ = self._get_per_token_logps_and_entropies(model, ids, attended, theirs.shape[1])
        self.differences.append(float((ours - theirs)[mask].abs().max()))
        return super()._compute_loss(model, inputs)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=checkpoint_directory, required=True, help="directory of the workers' checkpoint"
    )
    parser.add_argument("--url", type=address, default="http://127.0.0.1:8000", help="the front door")
    parser.add_argument(
        "--engine-url", type=address, action="append", required=True, help="a worker's --engine-port; once for each"
    )
    parser.add_argument("--engine-key", required=True, help="a key of the workers' --engine-key-file")
    parser.add_argument("--output", type=Path, required=True, help="directory for checkpoints")
    parser.add_argument("--task", choices=list(TASKS), default="sums")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--answers", type=int, default=4)
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    policy: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    workers = Workers(options.url, options.engine_url, options.engine_key)
    source = random.Random(0)
    questions: dict[str, Question] = {}
    for _ in range(options.steps):
        question = TASKS[options.task](source)
        questions[question.prompt] = question

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """A group of answers for each run of equal prompts, which TRL repeats for a group."""
        version = str(trainer.state.global_step)
        workers.update(checkpoint(policy, options.model, options.output / "newest"), version)
        groups = [list(prompts[start : start + options.answers]) for start in range(0, len(prompts), options.answers)]
        ids = [tokenizer.encode(group[0], add_special_tokens=False) for group in groups]
        found = workers.sample(ids, n=options.answers, max_tokens=6, seed=1000 * int(version))
        samples = [one for group in found for one in group]
        return {
            "prompt_ids": [one.rollout.prompt_token_ids for one in samples],
            "completion_ids": [one.rollout.token_ids for one in samples],
            "logprobs": [one.logprobs for one in samples],
        }

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [questions[prompt].reward(text) for prompt, text in zip(prompts, completions, strict=True)]

    config = GRPOConfig(
        output_dir=str(options.output / "trl"),
        max_steps=options.steps,
        per_device_train_batch_size=options.answers,
        num_generations=options.answers,
        max_completion_length=6,
        learning_rate=5e-5,
        beta=0.0,
        temperature=1.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    trainer = ExactGrpoTrainer(
        ExactLogprobs(policy, options.model),
        model=policy,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in questions]),
        rollout_func=rollouts,
    )
    trainer.train()
    print(f"largest differences: {trainer.differences}")


if __name__ == "__main__":
    try:
        run(parsed())
    except (WorkerError, ServingError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
