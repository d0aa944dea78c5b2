"""The playground's files: what is served, and what its scripts make of requests, streams and
schemas. `tests/e2e/test_playground_e2e.py` uses the page in a browser.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import quickjs
from hypothesis import given
from hypothesis import strategies as st

from adapters.catalog import Catalog
from worker.frontdoor.fields import CHAT, TABLES
from worker.frontdoor.playground import PAGE, documents

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "worker" / "frontdoor" / "playground"
SCRIPTS = {
    path.removeprefix(f"{PAGE}/"): document.body.decode()
    for path, document in documents().items()
    if path.endswith(".js")
}
BASE = "http://127.0.0.1:8000/v1"


def scripts(*names: str) -> quickjs.Context:
    """The playground's scripts, those that need no document, in one context."""
    context = quickjs.Context()
    for name in names:
        context.eval(re.sub(r"^(import .*?;\n)|^export ", "", SCRIPTS[name], flags=re.MULTILINE))
    return context


def call(context: quickjs.Context, name: str, *arguments: Any) -> Any:
    """What a function returns for JSON data, as JSON data."""
    given = ", ".join(json.dumps(argument) for argument in arguments)
    return json.loads(context.eval(f"JSON.stringify({name}({given}) ?? null)"))


@pytest.fixture(scope="module")
def requests() -> quickjs.Context:
    return scripts("requests.js")


def body_of(context: quickjs.Context, text: str, args: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    chosen = [{"name": "choice", "args": args}] if args else []
    return dict(call(context, "bodyOf", "a/model", messages, sampling, chosen))


class Page(HTMLParser):
    """Tags and attributes of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed((FOLDER / "index.html").read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))


def test_the_page_has_its_own_files_alone() -> None:
    served = documents()
    files = {path.name for path in FOLDER.iterdir() if path.suffix in (".js", ".css", ".svg")}
    assert {path for path in served if path != PAGE} == {f"{PAGE}/{name}" for name in {*files, "sampling.js"}}
    for tag, attributes in Page().found:
        assert not any(name.startswith("on") or name == "style" for name in attributes), attributes
        for name in {"src", "href"} & attributes.keys():
            assert f"/{attributes[name]}" in served
        assert tag != "style"
        assert tag != "script" or attributes["src"]
    for path in FOLDER.iterdir():
        if path.suffix in (".js", ".css", ".html"):
            assert not re.search(r"(https?:)?//[\w.]+\.\w|\burl\(|@import|innerHTML|eval\(", path.read_text()), (
                path.name
            )


def test_the_policy_lets_nothing_else_in() -> None:
    for document in documents().values():
        lines = dict(line.split(": ", 1) for line in document.headers.decode().splitlines())
        sources = dict(part.split(" ", 1) for part in lines["content-security-policy"].split("; "))
        assert sources["default-src"] == "'none'"
        assert {sources[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
        assert lines["x-content-type-options"] == "nosniff"


def test_a_wheel_has_the_files() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = settings["package-data"]["worker.frontdoor.playground"]
    found = {path.name for pattern in patterns for path in FOLDER.glob(pattern)}
    assert {Path(path).name for path in documents() if path != PAGE} | {"index.html"} <= found | {"sampling.js"}


def test_scripts_import_what_there_is() -> None:
    for name, text in SCRIPTS.items():
        for names, source in re.findall(r"^import (?:\* as \w+|\{ (.*?) \}) from \"\./(.*?)\";", text, re.MULTILINE):
            exported = re.findall(r"^export (?:class|const|function) (\w+)", SCRIPTS[source], re.MULTILINE)
            assert set(filter(None, names.split(", "))) <= set(exported), f"{name} from {source}"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["it's", "'; rm -rf $HOME; '", "a\\nb\n", '"\\"', "$(id) `id`", "\u2028\x00\x7f\x85", "😀"]
)
ARGS = st.dictionaries(
    TEXTS,
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS, lambda each: st.lists(each, max_size=4)
    ),
    max_size=4,
)


@given(text=TEXTS, args=ARGS, seed=st.integers(0, 2**53 - 1))
def test_the_commands_are_the_request(requests: quickjs.Context, text: str, args: dict[str, Any], seed: int) -> None:
    body = body_of(requests, text, args, seed=seed, top_k=3)
    wanted = call(requests, "plain", body)
    assert wanted["messages"] == [{"role": "user", "content": text}]
    assert not {"stream", "logprobs"} & wanted.keys()
    assert ("logits_processors" in wanted) == bool(args)

    command = shlex.split(call(requests, "asCurl", body, BASE, False).replace(" \\\n", " "))
    assert command[:4] == ["curl", f"{BASE}/chat/completions", "-H", "Content-Type: application/json"]
    assert [command[4], json.loads(command[5])] == ["-d", wanted]
    assert '"Authorization: Bearer $API_KEY"' in call(requests, "asCurl", body, BASE, True)

    assert run_with_openai(call(requests, "asPython", body, BASE, False)) == wanted


def run_with_openai(program: str) -> dict[str, Any]:
    """The body of the one request that a program makes with the openai package."""
    asked: dict[str, Any] = {}

    class Anything:
        def __getattr__(self, name: str) -> Any:
            return self

        def __getitem__(self, key: Any) -> Any:
            return self

        def create(self, **fields: Any) -> Any:
            asked.update(fields)
            return self

    module = types.SimpleNamespace(OpenAI=lambda base_url, api_key: Anything())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "openai", module)
        exec(compile(program, "copied", "exec"), {"print": lambda *_: None})
    extra = asked.pop("extra_body", {})
    assert not asked.keys() & extra.keys()
    return asked | extra


EVENTS = 'data: {"a": "é\\n"}\n\nevent: error\n: why\n: indeed\n\ndata: b\ndata: c\r\n\r\ndata: [DONE]\n\n'


@given(cuts=st.lists(st.integers(0, len(EVENTS)), max_size=6).map(sorted))
def test_events_of_a_stream_in_any_pieces(requests: quickjs.Context, cuts: list[int]) -> None:
    pieces = [EVENTS[start:end] for start, end in zip([0, *cuts], [*cuts, len(EVENTS)], strict=True)]
    requests.eval("var reader = new EventReader()")
    found = [event for piece in pieces for event in call(requests, "reader.feed", piece)]
    assert found == [
        {"event": "", "data": '{"a": "é\\n"}', "comment": ""},
        {"event": "error", "data": "", "comment": "why\nindeed"},
        {"event": "", "data": "b\nc", "comment": ""},
        {"event": "", "data": "[DONE]", "comment": ""},
    ]


@pytest.mark.parametrize(
    ("error", "segments"),
    [
        ({"error": {"message": "seed: no", "param": "seed"}}, ["seed"]),
        (
            {"error": {"message": "m", "param": "logits_processors.processors[1].args.sequences[0].bias"}},
            ["processors", "1", "args", "sequences", "0", "bias"],
        ),
        ({"error": {"message": "m", "param": "logits_processors[0].args.k"}}, ["processors", "0", "args", "k"]),
        (
            {"message": "processors[0].args.token_ids[3]: is not a token", "code": 400},
            ["processors", "0", "args", "token_ids", "3"],
        ),
        ({"message": "sampling_options.min_p: must be at most 1", "code": 400}, ["min_p"]),
        ({"error": {"message": "no frontend can be reached", "param": None}}, []),
    ],
)
def test_the_field_that_an_error_names(requests: quickjs.Context, error: dict[str, Any], segments: list[str]) -> None:
    found = call(requests, "problemOf", json.dumps(error))
    assert found["segments"] == segments
    assert found["message"] == error.get("error", error)["message"]
    assert call(requests, "problemOf", "<html>") == {"message": "<html>", "segments": []}


def test_every_processor_has_a_form() -> None:
    """What has no control of its own, and is written as JSON, are JSON Schemas alone."""
    schemas = scripts("schemas.js")
    as_json = set()
    for one in Catalog.default().as_json()["processors"]:
        for name, schema in parts_of(one["args"], one["args"]):
            found = call(schemas, "resolved", schema, one["args"])["found"]
            if call(schemas, "kindOf", found, one["args"]) == "json":
                as_json.add((one["name"], name))
    assert as_json == {
        ("json_schema", "schema"),
        ("structural_tag", "json_schema"),
        ("tool_calls", "json_schema"),
        ("tool_calls", "parameters"),
    }


def parts_of(schema: dict[str, Any], root: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Properties, also those of the schemas that it refers to."""
    defined = root.get("$defs", {}).values() if schema is root else ()
    return [*schema.get("properties", {}).items(), *(pair for each in defined for pair in parts_of(each, root))]


@pytest.mark.parametrize(
    ("text", "schema", "problem"),
    [
        ("5", {"type": "integer", "minimum": 1, "maximum": 5}, None),
        ("5.5", {"type": "integer"}, "must be an integer, got 5.5"),
        ("x", {"type": "number"}, 'must be a number, got "x"'),
        ("0", {"type": "number", "exclusiveMinimum": 0}, "must be above 0, got 0"),
        ("1", {"type": "number", "exclusiveMaximum": 1}, "must be below 1, got 1"),
        ("-2", {"type": "number", "minimum": -1}, "must be at least -1, got -2"),
        ("2", {"type": "number", "maximum": 1}, "must be at most 1, got 2"),
        ("9007199254740993", {"type": "integer"}, "is too large for a browser to send exactly"),
    ],
)
def test_bounds_of_numbers(text: str, schema: dict[str, Any], problem: str | None) -> None:
    assert (
        scripts("schemas.js").eval(
            f"numberProblem({json.dumps(text)}, Number({json.dumps(text)}), {json.dumps(schema)}) ?? null"
        )
        == problem
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"maximum": 9007199254740991, "minimum": -0.5}', None),
        ('{"maximum": 9007199254740993}', "9007199254740992 is too large for a browser to send exactly"),
        ('{"enum": [-1e400]}', "-Infinity is too large for a browser to send exactly"),
        ("{", "JSON"),
    ],
)
def test_json_that_would_be_sent_as_another(text: str, problem: str | None) -> None:
    schemas = scripts("schemas.js")
    if problem is None:
        assert call(schemas, "jsonOf", text) == json.loads(text)
    else:
        with pytest.raises(quickjs.JSException, match=problem):
            call(schemas, "jsonOf", text)


def test_the_sampling_fields_are_honoured() -> None:
    offered = json.loads(scripts("sampling.js").eval("JSON.stringify(SAMPLING.properties)"))
    assert {TABLES[CHAT][name].fate for name in offered} <= {"honoured", "frontend"}
