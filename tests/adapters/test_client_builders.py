"""Builders of the client packages: what the generator makes, and what a worker reads."""

from __future__ import annotations

import inspect
import json
import re
import typing
from pathlib import Path
from typing import Any

import dynamo_logits_client
import generate_clients
import pytest
import quickjs
from client_arguments import objects, processors
from dynamo_logits_client import processors as p
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import worker
from adapters import client
from adapters.catalog import Catalog, Requested, parse_selection

ROOT = Path(__file__).parents[2]
MODULE = (ROOT / "clients" / "javascript" / "dynamo-logits-client.js").read_text(encoding="utf-8")
CATALOG = Catalog.default()

VALUES: dict[str, Any] = {
    "boolean": st.booleans(),
    "integer": st.integers(0, 3),
    "number": st.sampled_from([0, 0.5, 1, 2.25]),
    "string": st.text(min_size=1, max_size=4),
}


def values(schema: Any, definitions: Any) -> st.SearchStrategy[Any]:
    """Values of the type that a JSON Schema of an argument says, within its bounds or not."""
    if "$ref" in schema:
        return values(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return st.one_of([values(each, definitions) for each in schema["anyOf"]])
    if schema.get("type") == "null":
        return st.none()
    if schema["type"] == "array":
        return st.lists(values(schema["items"], definitions), min_size=1, max_size=3)
    if schema["type"] == "object":
        fields = schema.get("properties")
        return st.fixed_dictionaries(
            {name: values(each, definitions) for name, each in fields.items() if name in schema["required"]}
            if fields
            else {"1": st.integers(1, 2)}
        )
    return VALUES[schema["type"]]  # type: ignore[no-any-return]


@st.composite
def given_arguments(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    entry = draw(st.sampled_from(CATALOG.entries))
    schema = entry.args_schema()
    definitions, required = schema.get("$defs", {}), schema.get("required", ())
    fields = {name: values(each, definitions) for name, each in schema["properties"].items()}
    needed = {name: each for name, each in fields.items() if name in required}
    others = {name: each for name, each in fields.items() if name not in required}
    return entry.name, draw(st.fixed_dictionaries(needed, optional=others))


@pytest.fixture(scope="module")
def module() -> quickjs.Context:
    """The JavaScript client, whose pure parts need no engine's own functions."""
    context = quickjs.Context()
    context.eval(re.sub(r"^export ", "", MODULE, flags=re.MULTILINE))
    return context


def test_the_committed_files_are_what_the_generator_makes() -> None:
    for path, text in generate_clients.generated().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"run scripts/generate_clients.py: {path}"


def test_the_version_is_the_workers(module: quickjs.Context) -> None:
    package = json.loads((ROOT / "clients" / "javascript" / "package.json").read_text())
    assert dynamo_logits_client.__version__ == package["version"] == module.eval("VERSION") == worker.__version__


def test_there_is_a_builder_for_every_processor(module: quickjs.Context) -> None:
    assert set(p.__all__) == set(CATALOG.names)
    assert json.loads(module.eval("JSON.stringify(Object.keys(processors))")) == CATALOG.names


def test_builders_are_documented_and_typed() -> None:
    for described in processors(CATALOG):
        build = getattr(p, described.name)
        hints = typing.get_type_hints(build)
        assert inspect.getdoc(build).splitlines()[0].startswith(described.summary[:40])  # type: ignore[union-attr]
        for argument in described.arguments:
            parameter = inspect.signature(build).parameters[argument.name]
            assert parameter.kind is parameter.KEYWORD_ONLY
            assert (parameter.default is parameter.empty) == argument.required
            assert argument.name in hints
            assert f"{argument.name}: " in build.__doc__
    for each in objects(CATALOG):
        assert set(typing.get_type_hints(getattr(p, each.name))) == {one.name for one in each.arguments}


@settings(max_examples=examples(300))
@given(given_arguments())
def test_a_worker_reads_the_arguments_that_were_given(case: tuple[str, dict[str, Any]]) -> None:
    name, args = case
    (built,) = parse_selection(client.selection(getattr(p, name)(**args))).processors
    plain = Requested(name, {key: value for key, value in args.items() if key != "scope"}, args.get("scope", "all"))
    assert built.scope == plain.scope
    entry = CATALOG[name]
    assert _parsed(entry, built) == _parsed(entry, plain)


def _parsed(entry: Any, requested: Requested) -> object:
    """Typed arguments, or the problem without its path."""
    try:
        return entry.parse_args(requested)
    except ValueError as error:
        return error.problem  # type: ignore[attr-defined]


@settings(max_examples=examples(100))
@given(given_arguments())
def test_both_packages_select_the_same(module: quickjs.Context, case: tuple[str, dict[str, Any]]) -> None:
    name, args = case
    options = {"receipt": "debug", "order": ["top_k"], "speculation": False, "deadline": 1790000000.5}
    options["prediction"] = "naïve\n"
    text = module.eval(f"selection([processors.{name}({json.dumps(args)})], {json.dumps(options)})")
    assert text.isascii()
    ours = client.selection(client.processor(name, **args), **options)  # type: ignore[arg-type]
    assert parse_selection(text) == parse_selection(ours)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("processors.min_tokens({n: 8, m: 1})", "unknown argument m; known are n, scope"),
        ("processors.min_tokens()", "the argument n is missing"),
        ("processors.choice({choices: undefined})", "the argument choices is missing"),
        ("selection([processors.top_p({p: NaN})])", "p: NaN is not JSON"),
        (
            "selection([], {receit: true})",
            "unknown option receit; known are receipt, deadline, order, speculation, prediction",
        ),
        ("logitsProcessors([], {receit: true})", "unknown option receit"),
        ("logitsProcessors(processors.min_tokens({n: 8}))", "expected a list of processors, got {"),
        ("logitsProcessors('top_p')", 'expected a list of processors, got "top_p"'),
    ],
)
def test_javascript_refuses_wrong_arguments(module: quickjs.Context, call: str, message: str) -> None:
    with pytest.raises(quickjs.JSException, match=re.escape(message)):
        module.eval(call)


def test_python_refuses_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'm'"):
        p.min_tokens(n=8, m=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'n'"):
        p.min_tokens()  # type: ignore[call-arg]


def test_arguments_that_are_their_defaults_are_not_sent() -> None:
    assert p.dry()["args"] == p.dry(multiplier=0.8, breakers=["\n", ":", '"', "*"], scope="all")["args"] == {}
    assert p.dry(breakers=[":"])["args"] == {"breakers": [":"]}
    assert p.trigger_phrase(text="a", times=True)["args"] == {"text": "a", "times": True}  # 1 is the default


@given(st.text(st.sampled_from("ab \n\t\x1c\x85\xa0\u2003\ufeff\u4f60\N{GRINNING FACE}"), max_size=80))
def test_both_packages_heal_the_same(module: quickjs.Context, prompt: str) -> None:
    try:
        ours: Any = list(client.healed(prompt))
    except ValueError as error:
        ours = str(error)
    call = f"(() => {{ try {{ return healed({json.dumps(prompt)}) }} catch (error) {{ return error.message }} }})()"
    assert json.loads(module.eval(f"JSON.stringify({call})")) == ours


def test_both_packages_make_the_same_of_openais_fields(module: quickjs.Context) -> None:
    tools = [
        {"type": "function", "function": {"name": "one", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "two"}},
    ]
    named = {"type": "function", "function": {"name": "two"}}
    for choice in ("auto", "required", "none", named):
        options = {"format": "hermes", "toolChoice": choice, "parallelToolCalls": False, "scope": "answer"}
        theirs = module.eval(f"JSON.stringify(fromOpenAITools({json.dumps(tools)}, {json.dumps(options)}))")
        ours = client.from_openai_tools(
            tools,
            choice,
            format="hermes",
            parallel_tool_calls=False,
            scope="answer",
        )
        assert json.loads(theirs) == ours
    theirs = module.eval('JSON.stringify(fromOpenAILogitBias({"007": 5, "9": -100}))')
    assert json.loads(theirs) == client.from_openai_logit_bias({"007": 5, "9": -100})
    for wrong in ({"a": 1}, {"-1": 1}, {"1": 101}, {"1": True}, {"\u0661": 1}, {"1": 1, "01": 2}):
        with pytest.raises(quickjs.JSException, match="logit_bias"):
            module.eval(f"fromOpenAILogitBias({json.dumps(wrong)})")
        with pytest.raises(ValueError, match="logit_bias"):
            client.from_openai_logit_bias(wrong)


def test_the_fields_of_a_selection_are_the_same(module: quickjs.Context) -> None:
    nvext = {"annotations": ["mine"], "extra_fields": ["worker_id", "engine_data"], "max_thinking_tokens": 5}
    options = json.dumps({"receipt": True, "nvext": nvext})
    theirs = json.loads(module.eval(f"JSON.stringify(logitsProcessors([processors.top_k({{k: 3}})], {options}))"))
    ours = client.logits_processors(p.top_k(k=3), receipt=True, nvext=nvext)
    sent = [each["nvext"].pop("annotations") for each in (theirs, ours)]
    assert theirs == ours
    texts = [mine + text.removeprefix(client.ANNOTATION) for mine, text in sent]
    assert [each.removeprefix("mine") for each in texts] == [client.selection(p.top_k(k=3), receipt=True)] * 2
