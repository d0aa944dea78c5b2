"""Batches whose workers and frontend die in the middle."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from e2e_stack import MODEL, Stack, running_stack
from front_door_process import Door
from openai.types import Batch

CHAT: Any = "/v1/chat/completions"
PATIENT = ("--device", "cpu", "--dtype", "float32")
NUM_LINES = 60


@pytest.fixture
def stack(tmp_path: Path, tiny_model: Path) -> Iterator[Stack]:
    with running_stack(tmp_path, tiny_model) as stack:
        stack.start_frontend()
        yield stack


def submitted(client: openai.OpenAI) -> Batch:
    body = {"model": MODEL, "max_tokens": 100, "ignore_eos": True}
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": CHAT}
        | {"body": body | {"messages": [{"role": "user", "content": f"Say {n}"}]}}
        for n in range(NUM_LINES)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def num_completed(client: openai.OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    return counts.completed


def finished(client: openai.OpenAI, batch: Batch) -> Batch:
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def test_a_batch_waits_for_a_worker_that_died(stack: Stack, tmp_path: Path) -> None:
    """Submitted before there is a worker, which is killed; another takes its place."""
    door = Door(stack, "--batch-dir", str(tmp_path / "batches"))
    with door.client() as client:
        batch = submitted(client)
        time.sleep(1)
        assert client.batches.retrieve(batch.id).status == "validating"
        worker = stack.start_worker(*PATIENT)
        while num_completed(client, batch) < 5:
            time.sleep(0.02)
        worker.signal(signal.SIGKILL)
        worker.wait()
        assert num_completed(client, batch) < NUM_LINES
        time.sleep(8)  # longer than a line is tried without a worker, were that an error of the line
        stack.start_worker(*PATIENT)
        done = finished(client, batch)
        assert done.error_file_id is None, client.files.content(done.error_file_id).text
        assert done.status == "completed"
        assert done.output_file_id is not None
        lines = client.files.content(done.output_file_id).text.splitlines()
        assert [json.loads(each)["custom_id"] for each in lines] == [f"r{n}" for n in range(NUM_LINES)]
        used = [json.loads(each)["response"]["body"]["usage"] for each in lines]
        assert done.usage is not None
        assert done.usage.output_tokens == sum(each["completion_tokens"] for each in used) == 100 * NUM_LINES
        assert done.usage.total_tokens == sum(each["total_tokens"] for each in used)


def test_a_batch_waits_for_a_frontend_that_died(stack: Stack, tmp_path: Path) -> None:
    stack.start_worker(*PATIENT)
    door = Door(stack, "--batch-dir", str(tmp_path / "batches"))
    with door.client() as client:
        batch = submitted(client)
        while num_completed(client, batch) < 5:
            time.sleep(0.02)
        stack.frontend.signal(signal.SIGKILL)
        stack.frontend.wait()
        assert num_completed(client, batch) < NUM_LINES
        time.sleep(2)
        stack.start_frontend()
        done = finished(client, batch)
        assert (done.status, done.error_file_id) == ("completed", None)
        assert done.request_counts is not None
        assert done.request_counts.completed == NUM_LINES
