"""Digests of what a worker adds to the controls of a request: equal where nothing of it differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adapters.catalog import Catalog, Entry, Requested, Selection
from adapters.contract import Context
from adapters.strict_yaml import read_yaml
from adapters.vocabulary import Vocabulary
from worker.requests.continuation import ControlDigests
from worker.requests.control_digests import control_digests
from worker.requests.sampling_defaults import SamplingDefaults
from worker.sampling import SamplingParams

CATALOG = Catalog.default()
MODEL = Context(Vocabulary(8), watermark_keys={"house": b"k" * 16, "other": b"o" * 16})
CLIENTS = Requested("xtc", {"probability": 0.5}, "all", "processors[0]")
OPERATORS = Requested("no_repeat_ngram", {"n": 3}, "all", "default[0]", "default")
MARK = Requested("watermark", {"key_id": "house"}, "all", "processors[1]")
ASKED: dict[str, Any] = {
    "params": SamplingParams(top_p=0.9, min_tokens=3),
    "selection": Selection((OPERATORS, CLIENTS, MARK)),
    "catalog": CATALOG,
    "model": MODEL,
    "defaults": SamplingDefaults({"temperature": 0.7, "top_p": 0.5}),
    "end_token_ids": (2, 5),
}


def of(**changes: Any) -> ControlDigests:
    return control_digests(**ASKED | changes)


def with_version(name: str) -> Catalog:
    """The catalogue of a version in which a processor has changed."""
    changed = {name: type("Changed", (CATALOG[name].processor,), {"version": 99})}
    return Catalog([Entry(each.name, changed.get(each.name, each.processor)) for each in CATALOG.entries])


def chosen(*processors: Requested) -> dict[str, Any]:
    return {"selection": Selection(processors)}


SAME: list[dict[str, Any]] = [
    {"end_token_ids": (5, 2)},
    {"params": SamplingParams(top_p=0.9, min_tokens=0, max_tokens=7)},
    {"params": SamplingParams(top_p=0.9)},
    {"params": SamplingParams(top_p=0.8, min_tokens=3)},
    {"defaults": SamplingDefaults({"temperature": 0.7, "top_p": 0.4})},
    {"catalog": with_version("mirostat")},
    {"model": replace(MODEL, watermark_keys={**MODEL.watermark_keys, "other": b"x" * 16})},
    chosen(OPERATORS, replace(CLIENTS, args={"probability": 0.4}), MARK),
]
VERSIONS = [
    {"catalog": with_version(name)} for name in ("xtc", "no_repeat_ngram", "top_p", "temperature", "min_tokens")
]
ADDED: list[dict[str, Any]] = [
    {"end_token_ids": (2,)},
    {"defaults": SamplingDefaults({"temperature": 0.8})},
    {"model": replace(MODEL, watermark_keys={"house": b"x" * 16})},
    {"model": replace(MODEL, think_start=(1,), think_end=(3,))},
    {"max_tokens": 9},
    chosen(replace(OPERATORS, args={"n": 4}), CLIENTS, MARK),
    chosen(replace(OPERATORS, scope="answer"), CLIENTS, MARK),
    chosen(replace(OPERATORS, origin="client"), CLIENTS, MARK),
]


@pytest.mark.parametrize("changes", SAME, ids=" and ".join)
def test_what_the_client_gives_has_no_part(changes: dict[str, Any]) -> None:
    assert of(**changes) == of()


@pytest.mark.parametrize("changes", VERSIONS, ids=["xtc", "no_repeat_ngram", "top_p", "temperature", "min_tokens"])
def test_versions_of_its_processors_have(changes: dict[str, Any]) -> None:
    found = of(**changes).difference(of())
    assert found == ("processor_versions", of(**changes).processor_versions, of().processor_versions)


@pytest.mark.parametrize("changes", ADDED, ids=" and ".join)
def test_what_the_worker_adds_has(changes: dict[str, Any]) -> None:
    found = of(**changes).difference(of())
    assert found == ("added_controls", of(**changes).added_controls, of().added_controls)


OF_YAML = {
    "{bias: {7: 1, '9': 2}}": "{bias: {'9': 2, 7: 1}}",
    "{since: 2026-01-02, at: 2026-01-02 03:04:05}": "{at: 2026-01-02 03:04:05, since: 2026-01-02}",
    "{text: !!binary aGVsbG8=}": "{'text': !!binary aGVsbG8=}",
    "{names: !!set {a, b, c, d, e, f}}": "{names: !!set {f, e, d, c, b, a}}",
    "{most: .inf}": "{most: +.inf}",
}


@pytest.mark.parametrize("text", OF_YAML)
def test_a_policy_may_have_what_yaml_has(text: str) -> None:
    """In any order."""
    args: list[Any] = [read_yaml(each) for each in (text, OF_YAML[text])]
    own, same, other = (chosen(replace(OPERATORS, args=each)) for each in (*args, {**args[0], "more": 1}))
    assert of(**own) == of(**same) != of(**other)


def test_digests_are_texts() -> None:
    assert ControlDigests.from_text(str(of())) == of()
    assert str(ControlDigests()) == ""
    for text in ("", "a", "a/", "/b", "a/b/c"):
        assert ControlDigests.from_text(text) == ControlDigests()
        assert of().difference(ControlDigests.from_text(text)) is None


def test_a_named_processor_takes_the_place_of_a_default() -> None:
    """Its value is the client's, whatever the model's own is."""
    named = Selection((Requested("temperature", {"value": 0.5}, "all", ""), CLIENTS))
    without = of(selection=named, defaults=SamplingDefaults({}))
    assert of(selection=named, defaults=SamplingDefaults({"temperature": 0.7})) == without
