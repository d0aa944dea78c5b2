"""Requests of the JavaScript client, in QuickJS with stand-ins for what a platform has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import quickjs

MODULE = Path(__file__).parents[2] / "clients" / "javascript" / "dynamo-logits-client.js"

PLATFORM = """
globalThis.setTimeout = () => 0;
globalThis.clearTimeout = () => {};
globalThis.TextDecoder = class {
  decode(text = "") {
    return text;
  }
};
globalThis.AbortController = class {
  signal = { aborted: false, reason: undefined };
  abort(reason) {
    if (!this.signal.aborted) Object.assign(this.signal, { aborted: true, reason });
  }
};
/** A fetch that answers with these pieces of a body. */
const answering = (status, ...pieces) => async () => ({
  status,
  text: async () => pieces.join(""),
  body: { getReader: () => ({ read: async () => ({ done: pieces.length === 0, value: pieces.shift() }) }) },
});
const FIELDS = { model: "m", prompt: "p" };
let outcome;
"""


def outcome_of(program: str) -> Any:
    """What the body of an asynchronous function returns, or name and message of what it throws."""
    context = quickjs.Context()
    context.eval(PLATFORM + re.sub(r"^export ", "", MODULE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    context.eval(
        f"(async () => {{ {program} }})()"
        ".then((value) => { outcome = value; }, (error) => { outcome = [error.name, error.message]; })"
    )
    while context.execute_pending_job():
        pass
    return json.loads(context.eval("JSON.stringify(outcome)"))


@pytest.mark.parametrize(
    ("cause", "problem"),
    [
        ("{ message: 'connect ECONNREFUSED ::1:9' }", "connect ECONNREFUSED ::1:9"),
        ("{ message: '', code: 'ECONNREFUSED' }", "ECONNREFUSED"),  # of a name with two addresses
        ("undefined", "fetch failed"),
    ],
)
def test_a_server_that_cannot_be_reached(cause: str, problem: str) -> None:
    fetch = f"async () => {{ throw Object.assign(new TypeError('fetch failed'), {{ cause: {cause} }}); }}"
    asked = f"return new Client({{ baseURL: 'http://localhost:9/v1', fetch: {fetch} }}).models();"
    assert outcome_of(asked) == ["Unreachable", f"http://localhost:9/v1/models: {problem}"]


@pytest.mark.parametrize("body", ["[]", "null", "5", "no"])
def test_what_is_no_answer(body: str) -> None:
    asked = f"return new Client({{ fetch: answering(200, {json.dumps(body)}) }}).complete(FIELDS);"
    assert outcome_of(asked) == ["ClientError", f'expected a JSON object, got "{body}"']


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        ("200, CHUNK, 'data: [DONE]\\n\\n'", ["a"]),
        ('200, CHUNK + CHUNK + \'data: {"error":{"message":"late"}}\\n\\n\'', ["a", "a", "late"]),
        ("200, CHUNK", ["a", "the stream ended before the answer did"]),
        ('400, \'{"error":{"message":"no"}}\'', ["400: no"]),
    ],
)
def test_a_stream_and_who_listens_to_its_signal(answer: str, texts: list[str]) -> None:
    """Texts and the error; a signal that many streams have keeps the listener of none."""
    found = outcome_of(
        f"""
        const CHUNK = 'data: {{"choices":[{{"index":0,"text":"a"}}]}}\\n\\n';
        const listeners = new Set();
        const signal = {{
          aborted: false,
          addEventListener: (kind, listener) => listeners.add(listener),
          removeEventListener: (kind, listener) => listeners.delete(listener),
        }};
        const texts = [];
        const client = new Client({{ fetch: answering({answer}) }});
        try {{
          for await (const chunk of client.streamCompletion(FIELDS, {{ signal }})) texts.push(chunk.text);
        }} catch (error) {{
          texts.push(error.message);
        }}
        return {{ texts, listeners: listeners.size }};
        """
    )
    assert found == {"texts": texts, "listeners": 0}


SLOW = """
let now = 0;
const timers = new Map();
globalThis.setTimeout = (run, ms) => {
  timers.set(run, now + ms);
  return run;
};
globalThis.clearTimeout = (run) => timers.delete(run);
/** Wait so many milliseconds. */
const wait = (ms, signal) => {
  now += ms;
  for (const [run, at] of timers) if (at <= now) run();
  if (signal.aborted) throw signal.reason;
};
/** A fetch whose answer has these pieces, one in 200 milliseconds. */
const slowly = (status, ...pieces) => async (url, { signal }) => {
  const read = async () => {
    await null; // the client begins to wait first
    wait(200, signal);
    return { done: pieces.length === 0, value: pieces.shift() };
  };
  const text = async () => {
    let whole = "";
    for (;;) {
      const { done, value } = await read();
      if (done) return whole;
      whole += value;
    }
  };
  return { status, text, body: { getReader: () => ({ read }) } };
};
"""


@pytest.mark.parametrize(
    ("answer", "timeout_ms", "outcome"),
    [
        ("""200, '{"da', 'ta":[{"i', 'd":"m"}]}'""", 300, ["m"]),
        ("""400, '{"error":', '{"message"', ':"no"}}'""", 300, ["Refused", "400: no"]),
        ("200, '{}'", 100, ["TimedOut", "http://localhost:9/v1/models: nothing arrived in time"]),
    ],
)
def test_a_whole_answer_that_comes_slowly(answer: str, timeout_ms: int, outcome: list[str]) -> None:
    """Each piece of it has the timeout, as with Python: nothing arrived means nothing."""
    options = f"{{ baseURL: 'http://localhost:9/v1', timeoutMs: {timeout_ms}, fetch: slowly({answer}) }}"
    assert outcome_of(f"{SLOW} return new Client({options}).models();") == outcome


@pytest.mark.parametrize("code", ["UND_ERR_HEADERS_TIMEOUT", "UND_ERR_BODY_TIMEOUT"])
def test_a_timeout_of_nodes_own_fetch(code: str) -> None:
    """It waits 300 seconds at most, whatever the client's timeout."""
    fetch = f"async () => {{ throw Object.assign(new TypeError('fetch failed'), {{ cause: {{ code: '{code}' }} }}); }}"
    asked = f"return new Client({{ baseURL: 'http://localhost:9/v1', fetch: {fetch} }}).models();"
    assert outcome_of(asked) == ["TimedOut", "http://localhost:9/v1/models: nothing arrived in time"]


def test_a_whole_answer_of_another_fetch() -> None:
    """The body of node-fetch is a stream of Node's, which has no reader."""
    fetch = """async () => ({ status: 200, body: {}, text: async () => '{"data":[{"id":"m"}]}' })"""
    asked = f"return new Client({{ baseURL: 'http://localhost:9/v1', fetch: {fetch} }}).models();"
    assert outcome_of(asked) == ["m"]
