"""The worker's logits processor class, which also writes the model's own logits to files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from golden_vllm import DIRECTORY, NAME, RESUMED
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from worker.engines.vllm.processors import WorkerProcessors


class _Named(NamedTuple):
    """A request in the batch, and the lists in which vLLM keeps its tokens."""

    name: str
    prompt: list[int]
    output: list[int]


class Recorder(WorkerProcessors):
    """`WorkerProcessors`; writes the row of every request before it is edited.

    A file ``DIRECTORY/name/position`` has a row in float32, the newest of several; a file `RESUMED`
    beside says that the request went on after a preemption.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._directory = Path(os.environ[DIRECTORY])
        self._named: dict[int, _Named] = {}

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._named, batch_update, self._new)
        super().update_state(batch_update)

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        for index, (name, prompt, output) in self._named.items():
            position = len(prompt) + len(output)
            logits[index].float().numpy().tofile(self._directory / name / str(position))
        return super().apply(logits, ctx)

    def _new(self, params: Any, prompt: list[int], output: list[int]) -> _Named:
        named = _Named(params.extra_args[NAME], prompt, output)
        folder = self._directory / named.name
        folder.mkdir(exist_ok=True)
        if output:
            (folder / RESUMED).touch()
        return named
