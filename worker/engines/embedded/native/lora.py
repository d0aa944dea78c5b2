"""LoRA adapters as the kernels read them: A and B of each layer in panels, of float32 or 16 bits.

The linear layers that read one input have one A, the rows of theirs one below the other, so that a
row meets it in one product. B is multiplied by the adapter's scale, and lies in the panels of the
GEMM whose epilogue adds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional

from worker.engines.embedded.host import memory as host_memory
from worker.engines.embedded.native.packed import COLUMNS

_LINE = 64
"""Bytes of a line of a processor's cache."""

LANES = 16
"""Columns of a panel of A: ``LANES`` in ``vector.h``."""

QKV, OUTPUT, MLP, DOWN = range(4)
"""Inputs of the linear layers of a decoder layer: ``QKV_INPUT`` and so on in ``arguments.h``."""

_NUM_GEMMS = (3, 1, 2, 1)
"""GEMMs that may read each input, in the order of ``lora_layer_t``."""


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
class Place:
    """The place of a linear layer of the checkpoint among the GEMMs of a network.

    Attributes:
        layer: Index of the decoder layer.
        input: Input that it reads, `QKV`, `OUTPUT`, `MLP` or `DOWN`.
        column: First of its columns among those of the GEMMs that read this input.
        shape: Shape ``[N, K]`` of its weight.
    """

    layer: int
    input: int
    column: int
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AdaptedLayers:
    """The linear layers of a network that adapters may change.

    Attributes:
        places: Places of them, by their names in the checkpoint.
        gemms: Columns of the GEMMs that read each input, for each decoder layer.
        others: Shapes ``[N, K]`` of all other linear layers by name; None for those of experts.
        transposed: Names of linear layers whose weights the checkpoint holds as ``[K, N]``.
    """

    places: Mapping[str, Place]
    gemms: Sequence[Sequence[Sequence[int]]]
    others: Mapping[str, tuple[int, ...] | None]
    transposed: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        named: Iterable[tuple[str, int, int, tuple[int, int]]],
        gemms: Sequence[Sequence[Sequence[int]]],
        others: Mapping[str, tuple[int, ...] | None],
        transposed: frozenset[str] = frozenset(),
    ) -> AdaptedLayers:
        """Linear layers whose columns follow each other.

        Args:
            named: Name, index of the decoder layer, input and shape of each, in the order of their
                columns.
            gemms: See the class, as `others` and `transposed`.
            others: Shapes of all linear layers, these among them.
            transposed: See the class.
        """
        places: dict[str, Place] = {}
        columns: dict[tuple[int, int], int] = {}
        for name, layer, source, shape in named:
            places[name] = Place(layer, source, columns.get((layer, source), 0), shape)
            columns[layer, source] = places[name].column + shape[0]
        left = {name: shape for name, shape in others.items() if name not in places}
        return cls(places, gemms, left, transposed)


@dataclass(frozen=True, slots=True)
class _Part:
    """B of a linear layer within a GEMM.

    Attributes:
        column: First of its columns; before the GEMM's own, it is negative.
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


@dataclass(frozen=True, slots=True)
class _Placed:
    """A matrix in the block of an adapter.

    Attributes:
        start: Offset of it in bytes.
        type: Index of the data type of its elements in `_TYPES`.
        width: Sums of a row with it, if it is an A.
    """

    start: int
    type: int
    width: int


_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Data types of matrices: ``lora_type_t`` in ``arguments.h``."""

_NONE = _Placed(0, 0, 0)


class _Block:
    """The matrices of an adapter, one after the other in huge pages, since every step reads all."""

    def __init__(self) -> None:
        self._matrices: list[tuple[int, torch.Tensor]] = []  # with the offset of each
        self.nbytes = 0

    def add(self, matrix: torch.Tensor, width: int = 0) -> _Placed:
        """Add a float32 matrix, in 16 bits if that loses nothing: it is half the bytes."""
        exact = [kind for kind in _TYPES[1:] if torch.equal(matrix.to(kind).float(), matrix)]
        start, kept = self.nbytes, matrix.to(exact[0]) if exact else matrix
        self._matrices.append((start, kept))
        self.nbytes += -(-kept.nbytes // _LINE) * _LINE
        return _Placed(start, _TYPES.index(kept.dtype), width)

    def place(self) -> int:
        """Put the matrices in place; returns the address of the first one."""
        (self._bytes,) = host_memory.zeros(1, (self.nbytes,), torch.uint8, torch.device("cpu"))
        for start, matrix in self._matrices:
            self._bytes[start : start + matrix.nbytes].view(matrix.dtype).view(matrix.shape).copy_(matrix)
        self._matrices.clear()
        return self._bytes.data_ptr()


class PackedAdapter:
    """An adapter, packed for `DecoderLayers.compute` and `gemm.linear`.

    Args:
        loras: LoRAs by the linear layers' names.
        layers: The linear layers of the network.

    Attributes:
        address: Address of its layers, ``lora_layer_t`` in ``arguments.h``.
        width: Elements of a row's sums with A, of the widest input.
        num_layers: Layers of the model that it changes.
        nbytes: Bytes of its panels.
    """

    def __init__(self, loras: Mapping[str, LowRank], layers: AdaptedLayers) -> None:
        self._block = _Block()
        self._panels: list[torch.Tensor] = []
        self.width = LANES
        self.num_layers = len(layers.gemms)
        found: dict[tuple[int, int], list[tuple[int, LowRank]]] = {}
        for name, lora in loras.items():
            place = layers.places[name]
            found.setdefault((place.layer, place.input), []).append((place.column, lora))
        for each in found.values():
            each.sort(key=lambda pair: pair[0])
        sources = [(layer, source) for layer in range(self.num_layers) for source in range(len(_NUM_GEMMS))]
        inputs = [self._input([lora.a for _, lora in found.get(each, ())]) for each in sources]
        gemms = [self._gemms(found.get(each, ()), layers.gemms[each[0]][each[1]], each[1]) for each in sources]
        base = self._block.place()
        for panels in self._panels:
            panels[:, 0] += base
        a = torch.tensor([[each.start, each.width, each.type] for each in inputs], dtype=torch.int64)
        a[:, 0] += base
        addresses = torch.tensor([address for each in gemms for address in each], dtype=torch.int64)
        self._table = torch.cat([a.view(self.num_layers, -1), addresses.view(self.num_layers, -1)], dim=1)
        self.address = self._table.data_ptr()
        self.nbytes = self._block.nbytes

    def _input(self, parts: Sequence[torch.Tensor]) -> _Placed:
        """A of the linear layers of one input."""
        if not parts:
            return _NONE
        a = torch.cat([*parts])
        a = functional.pad(a, (0, 0, 0, -len(a) % LANES))
        self.width = max(self.width, len(a))
        return self._block.add(a.view(-1, LANES, a.shape[1]).mT, len(a))

    def _gemms(self, loras: Sequence[tuple[int, LowRank]], columns: Sequence[int], source: int) -> list[int]:
        """Addresses of the ``lora_panel_t`` of the GEMMs of one input, 0 for those without LoRA."""
        ends = accumulate((len(lora.a) for _, lora in loras), initial=0)
        parts = [_Part(column, first, lora.b.T) for (column, lora), first in zip(loras, ends, strict=False)]
        addresses = [0] * _NUM_GEMMS[source]
        start = 0
        for index, count in enumerate(columns):
            own = [_Part(each.column - start, each.first, each.b) for each in parts]
            own = [each for each in own if each.column < count and each.stop > 0]
            if own:
                addresses[index] = self._gemm(own, count)
            start += count
        return addresses

    def _gemm(self, parts: Sequence[_Part], columns: int) -> int:
        table = []
        for column in range(0, columns, COLUMNS):
            found = [each for each in parts if each.column < column + COLUMNS and column < each.stop]
            table.append(self._panel(column, found))
        table.append([0, 0, 0, 0])
        self._panels.append(torch.tensor(table, dtype=torch.int64))
        return self._panels[-1].data_ptr()

    def _panel(self, column: int, parts: Sequence[_Part]) -> list[int]:
        """B for a panel, whose columns may be of several linear layers; 0 for sums of others."""
        if not parts:
            return [0, 0, 0, 0]
        first = parts[0].first
        count = parts[-1].first + len(parts[-1].b) - first
        panel = torch.zeros(count, COLUMNS)
        for each in parts:
            start, stop = max(each.column, column), min(each.stop, column + COLUMNS)
            rows = slice(each.first - first, each.first - first + len(each.b))
            panel[rows, start - column : stop - column] = each.b[:, start - each.column : stop - each.column]
        placed = self._block.add(panel)
        return [placed.start, first, count, placed.type]


class AdaptedRows:
    """The adapters of a step's rows, for `DecoderLayers.compute` and `gemm.linear`.

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

    def those_of(self, rows: torch.Tensor) -> AdaptedRows:
        """The adapters of some rows, int64 ``[n]``, as of a step that has no others."""
        some, numbers = copy(self), torch.full_like(self.adapters, -1)
        numbers[rows] = torch.arange(len(rows))
        some.adapters, some.rows = self.adapters[rows], numbers[self.rows]
        some.rows = some.rows[some.rows >= 0]
        return some
