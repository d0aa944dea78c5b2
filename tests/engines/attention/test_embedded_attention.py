from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines.embedded import native
from worker.engines.embedded.attention import AttentionBackend, NativeAttention, TorchAttention
from worker.engines.embedded.attention.online_softmax import CallShapes, TorchKernel
from worker.engines.embedded.kv_cache import CodeRows, KvStore, SequenceSlice, row_shape
from worker.engines.embedded.plan import PageCopy

NATIVE_DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if native.unavailable(dtype) is None]


@dataclass(frozen=True)
class Row:
    """Tokens of a sequence: those in front of `start` have been stored by earlier steps."""

    start: int
    stop: int
    shared: int  # pages that it shares with the other rows, as far as they are full and before `start`


@dataclass(frozen=True)
class Scene:
    size: int
    kv_heads: int
    group: int
    width: int
    window: int
    softcap: float | None
    rows: list[Row]
    dtype: torch.dtype
    backend: AttentionBackend
    codes: torch.dtype | None  # of rows in the store; None for elements
    seed: int


@st.composite
def with_torch(draw: st.DrawFn) -> tuple[torch.dtype, AttentionBackend]:
    shapes = CallShapes(
        draw(st.sampled_from([None, *TorchKernel])),
        draw(st.sampled_from([None, 1, 5])),
        draw(st.booleans()),
        draw(st.sampled_from([1, 8])),
    )
    return torch.float32, TorchAttention(shapes)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    size = draw(st.sampled_from([4, 32, 48]))
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 4 * size))
        count = draw(st.one_of(st.just(1), st.integers(1, 2 * size)))
        rows.append(Row(start, start + count, draw(st.integers(0, start // size))))
    dtype, backend = draw(st.one_of(with_torch(), *(st.just((each, NativeAttention())) for each in NATIVE_DTYPES)))
    return Scene(
        size,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([16, 40])),
        draw(st.sampled_from([0, 1, 5, size, 3 * size])),
        draw(st.sampled_from([None, None, 2.0])),
        rows,
        dtype,
        backend,
        draw(st.sampled_from([None, torch.int8] + [torch.int16] * (dtype == torch.float32))),
        draw(st.integers(0, 2**32 - 1)),
    )


class Stage:
    """A KV store in which the rows of a scene lie scattered, and a reference for them."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.source = random.Random(scene.seed)
        self.generator = torch.Generator().manual_seed(scene.seed)
        heads, size = scene.kv_heads, scene.size
        needed = sum(-(-row.stop // size) for row in scene.rows) + 6
        self.code_rows = CodeRows(scene.width, scene.dtype, scene.codes) if scene.codes is not None else None
        width, dtype = row_shape(scene.width, scene.dtype, self.code_rows)
        self.store = KvStore(  # type: ignore[call-arg]
            *([torch.zeros(needed, heads, size, width, dtype=dtype)] for _ in range(2)),
            self.code_rows,  # type: ignore[arg-type]
        )
        free = list(range(needed))
        if self.source.random() < 0.5:
            self.source.shuffle(free)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.sequences: list[SequenceSlice] = []
        prefix = self.randn(5 * size, 2, heads)
        common = [free.pop(0) for _ in range(5)]
        for row in scene.rows:
            own = self.randn(row.stop, 2, heads)
            own[: row.shared * size] = prefix[: row.shared * size]
            count = -(-row.stop // size)
            pages = common[: row.shared] + [free.pop(0) for _ in range(count - row.shared)]
            for position in range(row.start):
                slot = pages[position // size], slice(None), position % size
                self.store.keys[0][slot], self.store.values[0][slot] = self.rows(own[position])
            self.keys.append(own[:, 0])
            self.values.append(own[:, 1])
            self.sequences.append(SequenceSlice(pages, row.start, row.stop))
        self.query = self.randn(sum(row.stop - row.start for row in scene.rows), heads * scene.group)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, self.scene.width, generator=self.generator).to(self.scene.dtype)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """As they lie in the store."""
        return x if self.code_rows is None else self.code_rows.quantise(x)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """What is read there."""
        return x if self.code_rows is None else self.code_rows.dequantise(self.rows(x))

    def attend(self) -> torch.Tensor:
        scene = self.scene
        slots = [
            (sequence.page_table[position // scene.size], position % scene.size)
            for sequence in self.sequences
            for position in range(sequence.start, sequence.stop)
        ]
        step = scene.backend.plan(self.store, self.sequences, torch.tensor(slots).T)
        new = (
            torch.cat([each[row.start : row.stop] for each, row in zip(kind, scene.rows, strict=True)])
            for kind in (self.keys, self.values)
        )
        return step.attend(0, self.query, *new, 0.25, scene.window, scene.softcap)  # type: ignore[arg-type, call-arg]

    def reference(self) -> torch.Tensor:
        """Token by token, over all its keys, in float64."""
        results = []
        query = iter(self.query.double())
        for row, *own in zip(self.scene.rows, self.keys, self.values, strict=True):
            keys, values = map(self.stored, own)
            for position in range(row.start, row.stop):
                first = max(0, position - self.scene.window + 1) if self.scene.window else 0
                seen = slice(first, position + 1)
                by_head = next(query).view(self.scene.kv_heads, self.scene.group, self.scene.width)
                scores = torch.einsum("hgd,thd->hgt", by_head, keys[seen].double()) * 0.25
                if self.scene.softcap is not None:
                    scores = self.scene.softcap * torch.tanh(scores / self.scene.softcap)
                results.append(torch.einsum("hgt,thd->hgd", scores.softmax(-1), values[seen].double()).flatten(0, 1))
        return torch.stack(results)


@settings(max_examples=examples(150), deadline=None)
@given(scene=scenes())
def test_attention_over_scattered_pages_is_attention(scene: Scene) -> None:
    stage = Stage(scene)
    tolerance = 2e-6 if scene.dtype == torch.float32 else 2e-2
    if scene.codes == torch.int16 and isinstance(scene.backend, NativeAttention):
        tolerance = 1e-2  # queries and weights of values are rounded, too
    torch.testing.assert_close(stage.attend().double(), stage.reference(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [2, 32])
def test_densely_stored_rows_need_one_attention_call(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(torch.ops.aten, name)

        def _scaled_dot_product_flash_attention_for_cpu(self, *arguments: object, **named: object) -> object:
            counted.append(1)
            return flash(*arguments, **named)

    size = 32
    store = KvStore(*([torch.zeros(3 * rows, 1, size, 16)] for _ in range(2)))  # type: ignore[arg-type]
    sequences = [
        SequenceSlice([3 * row, 3 * row + 1, 3 * row + 2], 70 + row % 20, 71 + row % 20) for row in range(rows)
    ]
    slot_mapping = torch.tensor(
        [[sequence.page_table[2] for sequence in sequences], [sequence.start - 64 for sequence in sequences]]
    )
    monkeypatch.setattr("worker.engines.embedded.attention.online_softmax._ATEN", Counting())
    step = TorchAttention(CallShapes(TorchKernel.FLASH)).plan(store, sequences, slot_mapping)
    new = torch.ones(rows, 1, 16)
    step.attend(0, new, new, new, 1.0, 0)
    assert len(counted) == 1


def test_a_copied_or_opened_page_is_finite_behind_what_it_holds() -> None:
    store = KvStore(*([torch.full((3, 1, 4, 2), torch.nan)] for _ in range(2)))  # type: ignore[arg-type]
    for tensor in (store.keys[0], store.values[0]):
        tensor[0, :, :3] = 1.0
    store.copy([PageCopy(source=0, target=1, num_tokens=3)])
    store.begin([2])
    for tensor in (store.keys[0], store.values[0]):
        assert tensor[1, 0].tolist() == [[1.0, 1.0]] * 3 + [[0.0, 0.0]]
        assert tensor[2].abs().sum() == 0
