"""Whole answers of the NATS client, put together from chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from worker.runtimes.nats.client import Answer
from worker.runtimes.nats.client import answers as module


def told(token_id: int) -> dict[str, Any]:
    return {"rollout": json.dumps({"token_ids": [token_id], "raw": [-0.1 * token_id]}), "newest": token_id}


def test_what_is_told_of_each_token_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All before it was, with each chunk: 10,000 tokens held up the event loop for a minute."""
    chunks: list[dict[str, Any]] = [
        {"index": each % 2, "token_ids": [each], "engine_data": told(each)} for each in range(100)
    ]
    read: list[str] = []

    def loads(text: str) -> Any:
        read.append(text)
        return json.loads(text)

    monkeypatch.setattr(module, "json", type("Counted", (), {"loads": loads, "dumps": json.dumps}))
    answer = Answer()
    for chunk in chunks:
        answer.add(chunk)
    for index, choice in enumerate(answer.choices):
        assert choice.engine_data is not None
        assert json.loads(choice.engine_data["rollout"]) == {
            "token_ids": [*range(index, 100, 2)],
            "raw": [-0.1 * each for each in range(index, 100, 2)],
        }
        assert choice.engine_data["newest"] == 98 + index
    assert read == [chunk["engine_data"]["rollout"] for chunk in chunks]


def test_an_answer_without_data_has_none() -> None:
    answer = Answer()
    answer.add({"index": 0, "token_ids": [5]})
    assert answer.choices[0].engine_data is None
    answer.add({"index": 0, "token_ids": [], "engine_data": {"logits_processors": 1}})
    assert answer.choices[0].engine_data == {"logits_processors": 1}
