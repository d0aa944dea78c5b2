"""vLLM's side of `decode.py`; runs in vLLM's own environment: ``python decode_vllm.py CHECKPOINT``.

Reads lines ``rows seed sampled``, answers that many random prompts, and writes ``done``; once at the start, too.
"""

from __future__ import annotations

import random
import sys

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

PROMPT, NEW, VOCABULARY = 128, 128, 32_000
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05}


def main() -> None:
    engine = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512, max_num_seqs=32)
    print("done", flush=True)
    for line in sys.stdin:
        rows, seed, sampled = map(int, line.split())
        source = random.Random(seed)
        prompts = [{"prompt_token_ids": [source.randrange(VOCABULARY) for _ in range(PROMPT)]} for _ in range(rows)]
        controls = SAMPLED if sampled else {"temperature": 0.0}
        params = SamplingParams(max_tokens=NEW, ignore_eos=True, detokenize=False, **controls)
        results = engine.generate(prompts, params, use_tqdm=False)
        if sum(len(result.outputs[0].token_ids) for result in results) != rows * NEW:
            raise SystemExit("vLLM did not answer with as many tokens as were asked for")
        print("done", flush=True)


if __name__ == "__main__":
    main()
