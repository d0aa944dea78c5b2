"""Short runs of a loaded model: logits of a prompt in chunks, and greedy answers in batches."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from worker.engines import EngineRequest
from worker.engines.embedded.admission import admit
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.plan import Chunk, Plan, Request
from worker.engines.embedded.step import make_stepper
from worker.sampling import SamplingParams


def load_native(path: Path, **settings: Any) -> HfModel:
    """A checkpoint on native kernels, without rounding activations, with a KV store of 8 pages of
    32 tokens, unless `settings` of `EmbeddedConfig` say otherwise.
    """
    defaults = {"device": "cpu", "kernels": "native", "activation_dtype": "none"}
    model = load_model(EmbeddedConfig(model_path=path, **defaults | settings))
    model.allocate_kv(8, 32)
    return model


def last_logits(model: HfModel, cuts: tuple[int, ...] = (0, 90)) -> torch.Tensor:
    """Logits of the last token of each chunk of a prompt of 90 tokens, cut at `cuts`.

    The model's KV store has at least 4 pages of 32 tokens.
    """
    tokens = torch.randint(300, (90,), generator=torch.Generator().manual_seed(5)).tolist()
    request = Request("", 0, SamplingParams(), tokens, len(tokens), 999, frozenset(), 0, pages=[2, 0, 3])
    rows = [model.forward(Plan((), (Chunk(request, start, stop),), (request,))) for start, stop in pairwise(cuts)]
    return torch.cat(rows)


def greedy_answers(
    model: HfModel, prompts: Iterable[list[int]], max_tokens: int, *, budget: int, together: int
) -> list[list[int]]:
    """Greedy answers of `max_tokens` tokens, `together` requests at most in a step of `budget`."""
    config = EmbeddedConfig(model_path="", max_num_seqs=together, max_num_batched_tokens=budget, max_mixed_chunk=64)
    stepper = make_stepper(config, model, num_kv_blocks=160)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for which, prompt in enumerate(prompts):
        stepper.add(admit(EngineRequest(str(which), prompt, params), which, model, 512))
        tokens[str(which)] = []
    while not stepper.scheduler.is_idle:
        for output in stepper.step():
            assert output.token_id is not None
            tokens[output.request_id].append(output.token_id)
    return list(tokens.values())
