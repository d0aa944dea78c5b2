"""ONNX Runtime GenAI in `quantised.py`, in its own environment: ``python decode_onnxruntime.py
CHECKPOINT FORMAT``.

Its own builder quantises the weights in groups of 32, to the bits of the format; all rows of a task
are one batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime_genai
from workload import Reply, Stopwatch, Task, serve

OPTIONS = (
    "block_size=32",
    "accuracy_level=4",  # activations are rounded to 8 bits
    "matmul_mixed_precision=last_matmul:int8",  # as the files have it
    "prune_lm_head=true",  # logits of a prompt are those of its last token
    "shared_embeddings=false",  # with which it writes zero points that it does not load
)
FORMATS = {
    "Q4_0": ("int4", "is_symmetric=true"),
    "Q4_1": ("int4", "is_symmetric=false"),
    "Q8_0": ("int8", "is_symmetric=true"),
}
"""The builder's precision, and whether groups have no zero points."""


def build(checkpoint: str, form: str, directory: Path) -> None:
    """Write the model."""
    precision, symmetry = FORMATS[form]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", str(directory)]
    command += ["-c", str(directory / "cache"), "-e", "cpu", "-p", precision, "--extra_options", *OPTIONS, symmetry]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ONNX Runtime could not build the model: {done.stderr}")


class OnnxRuntime:
    """A loaded model that answers tasks greedily."""

    def __init__(self, directory: Path, threads: int) -> None:
        config = onnxruntime_genai.Config(str(directory))
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = onnxruntime_genai.Model(config)

    def answer(self, task: Task) -> Reply:
        """One reply; nothing is kept for the next."""
        if task.controls != "greedy":
            raise SystemExit("ONNX Runtime is asked for greedy answers only")
        params = onnxruntime_genai.GeneratorParams(self._model)
        length = task.prompt + task.new
        params.set_search_options(batch_size=task.rows, max_length=length, min_length=length, do_sample=False)
        generator = onnxruntime_genai.Generator(self._model, params)
        watch = Stopwatch(task.rows)
        generator.append_tokens(np.array(task.prompts(), np.int32))
        for _ in range(task.new):
            generator.generate_next_token()
            watch.tick()
        tokens = [generator.get_sequence(row)[task.prompt :] for row in range(task.rows)]
        return watch.fill(Reply(sum(map(len, tokens)), [int(row[0]) for row in tokens]))


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:

        def start() -> Callable[[Task], Reply]:
            checkpoint, form = sys.argv[1:]
            build(checkpoint, form, Path(directory))
            return OnnxRuntime(Path(directory), int(os.environ["OMP_NUM_THREADS"])).answer

        serve(start)


if __name__ == "__main__":
    main()
