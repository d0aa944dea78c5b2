"""llama.cpp in `speculation.py`, in an environment of its own: ``CHECKPOINT DTYPE END_ID...``.

Its Python package's `Llama`, with and without its prompt lookup. It answers one prompt after the
other, and is asked for no schema: the checkpoint is converted without its vocabulary.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from decode_llama import convert
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from speculation_workload import LONGEST, NGRAM, Answered, Ask, timed
from workload import serve


class Lookup:
    """A loaded model, whose prompt lookup is switched on for the requests that speculate."""

    def __init__(self, path: Path, end_ids: frozenset[int]) -> None:
        self._draft = LlamaPromptLookupDecoding(NGRAM["prompt_lookup_max"], NGRAM["num_speculative_tokens"])
        self._end_ids = end_ids
        threads = int(os.environ["OMP_NUM_THREADS"])
        self._models = {
            speculates: Llama(
                str(path),
                n_ctx=LONGEST,
                n_threads=threads,
                n_threads_batch=threads,
                draft_model=self._draft if speculates else None,
                verbose=False,
            )
            for speculates in (False, True)
        }

    def answer(self, asked: Ask) -> list[list[int]]:
        """Greedy, or sampled without truncation."""
        return [self._generate(asked, prompt, asked.seed + row) for row, prompt in enumerate(asked.prompts)]

    def _generate(self, asked: Ask, prompt: list[int], seed: int) -> list[int]:
        model = self._models[asked.speculates]
        model.set_seed(seed)
        controls = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": asked.temperature}
        found: list[int] = []
        for token in itertools.islice(model.generate(prompt, **controls), asked.tokens):
            found.append(token)
            if token in self._end_ids:
                break
        return found


def main() -> None:
    _, checkpoint, dtype, *end_ids = sys.argv
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"

        def start() -> Callable[[Ask], Answered]:
            convert(Path(checkpoint), path, dtype)
            return timed(Lookup(path, frozenset(map(int, end_ids))).answer)

        serve(start, Ask)


if __name__ == "__main__":
    main()
