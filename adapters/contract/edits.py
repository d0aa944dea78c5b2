"""Edits: what steering processors return, applied to many rows in a few batched operations.

An edit never holds a vocabulary-sized tensor of floats. The classes, in the order law's order::

    Bias(ids, values)      z <- z + value                       bias, penalties, soft boosts
    Scale(ids, factors)    z <- z / f where z > 0, else z * f   penalties (CTRL, arXiv 1909.05858)
    Ban(ids)               z <- -inf                            hard mask, sparse
    Allow(bitmask)         z <- -inf where the bit is 0         hard mask, packed
    Force(id)              the token is `id`                    forcing; the row is not touched

``kind`` is what a receipt calls it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch

from adapters.contract.bitmasks import (
    UnpackedMask,
    apply_on_device,
    apply_unpacked,
    bitmask_of,
    count_allowed,
    unpacked,
)
from adapters.devices import upload
from adapters.row_kernels import kernels_for

Ids: TypeAlias = "torch.Tensor | array[Any]"
Numbers: TypeAlias = "torch.Tensor | array[Any]"


class _Valued:
    """Distinct token ids (int64 ``[n]``) and a number for each (float32 ``[n]``).

    Of an array a tensor is made only where it is asked for: `apply_sparse` joins the arrays of many
    rows. That is for edits that change with every token.
    """

    __slots__ = ("_ids", "_numbers")
    kind: ClassVar[str] = "biased"

    def __init__(self, token_ids: Ids, numbers: Numbers) -> None:
        self._ids, self._numbers = token_ids, numbers

    @classmethod
    def _of(cls, token_ids: Sequence[int], numbers: Sequence[float]) -> Self:
        return cls(torch.tensor(token_ids, dtype=torch.int64), torch.tensor(numbers, dtype=torch.float32))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._ids!r}, {self._numbers!r})"

    @property
    def token_ids(self) -> torch.Tensor:
        return _joined([self._ids], torch.int64)


class Bias(_Valued):
    """Adds ``values`` to the logits at ``token_ids``.

    Attributes:
        token_ids: int64 ``[n]``, distinct. May be given as an ``array("q")``.
        values: float32 ``[n]``, finite. May be given as an ``array("f")``.
    """

    __slots__ = ()
    __match_args__ = ("token_ids", "values")

    def __init__(self, token_ids: Ids, values: Numbers) -> None:
        self._ids, self._numbers = token_ids, values

    @classmethod
    def of(cls, token_ids: Sequence[int], values: Sequence[float]) -> Self:
        """The edit of plain lists."""
        return cls._of(token_ids, values)

    @property
    def values(self) -> torch.Tensor:
        return _joined([self._numbers], torch.float32)


class Scale(_Valued):
    """Signed scale: positive logits at ``token_ids`` are divided by the factor, others multiplied.

    Attributes:
        token_ids: int64 ``[n]``, distinct. May be given as an ``array("q")``.
        factors: float32 ``[n]``, above 0. May be given as an ``array("f")``.
    """

    __slots__ = ()
    __match_args__ = ("token_ids", "factors")

    def __init__(self, token_ids: Ids, factors: Numbers) -> None:
        self._ids, self._numbers = token_ids, factors

    @classmethod
    def of(cls, token_ids: Sequence[int], factors: Sequence[float]) -> Self:
        """The edit of plain lists."""
        return cls._of(token_ids, factors)

    @property
    def factors(self) -> torch.Tensor:
        return _joined([self._numbers], torch.float32)


@dataclass(frozen=True, slots=True)
class Ban:
    """Masks ``token_ids`` (int64 ``[n]``)."""

    kind: ClassVar[str] = "masked"
    token_ids: torch.Tensor

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> Ban:
        """The edit of plain ids."""
        return cls(torch.tensor(sorted(token_ids), dtype=torch.int64))

    def num_masked(self, num_tokens: int) -> int:
        """Number of ids masked."""
        return self.token_ids.shape[0]


@dataclass(frozen=True, slots=True)
class Allow:
    """Masks every token whose bit is 0.

    Attributes:
        bitmask: int32 ``[ceil(V / 32)]`` on the CPU, token ``32 * i + j`` is bit j of word i. Ids
            beyond a narrower bitmask are masked. Not changed any more: what is computed from it is
            kept.
    """

    kind: ClassVar[str] = "masked"
    bitmask: torch.Tensor
    _num_masked: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _unpacked: dict[int, UnpackedMask] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, token_ids: Iterable[int], vocab_size: int) -> Allow:
        """Allows exactly ``token_ids``."""
        return cls(bitmask_of(token_ids, vocab_size))

    def num_masked(self, num_tokens: int) -> int:
        """Number of ids below ``num_tokens`` that are masked."""
        found = self._num_masked.get(num_tokens)
        if found is None:
            found = self._num_masked[num_tokens] = num_tokens - count_allowed(self.bitmask, num_tokens)
        return found

    def unpacked(self, width: int) -> UnpackedMask:
        """The form in which a CPU applies it to rows of ``width``."""
        found = self._unpacked.get(width)
        if found is None:
            found = self._unpacked[width] = unpacked(self.bitmask, width)
        return found


@dataclass(frozen=True, slots=True)
class Force:
    """The token is ``token_id``: overrides the sampled id and edits no logit."""

    kind: ClassVar[str] = "forced"
    token_id: int


Sparse = Bias | Scale | Ban
Edit = Sparse | Allow | Force


class MalformedEdit(Exception):
    """A processor returned an edit, or a position, that would harm the batch."""


def check_edit(edit: object, *, soft: bool, vocab_size: int, num_tokens: int) -> Edit:
    """A copy of ``edit``, of one of these classes itself, if it can be applied to a row.

    Its tensors are its own, on the CPU: the processor may write into those that it returned. A
    bitmask is widened with zeros.

    Args:
        edit: Value that a processor returned.
        soft: The processor acts at a stage at which biases and scales are applied.
        vocab_size: Width of the row.
        num_tokens: Ids that may be forced are below it.

    Raises:
        MalformedEdit: it cannot.
    """
    if isinstance(edit, Force):
        if type(edit.token_id) is not int or not 0 <= edit.token_id < num_tokens:
            raise MalformedEdit(f"forces {edit.token_id!r:.40}, expected a token id below {num_tokens}")
        return Force(edit.token_id)
    if isinstance(edit, Allow):
        return _check_bitmask(edit, -(-vocab_size // 32))
    if not isinstance(edit, Bias | Scale | Ban):
        raise MalformedEdit(f"returned {type(edit).__name__}, which is not an edit")
    edit = _copied(edit)
    name = type(edit).__name__
    ids = edit.token_ids
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise MalformedEdit(f"{name} holds ids {_described(ids)}, expected int64 [n]")
    if len(ids) and not (0 <= int(ids.min()) and int(ids.max()) < vocab_size):
        raise MalformedEdit(f"{name} holds ids {int(ids.min())} to {int(ids.max())} for a row of {vocab_size}")
    if isinstance(edit, Ban):
        return edit
    values = edit.values if isinstance(edit, Bias) else edit.factors
    if values.dtype != torch.float32 or values.shape != ids.shape:
        raise MalformedEdit(f"{name} holds values {_described(values)}, expected float32 {list(ids.shape)}")
    if not bool(values.isfinite().all()):
        raise MalformedEdit(f"{name} holds a value that is not finite, which no mask is,")
    if isinstance(edit, Scale) and not bool((values > 0).all()):
        raise MalformedEdit("Scale holds a factor that is not above 0")
    if not soft:
        raise MalformedEdit(f"{name} comes at a stage where biases and scales are not applied")
    return edit


def _copied(edit: Sparse) -> Sparse:
    """A copy on the CPU, of the class above that ``edit`` is of. Raises `MalformedEdit`."""
    if isinstance(edit, Ban):
        return Ban(_tensor(edit.token_ids, "Ban holds ids").detach().to("cpu", copy=True))
    kind: type[Bias | Scale] = Bias if isinstance(edit, Bias) else Scale
    parts: list[Any] = []
    for given, code, what in ((edit._ids, "q", "ids"), (edit._numbers, "f", "values")):
        if not isinstance(given, array):
            parts.append(_tensor(given, f"{kind.__name__} holds {what}").detach().to("cpu", copy=True))
        elif given.typecode == code:
            parts.append(given[:])
        else:
            raise MalformedEdit(f"{kind.__name__} holds an array of type {given.typecode!r}, expected {code!r}")
    return kind(*parts)


def _check_bitmask(edit: Allow, num_words: int) -> Allow:
    bitmask = _tensor(edit.bitmask, "Allow holds a bitmask")
    if bitmask.dtype != torch.int32 or bitmask.dim() != 1 or bitmask.device.type != "cpu" or len(bitmask) > num_words:
        expected = f"expected int32 [{num_words}] on the CPU"
        raise MalformedEdit(f"Allow holds a bitmask {_described(bitmask)} on {bitmask.device}, {expected}")
    widened = torch.zeros(num_words, dtype=torch.int32)
    widened[: len(bitmask)] = bitmask
    return Allow(widened)


def _tensor(given: object, what: str) -> torch.Tensor:
    if not isinstance(given, torch.Tensor):
        raise MalformedEdit(f"{what} of type {type(given).__name__}, expected a tensor")
    return given


def check_in_place(result: object, shown: torch.Tensor, row: torch.Tensor) -> None:
    """Check that code which was shown a row has edited it in place, so that its edit is not lost.

    Args:
        result: Value that the code returned: None, or the row or a part of it.
        shown: Tensor that it was given, a view of ``row``.
        row: The row.

    Raises:
        MalformedEdit: it returned something else, or put other data in the place of the row's.
    """
    if (shown.data_ptr(), shown.dtype, shown.numel()) != (row.data_ptr(), row.dtype, row.numel()):
        raise MalformedEdit("put other data in the place of the logits instead of editing them in place")
    if result is None:
        return
    if not isinstance(result, torch.Tensor) or _storage(result) != _storage(row):
        raise MalformedEdit(f"returned {type(result).__name__} instead of editing the logits in place")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def apply_sparse(logits: torch.Tensor, edits: Sequence[tuple[int, Sparse]]) -> None:
    """Apply one sparse edit to each of several rows with one gather and one scatter per kind.

    Args:
        logits: float ``[B, V]``, edited in place.
        edits: ``(row, edit)``; a row may occur several times, its edits are applied in the order
            given.
    """
    while edits:
        wave, edits = _first_per_row(edits)
        kinds = {type(edit) for _, edit in wave}
        for kind in kinds:  # in any order: they are of different rows
            part = wave if len(kinds) == 1 else [(row, edit) for row, edit in wave if type(edit) is kind]
            _apply_kind(logits, part, kind)


def _first_per_row(
    edits: Sequence[tuple[int, Sparse]],
) -> tuple[Sequence[tuple[int, Sparse]], Sequence[tuple[int, Sparse]]]:
    """Splits off the first edit of each row, so that one scatter never writes an element twice."""
    if len(dict(edits)) == len(edits):
        return edits, ()
    seen: set[int] = set()
    first: list[tuple[int, Sparse]] = []
    rest: list[tuple[int, Sparse]] = []
    for row, edit in edits:
        (rest if row in seen else first).append((row, edit))
        seen.add(row)
    return first, rest


def _apply_kind(logits: torch.Tensor, edits: Sequence[tuple[int, Sparse]], kind: type[Sparse]) -> None:
    device, width = logits.device, logits.shape[1]
    flat = logits.view(-1)
    parts = [edit.token_ids if isinstance(edit, Ban) else edit._ids for _, edit in edits]
    lengths = [len(part) if isinstance(part, array) else part.shape[0] for part in parts]  # len of a tensor is slow
    starts = np.repeat([row * width for row, _ in edits], lengths)
    index = upload(_joined(parts, torch.int64) + torch.from_numpy(starts), device)
    if kind is Ban:
        flat.index_fill_(0, index, -torch.inf)
        return
    values = upload(_joined([edit._numbers for _, edit in edits if not isinstance(edit, Ban)], torch.float32), device)
    if kind is Bias and logits.dtype == torch.float32:
        flat.index_add_(0, index, values)
        return
    z = flat.index_select(0, index).float()
    z = z + values if kind is Bias else torch.where(z > 0, z / values, z * values)
    flat.scatter_(0, index, z.to(logits.dtype))


def _joined(parts: Sequence[Numbers], dtype: torch.dtype) -> torch.Tensor:
    """The parts one after the other; a single tensor as it is, everything else as a copy."""
    arrays = [part for part in parts if isinstance(part, array)]
    if len(arrays) == len(parts):
        joined = bytearray().join(arrays)
        return torch.frombuffer(joined, dtype=dtype) if joined else torch.empty(0, dtype=dtype)
    tensors = [_joined([part], dtype) if isinstance(part, array) else part for part in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: Sequence[int] | None = None) -> None:
    """Masks with -inf every logit whose bit is 0; NaN and +inf become NaN there.

    Args:
        logits: float ``[B, V]``, edited in place.
        bitmask: int32 ``[R, W]``, one row of bits for each of ``rows``; ids beyond ``32 * W`` are
            masked.
        rows: Rows of ``logits`` to mask, all of them in order by default.
    """
    every = range(len(logits)) if rows is None else rows
    if logits.device.type == "cpu":
        apply_allows(logits, [(row, Allow(mask)) for row, mask in zip(every, bitmask.cpu(), strict=True)])
    else:
        apply_on_device(logits, bitmask, every)


def apply_allows(logits: torch.Tensor, edits: Sequence[tuple[int, Allow]]) -> None:
    """Apply the packed masks of some rows together: see `apply_bitmask`.

    Args:
        logits: float ``[B, V]``, edited in place.
        edits: ``(row, edit)``; no row occurs twice.
    """
    if not edits:
        return
    if (kernels := kernels_for(logits)) is not None:
        kernels.apply_masks(logits, [row for row, _ in edits], [edit.bitmask for _, edit in edits])
    elif logits.device.type == "cpu":
        apply_unpacked(logits, [(row, edit.unpacked(logits.shape[1])) for row, edit in edits])
    else:
        apply_on_device(logits, torch.stack([edit.bitmask for _, edit in edits]), [row for row, _ in edits])
