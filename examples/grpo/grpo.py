"""GRPO of a small model on a toy task: rollouts from workers over HTTP, a trainer in torch.

docs/recipes/rollouts.md says how to start workers and this. Each step writes a line of JSON with
the mean reward, the largest difference between the trainer's and the rollouts' log probabilities,
and a digest of the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from tasks import TASKS
from transformers import AutoModelForCausalLM, AutoTokenizer
from workers import Sample, WorkerError, Workers, address, checkpoint_directory

from worker.engines.embedded.training import ExactLogprobs
from worker.errors import ServingError

CONTEXT_LENGTH = 1024
"""Tokens of prompt and answer together, which the trainer's KV cache is made for."""

CLIP = 0.2
"""Largest change of a token's probability ratio that is rewarded (PPO's clipping)."""


class Sampler(Protocol):
    """What makes rollouts; `Workers` is one."""

    def update(self, weights: Path, version: str) -> None:
        """Sample from the weights in a checkpoint, or a file of some of them, from now on."""

    def sample(self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, seed: int) -> list[list[Sample]]:
        """`n` answers to each prompt."""


_LEAST = {"steps": 1, "prompts": 1, "answers": 2, "max_tokens": 1, "seed": 0, "layers": 0, "save_every": 0}
"""Least values of settings."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run.

    Attributes:
        task: One of `tasks.TASKS`.
        steps: Updates of the weights.
        prompts: Prompts of a step.
        answers: Answers to each prompt: its group. The advantage of one alone has no scale.
        max_tokens: Tokens of an answer at most.
        learning_rate: Learning rate of AdamW.
        seed: Seed of prompts and answers.
        layers: Decoder layers that are trained, from the last one; 0 trains all weights.
        save_every: Steps between checkpoints that are kept, beside the first; 0 for none.
    """

    task: str = "sums"
    steps: int = 16
    prompts: int = 2
    answers: int = 8
    max_tokens: int = 6
    learning_rate: float = 5e-5
    seed: int = 0
    layers: int = 0
    save_every: int = 0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be above 0 and finite, got {self.learning_rate}")


@dataclass(frozen=True, slots=True)
class Step:
    """What one step found.

    Attributes:
        step: Number of the step, from 0.
        reward: Mean reward of its rollouts.
        largest_difference: Largest |trainer - rollout| log probability of its tokens, in nats.
        tokens: Tokens of its answers.
        weights: SHA-256 of the weights after it.
    """

    step: int
    reward: float
    largest_difference: float
    tokens: int
    weights: str


def train(model_path: Path, sampler: Sampler, settings: Settings, output: Path) -> Iterator[Step]:
    """Run GRPO (Shao et al. 2024, arXiv:2402.03300) without a KL term, one update a batch.

    Args:
        model_path: Directory of the checkpoint to begin with.
        sampler: Makes the rollouts.
        settings: Settings of the run.
        output: Directory for checkpoints, on a disk that the workers see.
    """
    policy: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    exact = ExactLogprobs(policy, model_path, context_length=CONTEXT_LENGTH)
    if settings.layers:
        policy.requires_grad_(False)
        policy.model.layers[-settings.layers :].requires_grad_(True)
    trained = {name: each for name, each in policy.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=settings.learning_rate, weight_decay=0.0)
    source = random.Random(settings.seed)
    for step in range(settings.steps):
        if step == 0 or (settings.save_every and step % settings.save_every == 0):
            weights = checkpoint(policy, model_path, output / f"step{step}")
        else:
            weights = output / "newest.safetensors"
            save_file(trained, weights)
        sampler.update(weights, str(step))
        questions = [TASKS[settings.task](source) for _ in range(settings.prompts)]
        prompts = [tokenizer.encode(one.prompt, add_special_tokens=False) for one in questions]
        seed = (settings.seed << 32) + step * settings.prompts
        groups = sampler.sample(prompts, n=settings.answers, max_tokens=settings.max_tokens, seed=seed)
        texts = [
            [tokenizer.decode(one.rollout.token_ids, skip_special_tokens=True) for one in group] for group in groups
        ]
        rewards = torch.tensor(
            [[question.reward(text) for text in group] for question, group in zip(questions, texts, strict=True)]
        )
        samples = [one for group in groups for one in group]
        if any(one.versions != (str(step),) for one in samples):
            found = sorted({one.versions for one in samples})
            raise WorkerError(f"step {step}: an answer is of other weights: {found}")

        logprobs = exact([one.rollout for one in samples])
        theirs = [torch.tensor(one.logprobs, dtype=torch.float64) for one in samples]
        difference = max(
            float((ours.detach() - rollout).abs().max()) for ours, rollout in zip(logprobs, theirs, strict=True)
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss(logprobs, theirs, advantages(rewards).flatten()))
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        yield Step(step, float(rewards.mean()), difference, sum(map(len, theirs)), digest(policy))


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards ``[prompts, answers]`` less their group's mean, by its standard deviation."""
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)


def loss(logprobs: list[torch.Tensor], theirs: list[torch.Tensor], advantage: torch.Tensor) -> torch.Tensor:
    """The clipped surrogate objective, negated, averaged over all tokens."""
    terms = []
    for ours, rollout, weight in zip(logprobs, theirs, advantage.double(), strict=True):
        ratio = (ours - rollout).exp()  # exactly 1, with the gradient of `ours`
        terms.append(torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight))
    return -torch.cat(terms).mean()


def checkpoint(policy: Any, model_path: Path, directory: Path) -> Path:
    """A checkpoint of the policy, with everything beside the weights as it was."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in model_path.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copy(file, directory)
    policy.save_pretrained(directory)
    return directory


def digest(policy: Any) -> str:
    """SHA-256 of all weights."""
    found = hashlib.sha256()
    for parameter in policy.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def run(options: argparse.Namespace, settings: Settings) -> None:
    output = options.output.resolve()  # the workers have another working directory
    steps = output / "steps.jsonl"
    if steps.is_file() and steps.stat().st_size:
        raise WorkerError(f"--output {options.output}: has the steps of another run; give a new directory")
    workers = Workers(options.url, options.engine_url, options.engine_key)
    output.mkdir(parents=True, exist_ok=True)
    with steps.open("w") as report:
        for step in train(options.model, workers, settings, output):
            line = json.dumps(asdict(step))
            print(line, flush=True)
            print(line, file=report, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=checkpoint_directory, required=True, help="directory of the workers' checkpoint"
    )
    parser.add_argument("--url", type=address, default="http://127.0.0.1:8000", help="the front door")
    parser.add_argument(
        "--engine-url", type=address, action="append", required=True, help="a worker's --engine-port; once for each"
    )
    parser.add_argument("--engine-key", required=True, help="a key of the workers' --engine-key-file")
    parser.add_argument("--output", type=Path, required=True, help="directory for checkpoints and steps.jsonl")
    for name, default in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = parser.parse_args()
    try:
        settings = Settings(**{name: getattr(options, name) for name in asdict(Settings())})
    except ValueError as error:
        parser.error("--" + str(error).replace("_", "-"))
    try:
        run(options, settings)
    except (WorkerError, ServingError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
