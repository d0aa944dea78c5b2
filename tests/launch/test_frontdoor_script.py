"""The front door as the launch scripts start it."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import openai
import pytest
from launched_script import launched

from worker.tiny_model import write_tiny_model


def biased(client: openai.OpenAI, model: str) -> str:
    return client.completions.create(model=model, prompt="a", max_tokens=4, logit_bias={"40": 100}).choices[0].text


def test_a_control_arrives_with_a_key(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    (tmp_path / "its keys").write_text("# of March\n\nsecret\n")
    variables = {"MODEL_PATH": str(model), "FRONT_DOOR_API_KEY_FILE": str(tmp_path / "its keys")}
    with launched(tmp_path, variables=variables) as script:
        script.wait_until_ready()
        assert '"finish_reason":"length"' in script.run_printed_curl()
        with openai.OpenAI(base_url=script.url, api_key="secret", max_retries=0, timeout=60) as client:
            assert biased(client, script.model) == "DDDD"
            metrics = httpx.get(f"{script.url.removesuffix('/v1')}/metrics", headers={"authorization": "Bearer secret"})
            assert re.search(
                r'^dlw_requests_total\{worker="http://127.0.0.1:\d+",.*outcome="length".*\} ', metrics.text, re.M
            )
        with script.client() as client, pytest.raises(openai.AuthenticationError):
            biased(client, script.model)
        children = script.children()
        assert len(children) >= 3
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
        script.assert_nothing_left(children)


def test_switched_off(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    with launched(tmp_path, variables={"MODEL_PATH": str(model), "FRONT_DOOR": "off"}) as script:
        script.wait_until_ready()
        assert script.named("dynamo.frontend")
        assert not [child for child in script.children() if "worker.frontdoor" in child.cmdline()]
        with script.client() as client:
            assert biased(client, script.model) != "DDDD"
    with launched(tmp_path, variables={"FRONT_DOOR": "maybe"}) as script:
        assert script.finish() == 1
        assert "FRONT_DOOR must be on or off, got 'maybe'" in script.output
