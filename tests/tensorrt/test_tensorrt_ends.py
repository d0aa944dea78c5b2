"""Answers end where the worker says they do, whatever end token the library's tokenizer has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from stand_in import collect, embedded, running

from worker.sampling import SamplingParams

PROMPT = [9, 30, 41, 77]


def always(token_id: int, **fields: Any) -> SamplingParams:
    """An answer of one token, again and again."""
    bias = [0.0] * 1024
    bias[token_id] = 1000.0
    return SamplingParams(max_tokens=4, embedding_bias=bias, **fields)


def checkpoint(model: Path, tmp_path: Path, end: str, ends: list[int]) -> Path:
    """The model with another end token of its tokenizer, and other end tokens of its own."""
    made = tmp_path / "model"
    shutil.copytree(model, made, ignore=shutil.ignore_patterns(".packed"))
    changes: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {"eos_token": end},
        "config.json": {"eos_token_id": ends or None},
        "generation_config.json": {"eos_token_id": ends or None},
    }
    for name, values in changes.items():
        path = made / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return made


@pytest.mark.parametrize(
    ("end", "ends", "token_id", "answer"),
    [
        ("<|pad|>", [4, 1], 2, ([2] * 4, "length", None)),
        ("<|im_end|>", [1, 4], 4, ([], "stop", 4)),
        ("<|im_end|>", [], 4, ([4] * 4, "length", None)),
    ],
    ids=["the tokenizer's is none of the model's", "the tokenizer's is not the model's first", "the model has none"],
)
async def test_the_end_tokens_are_the_models(
    model: Path, tmp_path: Path, end: str, ends: list[int], token_id: int, answer: Any
) -> None:
    path = checkpoint(model, tmp_path, end, ends)
    asked = [always(token_id), always(token_id, logprobs=1)]  # natively, and with processors
    async with running(path, hides_end_token=True) as served, embedded(path) as reference:
        for engine in (served, reference):
            for each in asked:
                found = await collect(engine, PROMPT, each)
                assert (found.token_ids, found.finish_reason, found.stop_reason, found.error) == (*answer, None)
        if answer[1] == "length":
            found = await collect(served, PROMPT, always(token_id, min_tokens=4))
            assert (found.token_ids, found.finish_reason) == answer[:2]
