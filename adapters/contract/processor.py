"""The contract of a logits processor: steering or shaping, stage, what it reads, its arguments.

Authors import everything from `adapters.contract`: edits and bounded argument types too.

One instance serves one choice of one request. It is a function of token history, never of how often
it was called: the base class feeds it each generated token once, by absolute position, and when the
history turns out shorter or different it resets the processor and replays.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Self, TypeVar

import torch

from adapters.contract.context import Context, ProcessorArgs
from adapters.contract.edits import Edit, MalformedEdit, check_in_place
from adapters.contract.scope import Scope
from adapters.contract.stage import Reads, Stage
from adapters.interrupts import is_interrupt

T = TypeVar("T")

ALWAYS = sys.maxsize
"""Result of `SteeringProcessor.same_until` for an edit that never changes."""

_RENAMED = {"retract": "rewind_state", "taken_back": "rewinds_to", "taken_back_at_end": "rewinds_to_at_end"}
"""Methods that authors write by their former names, which would silently not be called."""

_CALLED_BY_CHAINS = ("start", "accept", "append", "rewind", "rewind_lazily", "lose")
"""Methods by which a processor follows the history, and whose names authors may want for theirs."""

_CALLED_AT_ONCE = ("reset", "advance", "rewind_state", "edit", "same_until", "shape", "shape_rows")
"""Methods that authors write, whose code would not run if a call made a coroutine or generator."""


class StateLost(RuntimeError):
    """A processor was rewound to where its state, made of logits, is not kept any more."""


class Unsatisfiable(Exception):
    """No token can satisfy the chain at this position.

    The request ends with an error; token 0 is never sampled instead.
    """


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
        counts_down: Counts tokens down to `Context.max_tokens`: the answer's room must not be less.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    stage: ClassVar[Stage]
    reads: ClassVar[Reads] = Reads.PROMPT_AND_GENERATED
    observes_logits: ClassVar[bool] = False
    wraps_third_party: ClassVar[bool] = False
    scopes: ClassVar[tuple[Scope, ...]] = ("all", "thinking", "answer")
    once: ClassVar[bool] = False
    counts_down: ClassVar[bool] = False
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
        for name in _CALLED_BY_CHAINS:
            if getattr(cls, name) is not getattr(Processor, name):
                raise TypeError(
                    f"{cls.__name__}.{name}: chains call this method of the base class, name yours otherwise"
                )
        for name in _CALLED_AT_ONCE:
            if _runs_later(getattr(cls, name, None)):
                raise TypeError(f"{cls.__name__}.{name}: a chain calls it and awaits nothing; no async def, no yield")

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
        """The tokens that it is about to force or leave alone, at most ``limit``, for speculation.

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
    def begins_anew(self) -> bool:
        """Whether `catch_up` will reset the state and replay, after a rewind that nobody undid."""
        return self._consumed < 0

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
        """Rewind to the tokens before ``position``.

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
            except BaseException as error:  # the processor boundary: the replay at the next step shows what is broken
                if is_interrupt(error):
                    raise
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
            MalformedEdit: it changes an attribute of the base class.
        """
        if self._lost is not None:
            raise StateLost(self._lost)
        tokens, end = self._tokens, len(self._tokens)
        if self._consumed < 0:
            self.reset()
            if self._consumed >= 0:
                raise _taken("_consumed")
            self._consumed = self._prompt_length
        for index in range(self._consumed, end):
            self.advance(tokens[index], index - self._prompt_length)
            if self._consumed != index:
                raise _taken("_consumed")
            self._consumed = index + 1
        if self._tokens is not tokens or len(tokens) != end:
            raise _taken("_tokens")


def _runs_later(method: object) -> bool:
    """Whether a call of a method only makes a coroutine or a generator."""
    made = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_one(method) for is_one in made)


def _taken(name: str) -> MalformedEdit:
    return MalformedEdit(f"changes {name}, which is an attribute of the base class,")


def state_methods(kind: type[Processor]) -> list[str]:
    """Names of a class's own methods by which its state follows the history, empty if none."""
    names = ("reset", "advance", "catch_up")
    return [name for name in names if getattr(kind, name) is not getattr(Processor, name)]


class SteeringProcessor(Processor):
    """Reads history, returns an `Edit`. Never reads logits, never touches another row."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls).get("same_until", SteeringProcessor.same_until)
        if own is SteeringProcessor.same_until:  # of a dataclass with slots this is called twice
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

    def usual_token(self) -> int | None:
        """The one of the tokens that the newest `edit` allows that is sampled if it can be.

        For a mask that leaves one text, which can be written in many ways: all of them are allowed,
        and the chain takes this one, unless another processor forbids it. None, by default, leaves
        the choice to the model. Only called for built-in processors.
        """
        return None

    def sure_token(self) -> int | None:
        """The result of `usual_token` behind `edit`, where it is known without calling `edit`.

        None, by default, says nothing. Only called for built-in processors, after `catch_up`.
        """
        return None


def tells_how_long(kind: type[SteeringProcessor]) -> bool:
    """Whether the class has a `SteeringProcessor.same_until` of its own."""
    return kind.same_until is not SteeringProcessor.same_until


class BacktrackingProcessor(SteeringProcessor):
    """Rewinds the answer to a token that was not sent, which is then sampled again without it.

    A function of the history, as every processor: it says where it rewinds to, and which tokens it
    may still rewind to. The chain does the rest: it rewinds the history, masks the token that was
    there, for as long as the tokens before it stay, and tells the engine which tokens to hold. Only
    an engine that holds tokens can serve it.

    `held_from` tells beforehand. If the processor rewinds to p after n generated tokens, then after
    each number of tokens m with p < m < n (where the answer ends, m <= n) `held_from` was not None
    and at most p, **whatever tokens came since**. It is about this processor's own history only:
    the chain adds what a rewind opens again, for it and for others.
    """

    stage: ClassVar[Stage] = Stage.MASK
    scopes: ClassVar[tuple[Scope, ...]] = ("all",)

    @property
    @abstractmethod
    def held_from(self) -> int | None:
        """Index of the first generated token that may still be rewound, else None."""

    @property
    @abstractmethod
    def rewinds_to(self) -> int | None:
        """Index of the generated token to sample again, None if the answer may go on."""

    @property
    def rewinds_to_at_end(self) -> int | None:
        """The result of `rewinds_to` if the answer ends here; by default the same."""
        return self.rewinds_to

    def edit(self) -> Edit | None:
        """None, by default: the chain masks the token that was rewound to."""
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

        Raises:
            MalformedEdit: one of them returned a row, or replaced it.
        """
        for index, (processor, row) in enumerate(zip(processors, logits, strict=True)):
            result: object = processor.shape(row)
            check_in_place(result, row, logits[index])
