from __future__ import annotations

import json
import pickle
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pydantic
import pytest
import third_party
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, RootModel, ValidationError, create_model
from typing_extensions import TypeAliasType

from adapters.catalog import (
    NAME,
    SCOPES,
    BuildFailed,
    Catalog,
    CatalogError,
    Entry,
    Requested,
    Selection,
    SelectionError,
    loading,
    parse_selection,
    selection_schema,
)
from adapters.chain import apply_chain
from adapters.contract import Context, ProcessorArgs, ShapingProcessor, SteeringProcessor
from adapters.processors import BUILTINS
from adapters.vocabulary import Vocabulary

CONTEXT = Context(Vocabulary(50), end_token_ids=frozenset({1}))
THINKING = Context(Vocabulary(50), end_token_ids=frozenset({1}), think_start=(2,), think_end=(3,))


def option(name: str, target: str) -> str:
    return f"{name}=third_party:{target}"


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    options = [option("acme/loud", "Loud"), option("broken", "Broken"), option("half", "Half")]
    return Catalog.load(options=[*options, option("answer_only", "AnswerOnly")])


def select(*processors: dict[str, Any], receipt: Any = False) -> Selection:
    return parse_selection(json.dumps({"version": 1, "processors": processors, "receipt": receipt}))


def test_every_built_in_is_in_the_catalogue_and_describes_itself() -> None:
    entries = Catalog.default().entries
    assert [entry.processor for entry in entries] == list(BUILTINS)
    for entry in entries:
        data = entry.as_json()
        assert NAME.fullmatch(entry.name)
        assert entry.summary.endswith("."), entry.name
        assert len(entry.summary) <= 120, entry.name
        assert "Source:" in (entry.processor.__doc__ or ""), entry.name
        assert data["kind"] in ("steering", "shaping")
        assert issubclass(entry.processor, SteeringProcessor) is (data["kind"] == "steering")
        assert issubclass(entry.processor, ShapingProcessor) is (data["kind"] == "shaping")
        assert set(data["args"]["properties"]["scope"]["enum"]) <= set(SCOPES)
        for name, field in data["args"]["properties"].items():
            assert field.get("description"), f"{entry.name}.{name}"


def test_the_readme_counts_the_built_ins() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert re.findall(r"(\d+)\s+built-ins", text) == [str(len(BUILTINS))]


NAMES = """
cfg logit_bias allowed_tokens banned_tokens bad_words min_tokens repetition_penalty frequency_penalty presence_penalty
phrase_ban no_repeat_ngram dry thinking_budget forced_sequence forced_prefix force_last_phrase gen_length trigger_phrase
multiple_choice cite_from_prompt loop_stop ban_scripts temperature top_k top_p min_p typical_p top_n_sigma xtc mirostat
epsilon_cutoff eta_cutoff exponential_decay_length watermark json_schema regex choice grammar
structural_tag tool_calls sequence_bias dynamic_temperature top_a synthid contrastive
"""


def test_no_built_in_is_missing() -> None:
    assert set(Catalog.default().names) == set(NAMES.split())


def test_built_ins_come_in_the_order_law() -> None:
    stages = [entry.processor.stage for entry in Catalog.default().entries]
    assert stages == sorted(stages)


def numbers_in(schema: Any) -> list[dict[str, Any]]:
    """Every schema of a number below ``schema``."""
    if isinstance(schema, list):
        return [found for item in schema for found in numbers_in(item)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if schema.get("type") in ("integer", "number") else []
    return own + [found for value in schema.values() for found in numbers_in(value)]


def unbounded(schema: Any, path: str = "") -> list[str]:
    """Lists and texts with neither an upper bound nor a pattern, below ``schema``."""
    if isinstance(schema, list):
        return [found for i, item in enumerate(schema) for found in unbounded(item, f"{path}[{i}]")]
    if not isinstance(schema, dict):
        return []
    bounds = {"array": "maxItems", "string": "maxLength"}
    bound = bounds.get(schema.get("type") if isinstance(schema.get("type"), str) else "")  # type: ignore[arg-type]
    own = [path] if bound and not {bound, "pattern", "enum", "const"} & set(schema) else []
    return own + [found for key, value in schema.items() for found in unbounded(value, f"{path}.{key}")]


def test_every_number_list_and_text_of_a_built_in_is_bounded() -> None:
    for entry in Catalog.default().entries:
        schema = entry.args_schema()
        for number in numbers_in(schema):
            assert {"minimum", "exclusiveMinimum"} & set(number), f"{entry.name}: {number}"
            assert {"maximum", "exclusiveMaximum"} & set(number), f"{entry.name}: {number}"
        assert unbounded(schema) == [], entry.name


def test_chain_has_the_selections_processors_in_the_order_law(catalog: Catalog) -> None:
    selection = select(
        {"name": "top_k", "args": {"k": 2}},
        {"name": "acme/loud", "args": {"token_id": 7, "scope": "thinking"}},
        {"name": "temperature", "args": {"value": 0.5}},
        receipt="debug",
    )
    chain = catalog.build_chain(selection, THINKING, step_budget_s=0.5)
    assert [(m.name, m.scope) for m in chain.members] == [
        ("acme/loud", "thinking"),
        ("temperature", "all"),
        ("top_k", "all"),
    ]
    assert chain.failures.step_budget_s == 0.5
    assert chain.receipt.attribution
    assert not catalog.build_chain(select(receipt=True), THINKING).receipt.attribution


@pytest.mark.parametrize(
    ("entry", "path", "problem"),
    [
        ({"name": "topk"}, "name", 'unknown logits processor "topk"; did you mean top_k or top_p'),
        ({"name": "zzzzzz"}, "name", 'unknown logits processor "zzzzzz"'),
        ({"name": "top_k"}, "args.k", "field required"),
        ({"name": "top_k", "args": {"k": -2}}, "args.k", "greater than or equal to -1, got -2"),
        ({"name": "top_k", "args": {"k": 2**31}}, "args.k", "less than or equal to 2147483647"),
        ({"name": "top_k", "args": {"k": 1.5}}, "args.k", "integer"),
        ({"name": "top_k", "args": {"k": "1"}}, "args.k", 'valid integer, got "1"'),
        ({"name": "top_k", "args": {"k": True}}, "args.k", "integer, got true"),
        ({"name": "top_k", "args": {"k": None}}, "args.k", "integer, got null"),
        ({"name": "top_k", "args": {"k": 1, "p": 1}}, "args.p", "unknown argument; known are k, scope"),
        ({"name": "json_schema", "args": {"x": 1, "schema": {}}}, "args.x", "known are schema, compact, scope"),
        ({"name": "acme/loud", "args": {"token_id": 60}}, "args.token_id", "between 0 and 49, got 60"),
        ({"name": "choice", "args": {"choices": ["a", 5]}}, "args.choices[1]", "string, got 5"),
        ({"name": "choice", "args": {"choices": ["a"]}}, "args.choices", "tokenizer"),
        ({"name": "top_k", "args": {"k": 5, "scope": "answer"}}, "args.scope", "this model has none"),
    ],
)
def test_refusals_name_the_argument(catalog: Catalog, entry: dict[str, Any], path: str, problem: str) -> None:
    with pytest.raises(SelectionError) as caught:
        catalog.build_chain(select({"name": "top_p", "args": {"p": 0.5}}, entry), CONTEXT)
    assert caught.value.path == f"processors[1].{path}"
    assert problem in caught.value.problem


def test_scopes_that_a_class_rules_out_are_refused(catalog: Catalog) -> None:
    for name, args in (("answer_only", {"token_id": 1}), ("choice", {"choices": ["a"], "scope": "thinking"})):
        with pytest.raises(SelectionError, match=r"expected one of .*answer, got (all|thinking)"):
            catalog.build_chain(select({"name": name, "args": args}), THINKING)


def test_a_constructor_that_raises_is_not_the_callers_fault(catalog: Catalog) -> None:
    with pytest.raises(BuildFailed, match="broken raised ZeroDivisionError when it was built") as caught:
        catalog.build_chain(select({"name": "broken", "args": {"token_id": 1}}), CONTEXT)
    assert pickle.loads(pickle.dumps(caught.value)).processor == "broken"


@pytest.mark.parametrize(
    ("target", "name", "problem"),
    [
        ("BuiltOfNone", "built_of_none", "is built of what is none"),
        ("Undecided", "undecided", "raised SystemExit when its arguments were checked"),
        ("NamesItself", "names_itself", "changes name, which is an attribute of its class"),
        ("SetsDevice", "sets_device", "raised MalformedEdit when it was built"),
        ("StagesItself", "stages_itself", "changes stage, which is an attribute of its class"),
    ],
)
def test_what_cannot_be_built_is_named(target: str, name: str, problem: str) -> None:
    catalog = Catalog.load(options=[option(name, target)])
    with pytest.raises(BuildFailed, match=f"{name} {problem}") as caught:
        catalog.build_chain(select({"name": name, "args": {"token_id": 1}}), CONTEXT)
    assert caught.value.processor == name
    assert torch.tensor([1.0]).device.type == "cpu"


def test_values_from_python_must_be_json_data() -> None:
    for args in ({"k": {1, 2}}, {"k": float("nan")}, {"k": object()}):
        with pytest.raises(SelectionError, match=r"p\.args: is not JSON data"):
            Catalog.default()["top_k"].parse_args(Requested("top_k", args, path="p"))
    nested: Any = []
    for _ in range(10_000):
        nested = [nested]
    with pytest.raises(SelectionError, match="not JSON data"):
        Catalog.default()["top_k"].parse_args(Requested("top_k", {"k": nested}, path="p"))


def test_third_party_class_is_wrapped_and_runs(catalog: Catalog) -> None:
    chain = catalog.build_chain(select({"name": "half"}), CONTEXT)
    chain.start([5])
    row = torch.full((50,), 4.0)
    apply_chain(chain, row)
    assert torch.equal(row, torch.full((50,), 2.0))
    assert catalog["half"].as_json()["source"] == "--logits-processor half=third_party:Half"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("third_party:Loud", "expected NAME=module:Class"),
        ("=third_party:Loud", "expected NAME=module:Class"),
        ("acme/loud=", "expected NAME=module:Class"),
        ("acme/loud=third_party", "expected module:Class"),
        ("acme/loud=./third_party:Loud", "expected the module as import names it, not a path, got './third_party'"),
        ("acme/loud=third_party.py:Loud", "expected the module as import names it, not a path, got 'third_party.py'"),
        ("acme/loud=no_such_module_here:Loud", "No module named"),
        ("acme/loud=third_party:Missing", "Missing"),
        ("acme/loud=third_party:number", "not a class"),
        ("loud=third_party:Loud", "names itself acme/loud, not loud"),
        ("Loud=third_party:Half", "is not a name"),
        ("top_k=third_party:Shadow", "the name top_k is taken"),
        ("top_k=third_party:Half", "the name top_k is taken"),
        ("no_stage=third_party:NoStage", "NoStage lacks stage"),
        ("scoped=third_party:Scoped", "scope"),
        ("stage_of_int=third_party:StageOfInt", "StageOfInt.stage must be of type Stage, got 4"),
        ("version_of_text=third_party:VersionOfText", "VersionOfText.version must be of type int, got '1.0'"),
        ("reads_text=third_party:ReadsText", "ReadsText.reads must be of type Reads, got 'generated'"),
        ("scoped_by_text=third_party:ScopedByText", "ScopedByText.scopes must be of type tuple, got 'answer'"),
        ("lenient_args=third_party:LenientArgs", "LenientArgs.Args must be a subclass of ProcessorArgs"),
        ("boundless_default=third_party:BoundlessDefault", "the arguments have no JSON Schema: Out of range float"),
        ("lenient_part=third_party:LenientPart", "LenientPart.Args: its part LenientLater takes unknown names"),
        ("without_schema=third_party:WithoutSchema", "the arguments have no JSON Schema"),
        ("nothing=third_party:Nothing", "cannot be called"),
        ("steering=adapters.contract.processor:SteeringProcessor", "neither"),
    ],
)
def test_options_that_cannot_be_honoured(text: str, problem: str) -> None:
    with pytest.raises(CatalogError) as caught:
        Catalog.load(options=[text])
    assert problem in str(caught.value)
    assert text in str(caught.value)


def test_a_module_that_raises_on_import_is_the_operators_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises_on_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CatalogError, match="raised ZeroDivisionError when it was imported: division by zero"):
        Catalog.load(options=["x=raises_on_import:X"])


@pytest.mark.parametrize("line", ["raise SystemExit(0)", "import sys; sys.exit()", "raise GeneratorExit"])
def test_a_module_that_exits_on_import_is_the_operators_error(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process would end, with status 0."""
    (tmp_path / "exits_on_import.py").write_text(f"{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CatalogError, match=r"exits_on_import:X: raised \w+Exit when it was imported"):
        Catalog.load(options=["x=exits_on_import:X"])


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("torch.set_default_dtype(torch.float64)", "default data type"),
        ("torch.set_default_device('meta')", "default device"),
    ],
)
def test_a_module_that_changes_torch_on_import_is_refused(
    line: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"changes_{setting.replace(' ', '_')}"
    (tmp_path / f"{module}.py").write_text(f"import torch\n{line}\nfrom third_party import Half\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CatalogError, match=f"{module}:Half: changed torch's {setting} when it was imported"):
        Catalog.load(options=[f"half={module}:Half"])
    assert torch.tensor([1.0]).dtype == torch.float32
    assert torch.tensor([1.0]).device.type == "cpu"


def test_a_class_that_resists_wrapping_is_the_operators_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resists.py").write_text(
        "class Signature(type):\n"
        "    @property\n"
        "    def __signature__(cls): raise KeyError('no signature')\n"
        "class X(metaclass=Signature):\n"
        "    def __call__(self, input_ids, logits): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CatalogError, match="resists:X: 'no signature'"):
        Catalog.load(options=["x=resists:X"])


def test_transformers_processors_are_published_as_json() -> None:
    """Those that truncate have minus infinity for a default."""
    catalog = Catalog.load(options=["hf/top_k=transformers:TopKLogitsWarper"])
    published = json.loads(json.dumps(catalog.as_json(), allow_nan=False))["processors"][-1]
    assert published["args"]["properties"]["filter_value"]["type"] == "number"
    chain = catalog.build_chain(select({"name": "hf/top_k", "args": {"top_k": 2}}), CONTEXT)
    chain.start([5])
    row = torch.arange(50.0)
    apply_chain(chain, row)
    assert (row > -torch.inf).nonzero()[:, 0].tolist() == [48, 49]


class Window(BaseModel):
    """Lets unknown names pass, and texts for numbers."""

    size: int = 1


@pydantic.dataclasses.dataclass
class LooseWindow:
    """The same, as a dataclass of pydantic's."""

    size: int = 1


class StrictWindow(ProcessorArgs):
    """A part of arguments."""

    size: int = 1


@dataclass
class PlainWindow:
    """A dataclass, which pydantic reads as strictly as what it is a part of."""

    size: int = 1


@dataclass
class PlainWithWindow:
    """A dataclass with such a part."""

    inner: Window


class StrictWithWindow(BaseModel):
    """A strict model with such a part."""

    model_config = ProcessorArgs.model_config

    inner: Window


class Sizes(RootModel[list[int]]):
    """Lets texts for numbers pass."""


@pytest.mark.parametrize(
    "part",
    [
        *(Window, list[Window], dict[str, Window | None], TypeAliasType("Windows", list[Window])),
        *(LooseWindow, PlainWithWindow, StrictWithWindow, Sizes),
    ],
)
def test_arguments_with_lenient_parts_are_refused(part: Any) -> None:
    with pytest.raises(TypeError, match=r"^Args: its part (\w*Window|Sizes) takes unknown names, other types or NaN"):
        create_model("Args", __base__=ProcessorArgs, window=(part, ...))


@pytest.mark.parametrize("loose", [{"extra": "ignore"}, {"strict": False}, {"allow_inf_nan": True}])
def test_arguments_that_are_lenient_are_refused(loose: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"Args takes unknown names, other types or NaN"):
        type("Args", (ProcessorArgs,), {"model_config": loose, "__module__": __name__})


def test_a_list_of_its_own_may_be_a_part_of_arguments() -> None:
    class Strict(RootModel[list[int]]):
        model_config = ConfigDict(strict=True, allow_inf_nan=False)

    kind = create_model("Args", __base__=ProcessorArgs, sizes=(Strict, ...))
    kind.model_validate_json('{"sizes": [2]}')
    with pytest.raises(ValidationError):
        kind.model_validate_json('{"sizes": ["2"]}')


@pytest.mark.parametrize("part", [StrictWindow, list[StrictWindow], PlainWindow])
def test_parts_of_arguments_are_strict(part: Any) -> None:
    kind = create_model("Args", __base__=ProcessorArgs, window=(part, ...))
    good: Any = {"size": 2}
    for value, accepted in ((good, True), ({"size": "2"}, False), ({"size": 2, "sise": 3}, False)):
        data = json.dumps({"window": [value] if part == list[StrictWindow] else value})
        if accepted:
            kind.model_validate_json(data)
        else:
            with pytest.raises(ValidationError):
                kind.model_validate_json(data)


def test_a_name_cannot_be_given_twice() -> None:
    with pytest.raises(CatalogError, match="the name half is taken"):
        Catalog.load(options=[option("half", "Half")] * 2)


def test_entry_points_are_taken_only_with_the_operators_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = [
        EntryPoint("acme/loud", "third_party:Loud", loading.GROUP),
        EntryPoint("evil", "no_such_module_here:Evil", loading.GROUP),
    ]

    def entry_points(*, group: str) -> EntryPoints:
        assert group == "logits_processors"
        return EntryPoints(offered)

    monkeypatch.setattr(loading, "entry_points", entry_points)
    assert "acme/loud" not in Catalog.load()
    loaded = Catalog.load(allow=["acme/loud"])
    assert loaded["acme/loud"] == Entry("acme/loud", third_party.Loud, "unknown distribution (third_party:Loud)")
    with pytest.raises(CatalogError, match="offers the logits processor missing"):
        Catalog.load(allow=["acme/loud", "missing"])
    with pytest.raises(CatalogError, match="No module named"):
        Catalog.load(allow=["evil"])
    offered.append(EntryPoint("acme/loud", "third_party:Half", loading.GROUP))
    with pytest.raises(CatalogError, match="taken"):
        Catalog.load(allow=["acme/loud"])


def test_an_unknown_name_is_a_key_error_that_helps(catalog: Catalog) -> None:
    with pytest.raises(KeyError, match="did you mean top_k"):
        catalog["topk"]


def references(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return {found for item in schema for found in references(item)}
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"]} if isinstance(schema.get("$ref"), str) else set()
    return own | {found for value in schema.values() for found in references(value)}


def test_the_selection_schema_has_all_processors_and_definitions(catalog: Catalog) -> None:
    schema = json.loads(json.dumps(selection_schema(catalog)))
    choices = schema["properties"]["processors"]["items"]["oneOf"]
    assert [choice["properties"]["name"]["const"] for choice in choices] == catalog.names
    assert {ref.removeprefix("#/$defs/") for ref in references(schema)} <= set(schema["$defs"])
    assert json.loads(json.dumps(catalog.as_json()))["processors"][0]["name"] == catalog.names[0]


ARGUMENT = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_arguments_of_any_kind_give_a_chain_or_a_selection_error(data: st.DataObject) -> None:
    catalog = Catalog.default()
    name = data.draw(st.sampled_from(catalog.names))
    fields = list(catalog[name].args_schema()["properties"])
    args = data.draw(st.dictionaries(st.sampled_from([*fields, "other"]), ARGUMENT, max_size=4))
    args.pop("scope", None)
    requested = Requested(name, args, data.draw(st.sampled_from(SCOPES)), "processors[0]")
    outcome: Any
    try:
        outcome = catalog.build_chain(Selection((requested,)), THINKING)
    except SelectionError as error:
        outcome = error
    assert not isinstance(outcome, BuildFailed)
    if isinstance(outcome, SelectionError):
        assert outcome.path.startswith("processors[0]")
