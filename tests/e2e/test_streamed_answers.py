"""A streamed answer says what the whole answer to the same request says, whatever is asked for."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_stack import running_stack
from effort import examples
from front_door_process import Door
from streamed_answers import PATHS, events_of, failed, put_together, request, said

PATIENT = ("--device", "cpu", "--dtype", "float32")


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Door]:
    with running_stack(tmp_path_factory.mktemp("streamed"), tiny_model) as stack:
        stack.start_frontend()
        stack.start_worker(*PATIENT)
        yield Door(stack, "--model-path", str(tiny_model))


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_says_what_the_whole_answer_says(door: Door, path: str) -> None:
    num_answers = 0
    for number in range(examples(400)):
        fields = request(path, random.Random(f"{path} {number}"))
        status, text = door.post(path, **fields)
        streamed, events = door.post(path, **fields, stream=True)
        if status != 200:  # what fails once an answer has begun is the end of its stream
            assert status == 400, (fields, text)
            assert streamed == 400 or failed(events_of(events)), (fields, text, events)
            continue
        num_answers += 1
        assert (streamed, put_together(path, events_of(events))) == (200, said(path, json.loads(text))), fields
    assert num_answers > 10
