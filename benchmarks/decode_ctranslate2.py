"""CTranslate2 in `quantised.py`, in its own environment.

``python decode_ctranslate2.py CHECKPOINT``

Its own converter makes 8 bit integers of the weights, with one scale for each row of a matrix; all
rows of a task are one batch.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2  # type: ignore[import-not-found]
from workload import Reply, Stopwatch, Task, serve


class CTranslate2:
    """A loaded model that answers tasks greedily."""

    def __init__(self, path: Path, threads: int) -> None:
        self._generator = ctranslate2.Generator(str(path), "cpu", compute_type="int8", intra_threads=threads)
        self._vocabulary = json.loads((path / "vocabulary.json").read_text(encoding="utf-8"))

    def answer(self, task: Task) -> Reply:
        """One reply; nothing is kept for the next."""
        if task.controls != "greedy":
            raise SystemExit("CTranslate2 is asked for greedy answers only")
        prompts = [[self._vocabulary[token] for token in prompt] for prompt in task.prompts()]
        watch = Stopwatch(task.rows)

        def tick(step: Any) -> bool:
            if step.batch_id == task.rows - 1:
                watch.tick()
            return False

        results = self._generator.generate_batch(
            prompts,
            max_length=task.new,
            min_length=task.new,
            include_prompt_in_result=False,  # prefill at once
            callback=tick,
        )
        tokens = [result.sequences_ids[0] for result in results]
        return watch.fill(Reply(sum(map(len, tokens)), [row[0] for row in tokens]))


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:

        def start() -> Callable[[Task], Reply]:
            path = Path(directory) / "model"
            ctranslate2.converters.TransformersConverter(sys.argv[1]).convert(str(path), quantization="int8")
            return CTranslate2(path, int(os.environ["OMP_NUM_THREADS"])).answer

        serve(start)


if __name__ == "__main__":
    main()
