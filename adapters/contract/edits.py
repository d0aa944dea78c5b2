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

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

from adapters.devices import upload, upload_ids

Ids = torch.Tensor | array  # type: ignore[type-arg]
Numbers = torch.Tensor | array  # type: ignore[type-arg]


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


@dataclass(frozen=True, slots=True)
class Allow:
    """Masks every token whose bit is 0.

    Attributes:
        bitmask: int32 ``[ceil(V / 32)]`` on the CPU, token ``32 * i + j`` is bit j of word i. Ids
            beyond a narrower bitmask are masked.
    """

    kind: ClassVar[str] = "masked"
    bitmask: torch.Tensor

    @classmethod
    def of(cls, token_ids: Iterable[int], vocab_size: int) -> Allow:
        """Allows exactly ``token_ids``."""
        return cls(bitmask_of(token_ids, vocab_size))


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
    """``edit``, if it can be applied to a row; a bitmask that is too narrow is widened with zeros.

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
        return edit
    if isinstance(edit, Allow):
        return _check_bitmask(edit, -(-vocab_size // 32))
    if not isinstance(edit, Bias | Scale | Ban):
        raise MalformedEdit(f"returned {type(edit).__name__}, which is not an edit")
    name = type(edit).__name__
    if not isinstance(edit, Ban):
        for given, code in ((edit._ids, "q"), (edit._numbers, "f")):
            if isinstance(given, array) and given.typecode != code:
                raise MalformedEdit(f"{name} holds an array of type {given.typecode!r}, expected {code!r}")
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
    if not soft:
        raise MalformedEdit(f"{name} comes at a stage where biases and scales are not applied")
    return edit


def _check_bitmask(edit: Allow, num_words: int) -> Allow:
    bitmask = edit.bitmask
    if bitmask.dtype != torch.int32 or bitmask.dim() != 1 or bitmask.device.type != "cpu" or len(bitmask) > num_words:
        expected = f"expected int32 [{num_words}] on the CPU"
        raise MalformedEdit(f"Allow holds a bitmask {_described(bitmask)} on {bitmask.device}, {expected}")
    missing = num_words - len(bitmask)
    return Allow(torch.nn.functional.pad(bitmask, (0, missing))) if missing else edit


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def bitmask_of(token_ids: Iterable[int], vocab_size: int) -> torch.Tensor:
    """Packed int32 ``[ceil(vocab_size / 32)]`` with the bits of ``token_ids`` set.

    Raises:
        ValueError: an id is outside ``[0, vocab_size)``.
    """
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    ids = np.fromiter(token_ids, dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(f"token ids must be between 0 and {vocab_size - 1}")
    bits[ids] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())


def is_allowed(bitmask: torch.Tensor, token_id: int) -> bool:
    """Whether the bit of ``token_id`` is set; ids beyond the bitmask are not allowed."""
    word = token_id >> 5
    return word < bitmask.shape[0] and bool((int(bitmask[word]) >> (token_id & 31)) & 1)


def count_allowed(bitmask: torch.Tensor, num_tokens: int) -> int:
    """Number of bits set below ``num_tokens``; bits of padding above it do not count."""
    words = np.ascontiguousarray(bitmask.numpy())
    num_pairs = min(num_tokens // 64, len(words) // 2)  # of words, as they are counted fastest
    count = int(np.bitwise_count(words[: 2 * num_pairs].view(np.uint64)).sum(dtype=np.uint32))
    rest = int.from_bytes(words[2 * num_pairs :][:2].tobytes(), "little")
    return count + (rest & (1 << num_tokens - 64 * num_pairs) - 1).bit_count()


def apply_sparse(logits: torch.Tensor, edits: Sequence[tuple[int, Sparse]]) -> None:
    """Apply one sparse edit to each of several rows with one gather and one scatter per kind.

    Args:
        logits: float ``[B, V]``, edited in place.
        edits: ``(row, edit)``; a row may occur several times, its edits are applied in the order
            given.
    """
    while edits:
        wave, edits = _first_per_row(edits)
        for kind in (Bias, Scale, Ban):
            _apply_kind(logits, [(row, edit) for row, edit in wave if type(edit) is kind], kind)


def _first_per_row(
    edits: Sequence[tuple[int, Sparse]],
) -> tuple[list[tuple[int, Sparse]], list[tuple[int, Sparse]]]:
    """Splits off the first edit of each row, so that one scatter never writes an element twice."""
    if len({row for row, _ in edits}) == len(edits):
        return list(edits), []
    seen: set[int] = set()
    first: list[tuple[int, Sparse]] = []
    rest: list[tuple[int, Sparse]] = []
    for row, edit in edits:
        (rest if row in seen else first).append((row, edit))
        seen.add(row)
    return first, rest


def _apply_kind(logits: torch.Tensor, edits: list[tuple[int, Sparse]], kind: type[Edit]) -> None:
    if not edits:
        return
    device, width = logits.device, logits.shape[1]
    flat = logits.view(-1)
    parts = [edit.token_ids if isinstance(edit, Ban) else edit._ids for _, edit in edits]
    starts = np.repeat([row * width for row, _ in edits], [len(part) for part in parts])
    index = upload(_joined(parts, torch.int64) + torch.from_numpy(starts), device)
    if kind is Ban:
        flat.index_fill_(0, index, -torch.inf)
        return
    values = upload(_joined([edit._numbers for _, edit in edits if not isinstance(edit, Ban)], torch.float32), device)
    z = flat.index_select(0, index).float()
    z = z + values if kind is Bias else torch.where(z > 0, z / values, z * values)
    flat.index_copy_(0, index, z.to(logits.dtype))


def _joined(parts: Sequence[Numbers], dtype: torch.dtype) -> torch.Tensor:
    """The parts one after the other; a single tensor as it is, everything else as a copy."""
    arrays = [part for part in parts if isinstance(part, array)]
    if len(arrays) == len(parts):
        joined = bytearray().join(arrays)
        return torch.frombuffer(joined, dtype=dtype) if joined else torch.empty(0, dtype=dtype)
    tensors = [_joined([part], dtype) if isinstance(part, array) else part for part in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


_FEW = 16
"""A mask is applied bit by bit if fewer than one word in this many has bits set."""

# Row b holds the eight addends of byte b: 0 where its bit is set, else -inf. Made per device on
# first use.
_ADDENDS: dict[torch.device, torch.Tensor] = {}


def _addends(device: torch.device) -> torch.Tensor:
    table = _ADDENDS.get(device)
    if table is None:
        bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
        table = _ADDENDS[device] = upload(torch.where(bits == 1, 0.0, -torch.inf), device)
    return table


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: Sequence[int] | None = None) -> None:
    """Masks with -inf every logit whose bit is 0.

    A table maps eight bits to eight addends, 0 or -inf, which costs a tenth of a boolean masked
    fill; on the CPU one row at a time, so that the addends stay in cache.

    Args:
        logits: float ``[B, V]``, edited in place.
        bitmask: int32 ``[R, W]``, one row of bits for each of ``rows``; ids beyond ``32 * W`` are
            masked.
        rows: Rows of ``logits`` to mask, all of them in order by default.
    """
    every = range(len(logits)) if rows is None else rows
    covered = min(logits.shape[1], bitmask.shape[1] * 32)
    if covered < logits.shape[1]:
        for row in every:
            logits[row, covered:] = -torch.inf
    if logits.device.type == "cpu":
        _mask_on_cpu(logits, bitmask, every, covered)
        return
    octets = _on_device(bitmask, logits.device).contiguous().view(torch.uint8).int()
    addends = _addends(logits.device).index_select(0, octets.flatten()).view(len(octets), -1)[:, :covered]
    if list(every) == list(range(len(logits))):
        logits[:, :covered].add_(addends)
        return
    logits[:, :covered].index_add_(0, upload_ids(list(every), logits.device), addends.to(logits.dtype))


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return upload(tensor, device) if tensor.device.type == "cpu" else tensor.to(device)


def _mask_on_cpu(logits: torch.Tensor, bitmask: torch.Tensor, rows: Sequence[int], covered: int) -> None:
    """Mask bit by bit where few words are clear or set (typical of grammars), else whole rows."""
    allowed = bitmask.cpu().contiguous().numpy()
    masked = ~allowed
    some_clear = masked != 0
    few_clear = _are_few(some_clear)
    if few_clear.any():
        some_clear[~few_clear] = False
        _mask_few(logits, masked, some_clear, rows, covered)
    if few_clear.all():
        return
    few_set = _are_few(allowed != 0)
    addends = np.empty((masked.shape[1] * 4, 8), dtype=np.float32)
    for i in np.flatnonzero(~few_clear).tolist():
        values = logits[rows[i], :covered]
        if few_set[i] and math.isfinite(values.max()):  # a row with NaN or +inf must stay recognisable
            _keep_few(values, allowed[i])
        else:
            np.take(_addends(logits.device).numpy(), allowed[i].view(np.uint8), axis=0, out=addends, mode="clip")
            values += torch.from_numpy(addends).view(-1)[:covered]


def _are_few(words: np.ndarray[Any, np.dtype[np.bool_]]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether few words are true, for each row. (A loop is three times as fast as by axis.)"""
    return np.array([np.count_nonzero(row) * _FEW < words.shape[1] for row in words], dtype=np.bool_)


def _mask_few(
    logits: torch.Tensor,
    masked: np.ndarray[Any, np.dtype[np.int32]],
    chosen: np.ndarray[Any, np.dtype[np.bool_]],
    rows: Sequence[int],
    covered: int,
) -> None:
    """Masks the bits set in the chosen words of all rows together, and no others."""
    words = np.flatnonzero(chosen)
    bits = _bits_in(masked.reshape(-1)[words])
    row, word = np.divmod(words[bits >> 5], masked.shape[1])
    column = word * 32 + (bits & 31)
    index = torch.from_numpy((np.asarray(rows)[row] * logits.shape[1] + column)[column < covered])
    flat = logits.view(-1)
    flat.index_copy_(0, index, flat[index] + -torch.inf)


def _keep_few(values: torch.Tensor, allowed: np.ndarray[Any, np.dtype[np.int32]]) -> None:
    """Masks one row except for the bits set."""
    some = np.flatnonzero(allowed)
    bits = _bits_in(allowed[some])
    columns = some[bits >> 5] * 32 + (bits & 31)
    index = torch.from_numpy(columns[columns < len(values)])
    kept = values[index]
    values.fill_(-torch.inf)
    values[index] = kept


def _bits_in(words: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Token ids of the bits set, ``32 * word + bit``, rising."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
