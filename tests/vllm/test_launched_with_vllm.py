"""``ENGINE=vllm launch/agg.sh``: frontend and front door in .venv, the worker in .venv-vllm."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from launched_vllm import FRONTEND, agg

from adapters.client import logits_processors, processor
from worker.models import DEFAULT_MODEL

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

PAGE_BODY = """
import json, re, sys, quickjs
script, *given = json.load(sys.stdin)
context = quickjs.Context()
context.eval(re.sub("^(import .*?;\\n)|^export ", "", script, flags=re.MULTILINE))
print(context.eval(f"JSON.stringify(bodyOf({', '.join(map(json.dumps, given))}))"))
"""
"""Prints the body that the playground's ``bodyOf`` makes of its arguments."""


def page_request(base: str, *arguments: Any) -> httpx.Response:
    """What the playground sends, by its own script, and the answer."""
    with urllib.request.urlopen(f"{base}/playground") as page:
        assert b"<title>Playground" in page.read()
    with urllib.request.urlopen(f"{base}/playground/requests.js") as found:
        script = found.read().decode()
    made = subprocess.run(
        [FRONTEND / "bin" / "python", "-c", PAGE_BODY],
        input=json.dumps([script, *arguments]),
        capture_output=True,
        text=True,
        check=True,
    )
    return httpx.post(f"{base}/v1/chat/completions", json=json.loads(made.stdout), timeout=60)


def test_conversations_the_playground_and_sigterm(tmp_path: Path) -> None:
    with agg(tmp_path) as script:
        script.wait_until_ready()
        assert script.model == DEFAULT_MODEL
        messages: list[Any] = [{"role": "user", "content": "What is the capital of France? One word."}]
        with script.client() as client:

            def ask(**fields: Any) -> str:
                answer = client.chat.completions.create(model=script.model, messages=messages, max_tokens=16, **fields)
                return str(answer.choices[0].message.content)

            greedy = ask(temperature=0)
            assert "Paris" in greedy
            messages += [
                {"role": "assistant", "content": greedy},
                {"role": "user", "content": "Now a city in Norway."},
            ]
            first, other = ask(temperature=1.2, seed=4), ask(temperature=1.2, seed=5)
            assert ask(temperature=1.2, seed=4) == first != other
            four = client.chat.completions.create(
                model=script.model, messages=messages, max_tokens=16, n=4, temperature=1.2, seed=4
            )
            texts = [choice.message.content for choice in four.choices]
            assert texts[0] == first
            assert len(set(texts)) == 4
            forced = logits_processors(processor("forced_sequence", text="one two three four"))
            assert ask(stop=[" three"], extra_body=forced) == "one two"
        chosen = [{"name": "choice", "args": {"choices": ["maybe"]}}]
        answer = page_request(script.url.removesuffix("/v1"), script.model, messages, {"temperature": 0.7}, chosen)
        assert answer.status_code == 200, answer.text
        events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line[6:7] == "{"]
        choices = [choice for event in events for choice in event["choices"]]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == "maybe"
        receipts = [event["nvext"]["engine_data"]["logits_processors"] for event in events if event.get("nvext")]
        assert receipts[-1]["engine"]["name"] == "vllm"
        assert receipts[-1]["processors"][0]["name"] == "choice"
        processes = psutil.Process(script.process.pid).children(recursive=True)
        script.process.send_signal(signal.SIGTERM)
        assert script.finish() == 0, script.output
    assert psutil.wait_procs(processes, timeout=60)[1] == []


def test_the_smoke_test_and_a_killed_worker(tmp_path: Path) -> None:
    """vLLM's own processes end with the worker, and the script with both."""
    with agg(tmp_path, DYN_ENABLE_TEST_LOGITS_PROCESSOR="1") as script:
        script.wait_until_ready()
        with script.client() as client:
            answer = client.chat.completions.create(
                model=script.model, messages=[{"role": "user", "content": "Hello"}], temperature=1.3, seed=4
            )
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello world!", "stop")
        worker = script.named("worker")
        below = worker.children(recursive=True)
        assert len(below) >= 2
        worker.kill()
        assert script.finish() == 1
        assert "error: the worker ended with status 137; stopping" in script.output
    assert psutil.wait_procs(below, timeout=60)[1] == []
