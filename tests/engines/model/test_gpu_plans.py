"""Decisions about a GPU that need none, and no Triton."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import decoder_shapes
import pytest
import torch
from safetensors.torch import load_file

from worker.engines import embedded
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.kv_cache import SequenceSlice
from worker.engines.embedded.model import load_model, loading, transformers_checkpoint
from worker.engines.embedded.model.batch_packing import Batch

ROOMS = (
    "worker.engines.embedded.cuda",
    "worker.engines.embedded.model.cuda_graphs",
    "worker.engines.embedded.attention.triton_backend",
)
"""Modules that import Triton."""


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets kernels be imported, which are not called, where Triton is not installed."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    package: Any = ModuleType("triton")
    language: Any = ModuleType("triton.language")
    package.language = language
    package.jit = language.constexpr = lambda given: given
    package.cdiv = lambda number, size: -(-number // size)
    package.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    monkeypatch.setitem(sys.modules, "triton", package)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    yield
    for name in [name for name in sys.modules if name.startswith(ROOMS)]:
        del sys.modules[name]
    del embedded.cuda


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("kib", [99, 163, 227], ids=["8.6, 8.9 and 12.0", "8.0", "9.0 and 10.0"])
def test_tiles_fit_into_the_shared_memory_of_every_gpu(kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fewer stages or rows, of which the bits tell nothing; where there is room, as measured."""
    gemm = importlib.import_module("worker.engines.embedded.cuda.gemm")
    attention = importlib.import_module("worker.engines.embedded.cuda.attention")
    for room in (gemm, attention):
        monkeypatch.setattr(room, "shared_bytes", lambda device: kib * 1024)
    for rows, columns, dtype in product((1, 65, 257), (64, 2048, 3072, 9000), (torch.bfloat16, torch.float32)):
        tile = gemm._tile(rows, columns, dtype)
        fitting = gemm._fitting(tile, dtype, torch.device("cuda"))
        of_stage = (tile["BLOCK_M"] + tile["BLOCK_N"]) * tile["BLOCK_K"] * dtype.itemsize
        assert fitting["num_stages"] * of_stage <= kib * 1024
        assert fitting == tile | {"num_stages": fitting["num_stages"]}
        assert fitting == tile or kib == 99
    for width, dtype in ((64, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16), (128, torch.float32)):
        for heads, kv_heads in ((32, 8), (8, 8), (14, 2)):
            query = torch.empty(1, heads, width, dtype=dtype, device="meta")
            rows = attention.tile_tokens(query, kv_heads) * (heads // kv_heads)
            most = 16 if dtype == torch.float32 else 32 if (kib, width) == (99, 256) else 64
            assert most - heads // kv_heads < rows <= most
            assert attention.split_bytes(width, dtype) + most * (width + 128) * dtype.itemsize <= kib * 1024


@pytest.mark.usefixtures("triton")
def test_graphs_that_are_given_up_keep_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without them need it: where a graph finds too little, those captured before go."""
    graphs = importlib.import_module("worker.engines.embedded.model.cuda_graphs")
    made: list[weakref.ref[Any]] = []

    class Graph:
        def __init__(self, rows: int, *_: object) -> None:
            if rows > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            made.append(weakref.ref(self))

        def replay(self, batch: Batch) -> str:
            return f"{len(batch.ids)} rows"

    monkeypatch.setattr(graphs, "_Graph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    found = graphs.DecodeGraphs(None, None)

    def batch(rows: int) -> Batch:
        return Batch([1] * rows, [0] * rows, [0] * rows, [0] * rows, [SequenceSlice([0], 0, 1)] * rows)

    assert found.compute(batch(1)) == "1 rows"
    assert found.compute(batch(2)) == "2 rows"
    assert found.compute(batch(3)) is None
    assert len(made) == 2
    assert all(each() is None for each in made)
    assert found.compute(batch(1)) is None


def test_other_weights_are_tried_on_the_models_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels, which are told no device, compute while a network of modules is made."""
    decoder_shapes.write(tmp_path, "gpt2", 0)
    config = EmbeddedConfig(model_path=tmp_path, device="cpu", kernels="torch")
    model, packed = load_model(config), transformers_checkpoint.packed
    current: list[torch.device] = []
    found: list[list[torch.device]] = []

    @contextmanager
    def launching_on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def packed_there(*given: Any) -> Any:
        found.append(list(current))
        return packed(*given)

    monkeypatch.setattr(loading, "launching_on", launching_on)
    monkeypatch.setattr(transformers_checkpoint, "packed", packed_there)
    loading.network_of(config, model, load_file(tmp_path / "model.safetensors"))
    assert found == [[model.device]]
