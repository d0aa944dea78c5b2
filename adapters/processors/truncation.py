"""Temperature and truncation samplers.

Every truncation writes -inf and nothing else, so that kept logits are unchanged, and none ever
leaves NaN in a row that had none. A row without a finite logit is left unchanged. All but
`TypicalP` keep the most likely token, so that they have no effect on greedy requests.
What a share of probability keeps is decided by `adapters.sampling`, as for the sampler's own
controls. Batch-invariant bit for bit, in any number of threads: weights are integers, and other
sums over the vocabulary are `row_sums`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator

from adapters.contract import Context, ProcessorArgs, Reads, ShapingProcessor, Stage
from adapters.processors.arguments import MAX_INT
from adapters.sampling.truncation import (
    GREEDY_BELOW,
    beyond_shares,
    column,
    divide_,
    drop,
    keep_min_p,
    keep_share,
    keep_top_k,
    keep_top_p,
    rounded_up,
    take,
    total_weights,
    weights_of_rows,
)

_SUMMED_AT_ONCE = 1024

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
        divide_(logits, [p.value for p in processors])


class DynamicTemperature(_RowWise):
    """Divides the logits by a temperature that rises with the row's entropy.

    Source: llama.cpp's ``dynatemp``: T = low + (high - low) * (H / ln n) ** exponent, where H is
    the entropy of the row and n how many tokens are left in it. A row with one token left is left
    alone; a temperature below 1e-5 counts as 1e-5.
    """

    name = "dynamic_temperature"
    version = 2  # divides the logits themselves, as `Temperature` does
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
        information = -logits.log_softmax(-1)
        entropy = _entropy(information, information.neg().exp_())
        count = (logits > -torch.inf).sum(-1, keepdim=True)
        share = (entropy / count.to(logits.dtype).log().clamp_(min=torch.finfo(logits.dtype).tiny)).clamp_(0.0, 1.0)
        low, high, exponent = (
            column(values, logits) for values in zip(*((p.low, p.high, p.exponent) for p in processors), strict=True)
        )
        temperatures = (low + (high - low) * share.pow(exponent)).clamp_(min=GREEDY_BELOW)
        logits.div_(torch.where(count > 1, temperatures, 1.0))


class TopK(_RowWise):
    """Keeps the k tokens with the highest logits.

    Source: Fan, Lewis and Dauphin, arXiv 1805.04833. Tokens that tie with the k-th are kept too; 0
    and -1 are off. k = 1 is greedy: ties keep the lowest id only.
    """

    name = "top_k"
    stage = Stage.TRUNCATION

    class Args(ProcessorArgs):
        k: int = Field(ge=-1, le=MAX_INT, description="Number of tokens to keep; 0 or -1 keeps all, 1 is greedy.")

    def __init__(self, args: Args, context: Context) -> None:
        self.k = max(args.k, 0)

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        keep_top_k(logits, [p.k for p in processors])


class TopP(_RowWise):
    """Keeps the nucleus: the most likely tokens, as few as have a probability mass of at least p.

    Source: nucleus sampling (Holtzman et al., arXiv 1904.09751). The token that reaches p is kept.
    Ties are ordered by rising id. 1 is off, 0 is greedy. Masses are sums of integer weights
    (`adapters.sampling.weights`), as those of the field.
    """

    name = "top_p"
    version = 3  # weights have the unit of the whole row
    stage = Stage.TRUNCATION

    class Args(ProcessorArgs):
        p: Fraction = Field(description="Probability mass to keep; 1 keeps all, 0 is greedy.")

    def __init__(self, args: Args, context: Context) -> None:
        self.p = args.p

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        keep_top_p(logits, [p.p for p in processors])


class MinP(_RowWise):
    """Keeps the tokens of probability at least p times the highest.

    Source: Nguyen et al., arXiv 2407.01082. In logits: z >= max(z) + ln p, in float64. 0 is off; 1
    is greedy: ties keep the lowest id only.
    """

    name = "min_p"
    version = 2  # the bound is computed in float64, and 1 is greedy
    stage = Stage.TRUNCATION

    class Args(ProcessorArgs):
        p: Fraction = Field(description="Least probability relative to the most likely token's; 0 keeps all.")

    def __init__(self, args: Args, context: Context) -> None:
        self.p = args.p

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        keep_min_p(logits, [p.p for p in processors])


class TopA(_RowWise):
    """Keeps the tokens at least a times as likely as the square of the highest probability.

    Source: top-a sampling (BlinkDL, RWKV-LM, 2022): p(t) >= a * max(p) ** 2, so that a row that is
    certain keeps fewer tokens than one that is not. The most likely token is always kept. 0 is off.
    """

    name = "top_a"
    version = 2  # weights are integers
    stage = Stage.TRUNCATION

    class Args(ProcessorArgs):
        a: Fraction = Field(description="Least probability relative to the square of the highest; 0 keeps all.")

    def __init__(self, args: Args, context: Context) -> None:
        self.a = args.a

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        totals = total_weights(logits)
        keep_share(logits, _column([p.a for p in processors], logits) / totals.square(), totals)


class TypicalP(_RowWise):
    """Keeps the tokens whose information is closest to the row's entropy, up to a mass of p.

    Source: locally typical sampling (Meister et al., arXiv 2202.00666). In the order of abs(-ln
    p(t) - H), the shortest prefix whose mass is at least p, and all ties with its last token. 1 is
    off. It may drop the most likely token, which changes greedy requests too.
    """

    name = "typical_p"
    version = 2  # weights are integers
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
        part = take(logits, rows)
        information = -part.log_softmax(-1)
        closeness = -(information - _entropy(information, information.neg().exp_())).abs_()
        mask = torch.empty_like(part, dtype=torch.bool)
        shares = [processors[row].p for row in rows]
        for some, beyond in beyond_shares(closeness, lambda some: weights_of_rows(part[some]), shares):
            last = closeness[some].masked_fill(beyond, torch.inf).amin(-1, keepdim=True)
            mask[some] = closeness[some] < last
        drop(logits, rows, part, mask)


class TopNSigma(_RowWise):
    """Keeps the logits within n standard deviations of the highest.

    Source: Tang et al., arXiv 2411.07641: z >= max(z) - n * sigma(z). The population deviation over
    the finite logits, so that masked tokens do not count.
    """

    name = "top_n_sigma"
    version = 3  # no deviation is infinite, nor 0 where logits differ
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
        exponents = torch.frexp(below.amin(-1, keepdim=True)).exponent.clamp_(-126, 126)
        below.mul_(torch.ldexp(torch.ones_like(highest), -exponents))  # else float32 may lack the squares
        mean = row_sums(below) / count
        squares = (below - mean).square_().masked_fill_(~finite, 0.0)
        sigma = torch.ldexp((row_sums(squares) / count).sqrt_().double(), exponents)
        cuts = highest.double() - _column([p.n for p in processors], logits) * sigma
        logits.masked_fill_(logits < rounded_up(cuts, logits.dtype), -torch.inf)


class EpsilonCutoff(_RowWise):
    """Keeps the tokens of probability at least epsilon, and always the most likely.

    Source: Hewitt, Manning and Liang, arXiv 2210.15191. 0 is off.
    """

    name = "epsilon_cutoff"
    version = 2  # weights are integers
    stage = Stage.TRUNCATION

    class Args(ProcessorArgs):
        epsilon: float = Field(ge=0.0, lt=1.0, description="Least probability of a token; 0 keeps all.")

    def __init__(self, args: Args, context: Context) -> None:
        self.epsilon = args.epsilon

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        keep_share(logits, _column([p.epsilon for p in processors], logits), total_weights(logits))


class EtaCutoff(_RowWise):
    """Keeps the tokens of probability at least eta, which falls with the row's entropy.

    Source: Hewitt, Manning and Liang, arXiv 2210.15191: eta = min(epsilon, sqrt(epsilon) *
    exp(-H)). The most likely token is always kept. 0 is off.
    """

    name = "eta_cutoff"
    version = 2  # weights are integers
    stage = Stage.TRUNCATION

    class Args(ProcessorArgs):
        epsilon: float = Field(ge=0.0, lt=1.0, description="Highest value of the cutoff eta; 0 keeps all.")

    def __init__(self, args: Args, context: Context) -> None:
        self.epsilon = args.epsilon

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        information = -logits.log_softmax(-1)
        entropy = _entropy(information, information.neg().exp_()).double()
        epsilon = _column([p.epsilon for p in processors], logits)
        eta = torch.minimum(epsilon, epsilon.sqrt() * entropy.neg_().exp_())
        keep_share(logits, eta, total_weights(logits))


def row_sums(values: torch.Tensor) -> torch.Tensor:
    """Row sums ``[R, 1]`` of float ``[R, V]``, the same in any batch and in any number of threads.

    Sums of pieces, and then their sum: torch splits the sum of one long row among threads.
    """
    whole = values.shape[1] // _SUMMED_AT_ONCE * _SUMMED_AT_ONCE
    pieces = values[:, :whole].reshape(len(values), -1, _SUMMED_AT_ONCE).sum(-1)
    return torch.cat((pieces, values[:, whole:].sum(-1, keepdim=True)), 1).sum(-1, keepdim=True)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """float64 ``[R, 1]`` on the device of ``like``."""
    return column(values, like, torch.float64)


def _entropy(information: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Entropy in nats, ``[R, 1]``; masked tokens contribute nothing."""
    return row_sums((information * probabilities).masked_fill_(probabilities == 0, 0.0))
