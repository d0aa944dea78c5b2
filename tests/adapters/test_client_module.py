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
  decode(text) {
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
