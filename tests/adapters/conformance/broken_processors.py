"""Processors that break the contract, each in one way that was seen in the field."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from transformers import LogitsProcessor

from adapters.contract import (
    ALWAYS,
    Allow,
    ArgumentError,
    BacktrackingProcessor,
    Ban,
    Bias,
    Context,
    Edit,
    Force,
    ProcessorArgs,
    Reads,
    ShapingProcessor,
    Stage,
    SteeringProcessor,
    TokenId,
)


class Amount(ProcessorArgs):
    """One bounded number."""

    n: int = Field(default=3, ge=0, le=50, description="Any number.")


class Steering(SteeringProcessor):
    """A processor in order, but for what a subclass does."""

    name = "steering_in_order"
    stage = Stage.SOFT
    reads = Reads.PROMPT_AND_GENERATED
    Args = Amount

    def __init__(self, args: Amount, context: Context) -> None:
        self.n = args.n
        self.end = min(context.end_token_ids)
        self.size = context.vocabulary.size

    def edit(self) -> Edit | None:
        return None


class Shaping(ShapingProcessor):
    """A processor in order, but for what a subclass does."""

    name = "shaping_in_order"
    stage = Stage.TEMPERATURE
    reads = Reads.NOTHING
    Args = Amount

    def __init__(self, args: Amount, context: Context) -> None:
        self.n = args.n

    def shape(self, logits: torch.Tensor) -> None:
        """Nothing."""


class CountsCalls(Steering):
    """Forces a token at every fourth call, not at every fourth position."""

    name = "counts_calls"

    def __init__(self, args: Amount, context: Context) -> None:
        super().__init__(args, context)
        self.calls = 0

    def edit(self) -> Edit | None:
        self.calls += 1
        return Force(40) if self.calls % 4 == 0 else None


class PromisesTooMuch(Steering):
    """Says that its edit stays the same, and changes it with the newest token."""

    name = "promises_too_much"

    def edit(self) -> Edit | None:
        return Force(40) if self.num_generated % 3 == 2 else None

    def same_until(self) -> int:
        return self.position + 2


class PromisesForEver(Steering):
    """Says that its edit never changes, and changes it after a thousand tokens."""

    name = "promises_for_ever"

    def edit(self) -> Edit | None:
        return Bias.of([40], [1.0]) if self.num_generated < 1000 else None

    def same_until(self) -> int:
        return ALWAYS


class PromisesUnlessAToken(Steering):
    """Says that its edit stays for a while, whatever comes, and changes it after one rare token."""

    name = "promises_unless_a_token"

    def edit(self) -> Edit | None:
        return Bias.of([40], [2.0 if self.last_token == 371 else 1.0])

    def same_until(self) -> int:
        return self.position + 3


class PromisesUntilItsArgument(Steering):
    """Says that its edit never changes, and changes it for one position that the arguments name."""

    name = "promises_until_its_argument"

    class Args(ProcessorArgs):
        n: int = Field(default=70_000, ge=0, le=2**31, description="Any number.")

    def edit(self) -> Edit | None:
        return Force(40) if self.num_generated == self.n else None

    def same_until(self) -> int:
        return ALWAYS


class Takes(BacktrackingProcessor):
    """A processor in order, but for what a subclass does: takes "the" back, as it is tokenized."""

    name = "takes_in_order"
    reads = Reads.GENERATED

    class Args(ProcessorArgs):
        token_ids: list[TokenId] = Field(default=[40, 41, 42], min_length=1, max_length=9, description="Taken back.")

    def __init__(self, args: Any, context: Context) -> None:
        self.wanted = list(args.token_ids)

    def reset(self) -> None:
        self.written: list[int] = []

    def advance(self, token_id: int, index: int) -> None:
        self.written.append(token_id)

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        del self.written[-len(token_ids) :]
        return True

    def begun(self) -> int | None:
        """Where the wanted tokens may begin."""
        for count in range(len(self.wanted), 0, -1):
            if self.written[-count:] == self.wanted[:count]:
                return len(self.written) - count
        return None

    @property
    def held_from(self) -> int | None:
        return self.begun()

    @property
    def rewinds_to(self) -> int | None:
        index = self.begun()
        return index if index is not None and self.num_generated - index == len(self.wanted) else None


class HoldsTheNewestOnly(Takes):
    """Holds one token where it may take back several."""

    name = "holds_the_newest_only"

    @property
    def held_from(self) -> int | None:
        return None if self.begun() is None else self.num_generated - 1


class HoldsNothingAtTheEnd(Takes):
    """Takes a beginning back where the answer ends with it, which it does not hold."""

    name = "holds_nothing_at_the_end"

    @property
    def held_from(self) -> int | None:
        index = self.begun()
        return None if index is None or self.num_generated - index == 1 else index

    @property
    def rewinds_to(self) -> int | None:
        return None

    @property
    def rewinds_to_at_end(self) -> int | None:
        return self.begun()


class HoldsMoreOnceRewound(Takes):
    """Tells another thing of the same history after a rewind."""

    name = "holds_more_once_rewound"

    def reset(self) -> None:
        super().reset()
        self.rewinds = 0

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        self.rewinds += 1
        return super().rewind_state(token_ids)

    @property
    def held_from(self) -> int | None:
        return 0 if self.rewinds and self.written else self.begun()


class ForgetsToReplay(Steering):
    """Starts its state when it is built, not when it is reset."""

    name = "forgets_to_replay"

    def __init__(self, args: Amount, context: Context) -> None:
        super().__init__(args, context)
        self.sum = 0

    def advance(self, token_id: int, index: int) -> None:
        self.sum += token_id

    def edit(self) -> Edit | None:
        return Bias.of([40], [float(self.sum % 7)])


class SharesState(Steering):
    """Keeps its counter on the class, so that all choices share it."""

    name = "shares_state"
    seen: ClassVar[list[int]] = []

    def reset(self) -> None:
        self.seen.clear()

    def advance(self, token_id: int, index: int) -> None:
        self.seen.append(token_id)

    def edit(self) -> Edit | None:
        return Bias.of([40], [float(len(set(self.seen)))])


class ResurrectsMasked(Shaping):
    """Clamps logits from below, so that masked tokens can be sampled again."""

    name = "resurrects_masked"

    def shape(self, logits: torch.Tensor) -> None:
        logits.clamp_(min=-50.0)


class LeavesNan(Shaping):
    """Divides by the spread of the row, masked entries included."""

    name = "leaves_nan"

    def shape(self, logits: torch.Tensor) -> None:
        logits.sub_(logits.max() * 0).div_(1 + (logits.max() - logits.min()) / 1e9)


class GrowsWithHistory(Steering):
    """Counts the whole answer again at each step."""

    name = "grows_with_history"

    def edit(self) -> Edit | None:
        return Bias.of([40], [0.1 * sum(token_id == 40 for token_id in self.generated)])


class Unbounded(Steering):
    """Takes any number."""

    name = "unbounded"

    class Args(ProcessorArgs):
        n: int = Field(default=3, ge=0)

    def __init__(self, args: Any, context: Context) -> None:
        super().__init__(args, context)
        self.bias = torch.full((1,), float(args.n)).int().float()

    def edit(self) -> Edit | None:
        return Bias(torch.tensor([40]), self.bias)


class RaisesOnArguments(Steering):
    """Looks an argument up where it may not be."""

    name = "raises_on_arguments"

    def __init__(self, args: Amount, context: Context) -> None:
        super().__init__(args, context)
        self.factor = [2, 4, 8, 16][args.n]


class TouchesBatchMates(Shaping):
    """Takes the highest logit of the whole batch for the highest of each row."""

    name = "touches_batch_mates"

    @classmethod
    def shape_rows(cls, processors: Sequence[Any], logits: torch.Tensor) -> None:
        logits.sub_(logits.max())

    def shape(self, logits: torch.Tensor) -> None:
        self.shape_rows([self], logits.unsqueeze(0))


class WritesOutsideItsRow(Shaping):
    """Edits the storage that its row is a view of."""

    name = "writes_outside_its_row"

    def shape(self, logits: torch.Tensor) -> None:
        logits.as_strided((logits.untyped_storage().nbytes() // 4,), (1,), 0).mul_(0.5)


class NotInPlace(Shaping):
    """Returns the new row."""

    name = "not_in_place"

    def shape(self, logits: torch.Tensor) -> None:
        return logits * 0.5  # type: ignore[return-value]


class ReadsMoreThanItSays(Steering):
    """Says that it reads nothing, and looks at the last token."""

    name = "reads_more_than_it_says"
    reads = Reads.NOTHING

    def edit(self) -> Edit | None:
        return Bias.of([40 + (self.last_token or 0) % 5], [1.0])


class ReadsThePrompt(Steering):
    """Says that it reads generated tokens, and looks at the prompt."""

    name = "reads_the_prompt"
    reads = Reads.GENERATED

    def reset(self) -> None:
        self.first = self.prompt[0]

    def edit(self) -> Edit | None:
        return Bias.of([self.first], [1.0])


class AllowsPadding(Steering):
    """Allows every id of the row, those beyond the tokenizer's too."""

    name = "allows_padding"
    stage = Stage.MASK

    def edit(self) -> Edit | None:
        return Allow.of(range(self.size), self.size)


class MasksEverything(Steering):
    """Bans the whole row instead of saying that it cannot be satisfied."""

    name = "masks_everything"
    stage = Stage.MASK

    def edit(self) -> Edit | None:
        return Ban.of(range(self.size)) if self.num_generated == 5 else None


class BiasAtMaskStage(Steering):
    """Asks for a bias at a stage where none is applied."""

    name = "bias_at_mask_stage"
    stage = Stage.MASK

    def edit(self) -> Edit | None:
        return Bias.of([40], [1.0])


class TossesGlobalCoins(Steering):
    """Draws from the process-wide generator."""

    name = "tosses_global_coins"

    def edit(self) -> Edit | None:
        return Ban.of([40]) if random.random() < 0.5 else None


class ChangesSettings(Shaping):
    """Changes what all requests share, as a test says."""

    name = "changes_settings"

    @staticmethod
    def change() -> object:
        """Nothing, unless a test says more."""

    def shape(self, logits: torch.Tensor) -> None:
        self.change()


class DoesNotPickle(Steering):
    """Keeps a function that cannot be found again."""

    name = "does_not_pickle"

    def __init__(self, args: Amount, context: Context) -> None:
        super().__init__(args, context)
        self.value = lambda: 1.0


class RewindsWrongly(Steering):
    """Says that it has undone what it has not."""

    name = "retracts_wrongly"

    def reset(self) -> None:
        self.sum = 0

    def advance(self, token_id: int, index: int) -> None:
        self.sum += token_id

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        return True

    def edit(self) -> Edit | None:
        return Bias.of([40], [float(self.sum % 7)])


class MiscountsOnEdit(Steering):
    """Moves its cursor in edit(), so that asking twice skips a token."""

    name = "miscounts_on_edit"

    def reset(self) -> None:
        self.cursor = 0

    def edit(self) -> Edit | None:
        self.cursor += 1
        return Force([40, 41, 42][self.cursor - 1]) if self.cursor <= 3 else None


class ForcesBlindly(Shaping):
    """Masks all but one token by subtraction, so that a banned one becomes NaN (-inf minus
    -inf).
    """

    name = "forces_blindly"

    def shape(self, logits: torch.Tensor) -> None:
        kept = float(logits[40])
        logits.fill_(-torch.inf)
        logits[40] = kept - kept


class NeedsAKey(Steering):
    """In order, but nobody can guess its argument."""

    name = "needs_a_key"

    class Args(ProcessorArgs):
        key: str = Field(min_length=20, max_length=20)

    def __init__(self, args: Any, context: Context) -> None:
        if args.key != "open sesame 12345678":
            raise ArgumentError("key", "is not the key")


class ExitsOnce(Steering):
    """Ends the process with status 0 for one value of its argument."""

    name = "exits_once"

    def __init__(self, args: Amount, context: Context) -> None:
        super().__init__(args, context)
        if args.n == 50:
            raise SystemExit(0)


class Exits(ExitsOnce):
    """Ends the process with status 0 for every value."""

    name = "exits"

    def __init__(self, args: Amount, context: Context) -> None:
        raise SystemExit(0)


class ExitsInAStep(Steering):
    """Ends the process with status 0 where a check asks for its edit."""

    name = "exits_in_a_step"

    def edit(self) -> Edit | None:
        raise SystemExit(0)


class RaisesInEdit(Steering):
    """Raises where its edit is asked for, after a few tokens."""

    name = "raises_in_edit"

    def edit(self) -> Edit | None:
        if self.num_generated == 3:
            raise LookupError("no such word")
        return None


class RaisesInShape(Shaping):
    """Raises where it is shown its row, after a few tokens."""

    name = "raises_in_shape"

    def shape(self, logits: torch.Tensor) -> None:
        if self.num_generated == 3:
            raise LookupError("no such word")


class YieldsItself(Steering):
    """In order; its parts come one by one."""

    name = "yields_itself"

    @classmethod
    def build(cls, args: Any, context: Context) -> Any:
        yield cls(args, context)

    def edit(self) -> Edit | None:
        return Bias.of([40], [1.0])


class LearntBias(LogitsProcessor):
    """In order: adds what a network makes of the scores, whose parameters have gradients."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores * self.weight.mean()


class LearntBiasInPlace(LearntBias):
    """The same, in place."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores *= self.weight.mean()
        return scores


class Unsigned(dict[str, int]):
    """Of a class of C, whose constructor tells no parameters."""

    def __call__(self, input_ids: list[int], logits: Any) -> None:
        logits[40] += 1.0


class ZooBoost:
    """In order: a TensorRT-LLM callable that counts its calls, which its wrapper takes care of."""

    def __init__(self, boost: float = 1.0) -> None:
        self.boost, self.calls = boost, 0

    def __call__(self, req_id: int, logits: Any, token_ids: Any, stream_ptr: Any, client_id: Any) -> None:
        logits[:, :, 40] += self.boost * (self.calls % 3)
        self.calls += 1


class ZooEnforce:
    """Forces a token by making all others as low as the lowest, and its own the highest: NaN
    where it was banned.
    """

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def __call__(self, req_id: int, logits: Any, token_ids: Any, stream_ptr: Any, client_id: Any) -> None:
        lowest = logits.min()
        logits[:, :, self.token_id] -= lowest
        others = torch.arange(logits.shape[-1]) != self.token_id
        logits[:, :, others] = torch.where(logits[:, :, others] > lowest, lowest, logits[:, :, others])
