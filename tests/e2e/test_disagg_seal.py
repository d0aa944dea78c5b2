"""Whoever reaches a worker's port: what a decode worker makes of KV transfers that no frontend
brings.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_stack import Stack, Worker, running_stack, wait_for
from endpoints import NUM_TOKENS, Endpoint, tokens, transferred
from stopped_processes import connections

from adapters.catalog import Selection
from worker.disaggregation.seal import Seal
from worker.engines.embedded import Engine
from worker.engines.embedded.transfer import params
from worker.sampling import SamplingParams

COMMON = ("--device", "cpu", "--dtype", "float32", "--numerics", "exact", "--max-num-seqs", "4")


class Pair:
    """A prefill and a decode worker, and their endpoints."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.prefill, self.decode = (self._start(role) for role in ("prefill", "decode"))
        self.to_prefill, self.to_decode = Endpoint(stack, "dynamo.prefill"), Endpoint(stack, "dynamo.backend")

    def _start(self, role: str, *arguments: str, **environ: str) -> Worker:
        mode = ("--disaggregation-mode", role)
        worker = self.stack.start_worker(*COMMON, *mode, *arguments, wait=False, UCX_TLS="tcp", **environ)  # type: ignore[arg-type]
        self.stack.wait_endpoint(worker)
        return worker

    @contextlib.contextmanager
    def stranger(self) -> Iterator[tuple[Worker, Endpoint]]:
        """A prefill worker that is not of this pool."""
        worker = self._start(
            "prefill", "--namespace", "elsewhere", DLW_POOL_SECRET="a secret of some other pool, far away"
        )
        endpoint = Endpoint(self.stack, "elsewhere.prefill")
        try:
            yield worker, endpoint
        finally:
            endpoint.end()
            worker.end()

    def outcomes(self) -> tuple[float, float, float]:
        """Prompts whose KV the decode worker read, had, and lost, so far."""
        received, cached, lost = (
            self.decode.metric("dlw_kv_transfers_total", outcome=name) for name in ("received", "cached", "lost")
        )
        return received, cached, lost

    def local(self, reason: str) -> float:
        return self.decode.metric("dlw_local_prefills_total", reason=reason)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Pair]:
    with running_stack(tmp_path_factory.mktemp("seal"), tiny_model) as stack:
        pair = Pair(stack)
        try:
            yield pair
        finally:
            pair.to_prefill.end()
            pair.to_decode.end()


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Engine:
    return Engine(tiny_model, device="cpu", dtype="float32", numerics="exact")


def prompt_of(number: int, length: int = 70) -> list[int]:
    return random.Random(number).choices(range(300, 900), k=length)


def answer_of(engine: Engine, prompt: list[int]) -> list[int]:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    return list(engine.generate([prompt], params, progress=False)[0].outputs[0].token_ids)


def test_a_kv_transfer_is_accepted_again_for_its_own_request(pair: Pair, expected: Engine) -> None:
    prompt = prompt_of(1)
    before = pair.outcomes()
    given = transferred(pair.to_prefill, prompt)
    for _ in range(2):
        answer = pair.to_decode.ask(prompt, prefill_result={"disaggregated_params": given})
        assert tokens(answer) == answer_of(expected, prompt)
        wait_for(lambda: pair.prefill.metric("dlw_kv_leased_prompts") == 0, "that nothing is leased")

    received, cached, lost = before
    wait_for(lambda: pair.outcomes() == (received + 1, cached + 1, lost), "one read and one prefix hit")


def test_a_prompt_without_a_kv_transfer_is_computed_bit_for_bit(pair: Pair, expected: Engine) -> None:
    prompt = prompt_of(2)
    before = pair.local("missing")
    select = {"version": 1, "receipt": True, "processors": [{"name": "min_tokens", "args": {"n": 2}}]}
    answer = pair.to_decode.ask(prompt, annotations=["logits_processors:" + json.dumps(select)])
    assert tokens(answer) == answer_of(expected, prompt)
    assert pair.local("missing") == before + 1
    receipts = [chunk["engine_data"]["logits_processors"] for chunk in answer["chunks"] if chunk.get("engine_data")]
    assert {receipt["mode"] for receipt in receipts} == {"local prefill"}


def are_connected(one: Worker, other: Worker) -> bool:
    """Over TCP, the only way that these workers have."""
    addresses = {(local, remote) for local, remote, _ in connections(one)}
    return any((remote, local) in addresses for local, remote, _ in connections(other))


def test_nobody_makes_a_decode_worker_connect(pair: Pair, expected: Engine) -> None:
    """A stranger with a worker of its own: the same model, another secret."""
    prompt = prompt_of(3)
    with pair.stranger() as (stranger, to_stranger):
        theirs = transferred(to_stranger, prompt)
        ours = transferred(pair.to_prefill, prompt)
        for given in (theirs, ours | {"body": theirs["body"]}, ours | {"mac": theirs["mac"]}):
            refused = pair.to_decode.ask(prompt, prefill_result={"disaggregated_params": given})
            assert "is not of this pool" in refused["error"], refused
        assert not are_connected(pair.decode, stranger)
        # and this is what would have been seen: with a seal of its pool decode goes there
        sealed = Seal(pair.stack.environ["DLW_POOL_SECRET"]).close(json.loads(theirs["body"]), 30.0)
        answer = pair.to_decode.ask(prompt, prefill_result={"disaggregated_params": sealed})
        assert tokens(answer) == answer_of(expected, prompt)
        assert are_connected(pair.decode, stranger)
    assert "refused: prefill_result.disaggregated_params.mac" in pair.decode.log
    assert pair.stack.environ["DLW_POOL_SECRET"] not in pair.decode.log + pair.prefill.log


def test_an_unsigned_kv_transfer_is_refused(pair: Pair) -> None:
    prompt = prompt_of(4)
    unsigned = params.write(prompt, Selection(), {}, 0)
    answer = pair.to_decode.ask(prompt, prefill_result={"disaggregated_params": unsigned})
    assert "must be of format dynamo-logits-worker/sealed" in answer["error"]


def test_a_worker_without_a_secret_does_not_start(stack: Stack) -> None:
    for role in ("prefill", "decode"):
        worker = stack.start_worker(*COMMON, "--disaggregation-mode", role, wait=False, DLW_POOL_SECRET="")
        assert worker.wait() == 2
        assert (
            f"worker: error: --disaggregation-mode {role} needs DLW_POOL_SECRET or DLW_POOL_SECRET_FILE" in worker.log
        )
