"""Linear layers on packed weights, in numbers of rows that keep them batch-invariant."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from worker.engines.embedded.model.gemm import GemmBackend, NativeGemm, TorchGemm
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.quantisation import (
    Quantised,
    QuantisedGemm,
    QuantisedWeight,
    concatenated,
)
from worker.engines.embedded.model.tiling import GemmTiling, LayerShape
from worker.engines.embedded.native import Gemm, GemmAdapters, PackedWeight, linear

logger = logging.getLogger(__name__)

NUM_TRIAL_ROWS = 128
"""Rows of a trial that are made of a weight's own columns."""


@dataclass(frozen=True, slots=True)
class Projection:
    """The weight and the bias of a linear layer.

    Attributes:
        weight: ``[N, K]``, of one layer or of several, one below the other.
        bias: ``[N]`` or None.
        stored: See `Linear.stored`.
    """

    weight: torch.Tensor | PackedWeight | Quantised
    bias: torch.Tensor | None
    stored: Quantised | None = None

    @classmethod
    def of(cls, *layers: torch.nn.Linear) -> Projection:
        """The projection of transformers' `layers`, whose results are concatenated.

        Raises:
            ValueError: some of them have a bias and others have none.
        """
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        if biases and len(biases) != len(layers):
            raise ValueError("all layers must have a bias, or none")
        found = (getattr(layer, "quantised", None) for layer in layers)
        kept = [weight for weight in found if isinstance(weight, QuantisedWeight)]
        stored = concatenated(kept) if len(kept) == len(layers) else None
        return cls(_stacked([layer.weight for layer in layers]), torch.cat(biases) if biases else None, stored)


class Linear(torch.nn.Module):
    """``x @ weight.T + bias`` for rows ``[n, K]``; after `pack` it keeps only the packed weight.

    Args:
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        is_unrounded: Whether results are the float32 sums, not rounded to the rows' data type.
        is_quantisable: Whether `pack` may round the weight to fewer bits.
        activation: Activation that `activated` computes, one of `native.ACTIVATIONS`.

    Attributes:
        activation: The same.
        adapters: Returns the LoRA of the rows that are multiplied now, given their number; None
            where they have none. It is set where modules of transformers call the layer.
        bias: The same.
        dtype: Data type of a weight that is not quantised.
        gemm: The GEMM backend, which holds the weight.
        tiling: Numbers of rows that `gemm` is called with.
        sample: Weights of the first columns, for the trial of tilings; None once it is settled.
        stored: The weight as its checkpoint holds it quantised, which `pack` takes; None for none.
        num_bytes: Bytes of the weight.
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
        if not self.out_features or not self.in_features:  # of which the kernels would leave results as memory has them
            raise ValueError(f"a linear layer of shape {list(weight.shape)} has no elements")
        self.activation = activation
        self.adapters: Callable[[int], GemmAdapters | None] | None = None
        self.tiling = GemmTiling()
        self.num_bytes = weight.nbytes
        self._weight: torch.Tensor | PackedWeight | Quantised | None
        self._weight = weight.detach() if isinstance(weight, torch.Tensor) else weight
        self.bias = bias.detach() if bias is not None else None
        self._is_unrounded = is_unrounded
        self._is_quantisable = is_quantisable
        self.sample: torch.Tensor | None = None
        self.stored: Quantised | None = None
        self.gemm: GemmBackend
        if isinstance(weight, torch.Tensor):
            self.dtype = weight.dtype
            self.gemm = TorchGemm(weight.detach(), self.bias)

    @classmethod
    def of(cls, projection: Projection, is_unrounded: bool = False, activation: str | None = None) -> Linear:
        """A layer that computes `projection`."""
        layer = cls(projection.weight, projection.bias, is_unrounded, activation=activation)
        layer.stored = projection.stored
        return layer

    def pack(self, kernels: KernelBackend) -> None:
        """Choose the GEMM backend, which packs the weight; once."""
        if self._weight is None:
            raise RuntimeError("the layer is packed already")
        weight = self._weight if self.stored is None else self.stored
        if isinstance(weight, torch.Tensor) and kernels.quantisation is not None and self._is_quantisable:
            weight = kernels.quantised(weight, self._is_unrounded)
        self.num_bytes = weight.nbytes
        self.gemm = kernels.gemm(weight, self.bias, self._is_unrounded)
        if isinstance(weight, torch.Tensor) and not self.gemm.is_batch_invariant and weight.device.type == "cpu":
            self.sample = weight[:NUM_TRIAL_ROWS].clone()
        self._weight = self.stored = None

    @property
    def is_packed(self) -> bool:
        """Whether `pack` has been called."""
        return self._weight is None

    @property
    def computes(self) -> bool:
        """Whether the layer computes before `pack`."""
        return isinstance(self._weight, torch.Tensor)

    def fits(self, kernels: KernelBackend) -> bool:
        """Whether the first of the GEMM backends supports the weight; before `pack`."""
        return isinstance(self._weight, Quantised) or kernels.gemms[0].supports(self._weight)

    @property
    def packed(self) -> Projection | None:
        """The packed weight, if the native kernels read it, and the bias."""
        gemm = self.gemm
        return Projection(gemm.packed, self.bias) if isinstance(gemm, (NativeGemm, QuantisedGemm)) else None

    @property
    def shape(self) -> LayerShape:
        """Layers of the same one have the same tiling."""
        features = self.out_features, self.in_features
        return LayerShape(*features, type(self.gemm), self._is_unrounded, self.activation)

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
        if self.adapters is not None and (adapters := self.adapters(rows)) is not None:
            [gemm] = self.native_parts
            return linear(x, gemm, epilogue, other, self._is_unrounded, adapters)
        if self.tiling.fits(rows):
            return self.gemm(x, epilogue, other)
        padding = -rows % self.tiling.step
        if padding:
            x = functional.pad(x, (0, 0, 0, padding))
            other = functional.pad(other, (0, 0, 0, padding)) if other is not None else None
        results = [
            self.gemm(x[tile], epilogue, other[tile] if other is not None else None)
            for tile in self.tiling.split(len(x))
        ]
        return (torch.cat(results) if len(results) > 1 else results[0])[:rows]

    @property
    def native_parts(self) -> tuple[Gemm, ...]:
        """GEMMs for `native.layers`; none if another GEMM backend computes, or in tiles."""
        if isinstance(self.gemm, (NativeGemm, QuantisedGemm)) and self.tiling == GemmTiling():
            return self.gemm.parts
        return ()

    def settle(self, tiling: GemmTiling) -> None:
        """Compute in `tiling` from now on; no other one will be tried."""
        self.tiling = tiling
        self.sample = None


def fuse(*layers: torch.nn.Linear) -> Linear:
    """One fused linear layer of `Projection.of` `layers`."""
    return Linear.of(Projection.of(*layers))


def halves(weight: torch.Tensor | QuantisedWeight) -> tuple[torch.Tensor | QuantisedWeight, ...]:
    """The upper and the lower half of a weight's rows."""
    return weight.halves() if isinstance(weight, QuantisedWeight) else weight.detach().chunk(2)


def _stacked(weights: list[torch.Tensor | QuantisedWeight]) -> torch.Tensor | Quantised:
    """The rows of all weights, which stay quantised if all of them are."""
    if len(weights) == 1:
        return weights[0]
    quantised = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
    if len(quantised) == len(weights):
        return concatenated(quantised)
    dense = [weight.detach() for weight in weights if isinstance(weight, torch.Tensor)]
    if quantised:
        logger.info("%d weights are dequantised: those of the same fused projection are not quantised", len(quantised))
    return torch.cat(
        [
            weight.dequantised().to(dense[0].dtype) if isinstance(weight, QuantisedWeight) else weight.detach()
            for weight in weights
        ]
    )


def lm_head(projection: Projection) -> Linear:
    """LM head. Its logits are float32: rounded to bfloat16, the most likely tokens often tie."""
    return Linear.of(projection, is_unrounded=True)


def replace_linears(module: torch.nn.Module) -> None:
    """Put a `Linear` in place of every ``torch.nn.Linear`` inside `module`."""
    for name, child in list(module.named_children()):
        if type(child) is torch.nn.Linear:
            setattr(module, name, fuse(child))
        else:
            replace_linears(child)


def pack_all(module: torch.nn.Module, kernels: KernelBackend, is_quantised: bool = False) -> None:
    """`Linear.pack` for every one inside `module` that is not packed; for those alone, if
    `is_quantised`, that cannot compute before, since their weights are quantised.
    """
    for layer in linears(module):
        if not layer.is_packed and not (is_quantised and layer.computes):
            layer.pack(kernels)


def linears(module: torch.nn.Module) -> Iterator[Linear]:
    """Every `Linear` inside `module`."""
    return (child for child in module.modules() if isinstance(child, Linear))
