"""Pictures by the anthropic package, before a worker on the stand-in for TensorRT-LLM that sees
colours.

Those of the openai package are in tests/runtimes/test_openengine_pictures.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from client_environments import HERE, command_of, output_of
from colour_model import NUM_TOKENS, data_url, png, write_colour_model
from e2e_stack import MODEL, STAND_IN
from engine_stack import EXACT, running_engines
from front_door_process import Door

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

COLOURS = ((252, 0, 0), (0, 0, 252))


def test_pictures_of_anthropic(tmp_path: Path) -> None:
    model = write_colour_model(tmp_path / "model")
    files = []
    for place, colour in enumerate(COLOURS):
        files.append(tmp_path / f"{place}.png")
        files[-1].write_bytes(png(colour))
    with running_engines(tmp_path / "stack", model) as stack:
        for name in EXACT:
            del stack.environ[f"WORKER_{name}"]
        stack.environ |= STAND_IN
        stack.start_engine("--engine", "trtllm", "--modality", "multimodal", "--max-num-seqs", "8")
        door = Door(stack)
        command = command_of("anthropic", HERE / "pictures_of_anthropic.py")
        found = json.loads(output_of("anthropic", [*command, door.url, MODEL, *map(str, files)], tmp_path))
        expected = []
        for each in COLOURS:
            parts = [
                {"type": "image_url", "image_url": {"url": data_url(each)}},
                {"type": "text", "text": "What is it?"},
            ]
            asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": 6, "temperature": 0}
            status, text = door.post("chat/completions", ignore_eos=True, **asked)
            assert status == 200, text
            expected.append(json.loads(text)["choices"][0]["message"]["content"])
    assert found["texts"] == found["streamed"] == expected
    assert expected[0] != expected[1]
    (first, counted), second = found["counts"]
    assert first == counted > NUM_TOKENS
    assert second == [first, counted]
    places = [f"messages[0].content[0].source.{key}" for key in ("data", "url")]
    assert found["refusals"] == places
