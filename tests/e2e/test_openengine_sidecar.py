"""Dynamo's sidecar and frontend: the controls that they pass on to OpenEngine
(docs/openengine.md), what clients see of errors, and migration.
"""

from __future__ import annotations

import asyncio
import json
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e_stack import Process, Stack, http, wait_for
from google.protobuf.json_format import MessageToDict
from ports import free_port

from worker.arguments import parse_arguments
from worker.errors import Draining, InvalidRequest, Overloaded, RequestFailed, ServingError
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.endpoint import Endpoint
from worker.runtimes.openengine.errors import engine_error

HELLO: Any = [{"role": "user", "content": "Hello"}]
PROCESSORS = {"version": 1, "processors": [{"name": "forced_prefix", "args": {"text": "Yes"}}]}


class Recorder:
    """Stands in for a worker: keeps the requests, and answers each with one token or an error.

    Attributes:
        requests: The requests, JSON data.
        failures: Errors of the requests that come next.
    """

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[tuple[ServingError, bool]] = queue.SimpleQueue()

    async def get_model_info(self, request: wire.GetModelInfoRequest, context: Any) -> wire.ModelInfo:
        return wire.ModelInfo(model_id=request.model, max_context_length=2048, supports_multimodal=True)

    async def generate(self, request: wire.GenerateRequest, context: Any) -> None:
        self.requests.put(MessageToDict(request, preserving_proto_field_name=True))
        if not self.failures.empty():
            error, is_event = self.failures.get()
            if not is_event:
                raise error
            await context.write(wire.GenerateResponse(error=engine_error(error)))
            return
        token = wire.TokenOutput(output_index=0, tokens=[wire.TokenInfo(token_id=47, logprob=-0.5)])
        finished = wire.GenerationFinished(output_index=0, reason=wire.FINISH_REASON_LENGTH)
        await context.write(wire.GenerateResponse(token=token))
        usage = wire.Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)
        await context.write(wire.GenerateResponse(finished=finished, usage=usage))

    def __getattr__(self, name: str) -> Any:
        """The calls that the sidecar has no use for."""
        if name.startswith("_"):
            raise AttributeError(name)

        async def refuse(request: Any, context: Any) -> None:
            raise InvalidRequest(name, "is not expected")

        return refuse


class Sidecars(Stack):
    """A stack whose workers are asked by sidecars."""

    def start_sidecar(self, port: int) -> Process:
        command = [sys.executable, "-m", "dynamo.trtllm.sidecar", "--grpc-endpoint", f"127.0.0.1:{port}"]
        command += ["--model-path", str(self.model_path)]
        sidecar = Process(command, self.environ, self.directory / f"sidecar{port}.log")
        self._processes.append(sidecar)
        return sidecar

    def start_openengine(self, port: int, *arguments: str) -> Process:
        """A worker behind OpenEngine, and its sidecar."""
        environ = {name: value for name, value in self.environ.items() if not name.startswith("DYN_")}
        command = [sys.executable, "-m", "worker", "--runtime", "openengine", "--grpc-port", str(port), *arguments]
        command += ["--model-path", str(self.model_path), "--device", "cpu", "--dtype", "float32"]
        worker = Process(command, environ, self.directory / f"worker{port}.log")
        self._processes.append(worker)
        self.start_sidecar(port)
        return worker

    def wait_for_model(self) -> None:
        self.wait_for_frontend()
        wait_for(lambda: self.ask(max_tokens=1)[0] == 200, "an answer")

    def ask(self, path: str = "chat/completions", **body: Any) -> tuple[int, dict[str, Any]]:
        prompt = {"prompt": "Hello"} if path == "completions" else {"messages": HELLO}
        body = {"model": str(self.model_path), "max_tokens": 4, **prompt, **body}
        status, text = http(f"{self.url}/v1/{path}", body)
        return status, json.loads(text) if text.startswith("{") else {"text": text}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Sidecars, Recorder]]:
    """A frontend and a sidecar before a recorder."""
    recorder, loop, port = Recorder(), asyncio.new_event_loop(), free_port()
    arguments = parse_arguments(
        ["--runtime", "openengine", "--grpc-port", str(port), "--model-path", str(tiny_model)], {}
    )

    async def serve() -> Endpoint:
        endpoint = Endpoint({"Inference": recorder, "Control": recorder}, arguments)
        await endpoint.start()
        return endpoint

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    endpoint = asyncio.run_coroutine_threadsafe(serve(), loop).result(30)
    stack = Sidecars(tmp_path_factory.mktemp("recorded"), tiny_model)
    try:
        stack.start_frontend()
        stack.start_sidecar(port)
        stack.wait_for_model()
        yield stack, recorder
    finally:
        stack.end()
        asyncio.run_coroutine_threadsafe(endpoint.stop(0), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


ARRIVE: dict[str, tuple[dict[str, Any], str, Any]] = {
    "temperature": ({"temperature": 0.5}, "sampling.temperature", 0.5),
    "top_p": ({"top_p": 0.5}, "sampling.top_p", 0.5),
    "top_k": ({"top_k": 5}, "sampling.top_k", 5),
    "min_p": ({"min_p": 0.25}, "sampling.min_p", 0.25),
    "frequency_penalty": ({"frequency_penalty": 0.5}, "sampling.frequency_penalty", 0.5),
    "presence_penalty": ({"presence_penalty": 0.5}, "sampling.presence_penalty", 0.5),
    "repetition_penalty": ({"repetition_penalty": 1.25}, "sampling.repetition_penalty", 1.25),
    "seed": ({"seed": 2**63 - 1}, "sampling.seed", str(2**63 - 1)),
    "max_tokens": ({"max_tokens": 7}, "stopping.max_tokens", 7),
    "min_tokens": ({"min_tokens": 2}, "stopping.min_tokens", 2),
    "ignore_eos": ({"ignore_eos": True}, "stopping.ignore_eos", True),
    "logprobs": ({"logprobs": True, "top_logprobs": 2}, "response.output_candidates", {"top_n": 2}),
    "guided_json": ({"guided_json": {"type": "object"}}, "guided.json_schema", '{"type":"object"}'),
    "guided_regex": ({"guided_regex": "a+"}, "guided.regex", "a+"),
    "guided_grammar": ({"guided_grammar": 'start: "a"'}, "guided.ebnf_grammar", 'start: "a"'),
    "response_format": ({"response_format": {"type": "json_object"}}, "guided.json_schema", '{"type":"object"}'),
}
"""Fields of a chat that arrive: the request's, and the field and value of a GenerateRequest."""

DROPPED: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {"5": 3}},
    "allowed_token_ids": {"allowed_token_ids": [5, 6]},
    "bad_words_token_ids": {"bad_words_token_ids": [[5]]},
    "nvext.annotations": {"nvext": {"annotations": ["logits_processors:" + json.dumps(PROCESSORS)]}},
}
"""Fields of a chat that are dropped, with a 200."""

REFUSED: dict[str, dict[str, Any]] = {
    "n": {"n": 2},
    "include_stop_str_in_output": {"stop": ["a"], "include_stop_str_in_output": True},
    "guided_choice": {"guided_choice": ["a", "b"]},
    "nvext.max_thinking_tokens": {"nvext": {"max_thinking_tokens": 5}},
    "nvext.agent_hints.priority": {"nvext": {"agent_hints": {"priority": 5}}},
    "nvext.cache_salt": {"nvext": {"cache_salt": "s"}},
    "prompt_logprobs": {"prompt_logprobs": 1},
}
"""Fields of a chat that the sidecar refuses."""


def value_at(request: dict[str, Any], path: str) -> Any:
    for name in path.split("."):
        request = request[name]
    return request


@pytest.mark.parametrize("name", ARRIVE)
def test_these_controls_arrive(recorded: tuple[Sidecars, Recorder], name: str) -> None:
    stack, recorder = recorded
    body, path, value = ARRIVE[name]
    while not recorder.requests.empty():
        recorder.requests.get()
    status, answer = stack.ask(**body)
    assert status == 200, answer
    request = recorder.requests.get(timeout=10)
    assert value_at(request, path) == value
    assert request["extra"] == {"detokenize": False}


def test_stop_texts_and_end_tokens_arrive(recorded: tuple[Sidecars, Recorder]) -> None:
    stack, recorder = recorded
    while not recorder.requests.empty():
        recorder.requests.get()
    assert stack.ask(stop=["a", "b"], stop_token_ids=[9])[0] == 200
    conditions = recorder.requests.get(timeout=10)["stopping"]["conditions"]
    assert [one for one in conditions if "stop_text" in one] == [{"stop_text": "a"}, {"stop_text": "b"}]
    assert {"stop_token_id": 9} in conditions


@pytest.mark.parametrize("name", [*DROPPED, "x-dynamo-meta-logits-processors"])
def test_these_controls_are_dropped(recorded: tuple[Sidecars, Recorder], name: str) -> None:
    stack, recorder = recorded
    while not recorder.requests.empty():
        recorder.requests.get()
    assert stack.ask()[0] == 200
    plain = recorder.requests.get(timeout=10)
    if name in DROPPED:
        assert stack.ask(**DROPPED[name])[0] == 200
    else:
        headers = {"x-dynamo-meta-logits-processors": json.dumps(PROCESSORS)}
        with stack.client() as client:
            client.chat.completions.create(
                model=str(stack.model_path),
                messages=HELLO,
                max_tokens=4,
                extra_headers=headers,
            )
    request = recorder.requests.get(timeout=10)
    assert {**request, "request_id": ""} == {**plain, "request_id": ""}


@pytest.mark.parametrize("name", REFUSED)
def test_these_controls_are_refused(recorded: tuple[Sidecars, Recorder], name: str) -> None:
    stack, _ = recorded
    status, answer = stack.ask(**REFUSED[name])
    assert (status, answer["message"]) == (400, "Invalid request")


@pytest.mark.parametrize("url", ["data:image/png;base64,AAAA", "https://pictures.example/a.png"])
def test_pictures_of_chats_are_refused_by_the_sidecar(recorded: tuple[Sidecars, Recorder], url: str) -> None:
    """Though the worker says that it takes them: it gets nothing of them, neither ``media`` nor the
    request.
    """
    stack, recorder = recorded
    while not recorder.requests.empty():
        recorder.requests.get()
    text = {"type": "text", "text": "Hello"}
    picture = {"type": "image_url", "image_url": {"url": url}}
    status, answer = stack.ask(messages=[{"role": "user", "content": [picture, text]}])
    assert (status, answer["message"]) == (400, "Invalid request")
    assert stack.ask(messages=[{"role": "user", "content": [text]}])[0] == 200
    assert "media" not in recorder.requests.get(timeout=10)
    assert recorder.requests.empty()
    logs = [process.log for process in stack._processes]
    assert any("multimodal requests are not supported by the TensorRT-LLM sidecar" in log for log in logs)


def test_a_refusal_is_a_400_without_its_reason(recorded: tuple[Sidecars, Recorder]) -> None:
    stack, recorder = recorded
    recorder.failures.put((InvalidRequest("sampling.top_p", "must be nice"), False))
    assert stack.ask() == (400, {"message": "Invalid request", "type": "Bad Request", "code": 400})
    assert stack.ask()[0] == 200


def test_an_event_of_an_error_leaves_the_worker_in_rotation(recorded: tuple[Sidecars, Recorder]) -> None:
    """Which is why a worker does not answer with the status of an overload."""
    stack, recorder = recorded
    recorder.failures.put((Overloaded("the queue is full"), True))
    assert stack.ask()[0] == 500
    assert stack.ask()[0] == 200
    recorder.failures.put((RequestFailed("a logits processor left no token"), True))
    assert stack.ask()[0] == 400
    assert stack.ask()[0] == 200
    recorder.failures.put((Overloaded("the queue is full"), False))
    assert stack.ask()[0] == 500
    status, answer = stack.ask()
    assert (status, answer["type"]) == (503, "Service Unavailable")
    stack.wait_for_model()
    recorder.failures.put((Draining("this worker is shutting down"), False))
    assert stack.ask()[0] == 503
    stack.wait_for_model()


def num_running(port: int) -> int:
    """Requests that the worker at a port decodes."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(
            "/openengine.v1.Control/GetLoad",
            request_serializer=wire.GetLoadRequest.SerializeToString,
            response_deserializer=wire.LoadInfo.FromString,
        )
        return int(call(wire.GetLoadRequest()).running_requests)


def test_a_request_migrates_to_another_worker(tmp_path: Path, tiny_model: Path) -> None:
    stack = Sidecars(tmp_path, tiny_model)
    store = ("--migration", "on", "--boundary-store", f"file:{tmp_path / 'store'}", "--drain-timeout-s", "0")
    try:
        stack.start_frontend("--migration-limit", "3")
        ports = [free_port(), free_port()]
        workers = {port: stack.start_openengine(port, *store, "--numerics", "exact") for port in ports}
        stack.wait_for_model()
        wait_for(lambda: len(stack.registered()) >= 2, "both workers")
        sampling: dict[str, Any] = {"max_tokens": 1200, "temperature": 1.0, "seed": 7}
        status, whole = stack.ask("completions", ignore_eos=True, **sampling)
        assert status == 200, whole
        with stack.client() as client:
            extra = {"ignore_eos": True}
            model = str(stack.model_path)
            asked: dict[str, Any] = {"model": model, "prompt": "Hello", "extra_body": extra, **sampling}
            busy = None
            while busy is None:  # where this process gets little time, an answer may end before it looks
                chunks = iter(client.completions.create(stream=True, **asked))
                text = next(chunks).choices[0].text
                busy = next((worker for port, worker in workers.items() if num_running(port)), None)
            for _ in range(2):  # the second one ends the drain
                busy.signal(signal.SIGTERM)
            text += "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        assert busy.wait() == 0
        assert text == whole["choices"][0]["text"]
    finally:
        stack.end()
