"""lm-evaluation-harness against the launch script gets the numbers that it computes itself."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from client_environments import HERE, environment_of, output_of
from launched_script import launched
from transformers import AutoModelForCausalLM, AutoTokenizer

from worker.models import model_cache, prepare_default_model
from worker.tiny_model import write_tiny_model

WORKER = ("--device", "cpu", "--numerics", "exact", "--context-length", "2048")

pytestmark = [pytest.mark.campaign, pytest.mark.real_model, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without rows of padding, which have probability in the harness alone."""
    source, target = write_tiny_model(tmp_path_factory.mktemp("whole")), tmp_path_factory.mktemp("tiny")
    network: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    network.resize_token_embeddings(len(AutoTokenizer.from_pretrained(source)))
    network.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target)
    return target


def compared(checkpoint: Path, directory: Path) -> dict[str, Any]:
    """The harness's results with the served model and with its own."""
    python = str(environment_of("lm-eval") / "bin" / "python")
    variables = {"MODEL_PATH": str(checkpoint), "WORKER_DTYPE": "float32"}
    with launched(directory, *WORKER, variables=variables, script="agg.sh") as script:
        script.wait_until_ready()
        output = output_of(
            "lm-eval", [python, str(HERE / "compare_lm_eval.py"), script.url, script.model, str(checkpoint)], directory
        )
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
    found: dict[str, Any] = json.loads(output[output.index("{") :])
    assert len(found["choices"]) == 31
    assert len(found["texts_scored"]) == 4
    assert all(ours == theirs for ours, theirs in found["greedy"])
    return found


def test_log_likelihoods_are_those_of_its_own_model(tiny: Path, tmp_path: Path) -> None:
    found = compared(tiny, tmp_path)
    for ours, theirs in (*found["choices"], *found["texts_scored"]):
        assert ours == pytest.approx(theirs, abs=1e-4, rel=0)
    for ours, theirs in found["metrics"]["dlw_choice"], found["metrics"]["dlw_perplexity"]:
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_the_default_models_numbers(tmp_path: Path) -> None:
    """In float32 its logits are off by 1e-4 in either program, which adds up over a text."""
    checkpoint = prepare_default_model(model_cache(os.environ), lambda line: None)
    found = compared(checkpoint, tmp_path)
    for ours, theirs in (*found["choices"], *found["texts_scored"]):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert all(ours == theirs for ours, theirs in found["texts_generated"])
    for ours, theirs in found["metrics"].values():
        assert ours == pytest.approx(theirs, rel=1e-4)
