"""Linear layers on packed weights, in numbers of rows that keep them batch-invariant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from worker.engines.embedded.model.gemm import GemmBackend, NativeGemm, TorchGemm
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.panels import Lookup, Panels, lookup
from worker.engines.embedded.model.quantisation import (
    PackedQuantised,
    Quantised,
    QuantisedGemm,
    QuantisedWeight,
    concatenated,
)
from worker.engines.embedded.native import Gemm, PackedWeight


class LayerShape(NamedTuple):
    """Properties of a `Linear` that its tiling depends on; attributes as there."""

    out_features: int
    in_features: int
    gemm: type[GemmBackend]
    is_unrounded: bool = False
    activation: str | None = None


@dataclass(frozen=True, slots=True)
class GemmTiling:
    """Numbers of rows that a GEMM is called with: multiples of `step` up to `most`, and `blocks`.

    A GEMM kernel chooses its order of summation by the number of rows. So a layer whose kernel is
    not batch-invariant by construction is called with few different numbers, which are tried at
    start: rows are padded to a multiple of `step` and split into tiles of at most `most`.

    Attributes:
        step: What numbers of rows are padded to a multiple of.
        most: Rows of a tile at most; None for any number.
        blocks: Further numbers, multiples of `step` above `most`, largest first. Long prompts are
            computed faster in them.
    """

    step: int = 1
    most: int | None = None
    blocks: tuple[int, ...] = ()

    def fits(self, rows: int) -> bool:
        """Whether a GEMM of `rows` rows needs neither padding nor splitting."""
        return rows in self.blocks or (rows % self.step == 0 and (self.most is None or rows <= self.most))

    def split(self, rows: int) -> Iterator[slice]:
        """`rows` rows, a multiple of `step`, in slices that fit."""
        start = 0
        while start < rows:
            left = rows - start
            count = next((block for block in self.blocks if block <= left), min(left, self.most or left))
            yield slice(start, start + count)
            start += count


NUM_TRIAL_ROWS = 128


@dataclass(frozen=True, slots=True)
class Projection:
    """What a linear layer multiplies by and adds.

    Attributes:
        weight: ``[N, K]``, of one layer or of several, one below the other.
        bias: ``[N]`` or None.
    """

    weight: torch.Tensor | PackedWeight | Quantised
    bias: torch.Tensor | None

    @classmethod
    def of(cls, *layers: torch.nn.Linear) -> Projection:
        """Of transformers' `layers`, whose results are concatenated.

        Raises:
            ValueError: some of them have a bias and others have none.
        """
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        if biases and len(biases) != len(layers):
            raise ValueError("all layers must have a bias, or none")
        return cls(_stacked([layer.weight for layer in layers]), torch.cat(biases) if biases else None)


class Linear(torch.nn.Module):
    """``x @ weight.T + bias`` for rows ``[n, K]``; after `pack` it keeps only the packed weight.

    Args:
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        is_unrounded: Whether results are the float32 sums, not rounded to the rows' data type.
        is_quantisable: Whether `pack` may round the weight to fewer bits.
        activation: What `activated` computes, one of `native.ACTIVATIONS`.

    Attributes:
        activation: The same.
    """

    def __init__(
        self,
        weight: torch.Tensor | PackedWeight | Quantised,
        bias: torch.Tensor | None = None,
        is_unrounded: bool = False,
        is_quantisable: bool = True,
        activation: str | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.activation = activation
        self.tiling = GemmTiling()
        self.num_bytes = weight.nbytes
        self._weight: torch.Tensor | PackedWeight | Quantised | None
        self._weight = weight.detach() if isinstance(weight, torch.Tensor) else weight
        self._bias = bias.detach() if bias is not None else None
        self._is_unrounded = is_unrounded
        self._is_quantisable = is_quantisable
        self._sample: torch.Tensor | None = None  # the first columns' weights, for the trial of tilings
        self._gemm: GemmBackend
        if isinstance(weight, torch.Tensor):
            self._dtype = weight.dtype
            self._gemm = TorchGemm(weight.detach(), self._bias)

    @classmethod
    def of(cls, projection: Projection, is_unrounded: bool = False, activation: str | None = None) -> Linear:
        """Of a projection."""
        return cls(projection.weight, projection.bias, is_unrounded, activation=activation)

    def pack(self, kernels: KernelBackend) -> None:
        """Choose the GEMM backend, which packs the weight; once."""
        if self._weight is None:
            raise RuntimeError("the layer is packed already")
        weight = self._weight
        if isinstance(weight, torch.Tensor) and kernels.quantisation is not None and self._is_quantisable:
            weight = kernels.quantised(weight, self._is_unrounded)
            self.num_bytes = weight.nbytes
        self._gemm = kernels.gemm(weight, self._bias, self._is_unrounded)
        if isinstance(weight, torch.Tensor) and not self._gemm.is_batch_invariant and weight.device.type == "cpu":
            self._sample = weight[:NUM_TRIAL_ROWS].clone()
        self._weight = None

    def layouts(self) -> Iterator[Panels]:
        """Layouts that the packed weight may have."""
        return self._gemm.layouts()

    @property
    def quantised(self) -> QuantisedGemm | None:
        """The GEMM backend, if the weight is quantised."""
        return self._gemm if isinstance(self._gemm, QuantisedGemm) else None

    @property
    def packed(self) -> Projection | None:
        """The packed weight, if the native kernels read it, and the bias."""
        gemm = self._gemm
        return Projection(gemm.packed, self._bias) if isinstance(gemm, (NativeGemm, QuantisedGemm)) else None

    @property
    def is_packed(self) -> bool:
        """Whether the weight is held in another layout, so that the one given can be freed."""
        return self._gemm.is_packed

    @property
    def is_batch_invariant(self) -> bool:
        """Whether it is batch-invariant without a tiling."""
        return self._gemm.is_batch_invariant

    @property
    def shape(self) -> LayerShape:
        """Layers of the same one have the same tiling."""
        features = self.out_features, self.in_features
        return LayerShape(*features, type(self._gemm), self._is_unrounded, self.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` to ``[..., N]``."""
        if x.dim() == 2:
            return self._tiled(x)
        return self._tiled(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of the result."""
        assert self.activation is not None
        return self._tiled(x, self.activation)

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The result plus `other` ``[n, N]``."""
        return self._tiled(x, "add", other)

    def mul(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The result times `other` ``[n, N]``, element by element."""
        return self._tiled(x, "mul", other)

    def _tiled(self, x: torch.Tensor, epilogue: str = "none", other: torch.Tensor | None = None) -> torch.Tensor:
        rows = len(x)
        if self.tiling.fits(rows):
            return self._gemm(x, epilogue, other)
        padding = -rows % self.tiling.step
        if padding:
            x = functional.pad(x, (0, 0, 0, padding))
            other = functional.pad(other, (0, 0, 0, padding)) if other is not None else None
        results = [
            self._gemm(x[tile], epilogue, other[tile] if other is not None else None)
            for tile in self.tiling.split(len(x))
        ]
        return (torch.cat(results) if len(results) > 1 else results[0])[:rows]

    @property
    def native_parts(self) -> tuple[Gemm, ...]:
        """What `native.layers` computes with; none if another GEMM backend does, or in tiles."""
        if isinstance(self._gemm, (NativeGemm, QuantisedGemm)) and self.tiling == GemmTiling():
            return self._gemm.parts
        return ()

    def settle(self, tiling: GemmTiling) -> None:
        """Compute in `tiling` from now on; no other one will be tried."""
        self.tiling = tiling
        self._sample = None

    def is_invariant(self, tiling: GemmTiling) -> bool:
        """Whether a row's result has the same bits in all tiles of `tiling`, at any index in them.

        Raises:
            ValueError: `tiling` is not bounded, so that not all tiles can be tried.
        """
        if tiling.most is None:
            raise ValueError("only a bounded number of shapes can be tried")
        generator = torch.Generator().manual_seed(0)
        num_rows = max((tiling.most, *tiling.blocks))

        rows = torch.randn(num_rows, self.in_features, generator=generator).to(self._dtype)
        if self._sample is not None:
            count = min(num_rows, NUM_TRIAL_ROWS)
            rows[:count] = cancelling_rows(self._sample, self._bias, count)
        return all(self._has_same_bits(tiling, rows, epilogue) for epilogue in ("none", self.activation) if epilogue)

    def _has_same_bits(self, tiling: GemmTiling, rows: torch.Tensor, epilogue: str) -> bool:
        most = tiling.most
        assert most is not None

        def multiply(start: int, stop: int) -> torch.Tensor:
            return self._gemm(rows[start:stop], epilogue)

        expected = torch.cat([multiply(start, start + most) for start in range(0, len(rows), most)])
        if not all(torch.equal(multiply(0, block), expected[:block]) for block in tiling.blocks):
            return False
        return all(
            torch.equal(multiply(start, start + count), expected[start : start + count])
            for count in range(tiling.step, most + 1, tiling.step)
            for start in {0, (most - count) // 2, most - count}
        )


def cancelling_rows(weight: torch.Tensor, bias: torch.Tensor | None, count: int) -> torch.Tensor:
    """Rows whose products with the weights of a column nearly cancel: the order of a float32 sum is
    told by its rounding errors, which a result in bfloat16 would otherwise round away.

    Args:
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        count: Number of rows.

    Returns:
        ``[count, K]`` in the weight's data type; row i cancels with column ``i % N``.
    """
    generator = torch.Generator().manual_seed(1)
    columns = torch.arange(count) % weight.shape[0]
    factors = weight[columns].double()
    rows = torch.randn(count, weight.shape[1], generator=generator).to(weight.dtype).double()
    start = torch.zeros(count, dtype=torch.float64) if bias is None else bias[columns].double()
    for place in factors.abs().argsort(dim=1, descending=True)[:, :3].T[:, :, None]:  # each cancels what is left
        rows.scatter_(1, place, 0.0)
        rest = start + (rows * factors).sum(1)
        last = -rest[:, None] / factors.gather(1, place)
        rows.scatter_(1, place, last.nan_to_num(0.0, 0.0, 0.0).to(weight.dtype).double())
    return rows.to(weight.dtype)


def fuse(*layers: torch.nn.Linear) -> Linear:
    """One fused linear layer of `Projection.of` `layers`."""
    return Linear.of(Projection.of(*layers))


def _stacked(weights: list[torch.Tensor | QuantisedWeight]) -> torch.Tensor | Quantised:
    """The rows of all weights, which are quantised, or none of them is."""
    if len(weights) == 1:
        return weights[0]
    quantised = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
    if quantised:
        return concatenated(quantised)
    return torch.cat([weight.detach() for weight in weights if isinstance(weight, torch.Tensor)])


def lm_head(projection: Projection) -> Linear:
    """The LM head. Its logits are float32: rounded to bfloat16, the likeliest tokens often tie."""
    return Linear.of(projection, is_unrounded=True)


def has_tied_embeddings(network: Any) -> bool:
    """Whether output layer and embedding of transformers' causal language model share a weight."""
    embedding, head = network.model.embed_tokens.weight, network.lm_head.weight
    if isinstance(embedding, QuantisedWeight) or isinstance(head, QuantisedWeight):
        return embedding is head
    return bool(embedding.data_ptr() == head.data_ptr() and embedding.shape == head.shape)


class Embedding:
    """Row lookup in an embedding's ``weight [N, K]``; in the packed weight of the LM head where it
    is tied, so that the weight is held once.

    Where all layers hold packed copies it keeps none of the memory of the weight, which may be the
    whole checkpoint, mapped into memory.

    Args:
        weight: None for the packed weight of `head`.
        head: The LM head, packed.
        is_tied: Whether `head` has the same weight.
        dtype: Of the rows; a weight that is not quantised has it.

    Attributes:
        packed: What is held beside the weight of `head`; None for nothing.
    """

    def __init__(
        self,
        weight: torch.Tensor | QuantisedWeight | PackedQuantised | None,
        head: Linear,
        is_tied: bool,
        dtype: torch.dtype,
    ) -> None:
        self.packed: torch.Tensor | PackedQuantised | None = None
        self._rows: Lookup
        quantised = head.quantised if is_tied else None
        if isinstance(weight, (QuantisedWeight, PackedQuantised)) and quantised is None:
            quantised = QuantisedGemm(weight, None)
            self.packed = quantised.packed
        if quantised is not None:
            self._rows = partial(quantised.rows, dtype=dtype)
        elif weight is None:
            [panels] = head.layouts()
            self._rows = panels.rows
        else:
            assert isinstance(weight, torch.Tensor)
            weight = weight.detach()
            found = lookup(weight, head.layouts()) if is_tied else None
            if found is None:
                self.packed = weight.clone() if head.is_packed else weight
                found = partial(functional.embedding, weight=self.packed)
            self._rows = found

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``[..., K]`` of indices ``[...]``."""
        return self._rows(ids)


def replace_linears(module: torch.nn.Module) -> None:
    """Put a `Linear` in place of every ``torch.nn.Linear`` inside `module`."""
    for name, child in list(module.named_children()):
        if type(child) is torch.nn.Linear:
            setattr(module, name, fuse(child))
        else:
            replace_linears(child)


def pack_all(module: torch.nn.Module, kernels: KernelBackend) -> None:
    """`Linear.pack` for every one inside `module`."""
    for layer in linears(module):
        layer.pack(kernels)


def linears(module: torch.nn.Module) -> Iterator[Linear]:
    """Every `Linear` inside `module`."""
    return (child for child in module.modules() if isinstance(child, Linear))
