"""Every field of the front door's table before workers behind OpenEngine, by the tests that it
passes before Dynamo's frontend.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_frontdoor_fields as fields
from engine_stack import running_engines
from front_door_process import Door
from test_frontdoor_fields import (
    test_a_bad_field_is_a_400_that_names_it,
    test_a_refusal_of_choices_is_that_of_one,
    test_choices_are_those_of_requests_that_name_them,
)

__all__ = [
    "test_a_bad_field_is_a_400_that_names_it",
    "test_a_refusal_of_choices_is_that_of_one",
    "test_choices_are_those_of_requests_that_name_them",
]
pytestmark = pytest.mark.campaign

EFFECTS = [each for each in fields.EFFECTS if each[1] != "parallel_tool_calls"]
"""Without the field that is kept where the chat template is known, which it is here."""

REFUSED = [each for each in fields.REFUSED_BY_THE_WORKER if each[1] != {"prompt": ["\0"]}]
"""Without the prompt of which Dynamo's frontend makes no token; here it is one."""


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Door]:
    directory = tmp_path_factory.mktemp("door")
    template = directory / "template.jinja"
    template.write_text(fields.TEMPLATE)
    with running_engines(directory, tiny_model) as stack:
        stack.start_engine()
        yield Door(stack, "--", "--custom-jinja-template", str(template))


@pytest.mark.parametrize(("path", "name"), EFFECTS, ids=["-".join(each) for each in EFFECTS])
def test_effect(door: Door, path: str, name: str) -> None:
    fields.test_effect(door, path, name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "refused", "param"), REFUSED)
def test_the_worker_s_refusal_is_a_400(
    door: Door, path: str, refused: dict[str, Any], param: str, stream: bool
) -> None:
    fields.test_the_worker_s_refusal_is_a_400(door, path, refused, param, stream)
