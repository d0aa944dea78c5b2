"""New weights for a network that serves: checked, packed as at load, and put beside the old ones.

A packed version of a model is one block of memory, in huge pages, as a packed copy is that was
read. So an update leaves nothing behind when the version before it is dropped, however many tensors
it had, and decoding is as fast after it. Tensors that an update does not have are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import torch

from adapters import lean_torch
from worker.engines.embedded.attention import AttentionLayer
from worker.engines.embedded.host import memory as host_memory
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.linear import Projection
from worker.engines.embedded.model.llama_weights import LayerWeights, LlamaWeights, Norm
from worker.engines.embedded.model.panels import Panels
from worker.engines.embedded.model.quantisation import PackedQuantised, QuantisedWeight, concatenated
from worker.engines.embedded.model.requantisation import has_layout_of, largest_of, quantised_parts, rounded_as
from worker.engines.embedded.model.stored_weights import Weight
from worker.engines.embedded.native import PackedWeight
from worker.engines.embedded.native.packed import COLUMNS, fill_panels, pack
from worker.engines.embedded.native.paths import compute_alone
from worker.engines.embedded.native.quantised import QuantisedPanels
from worker.engines.weights import WeightsRefused
from worker.models.beside import side_by_side
from worker.models.geometry import Geometry

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Given:
    """Tensors of an update, checked, in the data type of the model.

    Attributes:
        weights: Weights by name.
        digests: 128 bits of each, hexadecimal digits.
        formats: Formats of float tensors that replace quantised ones of the checkpoint, by name.
    """

    weights: Mapping[str, Weight]
    digests: Mapping[str, str]
    formats: Mapping[str, str]


def check_given(
    weights: Mapping[str, Weight],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    formats: Mapping[str, str] = MappingProxyType({}),
    transposed: Collection[str] = (),
    in_float32: Collection[str] = (),
) -> Given:
    """The tensors of an update as the model holds them: rounded to `dtype`, or quantised.

    Args:
        weights: Tensors by name.
        shapes: Shapes of the model's tensors, by name; without the LM head's where it is tied.
        dtype: Data type of the model.
        formats: Formats of tensors that the model's checkpoint has quantised; see
            `requantisation.formats_of`.
        transposed: Names of experts' weights that are transposed; see `StackedExperts`.
        in_float32: Names of tensors that are float32 whatever `dtype` is.

    Raises:
        WeightsRefused: there are none; or one is not the model's, of another shape, or holds what
            is not a finite number of `dtype`, or what its format cannot hold.
    """
    if not weights:
        raise WeightsRefused("the update has no tensors")
    if HEAD in weights and HEAD not in shapes and EMBEDDING in shapes:
        weights = _untied_apart(weights)
    for name, weight in weights.items():
        if name not in shapes:
            raise WeightsRefused(f"tensor {name[:200]!r}: the model has none of this name")
        if tuple(weight.shape) != shapes[name]:
            raise WeightsRefused(
                f"tensor {name}: must be of shape {list(shapes[name])}, as the model's is, got {list(weight.shape)}"
            )
    names = sorted(weights, key=lambda name: -weights[name].nbytes)

    def check(name: str) -> tuple[Weight, str]:
        held_in = torch.float32 if name in in_float32 else dtype
        return _checked(name, weights[name], held_in, formats.get(name), name in transposed)

    checked = dict(zip(names, side_by_side(check, names), strict=True))
    rounded = {
        name: formats[name] for name, one in weights.items() if name in formats and isinstance(one, torch.Tensor)
    }
    return Given({name: checked[name][0] for name in weights}, {name: checked[name][1] for name in weights}, rounded)


def _untied_apart(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The weights of a model whose embeddings are tied, without the second name of the one."""
    head, embedding = weights[HEAD], weights.get(EMBEDDING)
    if not (isinstance(head, torch.Tensor) and isinstance(embedding, torch.Tensor) and torch.equal(head, embedding)):
        raise WeightsRefused(
            f"tensor {HEAD}: the model's embeddings are tied; give {EMBEDDING} alone, or twice the same"
        )
    return {name: weight for name, weight in weights.items() if name != HEAD}


def _checked(
    name: str, weight: Weight, dtype: torch.dtype, format: str | None, is_transposed: bool
) -> tuple[Weight, str]:
    """A tensor as the model holds it, and its digest; in a thread that shares the processors."""
    compute_alone()

    def check(largest: float) -> None:
        if not largest < float("inf"):
            raise WeightsRefused(f"tensor {name}: holds a number that is infinite or not a number")
        if largest > torch.finfo(dtype).max:
            wanted = str(dtype).removeprefix("torch.")
            raise WeightsRefused(f"tensor {name}: holds {largest:g}, which {wanted} cannot")

    if isinstance(weight, torch.Tensor) and format is not None:
        try:
            weight = rounded_as(format, weight, is_transposed, check)
        except ValueError as error:
            raise WeightsRefused(f"tensor {name}: {error}") from None
    else:
        for part in (one for one in _parts(weight) if one.is_floating_point()):
            check(largest_of(part))
    if isinstance(weight, torch.Tensor):
        weight = weight.to(dtype)
    digest = sha256()  # which processors have instructions for
    for part in _parts(weight):
        digest.update(part.reshape(-1).view(torch.uint8).numpy().data)  # may have no dimension
    return weight, digest.hexdigest()[:32]


def _parts(weight: Weight) -> list[torch.Tensor]:
    if isinstance(weight, torch.Tensor):
        return [weight]
    return [one for one in (weight.scales, weight.offsets, weight.codes) if one is not None]


def updated(old: LlamaWeights, given: Given, geometry: Geometry, kernels: KernelBackend) -> LlamaWeights:
    """The weights of the next version, packed, in memory of their own.

    Args:
        old: Packed weights of this version; tensors of the ``meta`` device have no values, and must
            all be given.
        given: Tensors that change.
        geometry: Geometry of the model.
        kernels: Backends that pack, as they did at load.

    Raises:
        WeightsRefused: a tensor is quantised and the model's is not, or one is missing.
    """
    return _Update(old, given.weights, geometry, kernels).weights()


def without_values(weights: LlamaWeights) -> LlamaWeights:
    """The same weights on the ``meta`` device: shapes alone, in no memory."""
    lean_torch.complete()
    found: LlamaWeights = _mapped(weights, lambda tensor: torch.empty_like(tensor, device="meta"))
    rope = replace(weights.rope, frequencies=weights.rope.frequencies.clone())  # not a view of the old block
    return replace(found, rope=rope)  # which no update has


def tensors_in(weights: LlamaWeights) -> list[torch.Tensor]:
    """All tensors, in the order of the dataclasses' fields."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _mapped(weights, note)
    return found


class _Update:
    def __init__(
        self, old: LlamaWeights, given: Mapping[str, Weight], geometry: Geometry, kernels: KernelBackend
    ) -> None:
        self._old, self._given, self._kernels = old, given, kernels
        width, heads, kv_heads = geometry.head_dim, geometry.num_attention_heads, geometry.num_key_value_heads
        self._qkv_rows = [heads * width, kv_heads * width, kv_heads * width]
        kept = dict(quantised_parts(old, kv_heads * width))
        self._keeps_layout = all(
            has_layout_of(weight, kept[name])
            for name, weight in given.items()
            if isinstance(weight, QuantisedWeight) and name in kept
        )
        self._slots = iter(host_memory.like(tensors_in(old)) if self._keeps_layout else ())
        self._filled: set[int] = set()  # ids of the tensors that are packed in their places
        self._jobs: list[Callable[[], object]] = []  # which fill them, each of its own

    def weights(self) -> LlamaWeights:
        """The new weights, made in the order of the fields: each part is packed into its slot, or,
        where a weight has another layout than before, they are moved into slots behind it.
        """
        found = self._weights()
        self._fill()
        if self._keeps_layout:
            return found
        self._keeps_layout = True
        self._filled.clear()
        self._slots = iter(host_memory.like(tensors_in(found)))
        moved: LlamaWeights = self._placed(found)
        self._fill()
        return moved

    def _fill(self) -> None:
        """Write all values, side by side."""

        def call(job: Callable[[], object]) -> None:
            compute_alone()
            job()

        side_by_side(call, self._jobs)
        self._jobs.clear()

    def _weights(self) -> LlamaWeights:
        old = self._old
        rope = self._placed(old.rope)
        norm = self._placed(self._norm("model.norm", old.norm))
        tied = old.is_tied
        head = self._placed(self._projection([EMBEDDING if tied else "lm_head"], old.head, is_unrounded=True))
        embedding = self._placed(self._embedding(old))
        layers = tuple(self._layer(f"model.layers.{index}", layer) for index, layer in enumerate(old.layers))
        return LlamaWeights(old.dtype, rope, norm, head, embedding, tied, layers)

    def _layer(self, at: str, old: LayerWeights) -> LayerWeights:
        place = self._placed
        attention = place(self._attention(at, old.attention))
        input_norm = place(self._norm(f"{at}.input_layernorm", old.input_norm))
        mlp_norm = place(self._norm(f"{at}.post_attention_layernorm", old.mlp_norm))
        qkv = place(self._projection([f"{at}.self_attn.{letter}_proj" for letter in "qkv"], old.qkv))
        output = place(self._projection([f"{at}.self_attn.o_proj"], old.output))
        mlp = (
            place(self._projection([f"{at}.mlp.{name}_proj"], was))
            for name, was in (("gate", old.gate), ("up", old.up), ("down", old.down))
        )
        gate, up, down = mlp
        return LayerWeights(attention, input_norm, mlp_norm, qkv, output, gate, up, down)

    def _attention(self, at: str, old: AttentionLayer) -> AttentionLayer:
        if old.head_norms is None:
            return old
        query, key, epsilon = old.head_norms
        query = self._vector(f"{at}.self_attn.q_norm.weight", query)
        key = self._vector(f"{at}.self_attn.k_norm.weight", key)
        return replace(old, head_norms=(query, key, epsilon))

    def _norm(self, name: str, old: Norm) -> Norm:
        return replace(old, weight=self._vector(f"{name}.weight", old.weight))

    def _vector(self, name: str, old: torch.Tensor) -> torch.Tensor:
        found = self._given.get(name)
        if found is not None and not isinstance(found, torch.Tensor):
            raise WeightsRefused(f"tensor {name}: the model's is not quantised")
        return old if found is None else found

    def _embedding(self, old: LlamaWeights) -> torch.Tensor | QuantisedWeight | PackedQuantised | None:
        found = self._given.get(EMBEDDING)
        if found is None or old.embedding is None:
            return old.embedding
        if isinstance(old.embedding, torch.Tensor):
            return found if isinstance(found, torch.Tensor) else found.dequantised().to(old.dtype)
        if not isinstance(found, QuantisedWeight):
            raise WeightsRefused(f"tensor {EMBEDDING}: must be quantised, as the model's is")
        return PackedQuantised((found.packed(panels=self._panels),))  # as `Embedding` packs it

    def _projection(self, layers: Sequence[str], old: Projection, is_unrounded: bool = False) -> Projection:
        """The projection of `layers`, names without ``.weight`` and ``.bias``, concatenated."""
        names = [name if name == EMBEDDING else f"{name}.weight" for name in layers]
        weight, bias = old.weight, old.bias
        if any(name in self._given for name in names):
            weight = self._packed(names, old, is_unrounded)
        if bias is not None and len(layers) == 1:
            bias = self._vector(f"{layers[0]}.bias", bias)
        elif bias is not None:
            parts = zip(layers, torch.split(bias, self._qkv_rows), strict=True)
            bias = torch.cat(_with_values([self._vector(f"{name}.bias", part) for name, part in parts]))
        return Projection(weight, bias)

    def _packed(self, names: Sequence[str], old: Projection, is_unrounded: bool) -> PackedWeight | PackedQuantised:
        """The weights called `names`, packed as `old` is, whose rows replace those not given."""
        rows = self._qkv_rows if len(names) > 1 else [old.weight.shape[0]]
        ends = [sum(rows[: index + 1]) for index in range(len(rows))]
        weights = [
            self._given[name] if name in self._given else _rows(name, old.weight, end - count, end)
            for name, count, end in zip(names, rows, ends, strict=True)
        ]
        _with_values([part for one in weights for part in _parts(one)])
        if isinstance(old.weight, PackedWeight):
            return self._dense(weights, old.weight)
        return self._quantised(names, weights, is_unrounded)

    def _dense(self, weights: Sequence[Weight], old: PackedWeight) -> PackedWeight:
        """The weights packed into the next slot, without another copy where panels allow it."""
        dense = [one if isinstance(one, torch.Tensor) else one.dequantised().to(old.dtype) for one in weights]
        if any(len(one) % COLUMNS for one in dense[:-1]):
            dense = [torch.cat(dense)]
        panels = self._slot(old.panels.shape, old.panels.dtype)
        sizes = [-(-len(one) // COLUMNS) for one in dense]
        for one, part in zip(dense, torch.split(panels, sizes), strict=True):
            self._jobs.append(partial(pack, one, part, 1))
        return PackedWeight(panels, old.columns)

    def _quantised(self, names: Sequence[str], weights: Sequence[Weight], is_unrounded: bool) -> PackedQuantised:
        kernels = self._kernels
        if kernels.quantisation is not None and any(
            isinstance(self._given.get(name), QuantisedWeight) for name in names
        ):
            raise WeightsRefused(f"tensor {names[0]}: is quantised already; --quantization quantises what is not")
        made = [kernels.quantised(one, is_unrounded) if isinstance(one, torch.Tensor) else one for one in weights]
        joined = concatenated([one for one in made if isinstance(one, QuantisedWeight)]).parts
        return PackedQuantised(tuple(part.packed(kernels.rounds_to, self._panels) for part in joined))

    def _panels(self, rows: torch.Tensor) -> torch.Tensor:
        """Panels of ``rows [N, n]`` in the next slot."""
        panels = self._slot((-(-len(rows) // COLUMNS), rows.shape[1], COLUMNS), rows.dtype)
        self._jobs.append(partial(fill_panels, rows, panels, 1))
        return panels

    def _slot(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next slot, for what is packed in its place; new memory if there are none."""
        slot = next(self._slots) if self._keeps_layout else torch.empty(tuple(shape), dtype=dtype)
        _check_layout(slot, shape, dtype)
        self._filled.add(id(slot))
        return slot

    def _placed(self, part: Any) -> Any:
        """`part` with its tensors in their slots of the new block, if they have the old layout."""
        return _mapped(part, self._take) if self._keeps_layout else part

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._filled:
            return tensor
        slot = next(self._slots)
        if tensor.is_meta:
            raise _incomplete()
        _check_layout(slot, tensor.shape, tensor.dtype)
        self._jobs.append(partial(slot.copy_, tensor))
        return slot


def _check_layout(slot: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tuple(slot.shape) != tuple(shape) or slot.dtype != dtype:
        raise WeightsRefused(f"a tensor is packed as {dtype} {list(shape)}, not as the model's")


def _with_values(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same. Raises `WeightsRefused` if one of them has no values."""
    if any(one.is_meta for one in tensors):
        raise _incomplete()
    return tensors


def _incomplete() -> WeightsRefused:
    return WeightsRefused("after a sleep of level 2 an update must have every tensor of the model")


def _rows(name: str, weight: PackedWeight | PackedQuantised | Any, start: int, stop: int) -> Weight:
    """Rows ``[start, stop)`` of a packed weight, those of the layer called `name`, as they were."""
    if isinstance(weight, PackedWeight):
        panels = weight.panels
        if panels.is_meta:
            return torch.empty(stop - start, weight.shape[1], dtype=weight.dtype, device="meta")
        words = Panels(panels.view(torch.int32).squeeze(-1), weight.shape[1], panels.dtype)
        return words.rows(torch.arange(start, stop))
    assert isinstance(weight, PackedQuantised), f"{name} is not packed"
    first = 0
    for part in weight.parts:
        if first <= start and stop <= first + part.columns:
            return _quantised_rows(part, start - first, stop - first)
        first += part.columns
    raise AssertionError(f"{name} lies in several parts")


def _quantised_rows(panels: QuantisedPanels, start: int, stop: int) -> QuantisedWeight:
    """Rows ``[start, stop)`` of a quantised weight; the inverse of `QuantisedWeight.packed`."""

    def rows(one: torch.Tensor) -> torch.Tensor:
        return one.mT.reshape(-1, one.shape[1])[start:stop].contiguous()

    codes = rows(panels.codes)
    if panels.bits == 4:
        codes = codes.view(torch.uint8)
    elif panels.rounds_to == "int8":
        codes = codes.view(torch.int8)[:, : panels.inner]
    offsets = None if panels.offsets is None else rows(panels.offsets)
    return QuantisedWeight(codes, rows(panels.scales), offsets, panels.is_e2m1)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor in it changed, in the order of the dataclasses' fields."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(each, change) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {one.name: _mapped(getattr(value, one.name), change) for one in fields(value)}
        return replace(value, **changed)
    return value
