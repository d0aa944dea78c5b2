"""How far other engines' log probabilities are from a trainer's, on checkpoints of `grpo.py`.

    .venv/bin/python examples/grpo/differences.py RUN --vllm .venv-vllm/bin/python

Reads the checkpoints ``step*`` of RUN (``--save-every``), lets transformers' ``generate`` and
vLLM's CPU build sample answers in float32, computes their log probabilities with the trainer's
forward pass, and writes ``RUN/differences.json``: per engine and step the largest
|trainer - rollout|, in nats.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

ENVIRON = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
MARK = "rollouts "

Found = list[tuple[list[int], list[int], list[float]]]
"""Prompts, answers and log probabilities of the answers' tokens."""


def sample_with_vllm(checkpoint: str, prompts: list[list[int]], n: int, max_tokens: int) -> Found:
    from vllm import LLM, SamplingParams

    engine = LLM(checkpoint, dtype="float32", max_model_len=256, enforce_eager=True)
    params = SamplingParams(n=n, max_tokens=max_tokens, temperature=1.0, logprobs=0, seed=1)
    found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [
        (
            ids,
            list(output.token_ids),
            [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)],
        )
        for ids, result in zip(prompts, found, strict=True)
        for output in result.outputs
    ]


def sample_with_transformers(policy: Any, prompts: list[list[int]], n: int, max_tokens: int) -> Found:
    import torch

    torch.manual_seed(1)
    ends, found = policy.generation_config.eos_token_id, []  # an id, or a list of them
    ends = ends if isinstance(ends, list) else [ends]
    for ids in prompts:
        given = torch.tensor([ids])
        wanted = {"max_new_tokens": max_tokens, "num_return_sequences": n, "output_logits": True}
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        output = policy.generate(
            given, attention_mask=torch.ones_like(given), return_dict_in_generate=True, **wanted, **sampling
        )
        logprobs = torch.stack(output.logits, 1).float().log_softmax(-1)
        for row, answer in zip(logprobs, output.sequences[:, len(ids) :].tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(answer) if token in ends), len(answer))
            values = [float(row[place, token]) for place, token in enumerate(answer[:end])]
            found.append((ids, answer[:end], values))
    return found


def trainer_logprobs(policy: Any, rollouts: Found) -> list[list[float]]:
    """Log probabilities as a trainer computes them: one padded batch, log-softmax in float32."""
    import torch

    texts = [prompt + answer for prompt, answer, _ in rollouts]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    with torch.inference_mode():
        logprobs = policy(input_ids=ids, attention_mask=mask, use_cache=False).logits.float().log_softmax(-1)
    return [
        [float(row[len(prompt) - 1 + place, token]) for place, token in enumerate(answer)]
        for row, (prompt, answer, _) in zip(logprobs, rollouts, strict=True)
    ]


def largest(policy: Any, rollouts: Found) -> float:
    """Largest |trainer - rollout| of all tokens."""
    pairs = zip(trainer_logprobs(policy, rollouts), (values for _, _, values in rollouts), strict=True)
    return max(abs(one - other) for ours, theirs in pairs for one, other in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="--output of grpo.py; with --sample, a checkpoint")
    parser.add_argument("--vllm", help="Python of an environment with vLLM")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--sample", action="store_true", help=argparse.SUPPRESS)  # in vLLM's environment
    options = parser.parse_args()
    if options.sample:
        prompts = json.load(sys.stdin)
        found = sample_with_vllm(str(options.run), prompts, options.answers, options.max_tokens)
        print(MARK + json.dumps(found))
        return

    import torch
    from tasks import TASKS
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = random.Random(1)
    differences: dict[str, dict[str, float]] = {"transformers": {}} | ({"vLLM": {}} if options.vllm else {})
    checkpoints = sorted(options.run.glob("step[0-9]*"), key=lambda path: int(path.name[4:]))
    if not checkpoints:
        raise SystemExit(f"error: {options.run}: no step0 in it: expected the --output of grpo.py")
    for checkpoint in checkpoints:
        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        policy: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        asked = [TASKS["sums"](source).prompt for _ in range(options.prompts)]
        prompts = [tokenizer.encode(one, add_special_tokens=False) for one in asked]
        step, sizes = checkpoint.name[4:], (options.answers, options.max_tokens)
        differences["transformers"][step] = largest(policy, sample_with_transformers(policy, prompts, *sizes))
        if options.vllm:
            command = [options.vllm, __file__, str(checkpoint), "--sample"]
            command += ["--answers", str(sizes[0]), "--max-tokens", str(sizes[1])]
            text = json.dumps(prompts)
            done = subprocess.run(
                command, input=text, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **ENVIRON}
            )
            (line,) = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
            differences["vLLM"][step] = largest(policy, json.loads(line.removeprefix(MARK)))
        print(step, {name: found[step] for name, found in differences.items()}, flush=True)
    (options.run / "differences.json").write_text(json.dumps(differences, indent=1) + "\n")


if __name__ == "__main__":
    main()
