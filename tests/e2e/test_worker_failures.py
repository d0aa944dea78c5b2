"""What a client sees when something breaks, and what becomes of the worker."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from pathlib import Path

import openai
import pytest
from e2e_stack import DYNAMO, MODEL, Stack, http, wait_for
from ports import free_port
from stopped_processes import stopped

from worker.runtimes.file_discovery import CHECK_S


def test_a_request_that_fails_in_the_middle_is_an_error(stack: Stack) -> None:
    """A failed processor must never look like a short answer."""
    stack.start_frontend()
    worker = stack.start_worker(scripted=True)
    for stream in (False, True):
        status, text = stack.post("completions", prompt="p", max_tokens=20, stream=stream)
        if DYNAMO < (1, 6):
            assert status == (200 if stream else 500)
            assert '"code":500' in text
        else:
            assert status == (200 if stream else 400)
            assert '"code":400' in text
            assert "logits processor Bad: raised ValueError" in text
        assert 'finish_reason":"' not in text
    assert worker.metric("dlw_requests_total", outcome="failed") == 2
    assert stack.post("completions", prompt="z", max_tokens=4)[0] == 200


def test_overload_leaves_the_worker_in_rotation(stack: Stack) -> None:
    stack.start_frontend()
    worker = stack.start_worker(scripted=True)
    status, text = stack.post("chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
    assert status == 200, text
    for _ in range(3):
        status, _ = stack.post("completions", prompt="o", max_tokens=4)
        assert status == (500 if DYNAMO < (1, 6) else 529)
        assert stack.post("completions", prompt="z", max_tokens=4)[0] == 200
    assert worker.metric("dlw_requests_total", outcome="overloaded") == 3


def test_a_worker_whose_entries_expired_registers_again(stack: Stack) -> None:
    """As after a stop of more than 10 s. SIGTERM still ends it for good."""
    stack.start_frontend()
    worker = stack.start_worker(scripted=True)
    assert stack.post("completions", prompt="z", max_tokens=4)[0] == 200

    def registers_again() -> bool:
        """Whether entries that are removed come again; a worker that has not looked at them yet has
        another chance.
        """
        time.sleep(2 * CHECK_S)
        entries = {path: path.read_bytes() for path in (stack.directory / "discovery").glob("v1/*/*")}
        assert entries
        for path in entries:
            path.unlink()
        try:
            return bool(wait_for(lambda: all(path.exists() for path in entries), "entries", 5 * CHECK_S))
        except AssertionError:
            for path, content in entries.items():
                path.write_bytes(content)
            return False

    wait_for(registers_again, "the entries")
    wait_for(lambda: stack.post("completions", prompt="z", max_tokens=4)[0] == 200, "an answer")
    assert worker.running
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert stack.registered() == []


def test_a_killed_worker_is_listed_no_more(stack: Stack) -> None:
    """At once: all who would notice after 10 s are stopped."""
    frontend = stack.start_frontend()
    worker, other = (stack.start_worker(scripted=True, wait=False) for _ in range(2))
    for one in (worker, other):
        stack.wait_registered(one)
        wait_for(lambda one=one: "2 entries of discovery are removed when this process ends" in one.log, "the guard")
    with stopped(frontend, other):
        worker.end()
        wait_for(lambda: len(list((stack.directory / "discovery").glob("v1/*/*"))) == 2, "that it is not listed")


def test_unknown_errors_end_their_requests_until_too_many_occur(stack: Stack) -> None:
    stack.start_frontend()
    worker = stack.start_worker(scripted=True)
    for _ in range(7):
        status, text = stack.post("completions", prompt="u", max_tokens=20)
        assert status == 500
        assert "foresaw" not in text
        assert stack.post("completions", prompt="z", max_tokens=2)[0] == 200
    assert worker.running
    stack.post("completions", prompt="u", max_tokens=20)
    assert worker.wait() == 1
    assert worker.complaint == "worker: error: engine broken: 8 unknown errors within 60 s"
    assert stack.registered() == []


async def test_a_broken_engine_hands_its_requests_off_and_leaves(stack: Stack) -> None:
    stack.start_frontend("--migration-limit", "3")
    broken = stack.start_worker(scripted=True, SCRIPT_BREAKS="true")
    async with stack.async_client() as client:

        async def text(prompt: str, num_tokens: int) -> str:
            answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=num_tokens)
            return answer.choices[0].text

        innocent = [asyncio.create_task(text("z", 300)) for _ in range(4)]
        await asyncio.to_thread(wait_for, lambda: broken.metric("dlw_in_flight_requests") == 4, "in flight")
        staying = await asyncio.to_thread(stack.start_worker, scripted=True)
        fatal = [asyncio.create_task(text("b", 20)) for _ in range(2)]  # round-robin: one to each worker
        assert await asyncio.gather(*innocent) == ["x" * 300] * 4
        assert await asyncio.gather(*fatal) == ["x" * 20] * 2
    assert broken.wait() == 1
    assert broken.complaint == "worker: error: engine broken: the device is gone"
    assert staying.running


def test_kill_of_the_worker_ends_its_streams_with_an_error(stack: Stack) -> None:
    stack.start_frontend()
    worker = stack.start_worker(scripted=True)
    with stack.client().completions.create(model=MODEL, prompt="z", max_tokens=1000, stream=True) as stream:
        next(iter(stream))
        worker.signal(signal.SIGKILL)
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
    stack.start_worker(scripted=True)
    assert wait_for(lambda: stack.post("completions", prompt="z", max_tokens=4)[0] == 200, "serving again")


def test_kill_of_the_frontend_frees_its_requests(stack: Stack) -> None:
    frontend = stack.start_frontend()
    worker = stack.start_worker(scripted=True)
    with stack.client().completions.create(model=MODEL, prompt="z", max_tokens=2000, stream=True) as stream:
        next(iter(stream))
        assert worker.metric("dlw_in_flight_requests") == 1
        frontend.signal(signal.SIGKILL)
        wait_for(lambda: worker.metric("dlw_in_flight_requests") == 0, "request freed")
    frontend.wait()  # its port is free
    stack.start_frontend()
    assert wait_for(lambda: stack.post("completions", prompt="z", max_tokens=4)[0] == 200, "serving again")
    assert worker.running


PROBED = {
    "DYN_HEALTH_CHECK_ENABLED": "true",
    "DYN_CANARY_WAIT_TIME": "1",
    "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "1",
    "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
}


def test_the_canary_notices_an_engine_that_does_not_answer(stack: Stack) -> None:
    stack.start_frontend()
    worker = stack.start_worker(scripted=True, **PROBED)  # type: ignore[arg-type]
    url = f"http://127.0.0.1:{worker.port}"
    wait_for(lambda: http(f"{url}/health")[0] == 200, "a probe that passes")
    assert stack.post("completions", prompt="d", max_tokens=4)[0] == 200  # from now on the engine is deaf
    for path in ("health", "live"):
        wait_for(lambda path=path: http(f"{url}/{path}")[0] == 503, "a probe that fails")


def test_the_canary_passes_while_idle(stack: Stack) -> None:
    stack.start_frontend()
    worker = stack.start_worker("--device", "cpu", **{**PROBED, "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "30"})  # type: ignore[arg-type]
    wait_for(lambda: worker.metric("dlw_requests_total", outcome="length") >= 2, "two probes")
    assert http(f"http://127.0.0.1:{worker.port}/health")[0] == 200
    assert worker.metric("dlw_requests_total", outcome="refused") == 0


STARTUP_FAILURES = {
    "missing model": (["--model-path", "/nowhere"], 1, "--model-path /nowhere: no such directory"),
    "bad number": (["--max-num-seqs", "0"], 2, "--max-num-seqs must be an integer of at least 1, got '0'"),
    "unknown flag": (
        ["--max-num-seq", "4"],
        2,
        "unrecognized arguments: --max-num-seq 4; did you mean --max-num-seqs?",
    ),
    "trtllm": (["--engine", "trtllm"], 2, "--engine trtllm: tensorrt_llm is not installed"),
}


@pytest.mark.parametrize("name", STARTUP_FAILURES)
def test_startup_failure_is_one_line(stack: Stack, name: str) -> None:
    arguments, status, message = STARTUP_FAILURES[name]
    worker = stack.start_worker(*arguments, wait=False)
    assert worker.wait() == status
    assert worker.log.strip() == f"worker: error: {message}"
    assert stack.registered() == []


def test_taken_port_is_one_line(stack: Stack) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        worker = stack.start_worker("--device", "cpu", wait=False, DYN_SYSTEM_PORT=str(port))
        assert worker.wait() == 1
    assert worker.log.strip().startswith(f"worker: error: DYN_SYSTEM_PORT: cannot listen on 127.0.0.1:{port}: ")
    assert stack.registered() == []


def test_broken_weights_end_the_start(stack: Stack) -> None:
    """Half-way: the runtime is up, the model does not load."""
    copy = stack.directory / "broken"
    copy.mkdir()
    for path in filter(Path.is_file, stack.model_path.iterdir()):
        content = path.read_bytes()
        (copy / path.name).write_bytes(content[:100] if path.suffix == ".safetensors" else content)
    stack.start_frontend()
    worker = stack.start_worker("--model-path", str(copy), "--device", "cpu", wait=False)
    assert worker.wait(60) == 1
    assert str(copy) in worker.complaint
    assert stack.registered() == []
    stack.wait_for_frontend()
    assert f'"{MODEL}"' not in http(f"{stack.url}/v1/models")[1]
