"""Tensor parallelism: each rank draws for itself, and feeds its part of the model what it drew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine import tiny

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    options = {"max_model_len": 256, "max_num_seqs": 4, "block_size": 32, "dtype": "float32", "enforce_eager": True}
    llm = LLM(
        sys.argv[1], tensor_parallel_size=2, distributed_executor_backend="mp", enable_prefix_caching=False,
        logits_processors=["adapters.vllm:Processors"], **options,
    )
    drawn = json.dumps({"version": 1, "processors": [{"name": "xtc", "args": {"threshold": 0.1, "probability": 0.5}}]})
    asked = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=0, extra_args={"logits_processors": drawn})
    output = llm.generate({"prompt_token_ids": list(range(20, 40))}, asked, use_tqdm=False)[0]
    answer, prompt = list(output.outputs[0].token_ids), list(output.prompt_token_ids)
    said = [found[token].logprob for token, found in zip(answer, output.outputs[0].logprobs)]
    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    again = llm.generate({"prompt_token_ids": prompt + answer}, scored, use_tqdm=False)[0].prompt_logprobs
    print(json.dumps([said, [again[len(prompt) + i][token].logprob for i, token in enumerate(answer)]]))

if __name__ == "__main__":
    main()
"""


@pytest.mark.campaign
def test_what_ranks_draw_is_what_they_go_on_from(tmp_path: Path) -> None:
    """The log probabilities of an answer are those of its tokens as a prompt."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environ = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(program), str(tiny(tmp_path, "llama"))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said, scored = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))  # vLLM logs too
    assert said == pytest.approx(scored, abs=0.01)
