"""Requests of all kinds together on the default model: kernels for a vocabulary of 49,152 tokens,
and memory that nobody wrote to holds the worst.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.engines.embedded import Engine
from worker.models import model_cache, prepare_default_model
from worker.sampling import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

KEYS = [f"some_long_key_{index}" for index in range(3)]
SCHEMA = {
    "type": "object",
    "properties": {key: {"type": "integer", "minimum": 0, "maximum": 99} for key in KEYS},
    "required": KEYS,
    "additionalProperties": False,
}
FORCED = [{"name": "json_schema", "args": {"schema": SCHEMA}}]
REQUESTS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"temperature": 1.0, "top_p": 0.9}, FORCED),
    ({"logprobs": 3}, []),
    ({"temperature": 1.0, "top_k": 20, "logprobs": 1}, FORCED),
    ({"temperature": 1.2, "min_p": 0.05}, [{"name": "regex", "args": {"pattern": "The answer is [a-z]{3,9}\\."}}]),
    ({"temperature": 0.8}, [{"name": "banned_tokens", "args": {"token_ids": [28, 30]}}]),
    ({"frequency_penalty": 0.5, "logprobs": 2, "logprobs_mode": "processed"}, FORCED),
]


@pytest.fixture(scope="module")
def default_model() -> Path:
    return prepare_default_model(model_cache(os.environ), print)


@pytest.fixture(params=[torch.nan, -torch.inf])
def stale(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of floating-point tensors that are made without content holds this number."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)

        def filled(*args: Any, make: Any = make, **kwargs: Any) -> torch.Tensor:
            made: torch.Tensor = make(*args, **kwargs)
            return made.fill_(request.param) if made.is_floating_point() else made

        monkeypatch.setattr(owner, name, filled)


def answers(engine: Engine, together: int) -> list[Any]:
    """Ids, reasons, and log probabilities, of `together` requests at a time."""
    found: list[Any] = []
    for first in range(0, len(REQUESTS), together):
        some = REQUESTS[first : first + together]
        results = engine.generate(
            [f"Number {first + index}: a story" for index in range(len(some))],
            [SamplingParams(max_tokens=40, seed=first + index, **fields) for index, (fields, _) in enumerate(some)],
            processors=[processors for _, processors in some],
        )
        found += [(one.token_ids, one.finish_reason, one.outputs[0].error, one.outputs[0].logprobs) for one in results]
    return found


@pytest.mark.usefixtures("stale")
def test_a_mix_of_controls_is_as_each_alone(default_model: Path) -> None:
    engine = Engine(str(default_model), device="cpu", max_num_seqs=8, kv_blocks=64, context_length=512)
    alone = answers(engine, 1)
    assert all(error is None for _, _, error, _ in alone)
    assert answers(engine, len(REQUESTS)) == answers(engine, 2) == alone
