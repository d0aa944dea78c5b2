"""An attention backend is one class, and one entry in `model.kernels`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_checkpoints import TYPES, write

from worker.engines.embedded.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionSizes,
    AttentionStep,
    RopeTables,
    TorchAttention,
)
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.kv_cache.store import KvStore, SequenceSlice
from worker.engines.embedded.model import kernels, load_model
from worker.engines.embedded.model.numerics import choose
from worker.engines.embedded.plan import Chunk, Plan, Request
from worker.errors import StartupError
from worker.sampling import SamplingParams

PAGE = 32
SIZES = AttentionSizes(2, 1, 8, None, PAGE, torch.float32, torch.device("cpu"))

pytestmark = pytest.mark.usefixtures("one_thread")


class PlainStep(AttentionStep):
    """Attention as in a textbook: token by token and head by head."""

    def _attend(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = self._store.keys[layer], self._store.values[layer]
        size = keys.shape[2]
        group = query.shape[1] // keys.shape[1]
        attended = torch.zeros_like(query)
        token = 0
        for sequence in self._sequences:
            for position in range(sequence.start, sequence.stop):
                seen = range(max(0, position - window + 1) if window else 0, position + 1)
                for head in range(query.shape[1]):
                    slots = [(sequence.page_table[each // size], head // group, each % size) for each in seen]
                    scores = torch.stack([keys[slot] @ query[token, head] for slot in slots]) * scale
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    weights = scores.softmax(0)
                    attended[token, head] = sum(w * values[slot] for w, slot in zip(weights, slots, strict=True))
                token += 1
        return attended

    def attend_qkv(self, layer: AttentionLayer, qkv: torch.Tensor, rope: RopeTables) -> torch.Tensor:
        query, key, value = qkv.split((layer.heads, layer.kv_heads, layer.kv_heads), 1)
        if layer.head_norms is not None:
            query_norm, key_norm, epsilon = layer.head_norms
            query, key = (
                x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight
                for x, weight in ((query, query_norm), (key, key_norm))
            )

        def rotate(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, -1)
            return x * rope.cosine[:, None] + torch.cat((-second, first), -1) * rope.sine[:, None]

        return self.attend(layer.index, rotate(query), rotate(key), value, layer.scale, layer.window)


class PlainAttention:
    kernels = "plain"
    is_batch_invariant = False
    wants_dense_pages = False
    reads_behind = True

    @classmethod
    def supports(cls, sizes: AttentionSizes) -> bool:
        return sizes.head_dim <= 16

    def candidates(self, sizes: AttentionSizes, may_cost: bool) -> Iterator[AttentionBackend]:
        return iter((self,) if may_cost else ())

    def plan(self, store: KvStore, sequences: Sequence[SequenceSlice], slot_mapping: torch.Tensor) -> PlainStep:
        return PlainStep(store, sequences, slot_mapping)


class BatchDependentAttention(PlainAttention):
    """Its results depend on the number of rows of a step."""

    def plan(self, store: KvStore, sequences: Sequence[SequenceSlice], slot_mapping: torch.Tensor) -> PlainStep:
        class Step(PlainStep):
            def attend(self, *arguments: Any, **named: Any) -> torch.Tensor:
                return super().attend(*arguments, **named) * (1 + len(self._sequences) * 2**-20)

        return Step(store, sequences, slot_mapping)


@pytest.mark.parametrize(("model_type", "changes"), [("llama", {}), ("qwen3", {}), ("gemma2", TYPES["gemma2"])])
def test_a_third_backend_serves_models(
    model_type: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernels, "TORCH", replace(kernels.TORCH, attentions=(PlainAttention, *kernels.TORCH.attentions))
    )
    network = write(tmp_path, model_type, changes)
    prompts = [torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(length)) for length in (45, 9)]
    with torch.inference_mode():
        expected = [network(prompt[None]).logits[0] for prompt in prompts]

    model = load_model(EmbeddedConfig(model_path=tmp_path, device="cpu", kernels="torch"))
    model.allocate_kv(4, PAGE)
    requests = [
        Request("", 0, SamplingParams(), prompt.tolist(), len(prompt), 999, frozenset(), 0, pages=pages)
        for prompt, pages in zip(prompts, ([3, 0], [2]), strict=True)
    ]
    # a prompt in two chunks, beside one in a single chunk, and then both decode their last token
    model.forward(Plan((), (Chunk(requests[0], 0, 20),), ()))
    chunks = (Chunk(requests[0], 20, 44), Chunk(requests[1], 0, 8))
    model.forward(Plan((), chunks, ()))
    logits = model.forward(Plan(tuple(requests), (), tuple(requests)))
    assert (model.wants_dense_kv, model.numerics) == (False, "fast")
    torch.testing.assert_close(logits, torch.stack([each[-1] for each in expected]), atol=2e-4, rtol=2e-4)


def test_a_backend_that_does_not_support_the_sizes_is_skipped() -> None:
    backend = replace(kernels.TORCH, attentions=(PlainAttention, *kernels.TORCH.attentions))
    assert backend.attention(SIZES).kernels == "plain"
    assert backend.attention(replace(SIZES, head_dim=32)).kernels == "torch"


def test_a_backend_is_exact_by_construction_or_by_trial() -> None:
    class ByConstruction(PlainAttention):
        is_batch_invariant = True

    assert choose("auto", [], ByConstruction(), SIZES).made_by == "exact, plain kernels"
    assert choose("auto", [], PlainAttention(), SIZES).made_by == "fast"
    assert choose("exact", [], PlainAttention(), SIZES).made_by == "exact, plain kernels"
    with pytest.raises(StartupError, match=r"--numerics exact: attention in torch\.float32 depend"):
        choose("exact", [], BatchDependentAttention(), SIZES)


@pytest.mark.parametrize("page_size", [2, 3, 4, 5])
def test_a_trial_fits_into_pages_of_a_few_tokens(page_size: int) -> None:
    """Which a context of a few tokens has."""
    sizes = replace(SIZES, page_size=page_size, has_windows=True)
    assert choose("exact", [], PlainAttention(), sizes).made_by == "exact, plain kernels"
    assert choose("exact", [], TorchAttention(), sizes).name == "exact"
