"""An answer of a GGUF file is replayed from the file, as it was served."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gguf_files import Source

from adapters.client import selection
from worker.__main__ import main
from worker.arguments import parse_arguments
from worker.build import make_engine, with_checkpoint
from worker.runtimes.dynamo_engine import WorkerEngine
from worker.tiny_model import write_tiny_model

PROMPT = [5, 300, 17, 600, 42, 7]


class Context:
    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}

    def id(self) -> str:
        return "request"

    def trace_headers(self) -> None:
        return None


async def receipt_of(options: list[str]) -> dict[str, Any]:
    """The receipt of an answer with a drawn seed."""
    arguments = with_checkpoint(parse_arguments(options, {}))
    worker = WorkerEngine(make_engine(arguments), arguments, shut_down=lambda: None)
    await worker.start(1)
    try:
        raw = {
            "token_ids": PROMPT,
            "sampling_options": {"temperature": 0.9},
            "stop_conditions": {"max_tokens": 12},
            "annotations": ["logits_processors:" + selection(receipt=True)],
        }
        chunks = [chunk async for chunk in worker.generate(raw, Context())]
    finally:
        await worker.cleanup()
    receipt: dict[str, Any] = chunks[-1]["engine_data"]["logits_processors"]
    return receipt


async def test_the_file_is_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = Source(write_tiny_model(tmp_path / "llama")).write(tmp_path / "mine.gguf")
    options = ["--model-path", str(path), "--device", "cpu", "--dtype", "float32"]
    receipt, prompt = tmp_path / "receipt.json", tmp_path / "prompt.json"
    receipt.write_text(json.dumps(await receipt_of(options)))
    prompt.write_text(json.dumps(PROMPT))
    replay = ["replay", str(receipt), "--prompt-file", str(prompt), *options[:4]]
    assert await asyncio.to_thread(main, replay) == 0, capsys.readouterr()
