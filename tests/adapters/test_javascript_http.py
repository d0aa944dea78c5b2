"""The JavaScript client with a ``fetch`` that answers what a test wants."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import quickjs

MODULE = Path(__file__).parents[2] / "clients" / "javascript" / "dynamo-logits-client.js"

ENVIRONMENT = """
globalThis.AbortController = class {
  signal = { aborted: false };
  abort(reason) { Object.assign(this.signal, { aborted: true, reason }); globalThis.cancelled += 1; }
};
globalThis.cancelled = 0;
globalThis.setTimeout = (call) => (globalThis.late ? call() : 0);
globalThis.clearTimeout = () => {};
globalThis.TextDecoder = class { decode(value = "") { return value; } };
globalThis.asked = [];

function answering(status, pieces, breaks = false) {
  return async (url, init) => {
    asked.push({ url, ...init, signal: undefined });
    if (globalThis.late) throw init.signal.reason;
    if (status === 0) throw new TypeError("fetch failed");
    const left = [...pieces];
    const read = async () => {
      if (left.length > 0) return { done: false, value: left.shift() };
      if (breaks) throw new TypeError("terminated");
      return { done: true };
    };
    return { status, text: async () => pieces.join(""), body: { getReader: () => ({ read }) } };
  };
}

async function gathered(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk.text);
  return chunks;
}

function outcome(promise) {
  globalThis.found = undefined;
  const report = (error) => {
    const { name, message, status, param } = error;
    globalThis.found = { error: { name, message, status, param } };
  };
  promise.then((value) => { globalThis.found = { value }; }, report);
}
"""

CHUNK = 'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
FIELDS = '{ model: "m", prompt: "p" }'


@pytest.fixture
def context() -> quickjs.Context:
    made = quickjs.Context()
    made.eval(ENVIRONMENT + re.sub(r"^export ", "", MODULE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    return made


def run(context: quickjs.Context, expression: str) -> Any:
    """What a promise comes to: its value, or its error."""
    context.eval(f"outcome({expression})")
    while context.execute_pending_job():
        pass
    return json.loads(context.eval("JSON.stringify(globalThis.found)"))


def client(status: int, *pieces: str, breaks: bool = False, options: str = "") -> str:
    fetch = f"answering({status}, {json.dumps(pieces)}, {json.dumps(breaks)})"
    return f'new Client({{ baseURL: "http://h:1/v1/", fetch: {fetch}, {options} }})'


@pytest.mark.parametrize(("method", "path"), [("chat", "/chat/completions"), ("complete", "/completions")])
def test_a_request_and_its_answer(context: quickjs.Context, method: str, path: str) -> None:
    body = json.dumps({"choices": [{"index": 1, "text": "b"}, {"index": 0, "message": {"content": None}}]})
    asking = client(200, body, options='apiKey: "k", headers: { "x-request-id": "7" }')
    assert run(context, f"{asking}.{method}({FIELDS}).then((answer) => answer.texts)") == {"value": ["", "b"]}
    (asked,) = json.loads(context.eval("JSON.stringify(asked)"))
    assert (asked["url"], asked["method"]) == (f"http://h:1/v1{path}", "POST")
    assert json.loads(asked["body"]) == {"model": "m", "prompt": "p"}
    assert asked["headers"]["authorization"] == "Bearer k"
    assert asked["headers"]["x-request-id"] == "7"


def test_a_stream(context: quickjs.Context) -> None:
    stream = client(200, CHUNK[:9], CHUNK[9:] + CHUNK, "data: [DONE]\n\n")
    assert run(context, f"gathered({stream}.streamCompletion({FIELDS}))") == {"value": ["a", "a"]}
    (asked,) = json.loads(context.eval("JSON.stringify(asked)"))
    assert json.loads(asked["body"]) == {"model": "m", "prompt": "p", "stream": True}


def test_a_stream_that_is_left_is_cancelled(context: quickjs.Context) -> None:
    stream = client(200, CHUNK, CHUNK)
    leaving = f"(async () => {{ for await (const each of {stream}.streamChat({FIELDS})) return each.text; }})()"
    assert run(context, leaving) == {"value": "a"}
    assert context.eval("cancelled") == 1


def test_models_and_catalogue(context: quickjs.Context) -> None:
    body = json.dumps({"data": [{"id": "m"}], "processors": [{"name": "top_k"}]})
    assert run(context, f"{client(200, body)}.models()") == {"value": ["m"]}
    assert run(context, f"{client(200, body)}.catalogue()") == {"value": [{"name": "top_k"}]}
    assert [each["method"] for each in json.loads(context.eval("JSON.stringify(asked)"))] == ["GET", "GET"]


@pytest.mark.parametrize("call", [f"complete({FIELDS})", f"streamCompletion({FIELDS})"])
@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (400, '{"error":{"message":"no","param":"n"}}', ("Refused", "400: no", 400, "n")),
        (503, "<html>", ("Refused", "503: <html>", 503, None)),
        (502, "", ("Refused", "502: an answer without a body", 502, None)),
        (0, "", ("Unreachable", "http://h:1/v1/completions: fetch failed", None, None)),
    ],
)
def test_errors(context: quickjs.Context, call: str, status: int, body: str, error: tuple[Any, ...]) -> None:
    asking = f"{client(status, body)}.{call}"
    found = run(context, f"gathered({asking})" if call.startswith("stream") else asking)["error"]
    assert tuple(found.get(name) for name in ("name", "message", "status", "param")) == error


@pytest.mark.parametrize(
    ("asking", "name"),
    [
        (f"{client(200, 'no')}.complete({FIELDS})", "ClientError"),
        (f"gathered({client(200, CHUNK)}.streamCompletion({FIELDS}))", "AnswerFailed"),
        (f"gathered({client(200, CHUNK, breaks=True)}.streamCompletion({FIELDS}))", "Unreachable"),
    ],
)
def test_what_is_no_whole_answer(context: quickjs.Context, asking: str, name: str) -> None:
    assert run(context, asking)["error"]["name"] == name


def test_a_server_that_sends_nothing(context: quickjs.Context) -> None:
    context.eval("globalThis.late = true")
    found = run(context, f"{client(200, '{}')}.complete({FIELDS})")["error"]
    assert (found["name"], found["message"]) == ("TimedOut", "http://h:1/v1/completions: nothing arrived in time")


@pytest.mark.parametrize("url", ["h:1/v1", "ftp://a/v1", "http://a/v1?b=c", ""])
def test_what_is_no_address(context: quickjs.Context, url: str) -> None:
    with pytest.raises(quickjs.JSException, match="baseURL: expected"):
        context.eval(f"new Client({{ baseURL: {json.dumps(url)} }})")


def test_a_method_streams(context: quickjs.Context) -> None:
    found = run(context, f"{client(200, '{}')}.complete({{ stream: true }})")["error"]
    assert "call the method that streams" in found["message"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ('{ baseUrl: "http://h/v1" }', "Client: unknown option baseUrl; known are baseURL, apiKey"),
        ("{ baseURL: null }", "baseURL: expected http://host:port/v1, got null"),
        ('{ timeoutMs: "60" }', "timeoutMs: expected 1 to 2147483647 milliseconds, got 60"),
        ("{ timeoutMs: Infinity }", "timeoutMs: expected 1 to 2147483647 milliseconds, got Infinity"),
        ("{ timeoutMs: 0 }", "timeoutMs: expected 1 to"),
        ('{ apiKey: "secret\\n" }', "apiKey: expected printable ASCII"),
        ('{ apiKey: "schl\\u00fcssel" }', "apiKey: expected printable ASCII"),
        ("{ timeoutMs: null }", "timeoutMs: expected 1 to"),
    ],
)
def test_options_that_no_request_could_have(context: quickjs.Context, options: str, problem: str) -> None:
    with pytest.raises(quickjs.JSException, match=re.escape(problem)):
        context.eval(f"new Client({options})")


def test_options_that_are_undefined_have_defaults(context: quickjs.Context) -> None:
    asking = client(200, '{"choices":[]}', options="apiKey: undefined, timeoutMs: undefined, headers: undefined")
    assert run(context, f"{asking}.complete({FIELDS}).then(() => 1)") == {"value": 1}
    (asked,) = json.loads(context.eval("JSON.stringify(asked)"))
    assert "authorization" not in asked["headers"]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("complete()", "expected the fields of a request, got undefined"),
        ("complete({ temperature: NaN })", "temperature: NaN is not JSON"),
        ("complete({ stop: [1 / 0] })", "0: Infinity is not JSON"),
        ("complete({}, { singal: 1 })", "options: unknown option singal; known are signal"),
    ],
)
def test_what_is_no_request(context: quickjs.Context, call: str, problem: str) -> None:
    found = run(context, f"{client(200)}.{call}")
    assert (found["error"]["name"], found["error"]["message"]) == ("TypeError", problem)
    assert context.eval("asked.length") == 0
