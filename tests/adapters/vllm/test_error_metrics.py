"""Failures of processors in vLLM's engine are among the metrics of its server, each once."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_stand_in import Params, Request, SecondRunner, alone, served_model

from adapters.vllm import metrics, reports
from adapters.vllm.metrics import ErrorFile, ErrorFiles, error_counter, publish
from adapters.vllm.reports import Failure

ROOT = Path(__file__).resolve().parents[3]
MODEL = served_model(penalises_first=True)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)


def config(instance_id: str = "one", rank: int = 0) -> Any:
    parallel = SimpleNamespace(rank=rank, tensor_parallel_size=2)
    return SimpleNamespace(instance_id=instance_id, parallel_config=parallel)


def failure(processor: str = "acme/raises", reason: str = "raised") -> Failure:
    return Failure("", processor, reason, "it did", 3)


def counted(instance_id: str = "one") -> dict[tuple[str, ...], float]:
    files = ErrorFiles()
    files.instance_ids.add(instance_id)
    (metric,) = files.collect()
    assert metric.name == "dlw_processor_errors"
    return {tuple(each.labels.values()): each.value for each in metric.samples}


def test_the_processes_of_an_engine_are_summed() -> None:
    counters = [ErrorFile(metrics._directory() / f"{name}.json") for name in ("one-1", "one_dp1-2", "other-3")]
    assert counted() == {}
    for counter in counters:
        counter.count(failure())
    counters[0].count(failure("min_tokens, choice", "unsatisfiable"))
    assert counted() == {
        ("acme/raises", "raised"): 2,
        ("min_tokens", "unsatisfiable"): 1,
        ("choice", "unsatisfiable"): 1,
    }


def test_one_of_the_tensor_parallel_processes_counts() -> None:
    counters = [error_counter(config(rank=rank)) for rank in range(4)]
    assert [counter is not None for counter in counters] == [True, False, True, False]


def test_the_server_has_the_counter_once() -> None:
    for instance_id in ("published", "published", "another"):
        publish(config(instance_id))
    counter = error_counter(config("published"))
    assert counter is not None
    counter(failure())
    text = prometheus_client.generate_latest().decode()
    assert text.count('dlw_processor_errors_total{processor="acme/raises",reason="raised"} 1.0') == 1


def test_a_directory_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert error_counter(config()) is None
    assert counted() == {}
    assert list(tmp_path.rglob("*.json")) == []


def test_a_full_disk_ends_no_step(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = error_counter(config())

    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    assert counter is not None
    counter(failure())
    assert "no space left" in caplog.text


COUNTS = """
from types import SimpleNamespace
from adapters.vllm.metrics import error_counter
from adapters.vllm.reports import Failure
parallel = SimpleNamespace(rank=0, tensor_parallel_size=1)
error_counter(SimpleNamespace(instance_id="x", parallel_config=parallel))
counter = error_counter(SimpleNamespace(instance_id="y", parallel_config=parallel))
counter(Failure("", "acme/raises", "raised", "it did", 3))
"""
COLLECTS = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_with_several_servers_the_librarys_files_are_used(tmp_path: Path) -> None:
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run(program: str) -> str:
        ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
        return ended.stdout

    run(COUNTS)
    run(COUNTS)
    assert 'dlw_processor_errors_total{processor="acme/raises",reason="raised"} 2.0' in run(COLLECTS)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8)), min_size=1, max_size=4), st.integers(0, 2**32))
def test_failures_of_tokens_that_are_none_are_not_counted(asked: list[tuple[bool, int]], seed: int) -> None:
    """Drafts before them were rejected, or end the answer; nor does the log say that they fail."""
    selection = {
        fails: json.dumps({"version": 1, "processors": [{"name": name}]})
        for fails, name in ((True, "acme/raises"), (False, "acme/fatigue"))
    }
    requests = [
        Request(
            number,
            Params(
                temperature=0, ignore_eos=True, max_tokens=length, extra_args={"logits_processors": selection[fails]}
            ),
            [5],
        )
        for number, (fails, length) in enumerate(asked)
    ]
    answers = [alone(each.number, each.params, each.prompt, MODEL) for each in requests]
    found: list[Failure] = []
    runner = SecondRunner(MODEL, random.Random(seed), 4, lambda request: answers[request.number].tokens)
    runner.slots._builder._count = found.append  # type: ignore[attr-defined]
    with patch.object(reports.logger, "log") as logged:
        runner.run(requests)
        for slot in runner.slots._slots.values():  # as when other requests take them
            if slot.row is not None:
                slot.row.settle()
    have_failed = [fails and len(each.tokens) > 3 for (fails, _), each in zip(asked, requests, strict=True)]
    assert len(found) == sum(have_failed) == logged.call_count
    assert all(call.args[0] == logging.WARNING for call in logged.call_args_list)
    assert {each.processor for each in found} <= {"acme/raises"}
