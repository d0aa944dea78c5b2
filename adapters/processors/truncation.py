"""Temperature and truncation samplers.

Every truncation writes -inf and nothing else, so that kept logits are unchanged, and none ever
leaves NaN in a row that had none. A row without a finite logit is left unchanged. All but
`TypicalP` keep the most likely token, so that they have no effect on greedy requests.
Batch-invariant bit for bit: probabilities come from a row-wise softmax, other sums over the
vocabulary are made one row at a time, and sums that decide a prefix are integer sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator

from adapters.candidates import block_maxima, highest_ids, top
from adapters.contract import Context, ProcessorArgs, Reads, ShapingProcessor, Stage
from adapters.processors.arguments import MAX_INT

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: only the lowest id of the highest logits is kept."""

MASS_RESOLUTION = 2.0**-22
"""Tolerance of a prefix's mass: about two float32 units in a sum of probabilities."""

_WIDEST_TOPK = 1024
_PREFIX_WIDTHS = (128, 1024, 8192)
_UNIT = 2.0**53

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class _RowWise(ShapingProcessor):
    """Base of stateless processors that are only implemented batched."""

    reads = Reads.NOTHING

    def shape(self, logits: torch.Tensor) -> None:
        self.shape_rows([self], logits.unsqueeze(0))


class Temperature(_RowWise):
    """Divides the logits by a temperature; 0 leaves only the most likely token.

    Source: z / T (Ackley, Hinton and Sejnowski, Cognitive Science 1985). Below 1e-5 the request is
    greedy: only the highest logit is kept, ties to the lowest id.
    """

    name = "temperature"
    stage = Stage.TEMPERATURE

    class Args(ProcessorArgs):
        value: float = Field(ge=0.0, le=100.0, description="Temperature; 1 changes nothing, 0 is greedy.")

    def __init__(self, args: Args, context: Context) -> None:
        self.value = args.value

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        greedy = [row for row, p in enumerate(processors) if p.value < GREEDY_BELOW]
        logits.div_(_column([1.0 if p.value < GREEDY_BELOW else p.value for p in processors], logits))
        keep_most_likely(logits, greedy)


class DynamicTemperature(_RowWise):
    """Divides the logits by a temperature that rises with the row's entropy.

    Source: llama.cpp's ``dynatemp``: T = low + (high - low) * (H / ln n) ** exponent, where H is
    the entropy of the row and n how many tokens are left in it. A row with one token left is left
    alone; a temperature below 1e-5 counts as 1e-5.
    """

    name = "dynamic_temperature"
    stage = Stage.TEMPERATURE

    class Args(ProcessorArgs):
        low: float = Field(ge=0.0, le=100.0, description="Temperature of a row that is certain.")
        high: float = Field(ge=0.0, le=100.0, description="Temperature of a row whose tokens are equally likely.")
        exponent: float = Field(default=1.0, ge=0.0, le=10.0, description="Above 1 the temperature stays low longer.")

        @model_validator(mode="after")
        def _in_order(self) -> Self:
            if self.low > self.high:
                raise ValueError("low must be at most high")
            return self

    def __init__(self, args: Args, context: Context) -> None:
        self.low, self.high, self.exponent = args.low, args.high, args.exponent

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        highest = logits.amax(-1, keepdim=True)
        information = -logits.log_softmax(-1)
        entropy = _entropy(information, information.neg().exp_())
        count = (logits > -torch.inf).sum(-1, keepdim=True)
        share = (entropy / count.to(logits.dtype).log().clamp_(min=torch.finfo(logits.dtype).tiny)).clamp_(0.0, 1.0)
        low, high, exponent = (
            _column(values, logits) for values in zip(*((p.low, p.high, p.exponent) for p in processors), strict=True)
        )
        temperatures = (low + (high - low) * share.pow(exponent)).clamp_(min=GREEDY_BELOW)
        warmed = (logits - highest) / temperatures  # from the highest down, so that nothing overflows
        logits.copy_(torch.where(count > 1, warmed, logits))


class TopK(_RowWise):
    """Keeps the k tokens with the highest logits.

    Source: Fan, Lewis and Dauphin, arXiv 1805.04833. Tokens that tie with the k-th are kept too; 0
    and -1 are off. k = 1 is greedy: ties keep the lowest id only.
    """

    name = "top_k"
    stage = Stage.TRUNCATION

    class Args(ProcessorArgs):
        k: int = Field(ge=-1, le=MAX_INT, description="How many tokens to keep; 0 or -1 keeps all, 1 is greedy.")

    def __init__(self, args: Args, context: Context) -> None:
        self.k = max(args.k, 0)

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        keep_top_k(logits, [p.k for p in processors])


class TopP(_RowWise):
    """Keeps the nucleus: the most likely tokens, as few as have a probability mass of at least p.

    Source: nucleus sampling (Holtzman et al., arXiv 1904.09751). The token that reaches p is kept.
    Ties are ordered by rising id. 1 is off, 0 is greedy.
    """

    name = "top_p"
    stage = Stage.TRUNCATION

    class Args(ProcessorArgs):
        p: Fraction = Field(description="Probability mass to keep; 1 keeps all, 0 is greedy.")

    def __init__(self, args: Args, context: Context) -> None:
        self.p = args.p

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        keep_top_p(logits, [p.p for p in processors], lambda part: part.softmax(-1))


class MinP(_RowWise):
    """Keeps the tokens of probability at least p times the highest.

    Source: Nguyen et al., arXiv 2407.01082. In logits: z >= max(z) + ln p. 0 is off.
    """

    name = "min_p"
    stage = Stage.TRUNCATION

    class Args(ProcessorArgs):
        p: Fraction = Field(description="Least probability relative to the most likely token's; 0 keeps all.")

    def __init__(self, args: Args, context: Context) -> None:
        self.offset = math.log(args.p) if args.p > 0 else -math.inf

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        cuts = logits.amax(-1, keepdim=True) + _column([p.offset for p in processors], logits)
        logits.masked_fill_(logits < cuts, -torch.inf)


class TopA(_RowWise):
    """Keeps the tokens at least a times as likely as the square of the highest probability.

    Source: top-a sampling (BlinkDL, RWKV-LM, 2022): p(t) >= a * max(p) ** 2, so that a row that is
    certain keeps fewer tokens than one that is not. The most likely token is always kept. 0 is off.
    """

    name = "top_a"
    stage = Stage.TRUNCATION

    class Args(ProcessorArgs):
        a: Fraction = Field(description="Least probability relative to the square of the highest; 0 keeps all.")

    def __init__(self, args: Args, context: Context) -> None:
        self.a = args.a

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        probabilities = logits.softmax(-1)
        cuts = _column([p.a for p in processors], logits) * probabilities.amax(-1, keepdim=True).square()
        _drop_unlikely(logits, probabilities, cuts)


class TypicalP(_RowWise):
    """Keeps the tokens whose information is closest to the row's entropy, up to a mass of p.

    Source: locally typical sampling (Meister et al., arXiv 2202.00666). In the order of abs(-ln
    p(t) - H), the shortest prefix whose mass is at least p, and all ties with its last token. 1 is
    off. It may drop the most likely token, which changes greedy requests too.
    """

    name = "typical_p"
    stage = Stage.TRUNCATION

    class Args(ProcessorArgs):
        p: float = Field(gt=0.0, le=1.0, description="Probability mass to keep; 1 keeps all.")

    def __init__(self, args: Args, context: Context) -> None:
        self.p = args.p

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        rows = [row for row, p in enumerate(processors) if p.p < 1.0]
        if not rows:
            return
        part = _take(logits, rows)
        information = -part.log_softmax(-1)
        probabilities = information.neg().exp_()
        closeness = -(information - _entropy(information, probabilities)).abs_()
        cuts, _ = _prefixes(closeness, probabilities, [processors[row].p for row in rows])
        _drop(logits, rows, part, closeness < cuts)


class TopNSigma(_RowWise):
    """Keeps the logits within n standard deviations of the highest.

    Source: Tang et al., arXiv 2411.07641: z >= max(z) - n * sigma(z). The population deviation over
    the finite logits, so that masked tokens do not count.
    """

    name = "top_n_sigma"
    stage = Stage.TRUNCATION

    class Args(ProcessorArgs):
        n: float = Field(ge=0.0, le=100.0, description="Standard deviations below the highest logit.")

    def __init__(self, args: Args, context: Context) -> None:
        self.n = args.n

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        highest = logits.amax(-1, keepdim=True)
        finite = logits > -torch.inf
        count = finite.sum(-1, keepdim=True)
        below = (logits - highest).masked_fill_(~finite, 0.0)
        mean = row_sums(below) / count
        squares = (below - mean).square_().masked_fill_(~finite, 0.0)
        sigma = (row_sums(squares) / count).sqrt_()
        cuts = highest - _column([p.n for p in processors], logits) * sigma
        logits.masked_fill_(logits < cuts, -torch.inf)


class EpsilonCutoff(_RowWise):
    """Keeps the tokens of probability at least epsilon, and always the most likely.

    Source: Hewitt, Manning and Liang, arXiv 2210.15191. 0 is off.
    """

    name = "epsilon_cutoff"
    stage = Stage.TRUNCATION

    class Args(ProcessorArgs):
        epsilon: float = Field(ge=0.0, lt=1.0, description="Least probability of a token; 0 keeps all.")

    def __init__(self, args: Args, context: Context) -> None:
        self.epsilon = args.epsilon

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        cuts = _column([p.epsilon for p in processors], logits)
        _drop_unlikely(logits, logits.softmax(-1), cuts)


class EtaCutoff(_RowWise):
    """Keeps the tokens of probability at least eta, which falls with the row's entropy.

    Source: Hewitt, Manning and Liang, arXiv 2210.15191: eta = min(epsilon, sqrt(epsilon) *
    exp(-H)). The most likely token is always kept. 0 is off.
    """

    name = "eta_cutoff"
    stage = Stage.TRUNCATION

    class Args(ProcessorArgs):
        epsilon: float = Field(ge=0.0, lt=1.0, description="Highest value of the cutoff eta; 0 keeps all.")

    def __init__(self, args: Args, context: Context) -> None:
        self.epsilon = args.epsilon

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        information = -logits.log_softmax(-1)
        probabilities = logits.softmax(-1)
        epsilon = _column([p.epsilon for p in processors], logits)
        eta = torch.minimum(epsilon, epsilon.sqrt() * _entropy(information, probabilities).neg_().exp_())
        _drop_unlikely(logits, probabilities, eta)


def keep_most_likely(logits: torch.Tensor, rows: Sequence[int]) -> None:
    """Mask all but the highest logit in ``rows`` of float ``[B, V]``; ties keep the lowest id."""
    if not rows:
        return
    part = logits[rows]
    best = highest_ids(part, block_maxima(part)).unsqueeze(1)
    highest = part.gather(-1, best)
    logits[rows] = part.fill_(-torch.inf).scatter_(-1, best, highest)


def keep_top_k(keys: torch.Tensor, ks: Sequence[int]) -> None:
    """Mask all but the ``ks[i]`` highest of row i of float ``[B, V]`` and ties with the last.

    0 and ``k >= V`` keep all; ``k = 1`` keeps only the lowest of the tied ids.
    """
    width = keys.shape[1]
    keep_most_likely(keys, [row for row, k in enumerate(ks) if k == 1])
    rows = [row for row, k in enumerate(ks) if 1 < k < width]
    narrow = [row for row in rows if ks[row] <= _WIDEST_TOPK]
    for together in (narrow, *([row] for row in rows if ks[row] > _WIDEST_TOPK)):
        if together:
            _keep_top_k(keys, together, [ks[row] for row in together])


def keep_top_p(keys: torch.Tensor, ps: Sequence[float], probabilities: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Mask all but the nucleus of mass at least ``ps[i]`` in row i of float ``[B, V]``.

    In descending order of the keys, ties by rising id. 1 keeps all.

    Args:
        probabilities: From some rows of the keys to their probabilities, float ``[R, V]``.
    """
    rows = [row for row, p in enumerate(ps) if p < 1.0]
    if not rows:
        return
    part = _take(keys, rows)
    cuts, room = _prefixes(part, probabilities(part), [ps[row] for row in rows])
    drop = part < cuts
    for i, kept in enumerate(room):
        if kept is not None:  # more tokens tie with the last key than the prefix holds
            tied = part[i] == cuts[i]
            drop[i] |= tied & (tied.cumsum(0) > kept)
    _drop(keys, rows, part, drop)


def row_sums(values: torch.Tensor) -> torch.Tensor:
    """Row sums ``[R, 1]``, one row at a time.

    A sum over ``[1, V]`` is split among threads and one over ``[R, V]`` is not, so a joint sum
    would not be batch-invariant.
    """
    return _each_sum(values, values.dtype)


def _each_sum(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([row.sum(dtype=dtype) for row in values]).unsqueeze(1)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """``[R, 1]`` on the device of ``like``."""
    return torch.tensor(values, dtype=like.dtype).unsqueeze(1).to(like.device, non_blocking=True)


def _take(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _drop(logits: torch.Tensor, rows: list[int], part: torch.Tensor, drop: torch.Tensor) -> None:
    """Mask ``rows``, whose values `_take` returned as ``part``."""
    part.masked_fill_(drop, -torch.inf)
    if part is not logits:
        logits[rows] = part


def _drop_unlikely(logits: torch.Tensor, probabilities: torch.Tensor, cuts: torch.Tensor) -> None:
    unlikely = (probabilities < cuts) & (logits < logits.amax(-1, keepdim=True))
    logits.masked_fill_(unlikely, -torch.inf)


def _keep_top_k(logits: torch.Tensor, rows: list[int], ks: list[int]) -> None:
    part = _take(logits, rows)
    last = torch.tensor(ks).unsqueeze(1).to(logits.device, non_blocking=True) - 1
    cuts = top(part, max(ks))[0].gather(-1, last)
    _drop(logits, rows, part, part < cuts)


def _entropy(information: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Entropy in nats, ``[R, 1]``; masked tokens contribute nothing."""
    return row_sums((information * probabilities).masked_fill_(probabilities == 0, 0.0))


def _prefixes(
    keys: torch.Tensor, probabilities: torch.Tensor, masses: Sequence[float]
) -> tuple[torch.Tensor, list[int | None]]:
    """The shortest prefixes, in descending order of the keys, with at least the given mass.

    A selection of the highest keys usually holds the whole prefix, as its mass proves; it is
    widened until it does. Only prefixes of many thousands of tokens are found by sorting.

    Args:
        keys: float ``[R, V]``.
        probabilities: float32 ``[R, V]``.
        masses: One for each row.

    Returns:
        The key of the last token of each prefix, ``[R, 1]``; and how many tokens of that key the
        prefix holds, None for all of them.
    """
    num_rows, width = keys.shape
    # In float32 the probabilities of a large vocabulary sum to 1 only within a few millionths.
    totals = _each_sum(probabilities, torch.float64)
    shares = _column([mass - MASS_RESOLUTION for mass in masses], totals)
    targets = (shares * totals * _UNIT).ceil().nan_to_num(1.0).long().clamp(min=1)  # a row may be all -inf
    cuts = keys.new_empty((num_rows, 1))
    room: list[int | None] = [None] * num_rows
    pending = list(range(num_rows))
    for num_selected in (*(w for w in _PREFIX_WIDTHS if w < width), width):
        part, some = _take(keys, pending), _take(probabilities, pending)
        ends, values = _ends(part, some, _take(targets, pending), num_selected)
        found = [i for i, end in enumerate(ends) if end + 1 < num_selected or num_selected == width]
        for i in found:
            row, end = pending[i], min(ends[i], width - 1)
            cuts[row, 0] = values[i, end]
            if end + 1 < width and bool(values[i, end + 1] == values[i, end]):
                room[row] = end + 1 - int((values[i] > values[i, end]).sum())
        pending = [row for i, row in enumerate(pending) if i not in found]
        if not pending:
            break
    return cuts, room


def _ends(
    keys: torch.Tensor, probabilities: torch.Tensor, targets: torch.Tensor, num_selected: int
) -> tuple[list[int], torch.Tensor]:
    """Index of each prefix's last token (``num_selected`` if beyond), and the keys, descending."""
    if num_selected == keys.shape[1]:
        values, ids = keys.sort(-1, descending=True)
    else:
        values, ids = top(keys, num_selected)
    reached = (probabilities.gather(-1, ids).double() * _UNIT).long().cumsum(-1)
    ends: list[int] = (reached < targets).sum(-1).tolist()
    return ends, values
