"""Settings of the TensorRT-LLM engine from a file of extra arguments."""

from __future__ import annotations

from pathlib import Path

from worker.arguments import parse_arguments
from worker.engines.trtllm import TrtllmConfig, config_from


def configured(tmp_path: Path, text: str = "", *argv: str, model_path: str = "/m") -> TrtllmConfig:
    path = tmp_path / "extra.yaml"
    path.write_text(text)
    arguments = ["--model-path", model_path, "--engine", "trtllm", "--extra-engine-args", str(path), *argv]
    return config_from(parse_arguments(arguments, {}))
