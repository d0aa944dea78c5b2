"""What a program of `examples/` says where its server is not there, or an argument is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from document_pages import ROOT
from ports import free_port
from warm_start import WarmProcess


def said(name: str, *arguments: str) -> str:
    """The one line that an example prints that cannot run, without argparse's usage."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as directory:
        log, program = Path(directory) / "log", [str(ROOT / "examples" / name), *arguments]
        if name.startswith(("grpo/", "offline")):  # which import torch
            status = WarmProcess(program, environment, log).wait(100)
        else:
            with log.open("wb") as file:
                status = subprocess.run(
                    [sys.executable, *program],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=file,
                    timeout=100,
                    check=False,
                ).returncode
        text = log.read_text()
    assert status in (1, 2), text
    assert "Traceback" not in text
    lines = text.splitlines()
    if lines[0].startswith("usage: "):
        return lines[-1]
    (line,) = lines
    return line


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("chat.py", ["Hello", "--url", "{url}/v1"]),
        ("logits_processors_client.py", ["--model", "M", "--url", "{url}/v1"]),
        ("nats_client.py", ["Hello", "--url", "nats://127.0.0.1:{port}"]),
        (
            "grpo/grpo.py",
            ["--model", "{model}", "--url", "{url}", "--engine-url", "{url}", "--engine-key", "K", "--output", "{run}"],
        ),
    ],
)
def test_no_server(name: str, arguments: Sequence[str], tiny_model: Path, tmp_path: Path) -> None:
    port = free_port()
    given = {"url": f"http://127.0.0.1:{port}", "port": port, "model": tiny_model, "run": tmp_path / "run"}
    line = said(name, *(one.format_map(given) for one in arguments))
    assert line.startswith("error: ")
    assert f"127.0.0.1:{port}" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("offline.py", ["/no/model"], "error: --model-path /no/model: no such directory"),
        ("offline.py", ["--n", "0"], "error: n must be at least 1, got 0"),
        ("grpo/figure.py", ["/no/run", "/no/figure.svg"], "No such file or directory: '/no/run/steps.jsonl'"),
        ("grpo/figure.py", [], "the following arguments are required: run, output"),
        ("grpo/differences.py", ["/no/run"], "error: /no/run: no step0 in it"),
    ],
)
def test_wrong_arguments(name: str, arguments: Sequence[str], problem: str) -> None:
    assert problem in said(name, *arguments)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "/no/model"], "argument --model: expected the directory of a checkpoint, with its config.json"),
        (["--engine-url", "127.0.0.1:8090"], "argument --engine-url: expected http://host:port, got '127.0.0.1:8090'"),
        (["--url", "http://"], "argument --url: expected http://host:port"),
        (["--task", "sum"], "error: --task must be one of sums, letters, got 'sum'"),
        (["--answers", "1"], "error: --answers must be at least 2, got 1"),  # its advantage would be NaN
        (["--max-tokens", "0"], "error: --max-tokens must be at least 1, got 0"),
        (["--layers", "-1"], "error: --layers must be at least 0, got -1"),
        (["--learning-rate", "nan"], "error: --learning-rate must be above 0 and finite, got nan"),
    ],
)
def test_wrong_settings_of_a_training(arguments: Sequence[str], problem: str, tiny_model: Path, tmp_path: Path) -> None:
    wanted = ["--model", str(tiny_model), "--engine-url", "http://127.0.0.1:1", "--engine-key", "K"]
    line = said("grpo/grpo.py", *wanted, "--output", str(tmp_path / "run"), *arguments)
    assert problem in line


class NoModels(BaseHTTPRequestHandler):
    """A server whose worker still loads: no model is listed."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"object": "list", "data": []}')


def test_no_model_yet(tiny_model: Path, tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", free_port()), NoModels) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        asked = said("chat.py", "Hello", "--url", f"{url}/v1")
        given = ["--model", str(tiny_model), "--url", url, "--engine-url", url, "--engine-key", "K"]
        trained = said("grpo/grpo.py", *given, "--output", str(tmp_path / "run"))
        server.shutdown()
    assert asked == f"error: {url}/v1: no model is served there yet"
    assert trained == f"error: {url}/v1/models: no model is served there yet"


def test_a_package_that_an_example_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "datasets.py").write_text("raise ModuleNotFoundError(name=__name__)")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, str(ROOT / "examples/grpo/trl_grpo.py"), "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    problem = "error: datasets is not installed: pip install trl accelerate datasets\n"
    assert (done.returncode, done.stderr) == (1, problem)


def test_a_run_is_not_written_over(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text("{}\n")
    wanted = ["--model", str(tiny_model), "--engine-url", "http://127.0.0.1:1", "--engine-key", "K"]
    line = said("grpo/grpo.py", *wanted, "--output", str(tmp_path))
    assert line == f"error: --output {tmp_path}: has the steps of another run; give a new directory"


def test_a_figure_of_a_run_without_any_reward(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"step": 0, "reward": 0.0, "largest_difference": 0.0}\n')
    command = [sys.executable, str(ROOT / "examples/grpo/figure.py"), str(tmp_path), str(tmp_path / "figure.svg")]
    subprocess.run(command, check=True, timeout=100)
    assert "mean reward" in (tmp_path / "figure.svg").read_text()
