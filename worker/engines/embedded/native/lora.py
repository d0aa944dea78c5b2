"""LoRA adapters as the kernels read them: A and B of each layer in panels, in float32.

The linear layers that read one input have one A, the rows of theirs one below the other, so that a
row meets it in one product. B is multiplied by the adapter's scale, and lies in the panels of the
GEMM whose epilogue adds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from worker.engines.embedded.native.packed import COLUMNS

LANES = 16
"""Columns of a panel of A: ``LANES`` in ``vector.h``."""

INPUTS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Linear layers that read one input, in the order of ``lora_layer_t`` in ``arguments.h``."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The LoRA of a linear layer: it adds ``x @ a.T @ b.T`` to the layer's result.

    Attributes:
        a: ``[r, K]``, float32.
        b: ``[N, r]``, float32, the adapter's scale in it.
    """

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class QkvGemms:
    """GEMMs of a fused QKV projection.

    Attributes:
        columns: Columns of queries, keys and values.
        is_one: Whether one GEMM computes all of them, else each has its own.
    """

    columns: tuple[int, int, int]
    is_one: bool


@dataclass(frozen=True, slots=True)
class _Placed:
    """B of a linear layer within a GEMM.

    Attributes:
        column: First of its columns.
        first: First of its sums among those with the input's A.
        b: ``[r, N]``.
    """

    column: int
    first: int
    b: torch.Tensor

    @property
    def stop(self) -> int:
        """Past the last of its columns."""
        return self.column + self.b.shape[1]


class PackedAdapter:
    """An adapter, packed for `DecoderLayers.compute`.

    Args:
        layers: LoRAs of each layer of the model, by the names in `INPUTS`.
        qkv: GEMMs of the fused QKV projection of each layer.

    Attributes:
        address: Address of its layers, ``lora_layer_t`` in ``arguments.h``.
        width: Elements of a row's sums with A, of the widest input.
        num_layers: Layers of the model that it changes.
        nbytes: Bytes of its panels.
    """

    def __init__(self, layers: Sequence[Mapping[str, LowRank]], qkv: Sequence[QkvGemms]) -> None:
        self._kept: list[torch.Tensor] = []  # whose addresses the table has
        self.width = LANES
        rows = [self._layer(loras, gemms) for loras, gemms in zip(layers, qkv, strict=True)]
        self.num_layers = len(rows)
        self._table = torch.tensor(rows, dtype=torch.int64)
        self.address = self._table.data_ptr()
        self.nbytes = sum(tensor.nbytes for tensor in self._kept)

    def _layer(self, loras: Mapping[str, LowRank], qkv: QkvGemms) -> list[int]:
        inputs: list[int] = []
        gemms: list[int] = []
        for names in INPUTS:
            inputs += self._input([loras[name].a for name in names if name in loras])
            is_fused = len(names) == len(qkv.columns) and qkv.is_one
            placed: dict[str, _Placed] = {}
            column = first = 0
            for index, name in enumerate(names):
                if name in loras:
                    placed[name] = _Placed(column, first, loras[name].b.T)
                    first += len(loras[name].a)
                column += qkv.columns[index] if is_fused else 0
            if is_fused:
                gemms += [self._gemm(list(placed.values()), column), 0, 0]
            else:
                gemms += [self._gemm([placed[name]], placed[name].stop) if name in placed else 0 for name in names]
        return inputs + gemms

    def _input(self, parts: Sequence[torch.Tensor]) -> list[int]:
        """Address and width of the A of the linear layers of one input."""
        if not parts:
            return [0, 0]
        a = torch.cat([*parts])
        a = functional.pad(a, (0, 0, 0, -len(a) % LANES))
        self.width = max(self.width, len(a))
        return [self._keep(a.view(-1, LANES, a.shape[1]).mT), len(a)]

    def _gemm(self, placed: Sequence[_Placed], columns: int) -> int:
        """Address of the ``lora_panel_t`` of a GEMM; 0 if none of its columns has LoRA."""
        if not placed:
            return 0
        table = []
        for column in range(0, columns, COLUMNS):
            found = [each for each in placed if each.column < column + COLUMNS and column < each.stop]
            table.append(self._panel(column, found) if found else [0, 0, 0])
        table.append([0, 0, 0])
        return self._keep(torch.tensor(table, dtype=torch.int64))

    def _panel(self, column: int, placed: Sequence[_Placed]) -> list[int]:
        """B for a panel, whose columns may be of several linear layers; 0 for sums of others."""
        first = placed[0].first
        count = placed[-1].first + len(placed[-1].b) - first
        panel = torch.zeros(count, COLUMNS)
        for each in placed:
            start, stop = max(each.column, column), min(each.stop, column + COLUMNS)
            rows = slice(each.first - first, each.first - first + len(each.b))
            panel[rows, start - column : stop - column] = each.b[:, start - each.column : stop - each.column]
        return [self._keep(panel), first, count]

    def _keep(self, tensor: torch.Tensor) -> int:
        kept = tensor.contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


class AdaptedRows:
    """The adapters of a step's rows, for `DecoderLayers.compute`.

    Args:
        runs: First row, number of rows and adapter of consecutive rows, where they have one.
        count: Rows of the step.

    Attributes:
        adapters: Address of the layers of each row's adapter, int64 ``[T]``; 0 for none.
        rows: Rows that have one, those of one adapter together, int64 ``[n]``.
        width: Elements of a row's sums with A.
        num_layers: Layers of the model that the adapters change.
    """

    def __init__(self, runs: Sequence[tuple[int, int, PackedAdapter]], count: int) -> None:
        self._runs = runs  # keeps the adapters
        addresses = [0] * count
        by_adapter: dict[int, list[int]] = {}
        for first, number, adapter in runs:
            addresses[first : first + number] = [adapter.address] * number
            by_adapter.setdefault(adapter.address, []).extend(range(first, first + number))
        self.adapters = torch.tensor(addresses, dtype=torch.int64)
        self.rows = torch.tensor([row for rows in by_adapter.values() for row in rows], dtype=torch.int64)
        self.width = max(adapter.width for _, _, adapter in runs)
        (self.num_layers,) = {adapter.num_layers for _, _, adapter in runs}
