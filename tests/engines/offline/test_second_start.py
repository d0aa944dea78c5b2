"""The second start of the offline engine imports only what a model on native kernels needs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from worker.engines.embedded import Engine
from worker.sampling import SamplingParams
from worker.tiny_model import write_tiny_model

SLOW = {"transformers", "scipy", "sklearn", "pandas", "torchvision", "huggingface_hub", "vllm", "tensorrt_llm", "nixl"}
"""Packages that take long to import, and that no native model needs."""

SECOND_START = """
import json, sys
from worker.engines.embedded import Engine
from worker.sampling import SamplingParams
engine = Engine(sys.argv[1])
[result] = engine.generate("Once upon a time", SamplingParams(max_tokens=4, temperature=0))
print(json.dumps([result.text, sorted(set(sys.modules) & set(sys.argv[2:]))]))
"""


@pytest.mark.native
def test_it_imports_nothing_slow(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny", arch="llama")
    first = Engine(path)
    expected = first.generate("Once upon a time", SamplingParams(max_tokens=4, temperature=0))[0].text
    deadline_s = time.monotonic() + 30
    while not list(path.glob(".packed/*.safetensors")):  # written in the background
        assert time.monotonic() < deadline_s, "no packed copy was written"
        time.sleep(0.02)
    command = [sys.executable, "-c", SECOND_START, str(path), *sorted(SLOW)]
    text, imported = json.loads(subprocess.check_output(command, text=True, timeout=60))
    assert (text, imported) == (expected, [])
    assert type(first.tokenizer).__module__.startswith("transformers")
