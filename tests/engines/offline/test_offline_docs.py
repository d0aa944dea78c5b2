"""`docs/controller.md` and `docs/offline.md` say what is there, and the example runs."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from worker.engines.embedded.controller.controller import TextGenerationController
from worker.engines.embedded.offline.request_builder import HONOURED

ROOT = Path(__file__).parents[3]
CONTROLLER = (ROOT / "docs" / "controller.md").read_text().partition("<!-- members -->")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| `(\w+)` \| (same|different|refused) \| (.+) \|$", CONTROLLER, re.MULTILINE)

SEED = [
    "tokenize_prompt",
    "detokenize",
    "detokenize_generations",
    "_torch_sampling_func",
    "sample_from_logits",
    "update_generation_status",
    "pad_input_prompt_tokens",
    "unpad_input_prompt_tokens",
    "generate_all_output_tokens_static_batch",
    "prep_inference_input",
    "stream_tokens",
    "_update_top_n_logprobs_dict",
    "_dynamic_step_sample_bookkeeping",
    "_dynamic_step_sample_logits",
    "_get_required_logit_indices",
    "_sample_speculative_logits",
    "_verify_speculative_tokens",
    "_dynamic_step_sample_logits_and_verify_tokens",
    "_rewind_kv_cache",
    "_compute_serial_mtp_and_sample",
    "_sample_from_logits_2d",
    "_dynamic_step_calculate_log_probs",
    "_dynamic_step_calculate_top_n_logprobs",
    "set_stop_word_finished_ids_callback",
    "_dynamic_step_context_bookkeeping",
    "async_generate_output_tokens_dynamic_batch",
    "generate_output_tokens_dynamic_batch",
    "_dynamic_step_context_init",
    "dummy_forward",
    "_dummy_serial_mtp_forward",
    "_router_record_bookkeeping",
]
"""Members of Megatron-Core's class, version 0.17.1."""


def test_every_member_has_one_row() -> None:
    assert sorted(name for name, _, _ in ROWS) == sorted(SEED)


@pytest.mark.parametrize("name", [one for one in SEED if not one.startswith("_")])
def test_public_members_are_there(name: str) -> None:
    assert inspect.isroutine(getattr(TextGenerationController, name))
    assert inspect.getdoc(getattr(TextGenerationController, name))


def test_rows_name_tests_that_exist() -> None:
    for name, fate, text in ROWS:
        tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
        assert bool(tests) == (fate != "refused"), name
        for file, test in tests:
            (found,) = Path(__file__).parents[1].rglob(file)
            source = found.read_text()
            assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), (name, test)


def test_offline_fields() -> None:
    table = (ROOT / "docs" / "offline.md").read_text().partition("<!-- fields -->")[2]
    rows = re.findall(r"^\| (`.+?) \| .+ \|$", table, re.MULTILINE)
    assert {field for row in rows for field in re.findall(r"`(\w+)`", row)} == HONOURED


EXAMPLE = ROOT / "examples" / "offline.py"
SHOWN = re.findall(r"^\.venv/bin/python examples/offline\.py(.*?)(?: +#.*)?$", EXAMPLE.read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("shown", SHOWN)
def test_the_commands_that_the_example_shows_run(shown: str, checkpoints: dict[str, Path]) -> None:
    given = shlex.split(shown.replace("/models/my-model", str(checkpoints["llama"])))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), *given, "--max-tokens", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_example_runs() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), "--max-tokens", "4", "--stop", "never so"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'Once upon a time'") == 2
    assert re.search(r"^  '[A-Z][a-z]+' \(", done.stdout, re.MULTILINE)
    assert len(re.findall(r"\((?:length|stop), \d tokens, -\d+\.\d\d nats\)", done.stdout)) == 3
