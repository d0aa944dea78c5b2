"""Models by their ids on the Hugging Face Hub, with the real client and a hub on loopback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub, hub

from worker.models import is_hub_id

pytestmark = pytest.mark.slow

NAME, GATED = "acme/model-1.5", "acme/gated"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A checkpoint in two files of weights, beside what no engine here reads."""
    directory = tmp_path / "model"
    for folder in ("onnx", "additional_chat_templates"):
        (directory / folder).mkdir(parents=True)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {
        "config.json": "{}",
        "tokenizer.json": "{}",
        "chat_template.jinja": "x",
        "additional_chat_templates/tool_use.jinja": "y",
        "model.safetensors.index.json": json.dumps(index),
        "model-1.safetensors": "1",
        "model-2.safetensors": "2",
        "consolidated.safetensors": "3",
        "pytorch_model.bin": "4",
        "onnx/config.json": "{}",
    }
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


@pytest.fixture
def server(models: Path) -> Iterator[Hub]:
    with hub({NAME: models, GATED: models}, gated=frozenset({GATED})) as running:
        yield running


def fetch(server: Hub, cache: Path, *argv: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
    """``python -m worker.models`` in an environment that knows this hub alone."""
    variables = {"HF_ENDPOINT": server.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": str(int(offline))}
    return subprocess.run(
        [sys.executable, "-m", "worker.models", *argv],
        env={**os.environ, **variables, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """The line that says why there is no model."""
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr.splitlines()[-1]


def test_ids_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("Qwen/Qwen3-0.6B")
    for path in ("gpt2", "/models/m", "./a/b", "../a", "~/a", "a/b/c", "a/b/", "a b/c", "", "default"):
        assert not is_hub_id(path)
    (tmp_path / "models" / "m").mkdir(parents=True)
    assert not is_hub_id("models/m")
    assert is_hub_id("models/n")


def test_a_model_is_downloaded_once_and_then_found(server: Hub, tmp_path: Path) -> None:
    done = fetch(server, tmp_path / "cache", NAME)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path == tmp_path / f"cache/hub/models--acme--model-1.5/snapshots/{COMMIT}"
    assert sorted(str(each.relative_to(path)) for each in path.rglob("*.*")) == [
        *("additional_chat_templates/tool_use.jinja", "chat_template.jinja", "config.json"),
        *("model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json", "tokenizer.json"),
    ]
    assert done.stderr.splitlines() == [
        f"models: downloading {NAME} into the cache of Hugging Face models ...",
        f"models: downloaded {NAME}",
    ]
    server.requests.clear()
    for offline in (False, True):
        again = fetch(server, tmp_path / "cache", NAME, offline=offline)
        assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")
    assert server.requests == []


def test_what_is_missing_in_the_cache_is_downloaded(server: Hub, tmp_path: Path) -> None:
    path = Path(fetch(server, tmp_path / "cache", NAME).stdout.strip())
    (path / "model-2.safetensors").unlink()
    assert "has not all of the model" in reason(fetch(server, tmp_path / "cache", NAME, offline=True))
    assert fetch(server, tmp_path / "cache", NAME).returncode == 0
    assert (path / "model-2.safetensors").read_text() == "2"


def test_files_that_no_start_needs_are_not_missed_offline(server: Hub, models: Path, tmp_path: Path) -> None:
    """A cache that another program filled with what it reads, by a listing of all files."""
    (models / "LICENSE.txt").write_text("5")
    path = Path(fetch(server, tmp_path / "cache", NAME).stdout.strip())
    (path / "LICENSE.txt").unlink()
    done = fetch(server, tmp_path / "cache", NAME, offline=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(path)), done.stderr
    assert fetch(server, tmp_path / "cache", NAME).returncode == 0
    assert (path / "LICENSE.txt").is_file()


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "hf_quant_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "vocab.txt",
        "model.safetensors.index.json",
    ],
)
def test_files_that_change_an_answer_are_missed_offline(name: str, server: Hub, models: Path, tmp_path: Path) -> None:
    """A model without its ends of an answer, or its template, would be another one."""
    if name == "vocab.txt":
        (models / "tokenizer.json").unlink()
    (models / name).touch()
    path = Path(fetch(server, tmp_path / "cache", NAME).stdout.strip())
    (path / name).unlink()
    assert "has not all of the model" in reason(fetch(server, tmp_path / "cache", NAME, offline=True))
    assert fetch(server, tmp_path / "cache", NAME).returncode == 0
    assert (path / name).is_file()


def test_a_download_that_was_cut_off_before_its_index(server: Hub, models: Path, tmp_path: Path) -> None:
    """Of a client that keeps no listing of a model's files."""
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, part in enumerate(parts, 1):
        (models / f"model-{number}.safetensors").rename(models / part)
    index = "model.safetensors.index.json"
    (models / index).write_text(json.dumps({"weight_map": dict(zip("ab", parts, strict=True))}))
    path = Path(fetch(server, tmp_path / "cache", NAME).stdout.strip())
    shutil.rmtree(path.parents[1] / "trees")
    (path / index).unlink()
    (path / parts[1]).unlink()
    assert "has not all of the model" in reason(fetch(server, tmp_path / "cache", NAME, offline=True))
    assert fetch(server, tmp_path / "cache", NAME).returncode == 0
    assert all((path / name).is_file() for name in (index, *parts))


def test_a_revision(server: Hub, tmp_path: Path) -> None:
    assert fetch(server, tmp_path / "cache", NAME, "--revision", COMMIT).returncode == 0
    said = reason(fetch(server, tmp_path / "cache", NAME, "--revision", "v9"))
    assert said.endswith("the model has no revision 'v9' (--revision)")


def test_why_there_is_no_model(server: Hub, models: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    begins = "models: --model-path {}: no such directory, and "
    assert reason(fetch(server, cache, NAME, offline=True)) == (
        begins.format(NAME)
        + f"the cache {cache}/hub has not all of the model, which HF_HUB_OFFLINE keeps from being downloaded"
    )
    assert reason(fetch(server, cache, "acme/none")) == (
        begins.format("acme/none") + f"{server.url} has no such model, or only for its members: set HF_TOKEN"
    )
    assert reason(fetch(server, cache, GATED)) == (
        begins.format(GATED) + f"the model is gated: accept its terms at {server.url}/{GATED} and set HF_TOKEN"
    )
    for weights in models.glob("model*.safetensors*"):
        weights.unlink()
    assert reason(fetch(server, cache, NAME)).endswith("the model has no config.json, or no weights in safetensors")
    server.url = "http://127.0.0.1:9"
    said = reason(fetch(server, cache, "acme/none"))
    assert said.startswith(begins.format("acme/none") + f"it cannot be downloaded from {server.url} into {cache}/hub: ")
    assert "refused" in said
