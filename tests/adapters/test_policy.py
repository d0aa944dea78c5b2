from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import third_party

from adapters.catalog import (
    Catalog,
    Entry,
    ModelPolicy,
    Policy,
    PolicyError,
    Selection,
    SelectionError,
    parse_selection,
)
from adapters.contract import Context
from adapters.vocabulary import Vocabulary

CATALOG = Catalog([*Catalog.default().entries, Entry("acme/loud", third_party.Loud, "test")])
KEY = "00112233445566778899aabbccddeeff"


@pytest.fixture
def load(tmp_path: Path):
    def loaded(text: str, environment: dict[str, str] | None = None) -> Policy:
        file = tmp_path / "policy.yaml"
        file.write_text(text, encoding="utf-8")
        return Policy.load(file, CATALOG, environment or {})

    return loaded


def select(*processors: dict[str, Any], receipt: bool = False) -> Selection:
    return parse_selection(json.dumps({"version": 1, "processors": processors, "receipt": receipt}))


def asked(selection: Selection) -> list[tuple[str, dict[str, Any]]]:
    return [(requested.name, dict(requested.args)) for requested in selection.processors]


MODEL = """
models:
  m:
    mandatory:
      - {name: top_p, args: {p: 0.9}}
    default:
      - {name: temperature, args: {value: 0.7}}
      - {name: min_p, args: {p: 0.1}}
    forbidden: [mirostat]
  "*":
    forbidden: [top_k]
"""


def test_mandatory_and_default_processors_join_every_request(load) -> None:
    policy = load(MODEL).for_model("m")
    operators = [("top_p", {"p": 0.9}), ("temperature", {"value": 0.7}), ("min_p", {"p": 0.1})]
    assert asked(policy.apply(Selection(), CATALOG)) == operators
    applied = policy.apply(select({"name": "top_k", "args": {"k": 3}}, receipt=True), CATALOG)
    assert asked(applied) == [*operators, ("top_k", {"k": 3})]
    assert applied.receipt is True


def test_a_default_gives_way_to_the_clients_own(load) -> None:
    applied = load(MODEL).for_model("m").apply(select({"name": "temperature", "args": {"value": 1.5}}), CATALOG)
    assert asked(applied) == [("top_p", {"p": 0.9}), ("min_p", {"p": 0.1}), ("temperature", {"value": 1.5})]


def test_a_mandatory_processor_can_be_named_but_not_changed(load) -> None:
    policy = load(MODEL).for_model("m")
    assert asked(policy.apply(select({"name": "top_p", "args": {"p": 0.9}}), CATALOG))[0] == ("top_p", {"p": 0.9})
    for args in ({"p": 1.0}, {"p": 0.9, "scope": "answer"}):
        with pytest.raises(SelectionError, match="top_p is set by the operator") as caught:
            policy.apply(select({"name": "min_p", "args": {"p": 0}}, {"name": "top_p", "args": args}), CATALOG)
        assert caught.value.path == "processors[1]"
        assert "0.9" not in str(caught.value)
    with pytest.raises(SelectionError) as caught:
        policy.apply(select({"name": "top_p", "args": {"p": 7}}), CATALOG)
    assert caught.value.path == "processors[0].args.p"


def test_a_forbidden_processor_is_refused_by_name(load) -> None:
    policy = load(MODEL)
    with pytest.raises(SelectionError, match="mirostat is not allowed for this model") as caught:
        policy.for_model("m").apply(select({"name": "mirostat"}), CATALOG)
    assert caught.value.path == "processors[0].name"
    with pytest.raises(SelectionError, match="top_k is not allowed"):
        policy.for_model("any other").apply(select({"name": "top_k"}), CATALOG)


def test_no_policy_changes_nothing() -> None:
    selection = select({"name": "top_k", "args": {"k": 3}})
    assert Policy().for_model("m") == ModelPolicy()
    assert Policy().for_model("m").apply(selection, CATALOG) == selection


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        ("models: {m: {mandatry: []}}", "models.m.mandatry", "unknown key; known are mandatory, default, forbidden"),
        ("model: {}", "model", "unknown key; known are keys, models"),
        ("- 1", "", "expected a mapping, got list"),
        ("models: [m]", "models", "expected a mapping, got list"),
        ("models: {7: {}}", "models", "expected text as the key, got 7"),
        ("models: {m: {default: {}}}", "models.m.default", "expected a list, got dict"),
        ("models: {m: {default: [top_k]}}", "models.m.default[0]", "expected an object"),
        ("models: {m: {default: [{name: top_k, arg: {k: 1}}]}}", "models.m.default[0]", 'unknown field "arg"'),
        ("models: {m: {default: [{name: topk}]}}", "models.m.default[0].name", "did you mean top_k"),
        ("models: {m: {default: [{name: top_k, args: {k: x}}]}}", "models.m.default[0].args.k", 'integer, got "x"'),
        ("models: {m: {default: [{name: top_k, args: {k: 2001-01-01}}]}}", "models.m.default[0].args", "JSON data"),
        ("models: {m: {default: [{name: top_k, args: {k: 1, 1: 2}}]}}", "models.m.default[0].args.1", "unknown"),
        ("models: {m: {forbidden: [nosuch]}}", "models.m.forbidden[0]", "got 'nosuch'"),
        (
            "models: {m: {mandatory: [{name: top_k, args: {k: 1}}], forbidden: [top_k]}}",
            "models.m.mandatory[0]",
            "top_k is named before, as forbidden",
        ),
        (
            "models: {m: {mandatory: [{name: top_k, args: {k: 1}}], default: [{name: top_k, args: {k: 1}}]}}",
            "models.m.default[0]",
            "as mandatory",
        ),
        ("models: {m: {}, m: {}}", "", "the key 'm' occurs twice"),
        ("models: {[m]: {}}", "", "is not YAML"),
        ("models: {", "", "is not YAML"),
        ("models: " + "[" * 5000, "", "is not YAML: it is nested too deep"),
        ("models: {m: {forbidden: [2026-13-45]}}", "", "is not YAML: a value cannot be read: month must be in 1..12"),
        (
            "models: {m: {forbidden: [" + "1" * 5000 + "]}}",
            "",
            "is not YAML: a value cannot be read: Exceeds the limit",
        ),
        ("models: {m: {forbidden: [!!bool maybe]}}", "", "is not YAML: a value cannot be read"),
        ("models: {m: {forbidden: [!!int '']}}", "", "is not YAML: a value cannot be read"),
        ("models: {m: {forbidden: [!!timestamp today]}}", "", "is not YAML: a value cannot be read"),
        ("models: {m: {forbidden: [" + "1:" * 200 + "1.5]}}", "", "is not YAML: a value cannot be read"),
        ('models: {"\\Uffffffff": {}}', "", "is not YAML: a value cannot be read"),
        ("models: !!python/object/apply:os.getcwd []", "", "is not YAML"),
        ("keys: {k: {file: /no/such/file}}", "keys.k", "No such file"),
        ("keys: {k: {env: MISSING}}", "keys.k", "MISSING is not set"),
        ("keys: {k: {env: SHORT}}", "keys.k", "16 to 64 bytes"),
        ("keys: {k: {env: BAD}}", "keys.k", "hexadecimal"),
        ("keys: {k: {env: A, file: b}}", "keys.k", "either file: PATH or env: NAME"),
        ("keys: {k: {env: 5}}", "keys.k", "either file: PATH or env: NAME"),
        ("keys: {k: secret}", "keys.k", "expected a mapping, got str"),
        ("keys: {k: {hex: ab}}", "keys.k.hex", "unknown key"),
    ],
)
def test_errors_name_the_file_and_the_key(load, tmp_path: Path, text: str, key: str, problem: str) -> None:
    with pytest.raises(PolicyError) as caught:
        load(text, {"SHORT": "aabb", "BAD": "not a key, but a secret"})
    assert caught.value.file == str(tmp_path / "policy.yaml")
    assert caught.value.key == key
    assert problem in caught.value.problem
    assert str(tmp_path / "policy.yaml") in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot be read"):
        Policy.load(tmp_path / "none.yaml", CATALOG)


@pytest.mark.parametrize("text", ["", "models: {m: }", "models: {m: {default: }}", "keys:\nmodels:\n"])
def test_empty_sections_are_empty(load, text: str) -> None:
    assert load(text).for_model("m") == ModelPolicy()


def test_watermark_keys_come_from_files_and_the_environment(load, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    policy = load(f"keys: {{house: {{file: {tmp_path / 'key'}}}, other: {{env: K}}}}", {"K": KEY * 2})
    assert policy.watermark_keys == {"house": bytes.fromhex(KEY), "other": bytes.fromhex(KEY * 2)}
    assert KEY not in repr(policy)
    assert str(bytes.fromhex(KEY)) not in repr(policy)


def test_check_builds_what_the_policy_asks_for(load) -> None:
    policy = load("models: {m: {mandatory: [{name: watermark, args: {key_id: house}}]}}")
    with pytest.raises(PolicyError, match="no watermark key") as caught:
        policy.check("m", CATALOG, Context(Vocabulary(10)))
    assert caught.value.key == "models.m.mandatory[0].args.key_id"
    policy.check("m", CATALOG, Context(Vocabulary(10), watermark_keys={"house": bytes.fromhex(KEY)}))
    policy.check("other", CATALOG, Context(Vocabulary(10)))
