"""The contract of a logits processor: steering or shaping, stage, what it reads, its arguments.

Authors import everything from `adapters.contract`: edits and bounded argument types too.

One instance serves one choice of one request. It is a function of token history, never of how often
it was called: the base class feeds it each generated token once, by absolute position, and when the
history turns out shorter or different it resets the processor and replays.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, ClassVar, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict

from adapters.contract.argument_types import Count, PositiveCount, Text, TokenId, TokenIds
from adapters.contract.edits import Allow, Ban, Bias, Edit, Force, Scale
from adapters.contract.scope import Scope
from adapters.vocabulary import Vocabulary

__all__ = [
    "ALWAYS",
    "Allow",
    "ArgumentError",
    "BacktrackingProcessor",
    "Ban",
    "Bias",
    "Context",
    "Count",
    "Edit",
    "Force",
    "PositiveCount",
    "Processor",
    "ProcessorArgs",
    "Reads",
    "Scale",
    "ShapingProcessor",
    "Stage",
    "StateLost",
    "SteeringProcessor",
    "Text",
    "TokenId",
    "TokenIds",
    "Unsatisfiable",
]

T = TypeVar("T")

_RENAMED = {"retract": "rewind_state", "taken_back": "rewinds_to", "taken_back_at_end": "rewinds_to_at_end"}
"""Methods of authors by a name that they once had, which would silently not be called any more."""

ALWAYS = sys.maxsize
"""For `SteeringProcessor.same_until`: the edit never changes."""


class Stage(IntEnum):
    """The order law, the same on every engine; within a stage, the order of the request."""

    BIAS = 1
    PENALTY = 2
    SOFT = 3
    MASK = 4
    FORCE = 5
    TEMPERATURE = 6
    TRUNCATION = 7
    SAMPLING = 8


class Reads(Enum):
    """What a processor reads. ``NOTHING`` still knows the position and its own chain's forcing."""

    NOTHING = "nothing"
    GENERATED = "generated"
    PROMPT_AND_GENERATED = "prompt and generated"


class ProcessorArgs(BaseModel):
    """Base of every processor's arguments: strict JSON types, no unknown names, NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ArgumentError(ValueError):
    """An argument is well-formed but cannot be honoured for this model or request.

    Args:
        argument: Name of the argument.
        problem: What was expected and what came.
    """

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument
        self.problem = problem


class StateLost(RuntimeError):
    """A processor was rewound to where its state, made of logits, is not kept any more."""


class Unsatisfiable(Exception):
    """No token can satisfy the chain at this position.

    The request ends with an error; token 0 is never sampled instead.
    """


@dataclass(frozen=True, slots=True)
class Context:
    """What a processor knows about the model and its request when it is built.

    Attributes:
        vocabulary: Width of a row, token bytes and text.
        end_token_ids: Ids that end this request's answer.
        seed: The request's seed, uint64, also of processors' random numbers
            (`adapters.contract.random_numbers`).
        choice: Index of the choice, 0 unless n > 1.
        max_tokens: Most tokens the answer may have, None if only the context bounds it.
        watermark_keys: The operator's keys by id.
        think_start: Ids of the tag that opens a thinking section, empty if the model has none.
        think_end: Ids of the tag that closes it.
    """

    vocabulary: Vocabulary
    end_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    choice: int = 0
    max_tokens: int | None = None
    watermark_keys: Mapping[str, bytes] = field(default_factory=dict)
    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()

    @property
    def end_token_id(self) -> int | None:
        """The end token to force: the lowest of the model's own, else of the request's, else None.

        A request's end tokens include its ``stop_token_ids``, which may be any word.
        """
        return min(self.end_token_ids & self.vocabulary.eos_token_ids or self.end_token_ids, default=None)

    def check_ids(self, argument: str, token_ids: Sequence[int]) -> None:
        """Raises `ArgumentError` if an id is outside the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocabulary.size:
                expected = f"token ids between 0 and {self.vocabulary.size - 1}"
                raise ArgumentError(argument, f"expected {expected}, got {token_id}")


class Processor(ABC):
    """One logits processor of one choice.

    Authors write `reset` and `advance`, and `edit` (steering) or `shape` (shaping). There
    ``self.prompt`` is the prompt and ``self.generated`` the answer so far, both read-only.

    Class attributes:
        name: Name in the catalogue.
        version: Raised when the same arguments give other tokens than before.
        stage: Position in the order law.
        reads: The history that it reads; by default everything.
        Args: Its arguments; none by default.
        observes_logits: State depends on logits, as mirostat's mu does: replayed on logits.
        wraps_third_party: Runs a third-party processor (`adapters.third_party`).
        scopes: The scopes that a request may give it.
        once: A request may name it only once with the same scope.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    stage: ClassVar[Stage]
    reads: ClassVar[Reads] = Reads.PROMPT_AND_GENERATED
    observes_logits: ClassVar[bool] = False
    wraps_third_party: ClassVar[bool] = False
    scopes: ClassVar[tuple[Scope, ...]] = ("all", "thinking", "answer")
    once: ClassVar[bool] = False
    Args: ClassVar[type[ProcessorArgs]] = ProcessorArgs

    num_outside: int
    """Generated tokens out of the processor's scope, hence not in `generated`; set by the chain."""

    _tokens: list[int]
    _prompt_length: int
    _consumed: int
    _lost: str | None
    _is_shared: bool
    _derived: dict[Hashable, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self._tokens, self._prompt_length, self._consumed = [], 0, -1
        self._lost, self._is_shared = None, False
        self._derived = {}
        self.num_outside = 0
        return self

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for old, new in _RENAMED.items():
            if hasattr(cls, old):
                raise TypeError(f"{cls.__name__}.{old}: this method is called {new}")

    def __init__(self, args: Any, context: Context) -> None:
        """Authors take their own ``Args`` and the context, and keep ids and tensors only.

        Raise `ArgumentError` for arguments that cannot be honoured. A processor is pickled into the
        engine's process, so it must not keep the vocabulary or the tokenizer.
        """

    @classmethod
    def build(cls, args: Any, context: Context) -> list[Processor]:
        """The processors that this name stands for; several where a control acts at two stages."""
        return [cls(args, context)]

    # Methods that authors write

    def reset(self) -> None:
        """Return to the state right after the prompt; ``self.prompt`` is set."""

    def advance(self, token_id: int, index: int) -> None:
        """Take generated token number ``index``, from 0; called once per token, in order."""

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        """Undo `advance` for the newest tokens, oldest first; False makes the base class replay.

        One that observes logits needs it: there is nothing to replay on.
        """
        return False

    def foresee(self, limit: int) -> Sequence[int]:
        """For speculation: the tokens that it is about to force or leave alone, at most ``limit``.

        A guess, which costs time where it is wrong and changes nothing: each token is sampled all
        the same. Only called for built-in processors.
        """
        return ()

    # Methods that chains and engines call

    @property
    def position(self) -> int:
        """Absolute index of the token to be sampled next: prompt + generated, in scope or not."""
        return len(self._tokens) + self.num_outside

    @property
    def num_generated(self) -> int:
        """Generated tokens so far."""
        return len(self._tokens) - self._prompt_length

    @property
    def is_too_short(self) -> bool:
        """Whether the answer must not end here, at a stop string either (minimum lengths)."""
        return False

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the prompt (a copy)."""
        return self._tokens[: self._prompt_length]

    @property
    def generated(self) -> Sequence[int]:
        """Generated token ids (a copy, O(length): not for every step)."""
        return self._tokens[self._prompt_length :]

    @property
    def last_token(self) -> int | None:
        """The newest token of prompt + generated, None if there is none."""
        return self._tokens[-1] if self._tokens else None

    def from_prompt(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()``, once per prompt and key: shared by the processors of a chain.

        The value must depend on the prompt and the key only, and be immutable. Begin the key with
        your class.
        """
        if key not in self._derived:
            self._derived[key] = make()
        value: T = self._derived[key]
        return value

    def start(
        self,
        prompt: Sequence[int],
        *,
        shared: list[int] | None = None,
        derived: dict[Hashable, Any] | None = None,
    ) -> None:
        """Begin after ``prompt``.

        Args:
            prompt: Token ids.
            shared: A list that starts with the prompt and that its owner extends.
            derived: Values of `from_prompt`, shared by processors of the same prompt.
        """
        self._tokens = list(prompt) if shared is None else shared
        self._is_shared = shared is not None
        self._derived = {} if derived is None else derived
        self._prompt_length = len(prompt)
        self._consumed = -1
        self._lost = None
        self.num_outside = 0
        self.catch_up()

    def accept(self, token_id: int, position: int) -> None:
        """Take one token by absolute position. Idempotent; a different token rewinds and replays.

        Raises:
            ValueError: the position is inside the prompt, or beyond the next one.
        """
        if not self._prompt_length <= position <= len(self._tokens):
            raise ValueError(f"position {position} is not between {self._prompt_length} and {len(self._tokens)}")
        if position < len(self._tokens):
            if self._tokens[position] == token_id:
                return
            self.rewind(position)
        self._tokens.append(token_id)
        self.catch_up()

    def rewind(self, position: int) -> None:
        """Forget every token from ``position`` on.

        Raises:
            ValueError: the position is inside the prompt or in the future.
        """
        if not self._prompt_length <= position <= len(self._tokens):
            raise ValueError(f"cannot rewind to {position}: not between {self._prompt_length} and {len(self._tokens)}")
        self.rewind_lazily(position)
        self.catch_up()

    def append(self, token_id: int) -> None:
        """Add one token to a history that is not shared; the state takes it at `catch_up`."""
        self._tokens.append(token_id)

    def rewind_lazily(self, position: int) -> None:
        """Rewind the state to ``position``, unchecked; it catches up later.

        A history that is not shared is shortened, too; a shared one is its owner's to shorten.
        """
        if self._consumed > position:
            try:
                undone = self.rewind_state(self._tokens[position : self._consumed])
            except Exception:  # the processor boundary: the replay at the next step shows whether it is broken
                undone = False
            self._consumed = position if undone else -1
            if self.observes_logits and not undone and position > self._prompt_length:
                self.lose("rewind_state() did not bring back a state that was made of logits")
        if not self._is_shared:
            del self._tokens[position:]

    def lose(self, problem: str) -> None:
        """Note that the state cannot be rebuilt: `catch_up` raises `StateLost` until `start`."""
        self._lost = problem

    def catch_up(self) -> None:
        """Consume the tokens of the history that the state has not seen yet.

        Raises:
            StateLost: see `lose`.
        """
        if self._lost is not None:
            raise StateLost(self._lost)
        if self._consumed < 0:
            self.reset()
            self._consumed = self._prompt_length
        tokens, index = self._tokens, self._consumed
        while index < len(tokens):
            self.advance(tokens[index], index - self._prompt_length)
            index = self._consumed = index + 1


def state_methods(kind: type[Processor]) -> list[str]:
    """Names of a class's own methods by which its state follows the history, empty if none."""
    names = ("reset", "advance", "catch_up")
    return [name for name in names if getattr(kind, name) is not getattr(Processor, name)]


class SteeringProcessor(Processor):
    """Reads history, returns an `Edit`. Never reads logits, never touches another row."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "same_until" not in vars(cls):
            setattr(cls, "same_until", SteeringProcessor.same_until)  # noqa: B010  # mypy takes it for an override
        elif names := state_methods(cls):
            raise TypeError(
                f"{cls.__name__}.same_until: a processor with state has none, and this has {', '.join(names)}"
            )

    @abstractmethod
    def edit(self) -> Edit | None:
        """The edit for the token at `position`, None if there is nothing to do.

        Raises:
            Unsatisfiable: no token can satisfy this processor here.
        """

    def same_until(self) -> int:
        """The position before which `edit` returns what it has just returned, whatever tokens come.

        `ALWAYS` if it never changes, 0 by default. A chain may spare itself the calls of `edit`
        before then, unless the history is rewound. It is of a processor without state that follows
        the history: a class with a `reset`, `advance` or `catch_up` of its own must not have it.
        Since it is about the `edit` of one class, a class that derives from it has the default
        again.
        """
        return 0


def tells_how_long(kind: type[SteeringProcessor]) -> bool:
    """Whether the class has a `SteeringProcessor.same_until` of its own."""
    return kind.same_until is not SteeringProcessor.same_until


class BacktrackingProcessor(SteeringProcessor):
    """Has tokens that were not sent sampled again, without the one that it took back.

    A function of the history, as every processor: it says where it goes back to, and what may still
    make it go back. All else is the chain's: it rewinds the history, masks at that position what
    was taken back there, for as long as the tokens before it stay, and tells the engine what to
    hold. Only an engine that holds tokens can serve it.

    `held_from` tells beforehand. If the processor goes back to p after n generated tokens, then
    after each number of tokens m with p < m < n (where the answer ends, m <= n) `held_from` was not
    None and at most p, **whatever tokens came since**. It is about this processor's own history
    only: that going back opens again what had been closed, for it and for others, the chain adds.
    """

    stage: ClassVar[Stage] = Stage.MASK
    scopes: ClassVar[tuple[Scope, ...]] = ("all",)

    @property
    @abstractmethod
    def held_from(self) -> int | None:
        """Index of the first generated token that tokens to come may have taken back, else None."""

    @property
    @abstractmethod
    def rewinds_to(self) -> int | None:
        """Index of the generated token to sample again, None if the answer may go on."""

    @property
    def rewinds_to_at_end(self) -> int | None:
        """As `rewinds_to`, if the answer ends here; by default the same."""
        return self.rewinds_to

    def edit(self) -> Edit | None:
        """None, by default: the chain masks what was taken back."""
        return None


class ShapingProcessor(Processor):
    """Maps a row of logits to a row of logits at its stage."""

    @abstractmethod
    def shape(self, logits: torch.Tensor) -> None:
        """Edit ``logits`` (float32 ``[V]``) in place."""

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        """Edit ``logits`` (float32 ``[R, V]``) in place, row i by ``processors[i]``, independently.

        Override it where the class can be batched.
        """
        for processor, row in zip(processors, logits, strict=True):
            processor.shape(row)
