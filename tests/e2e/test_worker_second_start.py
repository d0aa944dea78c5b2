"""The second start of a worker imports only what a model on native kernels needs."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from e2e_stack import REPOSITORY, wait_for

from worker.tiny_model import write_tiny_model

SLOW = {
    *("transformers", "huggingface_hub", "scipy", "sklearn", "pandas", "PIL", "torchvision"),
    *("vllm", "tensorrt_llm", "nixl", "nats", "grpc", "opentelemetry", "openai", "aiohttp", "jinja2"),
    *("torch._dynamo", "torch._inductor", "sympy", "gguf", "yaml"),
    *("torch._meta_registrations", "torch._decomp", "torch._prims", "torch._refs"),
}
"""Modules that take long to import, or that only other options need."""

WORKER = """
import json, os, sys, threading, time
from pathlib import Path

def report():
    while not any(path.is_file() for path in Path(os.environ["DYN_FILE_KV"]).glob("v1/mdc/**/*")):
        time.sleep(0.01)
    print(json.dumps(sorted(sys.modules)), flush=True)
    sys.stdin.read()
    os._exit(0)

threading.Thread(target=report, daemon=True).start()
from worker.__main__ import run
run()
"""
"""A worker that says what it has imported once it is registered, and ends with its input."""


@contextmanager
def registered(model: Path, discovery: Path) -> Iterator[set[str]]:
    """Modules that a worker has imported when it is registered; it runs meanwhile."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "DYNAMO_", "WORKER_"))}
    environ |= {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(discovery), "DYN_REQUEST_PLANE": "tcp"}
    environ |= {"DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_TCP_RESPONSE_STREAM_HOST": "lo", "HF_HUB_OFFLINE": "1"}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "DLW_POOL_SECRET": secrets.token_hex(32)}
    command = [sys.executable, "-c", WORKER, "--model-path", str(model), "--drain-timeout-s", "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True) as worker:
        assert worker.stdout is not None
        try:
            yield set(json.loads(worker.stdout.readline()))
        finally:
            worker.kill()


@pytest.mark.native
def test_a_registered_worker_imported_nothing_slow(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", arch="llama")
    with registered(model, tmp_path / "first") as imported:
        assert "transformers" in imported  # it read the tokenizer, and so a later start need not
        wait_for(lambda: list(model.glob(".packed/*.safetensors")), "the packed copy")
    with registered(model, tmp_path / "second") as imported:
        assert imported & SLOW == set()
        assert {"torch", "worker.engines.embedded"} <= imported
