"""Files and batches through the whole stack, as a user starts it, with a stock client."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from launched_script import LaunchedScript, launched
from openai.types import Batch

from worker.tiny_model import write_tiny_model

CHAT: Any = "/v1/chat/completions"


def body(script: LaunchedScript, number: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say {number}"}]
    return {"model": script.model, "messages": messages, "max_tokens": 8, "seed": number, "temperature": 1.0} | fields


def submitted(client: openai.OpenAI, bodies: list[dict[str, Any]]) -> Batch:
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": each} for number, each in enumerate(bodies)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def finished(client: openai.OpenAI, batch: Batch) -> Batch:
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def results_of(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    lines = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    found = {each["custom_id"]: each["response"] for each in lines}
    assert len(found) == len(lines)
    return found


def message_of(answer: dict[str, Any]) -> Any:
    return [(choice["message"], choice["finish_reason"]) for choice in answer["choices"]]


def asked(client: openai.OpenAI, fields: dict[str, Any]) -> Any:
    """The messages of the answer to the same request online, with every field as it is sent."""
    answer = client.post(CHAT.removeprefix("/v1"), cast_to=object, body=fields)
    assert isinstance(answer, dict)
    return message_of(answer)


@pytest.mark.campaign
def test_a_batch_answers_as_the_same_requests_online(tmp_path: Path) -> None:
    """Kept below the user's state directory, where nobody has asked for another."""
    variables = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with launched(tmp_path, variables=variables) as script:
        script.wait_until_ready()
        least = {"name": "min_tokens", "args": {"n": 4}}
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        bodies = [body(script, number) for number in range(12)]
        bodies += [
            body(script, 1, n=3),
            body(script, 2, logits_processors={"processors": [least], "receipt": True}),
            body(script, 3, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}),
            body(script, 4, suffix="b"),
            body(script, 5, logit_bias={"40": 100}, logprobs=True, top_logprobs=2),
        ]
        with script.client() as client:
            done = finished(client, submitted(client, bodies))
            assert done.request_counts is not None
            assert (done.status, done.model) == ("completed", script.model)
            assert (done.request_counts.completed, done.request_counts.failed) == (len(bodies) - 1, 1)
            answers = results_of(client, done.output_file_id)
            for number, fields in enumerate(bodies):
                if f"r{number}" in answers:
                    assert message_of(answers[f"r{number}"]["body"]) == asked(client, fields)
            (error,) = results_of(client, done.error_file_id).values()
            assert (error["status_code"], error["body"]["error"]["param"]) == (400, "suffix")
            assert "min_tokens" in json.dumps(answers["r13"]["body"]["nvext"]["engine_data"])
        place = tmp_path / f"state/dynamo-logits-worker/batches-{script.port}"
        assert (place / "batches.sqlite").exists()
        children = script.children()
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
        script.assert_nothing_left(children)


def test_a_batch_goes_on_after_everything_was_killed(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    variables = {"MODEL_PATH": str(model), "FRONT_DOOR_BATCH_DIR": str(tmp_path / "batches")}
    with launched(tmp_path, variables=variables | {"FRONT_DOOR_BATCH_CONCURRENCY": "2"}) as script:
        script.wait_until_ready()
        with script.client() as client:
            bodies = [body(script, number, max_tokens=200, ignore_eos=True) for number in range(40)]
            expected = asked(client, bodies[39])
            batch = submitted(client, bodies)
            while not (counts := client.batches.retrieve(batch.id).request_counts) or counts.completed < 3:
                time.sleep(0.01)
            assert counts.completed < 40
            script.named("worker.frontdoor").send_signal(signal.SIGKILL)
        assert script.finish() == 1
        assert "the front door ended with status 137" in script.output
    with launched(tmp_path, variables=variables) as script:
        script.wait_until_ready()
        with script.client() as client:
            before = client.batches.retrieve(batch.id).request_counts
            assert before is not None
            assert before.completed >= counts.completed
            done = finished(client, batch)
            assert (done.status, done.error_file_id) == ("completed", None)
            answers = results_of(client, done.output_file_id)
            assert set(answers) == {f"r{number}" for number in range(40)}
            assert message_of(answers["r39"]["body"]) == expected


def test_switched_off_they_are_refused_by_name(tmp_path: Path) -> None:
    variables = {"FRONT_DOOR_BATCH_DIR": "off", "XDG_STATE_HOME": str(tmp_path / "state")}
    with launched(tmp_path, variables=variables) as script:
        script.wait_until_ready()
        with script.client() as client, pytest.raises(openai.NotFoundError, match="--batch-dir"):
            client.files.list()
        assert not (tmp_path / "state").exists()
