"""``MODEL_PATH`` with an id on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from hub_server import hub
from launched_script import launched

from worker.tiny_model import write_tiny_model

NAME = "acme/tiny-model-1.5"


def variables(endpoint: str, cache: Path, model: str) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1"}
    return {"MODEL_PATH": model, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), **offline}


def test_a_model_is_served_by_its_id(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    with hub({NAME: model}) as server:
        given = variables(server.url, tmp_path / "hub", NAME)
        with launched(tmp_path, "--no-publish-kv-events", variables=given) as script:
            script.wait_until_ready()
            assert script.model == NAME
            with script.client() as client:
                answer = client.completions.create(model=NAME, prompt="Hello", max_tokens=4, echo=True)
            assert answer.choices[0].text.startswith("Hello")
            script.press_ctrl_c()
            assert script.finish() == 0, script.output
        assert f"agg: downloading {NAME} into the cache of Hugging Face models ...\n" in script.output
        weights = [path for path in server.requests if path.endswith("model.safetensors")]
        assert len(weights) <= 2  # once, and its size before


def test_an_id_that_nobody_has(tmp_path: Path) -> None:
    with (
        hub({}) as server,
        launched(tmp_path, variables=variables(server.url, tmp_path / "hub", "acme/none")) as script,
    ):
        script.read_rest()
        assert script.process.wait() == 1
    *_, reason, last = script.output.splitlines()
    assert reason == (
        f"agg: --model-path acme/none: no such directory, and {server.url} has no such model, or only for its members: "
        "set HF_TOKEN"
    )
    assert last == "agg: error: no model"
