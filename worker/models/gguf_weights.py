"""Weights of a Hugging Face checkpoint in the tensors of a GGUF file.

llama.cpp's converter renames weights, joins the experts of a layer, and in Llama's reorders the
rows of queries and keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.models.geometry import Geometry, Tensor
from worker.models.gguf_file import GgufError, GgufFile, GgufTensor
from worker.models.gguf_layouts import Layout, Place
from worker.models.model_types import ModelType
from worker.models.numbers import are_exact
from worker.models.quantised import READ

ROPE_FREQUENCIES = "rope_freqs.weight"
"""Tensor that is no weight of a checkpoint."""

_GGUF_NAMES = (
    ("model.embed_tokens.", "token_embd."),
    ("model.norm.", "output_norm."),
    ("lm_head.", "output."),
    ("model.layers.", "blk."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".self_attn.o_proj.", ".attn_output."),
    (".self_attn.q_norm.", ".attn_q_norm."),
    (".self_attn.k_norm.", ".attn_k_norm."),
    (".self_attn.q_proj.", ".attn_q."),
    (".self_attn.k_proj.", ".attn_k."),
    (".self_attn.v_proj.", ".attn_v."),
    (".mlp.gate.", ".ffn_gate_inp."),
    (".mlp.gate_proj.", ".ffn_gate."),
    (".mlp.up_proj.", ".ffn_up."),
    (".mlp.down_proj.", ".ffn_down."),
)
"""Parts of a weight's name, and what llama.cpp calls them."""

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")

_NUMBERS = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}
"""The dtype of tensors that are plain numbers; blocks are dequantised and rounded to `BLOCKS`."""

BLOCKS = "bfloat16"


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the checkpoint: some rows of a tensor of the file.

    Attributes:
        name: Hugging Face's.
        shape: Shape of the weight.
        tensor: Tensor that holds its values.
        rows: Indices of its rows in the tensor, in order.
        has_one: Whether the tensor holds the values plus 1.
        beside: Tensor whose rows alternate with those of `tensor`; None for none.
        below: Tensor whose rows come below those of `tensor`, expert by expert; None for none.
        turns: Whether the weight holds matrices of all experts, which are transposed.
    """

    name: str
    shape: tuple[int, ...]
    tensor: GgufTensor
    rows: npt.NDArray[np.int64]
    has_one: bool = False
    beside: GgufTensor | None = None
    below: GgufTensor | None = None
    turns: bool = False

    @property
    def tensors(self) -> tuple[GgufTensor, ...]:
        """The tensors that hold its values."""
        return tuple(tensor for tensor in (self.tensor, self.beside, self.below) if tensor is not None)

    def values(self, file: GgufFile) -> Iterator[npt.NDArray[np.float32]]:
        """The values of the weight in order, some rows at a time."""
        if self.tensors == (self.tensor,) and not self.turns:
            for rows in file.rows(self.tensor, self.rows):
                yield rows - np.float32(1) if self.has_one else rows
            return
        for found in self._matrices(file.rows):
            yield np.ascontiguousarray(found.T) if self.turns else found

    def _matrices(
        self, read: Callable[[GgufTensor, npt.NDArray[np.int64]], Iterator[npt.NDArray[Any]]]
    ) -> Iterator[npt.NDArray[Any]]:
        """Each expert's matrix, of the rows of all tensors, as `read` reads some of one tensor."""
        for matrix in np.split(self.rows, self.shape[0]):
            found = np.concatenate(list(read(self.tensor, matrix)))
            if self.below is not None:
                found = np.concatenate((found, *read(self.below, matrix)))
            if self.beside is not None:
                other = np.concatenate(list(read(self.beside, matrix)))
                axis = 1 if self.turns else 2  # rows of a matrix, or elements of a bias
                found = np.stack((found, other), axis).reshape(-1, found.shape[1] * (1 if self.turns else 2))
            yield found

    @property
    def can_keep_blocks(self) -> bool:
        """Whether the blocks of its tensors are those of the weight's own rows, or columns where it
        is transposed, and of one type, which the embedded engine reads. Routers are not quantised.
        """
        if len(self.shape) < 2 or self.has_one or ".ffn_gate_inp." in self.tensor.name:
            return False
        kinds = {tensor.kind for tensor in self.tensors}
        return self.tensor.name.endswith(".weight") and len(kinds) == 1 and self.tensor.kind.name in READ

    def packed_rows(self, file: GgufFile) -> Iterator[npt.NDArray[np.uint8]]:
        """Blocks of its rows in order, bytes ``[n, row_bytes]`` at a time, of each expert's matrix
        one after the other; see `can_keep_blocks`.
        """
        if self.tensors == (self.tensor,):
            yield from file.packed_rows(self.tensor, self.rows)
        else:
            yield from self._matrices(file.packed_rows)

    @property
    def dtype(self) -> str:
        """Data type that holds its values: exactly, if they are plain numbers."""
        found = {_NUMBERS.get(tensor.kind.name, BLOCKS) for tensor in self.tensors}
        return found.pop() if len(found) == 1 else "float32"


@dataclass(frozen=True, slots=True)
class LatentWeight(Weight):
    """The up projection of keys and values: the rows of each head are those of keys, of which
    `tensor` holds the transposed matrix, and those of values, in `below`.

    Attributes:
        heads: Heads.
    """

    heads: int = 1

    @property
    def can_keep_blocks(self) -> bool:
        """No: blocks of keys lie along its columns, those of values along its rows."""
        return False

    def values(self, file: GgufFile) -> Iterator[npt.NDArray[np.float32]]:
        """The values of the weight in order, a head at a time."""
        assert self.below is not None
        heads = (np.split(np.arange(tensor.num_rows), self.heads) for tensor in (self.tensor, self.below))
        for keys, values in zip(*heads, strict=True):
            turned = np.concatenate(list(file.rows(self.tensor, keys))).T
            yield np.concatenate((turned, *file.rows(self.below, values)))


def plain_dtype(file: GgufFile, adds_one: bool = False) -> str:
    """Data type of the model by default: the narrowest that holds all plain numbers of the file
    exactly; `BLOCKS` where there are blocks. With `adds_one`, norms are stored with 1 added.
    """
    kinds = {tensor.kind.name for tensor in file.tensors.values()}
    if not kinds <= set(_NUMBERS):
        return BLOCKS
    narrow = kinds - {"F32"}
    if len(narrow) != 1:
        return "float32"
    dtype = _NUMBERS[narrow.pop()]
    return dtype if all(_fits(file, tensor, dtype, adds_one) for tensor in file.tensors.values()) else "float32"


def _fits(file: GgufFile, tensor: GgufTensor, dtype: str, adds_one: bool) -> bool:
    """Whether each value of a tensor is one of `dtype`, bit by bit."""
    if tensor.kind.name != "F32":
        return True
    one = np.float32(adds_one and tensor.name.endswith("norm.weight"))
    return all(are_exact(rows - one, dtype) for rows in file.rows(tensor, np.arange(tensor.num_rows)))


def find_weights(file: GgufFile, kind: ModelType, geometry: Geometry) -> Iterator[Weight]:
    """The weights of a model, in the order of its layers.

    Raises:
        GgufError: a tensor is missing, or of another shape.
    """
    for ours in geometry.tensors():
        expert = _EXPERT.fullmatch(ours.name)
        if expert is not None:
            yield _expert(file, ours, expert, geometry.num_experts)
            continue
        theirs = ours.name
        for part, its in _GGUF_NAMES:
            theirs = theirs.replace(part, its)
        tensor = _shaped(file, theirs, *ours.shape)
        rows = np.arange(tensor.num_rows)
        if kind.gguf_pairs_rows and theirs.endswith((".attn_q.weight", ".attn_k.weight")):
            rows = _unpermuted(rows, geometry.head_dim)
        yield Weight(ours.name, ours.shape, tensor, rows)


def layout_weights(file: GgufFile, layout: Layout, config: Mapping[str, Any]) -> Iterator[Weight]:
    """The weights of a model of `layout`, in the order of its layers.

    Raises:
        GgufError: a tensor is missing, or of another shape.
    """
    has_biases = layout.has_biases and bool(config["attention_bias"])
    for ours, place in layout.tensors(config, has_biases):
        name, shape, count = place.tensor, ours.shape, ours.shape[0]
        if place.expert is not None:
            whole = _shaped(file, name, config["num_experts"], *shape)
            yield Weight(ours.name, shape, whole, np.arange(place.expert * count, (place.expert + 1) * count))
            continue
        if place.parts and name not in file.tensors:
            yield _latent_weight(file, ours, place)
            continue
        theirs = (shape[0], *reversed(shape[1:])) if place.turns else shape
        if place.beside is not None:
            columns = 1 if place.turns else len(theirs) - 1
            theirs = (*theirs[:columns], theirs[columns] // 2, *theirs[columns + 1 :])
        if place.below is not None:
            theirs = (theirs[0], theirs[1] // 2, *theirs[2:])
        tensor = _shaped(file, name, *theirs)
        rows = np.arange(tensor.num_rows)
        if layout.gguf_pairs_rows and name.endswith((".attn_q.weight", ".attn_k.weight")):
            rows = _unpermuted(rows, config["head_dim"])
        beside, below = (None if each is None else _shaped(file, each, *theirs) for each in (place.beside, place.below))
        has_one = layout.adds_one and name.endswith("norm.weight")
        yield Weight(ours.name, shape, tensor, rows, has_one, beside, below, place.turns)


def _latent_weight(file: GgufFile, ours: Tensor, place: Place) -> LatentWeight:
    rows, rank = ours.shape
    width = rows // place.heads
    keys = _shaped(file, place.parts[0], place.heads, rank, place.keys)
    values = _shaped(file, place.parts[1], place.heads, width - place.keys, rank)
    return LatentWeight(ours.name, ours.shape, keys, np.arange(keys.num_rows), below=values, heads=place.heads)


def _expert(file: GgufFile, ours: Tensor, matched: re.Match[str], count: int) -> Weight:
    """An expert's rows of the tensor that holds those of all experts of a layer."""
    layer, number, part = matched.groups()
    (rows, columns), expert = ours.shape, int(number)
    whole = _shaped(file, f"blk.{layer}.ffn_{part}_exps.weight", count, rows, columns)
    return Weight(ours.name, ours.shape, whole, np.arange(expert * rows, (expert + 1) * rows))


def _shaped(file: GgufFile, name: str, *shape: int) -> GgufTensor:
    tensor = file.tensor(name)
    if tensor.shape != shape:
        raise GgufError(f"tensor {name} must be of shape {list(shape)}, got {list(tensor.shape)}")
    return tensor


def _unpermuted(rows: npt.NDArray[np.int64], head_dim: int) -> npt.NDArray[np.int64]:
    """Undoes llama.cpp's order of a head's rows, which pairs those that RoPE rotates together."""
    return rows.reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
