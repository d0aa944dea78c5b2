"""Odd files and texts with arguments of TensorRT-LLM: each is read, or refused in one line that
names its source; none ends the worker with a traceback.
"""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from trtllm_files import configured

from worker.engines.trtllm.llm_options import NEEDED
from worker.errors import ConfigurationError

NAMES = [*NEEDED, "max_batch_size", "max_num_tokens", "kv_cache_config", "tensor_parallel_size", "cuda_graph_config"]
INNER = ["free_gpu_memory_fraction", "tokens_per_block", "decoding_type", "max_draft_len", "enable_block_reuse"]
DATA = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    | st.dates()
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)
BOMB = "kv_cache_config:\n  a0: &a0 [x]\n" + "".join(
    f"  a{each}: &a{each} [{', '.join([f'*a{each - 1}'] * 9)}]\n" for each in range(1, 30)
)


def is_data(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(is_data, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, datetime.date | bytes | float) or (isinstance(value, float) and math.isfinite(value))


@given(values=st.dictionaries(st.sampled_from(NAMES), DATA, max_size=3))
@settings(max_examples=examples(150), deadline=None)
def test_any_file_is_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, values: Any) -> None:
    directory = tmp_path_factory.mktemp("odd")
    config, problem = None, ""
    try:
        config = configured(directory, yaml.safe_dump(values))
    except ConfigurationError as error:
        problem = str(error)
    if config is None:
        assert problem.startswith(f"--extra-engine-args {directory}")
        assert "\n" not in problem
        return
    assert is_data(values)
    assert config.max_num_seqs is None or config.max_num_seqs == int(values["max_batch_size"]) >= 1


ODD: list[tuple[str, str]] = [
    ("max_batch_size: 2026-11-28", "max_batch_size: must be JSON data, got a date, 2026-11-28; text goes in quotes"),
    ("max_batch_size: 2026-02-31", "day is out of range"),
    ("max_batch_size: .inf", "max_batch_size: must be a finite number, got inf"),
    ("max_batch_size: -1", "max_batch_size: must be an integer of at least 1, got -1"),
    ("max_batch_size: 8.5", "max_batch_size: must be an integer of at least 1, got 8.5"),
    ("max_batch_size: true", "max_batch_size: must be an integer of at least 1, got True"),
    ("kv_cache_config: {a: [.nan]}", r"kv_cache_config\.a\[0\]: must be a finite number, got nan"),
    ("kv_cache_config: [1]", r"kv_cache_config: must be a mapping, got \[1\]"),
    ("kv_cache_config: &a\n  x: *a", "is nested more than 32 deep, or holds itself"),
    ("a: " + "[" * 5000 + "]" * 5000, "is nested too deep"),
    ("max_batch_size: !!binary aGk=", "max_batch_size: must be JSON data, got a bytes"),
    ("- max_batch_size", "must be a mapping of option names to values"),
    ("max_batch_size: 3\n---\nmax_batch_size: 4", "expected a single document"),
    ("max_batch_size: 3\x00", "special characters are not allowed"),
]


@pytest.mark.parametrize(("text", "problem"), ODD, ids=range(len(ODD)))
def test_odd_files(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        configured(tmp_path, text)


def test_aliases_are_looked_at_once(tmp_path: Path) -> None:
    assert "a29" in configured(tmp_path, BOMB).options["kv_cache_config"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"max_batch_size": 1, "max_batch_size": 2}', 'the key "max_batch_size" occurs twice'),
        ('{"kv_cache_config": {"free_gpu_memory_fraction": NaN}}', "NaN is not JSON"),
        ('{"max_batch_size": 1e999}', "1e999"),
        ("[1]", "must be a JSON object"),
        (json.dumps({"max_batch_size": "x"}), "max_batch_size: must be an integer of at least 1, got 'x'"),
    ],
)
def test_odd_texts(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as caught:
        configured(tmp_path, "", "--override-engine-args", text)
    assert str(caught.value).startswith("--override-engine-args: ")
