"""LoRA adapters of a network that native kernels compute: from peft's files to packed weights."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import torch

from worker.engines.embedded.adapters import LoadedAdapter
from worker.engines.embedded.model.stored_weights import DTYPES
from worker.engines.embedded.native.lora import INPUTS, LowRank, PackedAdapter, QkvGemms
from worker.engines.lora_adapters import WEIGHTS, AdapterFiles, Matrix, read_files
from worker.engines.weights import WeightsRefused
from worker.models.geometry import Geometry
from worker.models.problems import ModelFileError

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"model\.layers\.(?P<index>\d+)\.(?P<part>.+)")

_PARTS = {f"{'self_attn' if index < 2 else 'mlp'}.{name}": name for index, names in enumerate(INPUTS) for name in names}
"""Linear layers within a decoder layer, by their names there."""


class AdaptedGemms:
    """GEMMs that LoRA adapters are packed for, which stay as they are once there is one. Any
    thread.

    Args:
        qkv: `Network.qkv_gemms` of the network that computes.
    """

    def __init__(self, qkv: Sequence[QkvGemms]) -> None:
        self._qkv = qkv
        self._has_adapters = False
        self._lock = threading.Lock()

    def taken(self) -> Sequence[QkvGemms]:
        """The GEMMs, for an adapter to be packed for them."""
        with self._lock:
            self._has_adapters = True
            return self._qkv

    def check(self, qkv: Sequence[QkvGemms] | None) -> None:
        """Raises `WeightsRefused` if a network with other GEMMs cannot take the place of the one
        that computes.
        """
        if self._has_adapters and qkv != self._qkv:
            raise WeightsRefused(
                "its quantised tensors change which of a layer's query, key and value projections are computed "
                "together, and LoRA adapters are packed for those that serve; give tensors of the same types"
            )

    def change(self, qkv: Sequence[QkvGemms] | None, replace: Callable[[], None]) -> None:
        """Call `replace`, which puts a network with other GEMMs in place. Raises: see `check`."""
        with self._lock:
            self.check(qkv)
            replace()
            self._qkv = qkv or ()


def load_adapter(
    name: str, directory: Path, geometry: Geometry, qkv: Sequence[QkvGemms], dtype: torch.dtype
) -> LoadedAdapter:
    """Read, check and pack an adapter.

    Args:
        name: Name of it as a model.
        directory: Directory of its files.
        geometry: Geometry of the model that it changes.
        qkv: `Network.qkv_gemms` of it.
        dtype: Data type that its matrices, B's times the scale, are rounded to.

    Raises:
        ModelFileError: it cannot be read, or not be served.
    """
    shapes = {
        tensor.name.removesuffix(".weight"): tensor.shape for tensor in geometry.tensors() if len(tensor.shape) == 2
    }
    files = read_files(name, directory, shapes)
    layers: list[dict[str, LowRank]] = [{} for _ in range(geometry.num_hidden_layers)]
    is_rounded = False
    for layer in files.pairs:
        place = _LAYER.fullmatch(layer)
        if place is None or place["part"] not in _PARTS:
            raise ModelFileError(f"the embedded engine adapts {', '.join(_PARTS)} alone, and it changes {layer}")
        exact = _low_rank(files, layer)
        kept = LowRank(_rounded(exact.a, dtype, f"{layer}.lora_A"), _rounded(exact.b, dtype, f"{layer}.lora_B"))
        is_rounded |= not (torch.equal(kept.a, exact.a) and torch.equal(kept.b, exact.b))
        layers[int(place["index"])][_PARTS[place["part"]]] = kept
    digest = files.adapter.digest
    if is_rounded:  # it computes otherwise than where it is not
        kind = str(dtype).removeprefix("torch.")
        digest = blake2b(f"{digest} {kind}".encode(), digest_size=16).hexdigest()
        logger.info("LoRA adapter %s: rounded to %s; --lora-dtype float32 keeps it as it is", name, kind)
    return LoadedAdapter(name, digest, PackedAdapter(layers, qkv))


def _low_rank(files: AdapterFiles, layer: str) -> LowRank:
    a, b = (_read(files, one, f"{layer}.lora_{side}") for one, side in zip(files.pairs[layer], "AB", strict=True))
    scaled = b * files.scale(layer)
    if not scaled.isfinite().all():
        raise ModelFileError(f"{WEIGHTS}: {layer}.lora_B times its scale holds what is no finite number of float32")
    return LowRank(a, scaled)


def _rounded(matrix: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """A float32 matrix rounded to `dtype`, in float32."""
    found = matrix.to(dtype).float()
    if not found.isfinite().all():
        kind = str(dtype).removeprefix("torch.")
        raise ModelFileError(f"{WEIGHTS}: {name} holds what is too large for --lora-dtype {kind}")
    return found


def _read(files: AdapterFiles, matrix: Matrix, name: str) -> torch.Tensor:
    """A matrix in float32; its bytes may lie anywhere."""
    content = bytearray(files.content[matrix.start : matrix.stop])
    found = torch.frombuffer(content, dtype=DTYPES[matrix.stored.dtype]).view(matrix.stored.shape).float()
    if not found.isfinite().all():
        raise ModelFileError(f"{WEIGHTS}: {name} holds what is no finite number of float32")
    return found
