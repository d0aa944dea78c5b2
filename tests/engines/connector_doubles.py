"""Two workers in one process, on a model that checks the KV it reads: one prefills, one decodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
from kv_doubles import RecallModel, recall_request

from worker.engines.embedded import EmbeddedConfig, Request
from worker.engines.embedded.kv_cache import KvStore
from worker.engines.embedded.plan import Output, Plan
from worker.engines.embedded.step import Stepper, make_stepper
from worker.engines.embedded.transfer.connector import KvConnector
from worker.engines.embedded.transfer.handle import KvHandle, handle_from_json
from worker.engines.embedded.transfer.layout import KvLayout
from worker.engines.embedded.transfer.transport import KvTransport

CONTEXT = 256
BLOCK = 4


class TensorRecallModel(RecallModel):
    """Its store is a tensor, so that another process can read it; the numbers of keys are also
    those of values.
    """

    def allocate_kv(self, num_pages: int, page_size: int) -> None:
        super().allocate_kv(num_pages, page_size)
        self.keys = torch.full((num_pages, 1, page_size, 1), -1, dtype=torch.int64)
        self.values = self.keys.clone()
        self.store = [self.keys[page, 0, :, 0] for page in range(num_pages)]  # type: ignore[misc]

    @property
    def kv_store(self) -> KvStore:
        return KvStore([self.keys], [self.values])

    def forward(self, plan: Plan) -> torch.Tensor:
        logits = super().forward(plan)
        self.values.copy_(self.keys)
        return logits

    def _read(self, one: Request, position: int) -> int:
        return int(super()._read(one, position))


class Side:
    """One worker: its stepper, and what its requests have said."""

    def __init__(
        self, *, lease_s: float | None = None, clock: Callable[[], float] | None = None, **changes: int
    ) -> None:
        settings = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "kv_block_size": BLOCK,
            "max_mixed_chunk": 64,
            "speculative_config": {"method": "none"},
        } | changes
        config = EmbeddedConfig(model_path="unused", device="cpu", context_length=CONTEXT, **settings)  # type: ignore[arg-type]
        self.model = TensorRecallModel(CONTEXT)
        blocks = config.kv_blocks or 8 * CONTEXT // BLOCK
        self.stepper: Stepper = make_stepper(config, self.model, blocks)  # type: ignore[arg-type]
        size = self.model.size
        layout = KvLayout("recall", "int64", 1, 1, 1, BLOCK, size)
        store = self.model.kv_store
        transport = KvTransport(store.tensors, layout)
        timing = {} if clock is None else {"clock": clock}
        self.connector = KvConnector(transport, store, self.stepper.scheduler.transfers, lease_s, **timing)
        self.stepper.connector = self.connector
        self.num_pages = self.stepper.scheduler.cache.num_available
        self.outputs: dict[str, list[Output]] = {}

    def step(self) -> None:
        for output in self.stepper.step():
            self.outputs.setdefault(output.request_id, []).append(output)
        self.stepper.scheduler.check_integrity()

    def tokens(self, name: str) -> list[int]:
        """The answer so far, with the end token, which an output does not show."""
        said = self.outputs.get(name, [])
        shown = [one.token_id if one.stop_reason is None else one.stop_reason for one in said]
        return [token for token in shown if token is not None]

    def finished(self, name: str) -> str | None:
        found = self.outputs.get(name)
        return found[-1].finish_reason if found else None

    def prefill(self, name: str, prompt: Sequence[int]) -> None:
        request = recall_request(self.model, name, prompt, 1)
        request.keeps_kv, request.end_ids = True, frozenset()
        self.stepper.add(request)

    def handle(self, name: str) -> KvHandle:
        """Of a prompt that this side has leased, as it comes out of JSON."""
        kv = self.outputs[name][-1].kv
        assert kv is not None, self.outputs[name]
        return handle_from_json(json.loads(json.dumps(kv)), self.connector.layout, self._length(kv))

    def decode(self, name: str, prompt: Sequence[int], handle: KvHandle, count: int) -> None:
        self.connector.receive(recall_request(self.model, name, prompt, count), handle)

    def abort(self, name: str) -> None:
        output = self.stepper.abort(name)
        if output is not None:
            self.outputs.setdefault(name, []).append(output)

    @property
    def is_empty(self) -> bool:
        """Whether nobody owns a page and nothing is under way."""
        scheduler = self.stepper.scheduler
        return scheduler.is_idle and not scheduler.queues.pinned and scheduler.cache.num_available == self.num_pages

    def close(self) -> None:
        self.connector.close()

    def _length(self, kv: dict[str, object]) -> int:
        pages = kv["pages"]
        assert isinstance(pages, (tuple, list))
        return len(pages) * self.connector.layout.page_size


def run(sides: Sequence[Side], until: Callable[[], bool], limit: int = 20_000) -> None:
    """Step all sides in turn."""
    for _ in range(limit):
        if until():
            return
        for side in sides:
            side.step()
    raise AssertionError(f"still not: {[side.connector for side in sides]}")
