"""`docs/sampling.md` says what the engine does: every field once, the reasons word for word, and
tests that exist.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from worker.arguments import parse_arguments
from worker.engines.embedded.admission import HONOURED, REFUSED
from worker.engines.embedded.speculation.config import REFUSED as REFUSED_METHODS
from worker.engines.refusals import IRRELEVANT
from worker.errors import ConfigurationError
from worker.sampling import Control, SamplingParams, sampling_controls
from worker.sampling.control import NEVER

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "sampling.md").read_text()
TABLE = DOCUMENT.partition("<!-- features -->")[2]
ROWS = [
    (name, set(re.findall(r"`(\w+:?)`", asked)), fate, text)
    for name, asked, fate, text in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+) \|$", TABLE, re.MULTILINE)[1:]
    if fate != "---"
]


def control_row(control: Control) -> str:
    """A row of the table of controls."""

    def shown(value: Any) -> str:
        return "" if value is NEVER else f"`{value}`"

    processors = ", ".join(dict.fromkeys(f"`{one.processor.name}`" for one in control.runs_as))
    served = f"`{control.path}`: {control.client_bounds or 'request.md'}" if control.paths else "not in a request"
    cells = (f"`{control.name}`", str(control.bounds or ""), served, shown(control.neutral), shown(control.greedy))
    return f"| {' | '.join((*cells, processors))} |"


def test_the_table_of_controls_is_that_of_the_record() -> None:
    """On failure, paste the left side."""
    controls = [one for one in sampling_controls(SamplingParams) if one.runs_as or (one.bounds and one.paths)]
    table = DOCUMENT.partition("<!-- controls -->")[2].partition("<!-- /controls -->")[0]
    assert "\n".join(map(control_row, controls)) == "\n".join(table.strip().splitlines()[2:])


def fields_of(fate: str) -> set[str]:
    return {field for _, fields, found, _ in ROWS if found == fate for field in fields}


def test_every_row_has_a_fate_that_is_known() -> None:
    assert {fate for _, _, fate, _ in ROWS} == {"honoured", "refused", "refused at start", "no effect"}


def test_every_field_has_its_row() -> None:
    assert fields_of("honoured") == HONOURED
    assert fields_of("refused") == set(REFUSED)
    assert fields_of("no effect") == IRRELEVANT


def test_reasons_are_those_that_callers_get() -> None:
    refused = [(fields, text) for _, fields, fate, text in ROWS if fate == "refused"]
    assert {field: text for fields, text in refused for field in fields} == REFUSED


def test_honoured_rows_name_tests_that_exist() -> None:
    for name, _, fate, text in ROWS:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
        assert bool(tests) == (fate == "honoured"), name
        for path, test in tests:
            assert re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.MULTILINE), (name, path, test)


@pytest.mark.parametrize("option", sorted(fields_of("refused at start")))
def test_engine_options_stop_the_start(option: str, tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(f"{option} 1\n")
    with pytest.raises(ConfigurationError, match=f"unknown engine option '{option[:-1]}'"):
        parse_arguments(["--model-path", "/models/tiny", "--extra-engine-args", str(path)], {})


def test_methods_of_speculation_that_stop_the_start() -> None:
    refused = {text for _, fields, fate, text in ROWS if fate == "refused at start" and not fields}
    assert refused == set(REFUSED_METHODS.values())


@pytest.mark.parametrize(
    ("changes", "greedy"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "top_k": 50, "top_p": 0.9}, True),
        ({"top_k": 1, "temperature": 2.0}, True),
        ({"top_p": 0.0, "temperature": 2.0}, True),
        ({"min_p": 1.0, "temperature": 2.0}, True),
        ({"min_p": 0.0}, True),
        ({"temperature": 1.0}, False),
        ({"top_k": 0}, False),
        ({"top_k": 2}, False),
        ({"top_p": 1.0}, False),
        ({"min_p": 0.5}, False),
    ],
)
def test_greedy_and_default_rules(changes: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**changes).is_greedy == greedy
