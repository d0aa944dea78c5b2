"""Offline inference with the embedded engine: no server, no network, no other process.

.venv/bin/python examples/offline.py  # a tiny model with random weights, made on first use
.venv/bin/python examples/offline.py /models/my-model "Once upon a time" --temperature 0.8 --n 2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from worker.engines.embedded import Engine
from worker.errors import ServingError
from worker.sampling import SamplingParams

PROMPTS = ["Once upon a time", "What is the capital of France?"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Answer prompts offline.")
    parser.add_argument("model", nargs="?", help="directory of a checkpoint; a tiny random one by default")
    parser.add_argument("prompts", nargs="*", help="texts")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=1, help="answers to each prompt")
    parser.add_argument("--stop", action="append", help="text that ends an answer; may be given again")
    options = parser.parse_args(arguments)

    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        n=options.n,
        stop=options.stop,
        logprobs=0,
    )
    engine = Engine(options.model or "tiny")
    results = engine.generate(options.prompts or PROMPTS, params)
    # a logits processor by name: the answer is a word with a capital
    word = [{"name": "regex", "args": {"pattern": "[A-Z][a-z]{2,8}"}}]
    steered = engine.generate(PROMPTS[0], params, progress=False, processors=word)
    for result in [*results, *steered]:
        print(f"{result.prompt!r}")
        for output in result.outputs:
            ending = f"{output.finish_reason}, {len(output.token_ids)} tokens, {output.cumulative_logprob:.2f} nats"
            print(f"  {output.text!r} ({ending})")


if __name__ == "__main__":
    try:
        main()
    except (ServingError, ValueError) as error:  # such as no model, or a number out of its range
        raise SystemExit(f"error: {error}") from None
