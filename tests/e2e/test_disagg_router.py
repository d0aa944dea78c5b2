"""The KV router sends a prompt to the worker that has its beginning, and usage says how much it
had.
"""

from __future__ import annotations

from e2e_stack import Stack
from kv_router_checks import check_prefixes_stay

ENGINE = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8", "--enable-kv-routing", "true")


def test_prefixes_stay_with_their_worker(stack: Stack) -> None:
    stack.start_frontend("--router-mode", "kv")
    workers = [stack.start_worker(*ENGINE, wait=False) for _ in range(2)]
    for worker in workers:
        stack.wait_registered(worker)
    check_prefixes_stay(stack, 96)
    check_prefixes_stay(stack, 96, nvext={"cache_salt": "of a tenant"})
    for worker in workers:
        assert "block_hash mismatch" not in worker.log
