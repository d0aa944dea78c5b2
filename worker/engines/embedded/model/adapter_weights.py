"""LoRA adapters of a network that native kernels compute: from peft's files to packed weights."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import torch

from worker.engines.embedded.adapters import LoadedAdapter
from worker.engines.embedded.model.stored_weights import DTYPES
from worker.engines.embedded.native.lora import AdaptedLayers, LowRank, PackedAdapter
from worker.engines.lora_adapters import WEIGHTS, AdapterFiles, Matrix, read_files
from worker.engines.weights import WeightsRefused
from worker.models.problems import ModelFileError

logger = logging.getLogger(__name__)


class LayersInUse:
    """The linear layers that LoRA adapters are packed for, which stay as they are once there is
    one. Any thread.

    Args:
        layers: `Network.adapted_layers` of the network that computes.
    """

    def __init__(self, layers: AdaptedLayers) -> None:
        self._layers: AdaptedLayers | None = layers
        self._num_adapters = 0  # that were packed, or are
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[AdaptedLayers]:
        """The layers, for an adapter to be packed for them; one that raises is none.

        Raises `ModelFileError` if the weights that serve now take none.
        """
        with self._lock:
            if self._layers is None:
                raise ModelFileError("the weights that serve since an update take no LoRA adapters")
            layers = self._layers
            self._num_adapters += 1
        try:
            yield layers
        except BaseException:
            with self._lock:
                self._num_adapters -= 1
            raise

    def check(self, layers: AdaptedLayers | None) -> None:
        """Raises `WeightsRefused` if a network with other layers cannot take the place of the one
        that computes.
        """
        if self._num_adapters and layers != self._layers:
            raise WeightsRefused(
                "its tensors change which linear layers are computed together, and LoRA adapters are packed for those "
                "that serve; give tensors of the same types"
            )

    def change(self, layers: AdaptedLayers | None, replace: Callable[[], None]) -> None:
        """Call `replace`, which puts a network with these layers in place. Raises: see `check`."""
        with self._lock:
            self.check(layers)
            replace()
            self._layers = layers


def load_adapter(name: str, directory: Path, layers: AdaptedLayers, dtype: torch.dtype) -> LoadedAdapter:
    """Read, check and pack an adapter.

    Args:
        name: Name of it as a model.
        directory: Directory of its files.
        layers: Linear layers of the model that it changes.
        dtype: Data type that its matrices, B's times the scale, are rounded to.

    Raises:
        ModelFileError: it cannot be read, or not be served.
    """
    shapes = {layer: place.shape for layer, place in layers.places.items()}
    files = read_files(name, directory, {**layers.others, **shapes}, layers.transposed)
    loras: dict[str, LowRank] = {}
    is_rounded = False
    for layer in files.pairs:
        if layer not in shapes:
            kinds = ", ".join(sorted({each.rpartition(".")[2] for each in shapes}))
            raise ModelFileError(f"the embedded engine adapts {kinds} of this model alone, and it changes {layer}")
        exact = _low_rank(files, layer)
        kept = LowRank(_rounded(exact.a, dtype, f"{layer}.lora_A"), _rounded(exact.b, dtype, f"{layer}.lora_B"))
        is_rounded |= not (torch.equal(kept.a, exact.a) and torch.equal(kept.b, exact.b))
        loras[layer] = kept
    digest = files.adapter.digest
    if is_rounded:  # it computes otherwise than where it is not
        kind = str(dtype).removeprefix("torch.")
        digest = blake2b(f"{digest} {kind}".encode(), digest_size=16).hexdigest()
        logger.info("LoRA adapter %s: rounded to %s; --lora-dtype float32 keeps it as it is", name, kind)
    return LoadedAdapter(name, digest, PackedAdapter(loras, layers))


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
