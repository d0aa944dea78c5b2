"""What must hold of the records of a load client, and of the workers once nobody asks any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from e2e_stack import Worker, wait_for
from load_client import Record

from worker.engines.embedded import Engine
from worker.sampling import SamplingParams

Expected = Callable[[Record], list[int]]


class Reference:
    """The tokens of an engine that nothing happens to."""

    def __init__(self, model_path: Path) -> None:
        self._engine = Engine(model_path, device="cpu", dtype="float32", numerics="exact", max_num_seqs=64)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def learn(self, prompts: Iterable[Sequence[int]], num_tokens: int) -> None:
        """Compute the answers to prompts, all at once."""
        keys = list({tuple(prompt): None for prompt in prompts if len(self._of(prompt)) < num_tokens})
        if keys:
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            results = self._engine.generate([list(key) for key in keys], params, progress=False)
            for key, result in zip(keys, results, strict=True):
                self._known[key] = list(result.outputs[0].token_ids)

    def __call__(self, record: Record) -> list[int]:
        """What the request is to be answered with."""
        self.learn([record.prompt], record.num_tokens)
        return self._of(record.prompt)[: record.num_tokens]

    def forget(self) -> None:
        """Let go of what it has computed."""
        self._known.clear()

    def _of(self, prompt: Sequence[int]) -> list[int]:
        return self._known.get(tuple(prompt), [])


def problems(record: Record, expected: Expected, max_gap_s: float | None = None) -> list[str]:
    """What is wrong with an answer that should have been right."""
    after_s = (record.ended_s or time.monotonic()) - record.sent_s
    found = [f"error after {after_s:.2f} s (status {record.status}): {error}" for error in record.errors]
    if record.ended_s is None:
        found.append(f"never ended; {len(record.token_ids)} of {record.num_tokens} tokens came")
    if record.finish_reasons != ["length"]:
        found.append(f"finish reasons {record.finish_reasons}")
    right = expected(record)
    if record.token_ids != right:
        pairs = enumerate(zip(record.token_ids, right, strict=False))
        same = next((i for i, (came, due) in pairs if came != due), None)
        found.append(f"{len(record.token_ids)} tokens for {len(right)}, the first difference at {same}")
    if max_gap_s is not None and record.longest_gap_s > max_gap_s:
        found.append(f"a gap of {record.longest_gap_s:.2f} s")
    usage = record.usage or {}
    counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if counts != (len(record.prompt), record.num_tokens):
        found.append(f"usage says {counts} tokens, for {len(record.prompt)} and {record.num_tokens}")
    return [f"request {record.number}: {problem}" for problem in found]


def check_answers(records: Sequence[Record], expected: Reference, max_gap_s: float | None = None) -> None:
    """Every answer is whole and right, except those that their clients left."""
    stayed = [record for record in records if not record.has_left]
    for num_tokens in sorted({record.num_tokens for record in stayed}):
        expected.learn([record.prompt for record in stayed if record.num_tokens == num_tokens], num_tokens)
    wrong = [problem for record in stayed for problem in problems(record, expected, max_gap_s)]
    assert not wrong, f"{len(wrong)} problems in {len(stayed)} answers: " + "; ".join(wrong[:20])


def check_ended(records: Sequence[Record]) -> None:
    """Every request ended once: with one finish reason, or with an error."""
    wrong = [
        f"request {record.number}: {record.finish_reasons}, {record.errors}"
        for record in records
        if not record.has_left and (record.ended_s is None or len(record.finish_reasons) + bool(record.errors) != 1)
    ]
    assert not wrong, wrong


def all_counted(worker: Worker, timeout_s: float) -> None:
    """Until each request that has come to a worker has ended: one that was cancelled counts a
    moment after it is in flight no more.
    """

    def counts() -> tuple[float, float]:
        begun = worker.metric("dynamo_component_requests_total", dynamo_endpoint="generate")
        return begun, worker.metric("dlw_requests_total")

    try:
        wait_for(lambda: len(set(counts())) == 1, "the end of each request", timeout_s)
    except AssertionError:
        raise AssertionError(f"{worker.log_path}: requests began and ended: {counts()}") from None


def check_settled(workers: Sequence[Worker], timeout_s: float = 60) -> None:
    """Nobody is in flight, no page and no lease is left, and every request that began has ended."""
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        for name in ("dlw_in_flight_requests", "dlw_kv_used_blocks", "dlw_kv_leased_prompts"):
            left = max(1.0, deadline - time.monotonic())
            wait_for(lambda worker=worker, name=name: worker.metric(name) == 0, f"{name} of {worker.log_path}", left)
        all_counted(worker, max(1.0, deadline - time.monotonic()))
        assert worker.metric("dlw_requests_total", outcome="unknown_error") == 0, worker.log
