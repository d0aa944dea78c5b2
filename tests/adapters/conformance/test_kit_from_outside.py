"""The kit as authors use it: the page about writing processors, the pytest plugin, the command,
third-party classes.
"""

from __future__ import annotations

import importlib
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import broken_processors
import numpy as np
import pytest
import torch

from adapters import contract
from adapters.catalog import Catalog, Entry, Requested, Selection, SelectionError
from adapters.chain import apply_chain
from adapters.command import main
from adapters.contract import Ban, Edit, Stage, SteeringProcessor, edits
from adapters.testing import CHECKS, CheckFailed, Subject, check_processor, plugin
from adapters.testing.kit_model import kit_context

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

_PAGE = Path(__file__).parents[3] / "docs" / "writing-processors.md"
_OPTIONS = ("-p", "adapters.testing.plugin", "-p", "no:asyncio")


@pytest.fixture
def page_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:  # type: ignore[misc]
    """Python files of the page by name, which its first line gives; also written to a directory
    on the path.
    """
    blocks = re.findall(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    files = {re.match(r'"""(\w+\.py)"""', block)[1]: block for block in blocks}  # type: ignore[index]
    files["try_it.py"] = files["try_it.py"].replace('"/tmp/tiny-model"', repr(str(tmp_path / "model")))
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield files
    for name in files:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_the_processors_of_the_page_conform(page_files: dict[str, str]) -> None:
    limit = importlib.import_module("sentence_limit").SentenceLimit
    cap = importlib.import_module("soft_cap").SoftCap
    use_up = importlib.import_module("use_up").UseUp
    examples = {limit: {"sentences": 2}, cap: {"cap": 5.0}, use_up: {"token_ids": [40, 41], "amounts": [1, 2.5]}}
    for processor, example in examples.items():
        report = check_processor(processor, [example])  # type: ignore[list-item]
        assert report.passed, str(report)


def test_the_pages_command_line_loads_its_wrapped_classes(
    page_files: dict[str, str],
) -> None:
    options = re.findall(r"`?--logits-processor ([\w/]+=[\w:]+)`?", _PAGE.read_text(encoding="utf-8"))
    catalog = Catalog.load(options=sorted(set(options)))
    assert {"acme/sentence_limit", "hf/sequence_bias", "house/synthid"} <= set(catalog.names)
    synthid = catalog["house/synthid"].processor
    assert set(synthid.Args.model_fields) == {"skip_first_ngram_calls", "debug_mode"}
    assert synthid.stage is Stage.SAMPLING
    chain = catalog.build_chain(Selection((Requested("house/synthid"),)), kit_context())
    chain.start([40, 41])
    row = torch.linspace(-1, 1, chain.context.vocabulary.size)
    assert apply_chain(chain, row)
    assert bool(row.isfinite().all())


def test_trying_it_as_the_page_does(page_files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("try_it")
    out = capsys.readouterr().out
    assert "'name': 'acme/sentence_limit'" in out
    assert " stop [" in out or " length [" in out
    option = "acme/sentence_limit=sentence_limit:SentenceLimit"
    assert main(["show", "acme/sentence_limit", "--logits-processor", option]) == 0
    assert "Most sentences of the answer." in capsys.readouterr().out


def test_everything_that_an_author_needs_is_in_one_place() -> None:
    imported = re.findall(r"from (adapters\.[\w.]+) import", _PAGE.read_text(encoding="utf-8"))
    assert set(imported) == {
        "adapters.contract",
        "adapters.third_party",
        "adapters.catalog",
    }  # the last for trying only
    for edit in get_args(edits.Edit):
        assert getattr(contract, edit.__name__) is edit


class Least(SteeringProcessor):
    """The least that a processor can be."""

    name = "least"
    stage = Stage.MASK

    def edit(self) -> Edit | None:
        return Ban.of([self.last_token]) if self.num_generated else None  # type: ignore[list-item]


def test_a_processor_without_arguments_needs_a_name_and_a_stage() -> None:
    report = check_processor(Least, [{}])
    assert report.passed, str(report)
    chain = Catalog([Entry("least", Least)]).build_chain(Selection((Requested("least"),)), kit_context())
    chain.start([40], [41])
    assert chain.plan().bans[0].token_ids.tolist() == [41]
    with pytest.raises(SelectionError, match="unknown argument"):
        Entry("least", Least).parse_args(Requested("least", {"n": 1}))


def test_random_generators_are_left_as_they_were() -> None:
    """They are the test session's."""

    def drawn() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand())]

    def seed() -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    seed()
    expected = drawn()
    seed()
    assert check_processor(Least, [{}], only=["determinism"]).passed
    assert drawn() == expected


def test_the_pitfall_that_the_page_tells_is_caught(page_files: dict[str, str]) -> None:
    cap = importlib.import_module("soft_cap")
    source = page_files["soft_cap.py"]
    line = "logits.copy_(shaped.masked_fill(logits == -torch.inf, -torch.inf))"
    assert line in source
    exec(compile(source.replace(line, "logits.copy_(shaped)"), "soft_cap.py", "exec"), vars(cap))
    report = check_processor(cap.SoftCap, [{"cap": 5.0}], only=["masked_rows"])
    assert "was masked and came back" in str(report)


@pytest.mark.campaign
def test_the_test_file_of_the_page_runs_one_test_for_each_check(
    page_files: dict[str, str], pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(**{name.removesuffix(".py"): text for name, text in page_files.items()})
    result = pytester.runpytest_subprocess(*_OPTIONS, "test_sentence_limit.py", "--strict-markers")
    result.assert_outcomes(passed=len(CHECKS))


def test_the_page_lists_the_checks() -> None:
    listed = re.findall(
        r"^\| `(\w+)` \| (.*) \|$", _PAGE.read_text(encoding="utf-8").partition("## The checks")[2], re.M
    )
    assert listed == [(check.name, check.meaning) for check in CHECKS]


def test_plugin_fails_with_the_text_of_the_check(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(broken_processors.__file__).parent))
    pytester.makepyfile(
        """
        import pytest
        from broken_processors import GrowsWithHistory, Unbounded

        @pytest.mark.logits_processor(Unbounded, examples=[])
        @pytest.mark.logits_processor(GrowsWithHistory, examples=[{"n": 4}])
        def test_conformance(processor_check):
            processor_check()
        """
    )
    result = pytester.runpytest_subprocess(*_OPTIONS, "-k", "bounds or cost")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*bounds: n has no upper bound: give*", "*the work of a step grew: *history*"])


def test_plugin_needs_the_mark(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_conformance(processor_check): processor_check()")
    result = pytester.runpytest_subprocess(*_OPTIONS)
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*processor_check without @pytest.mark.logits_processor*"])


def test_plugin_leaves_a_missing_name_to_its_check() -> None:
    class Nameless(SteeringProcessor):
        """A processor whose author has forgotten the name."""

        stage = Stage.MASK

        def edit(self) -> Edit | None:
            return None

    mark = pytest.mark.logits_processor(Nameless, examples=[]).mark
    ids: list[Any] = []
    metafunc: Any = SimpleNamespace(
        fixturenames=[plugin.FIXTURE],
        definition=SimpleNamespace(iter_markers=lambda name: [mark]),
        parametrize=lambda name, params: ids.extend(each.id for each in params),
    )
    plugin.pytest_generate_tests(metafunc)
    assert ids[0] == "Nameless-declares"
    assert "Nameless.name is not set" in str(check_processor(Nameless, only=["declares"]))


def test_command_reports_and_sets_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "broken_processors:Steering", "--only", "bounds", "--only", "runs"]) == 0
    assert capsys.readouterr().out.endswith("Steering passes all 2 checks\n")
    assert main(["check", "broken_processors:CountsCalls", "--example", '{"n": 4}', "--only", "double_call"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAIL  double_call: ")
    assert 'arguments {"n": 4}, run 0, generated token' in out


@pytest.mark.parametrize(
    ("name", "check", "problem"),
    [
        ("Exits", "arguments", "no arguments could be generated"),
        ("ExitsOnce", "arguments", "raised SystemExit: 0; raise ArgumentError"),
        ("ExitsInAStep", "edits", "raised SystemExit: 0. A processor that passes"),
    ],
)
def test_command_outlives_a_processor_that_exits(
    name: str, check: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status would be the processor's."""
    assert main(["check", f"broken_processors:{name}", "--only", "bounds", "--only", check]) == 1
    out = capsys.readouterr().out
    assert problem in out
    assert out.endswith("fails 1 of 2 checks\n")


@pytest.mark.parametrize("kind", [broken_processors.RaisesInEdit, broken_processors.RaisesInShape])
def test_the_text_of_what_was_raised_is_told(kind: type) -> None:
    (result,) = check_processor(kind, [{}], only=["runs"]).failures
    assert "raised LookupError at position" in str(result.failure)
    assert ": no such word" in str(result.failure)


def test_parts_that_come_one_by_one_are_checked() -> None:
    (result,) = check_processor(broken_processors.YieldsItself, [{}], only=["edits"]).results
    assert result.failure is None
    assert result.remark is not None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no_such_module:X"], "no_such_module"),
        (["broken_processors:NoSuchClass"], "NoSuchClass"),
        (["builtins:int"], "int"),
        (["broken_processors:Unsigned"], "no signature found"),
        (["broken_processors:Steering", "--only", "no_such_check"], "unknown check no_such_check; known are declares"),
    ],
)
def test_command_says_what_it_cannot_check(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("example", ["[1]", "{"])
def test_command_refuses_an_example_that_is_no_object(example: str) -> None:
    with pytest.raises(SystemExit):
        main(["check", "broken_processors:Steering", "--example", example])


def test_command_lists_the_checks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["check", "--list"])
    assert left.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CHECKS)


@pytest.mark.parametrize(
    ("target", "example"),
    [
        ("transformers:RepetitionPenaltyLogitsProcessor", {"penalty": 1.2}),
        ("adapters.basic:TemperatureProcessor", {"temperature": 0.5}),
        ("broken_processors:ZooBoost", {"boost": 2.0}),
        ("broken_processors:LearntBias", {}),
        ("broken_processors:LearntBiasInPlace", {}),
    ],
)
def test_third_party_classes_conform(target: str, example: dict[str, Any]) -> None:
    module, _, name = target.partition(":")
    report = check_processor(getattr(importlib.import_module(module), name), [example])
    assert report.passed, str(report)


def test_third_party_forcing_that_leaves_nan_is_caught() -> None:
    report = check_processor(broken_processors.ZooEnforce, [{"token_id": 40}], only=["masked_rows", "banned_tokens"])
    assert "masked_rows" in {result.check.name for result in report.failures}


def test_a_refused_example_fails_every_check_that_needs_it() -> None:
    report = check_processor(broken_processors.Steering, [{"n": 51}], only=["runs"])
    assert 'the example {"n": 51} is refused' in str(report)
    with pytest.raises(CheckFailed, match="is refused"):
        report.raise_for_failures()


def test_the_kit_asks_for_examples_that_it_cannot_guess() -> None:
    with pytest.raises(CheckFailed, match="give examples"):
        _ = Subject(broken_processors.NeedsAKey).cases


def test_made_up_arguments_are_the_same_every_time() -> None:
    cases = [[str(case) for case in Subject(broken_processors.Steering).cases] for _ in range(2)]
    assert cases[0] == cases[1]
    assert len(cases[0]) == 5  # none, two made up, two scopes
