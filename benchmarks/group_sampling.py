"""Throughput of many answers to one prompt, which share its KV, and of as many separate requests.

    .venv/bin/python benchmarks/group_sampling.py                              # ours, in-process
    .venv/bin/python benchmarks/group_sampling.py --url http://127.0.0.1:8000  # by the front door
    .venv/bin/python benchmarks/group_sampling.py --vllm .venv-vllm/bin/python # and vLLM beside it

Rounds are interleaved, and each has a new prompt. The fastest round counts, since other work on the
machine can only make one slower. Prints tokens per second of answers and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Sample = Callable[[list[int], bool], int]
"""Samples the answers to a prompt, shared or not; returns the number of their tokens."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Answers to one prompt.

    Attributes:
        answers: Number of answers.
        prompt: Tokens of the prompt.
        new: Tokens of each answer.
    """

    answers: int
    prompt: int
    new: int


def ours(model: str, dtype: str, shape: Shape) -> Sample:
    """The embedded engine with exact numerics."""
    from worker.engines.embedded import Engine
    from worker.sampling import SamplingParams

    settings: dict[str, Any] = {"max_num_seqs": shape.answers, "speculative_config": {"method": "none"}}
    engine = Engine(model, dtype=dtype, quantization="none", numerics="exact", **settings)
    params: dict[str, Any] = {"max_tokens": shape.new, "ignore_eos": True, "temperature": 1.0, "detokenize": False}

    def sample(prompt: list[int], shared: bool) -> int:
        if shared:
            (group,) = engine.generate([prompt], SamplingParams(n=shape.answers, **params), progress=False)
            return sum(len(output.token_ids) for output in group.outputs)
        # another first token each, so that no block is equal
        prompts = [[number, *prompt[1:]] for number in range(5, 5 + shape.answers)]
        return sum(len(one.token_ids) for one in engine.generate(prompts, SamplingParams(**params), progress=False))

    return sample


def over_http(url: str, shape: Shape) -> Sample:
    """A worker behind the front door, which makes a request of each choice."""
    with urllib.request.urlopen(f"{url}/v1/models") as reply:
        model = json.load(reply)["data"][0]["id"]

    def ask(**fields: Any) -> int:
        body = {"model": model, "max_tokens": shape.new, "ignore_eos": True, "temperature": 1.0, **fields}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            return int(json.load(reply)["usage"]["completion_tokens"])

    def sample(prompt: list[int], shared: bool) -> int:
        if shared:
            return ask(prompt=prompt, n=shape.answers)
        with ThreadPoolExecutor(shape.answers) as pool:
            return sum(pool.map(lambda number: ask(prompt=[number, *prompt[1:]]), range(5, 5 + shape.answers)))

    return sample


def vllm(model: str, dtype: str, shape: Shape) -> Sample:
    """vLLM with its prefix cache; in its own environment."""
    from vllm import LLM, SamplingParams

    longest = shape.prompt + shape.new
    engine = LLM(model, dtype=dtype, max_model_len=longest, max_num_seqs=shape.answers, enable_prefix_caching=True)
    params: dict[str, Any] = {"max_tokens": shape.new, "ignore_eos": True, "temperature": 1.0, "detokenize": False}

    def sample(prompt: list[int], shared: bool) -> int:
        prompts = [prompt] if shared else [[number, *prompt[1:]] for number in range(5, 5 + shape.answers)]
        wanted = SamplingParams(n=shape.answers if shared else 1, **params)
        found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
        return sum(len(output.token_ids) for result in found for output in result.outputs)

    return sample


def serve(sample: Sample) -> None:
    """Answer each line of JSON, prompt and whether it is shared, with the number of tokens."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(f"tokens {sample(*json.loads(line))}", flush=True)


@contextmanager
def peer(python: str, arguments: list[str]) -> Iterator[Sample]:
    """vLLM in another process."""
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    command = [python, __file__, "--serve", *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environ, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        answers = (line.split() for line in process.stdout)
        assert any(line == ["ready"] for line in answers), "vLLM did not start"

        def sample(prompt: list[int], shared: bool) -> int:
            print(json.dumps([prompt, shared]), file=process.stdin, flush=True)
            return next(int(line[1]) for line in answers if line[:1] == ["tokens"])

        try:
            yield sample
        finally:
            process.stdin.close()


def measure(engines: dict[str, Sample], shape: Shape, rounds: int) -> None:
    """Time all engines in turn, and print the best round of each."""
    source, best = random.Random(), {(name, shared): 0.0 for name in engines for shared in (True, False)}
    for _ in range(rounds):
        for (name, shared), known in list(best.items()):
            prompt = [source.randrange(100, 4000) for _ in range(shape.prompt)]
            started = time.perf_counter()
            tokens = engines[name](prompt, shared)
            seconds = time.perf_counter() - started
            assert tokens == shape.answers * shape.new, (name, tokens)
            print(f"{name}, {'shared' if shared else 'alone'}: {tokens / seconds:.0f} tokens/s", flush=True)
            best[name, shared] = max(known, tokens / seconds)
    print(f"\n{shape.answers} answers of {shape.new} tokens to a prompt of {shape.prompt}\n")
    print("| engine | one request, n answers | n requests, nothing shared | ratio |\n| --- | --- | --- | --- |")
    for name in engines:
        together, alone = best[name, True], best[name, False]
        print(f"| {name} | {together:.0f} tokens/s | {alone:.0f} tokens/s | {together / alone:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a checkpoint; the default model by default")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--url", help="a front door; its worker is measured instead of one in-process")
    parser.add_argument("--vllm", help="Python of an environment with vLLM")
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = Shape(options.answers, options.prompt, options.new)
    if options.serve:
        serve(vllm(options.model, options.dtype, shape))
        return
    if options.model is None:
        from worker.models import model_cache
        from worker.models.default_model import prepare_default_model

        options.model = str(prepare_default_model(model_cache(), print, keeps_blocks=False))
    own = over_http(options.url, shape) if options.url else ours(options.model, options.dtype, shape)
    engines = {"ours over HTTP" if options.url else f"ours, {options.dtype}, exact": own}
    if options.vllm is None:
        measure(engines, shape, options.rounds)
        return
    sizes = ["--answers", str(shape.answers), "--prompt", str(shape.prompt), "--new", str(shape.new)]
    with peer(options.vllm, ["--model", options.model, "--dtype", options.dtype, *sizes]) as other:
        measure({**engines, f"vLLM, {options.dtype}": other}, shape, options.rounds)


if __name__ == "__main__":
    main()
