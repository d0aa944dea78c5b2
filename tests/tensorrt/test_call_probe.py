"""The probe of TensorRT-LLM's calls leaves nothing for the first request to load in its process."""

from __future__ import annotations

from pathlib import Path

import torch

from adapters.processors.grammar import grammar_cache
from adapters.trtllm import Step
from adapters.trtllm.side_channel import Reporter
from adapters.vocabulary import Vocabulary
from worker.engines.trtllm.probes import CallProbe


class Steps(Reporter):
    """Keeps what is reported, and sends it nowhere."""

    def __init__(self) -> None:
        self.found: list[Step] = []

    def step(self, step: Step) -> None:
        self.found.append(step)


def test_the_probe_loads_the_tokenizer_of_grammars(model: Path) -> None:
    vocabulary, steps = Vocabulary.from_pretrained(str(model), 1024), Steps()
    probe = CallProbe(steps, 5, vocabulary)
    logits = torch.zeros(1024)
    probe.edit_row(0, [3, 4], logits)
    assert logits.argmax() == 5
    assert [step.position for step in steps.found] == [2]
    assert grammar_cache(vocabulary)._tokenizer is not None
