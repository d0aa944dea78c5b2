"""Third-party logits processors, run unchanged as shaping processors.

Such processors assume an engine that calls once per token, and many count their calls. So each one
observes exactly one call per position: its state is saved before a call, and a repeated call, or
one after a rewind, starts from the state of that position. After a migration a new instance is
replayed on the model's logits.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from adapters.contract import ProcessorArgs, Reads, ShapingProcessor, Stage, check_in_place
from adapters.third_party.copies import copied
from adapters.third_party.protocols import name_of

NUM_KEPT_STATES = 32
"""Positions that a stateful third-party processor can be rewound."""


class ThirdPartyShaping(ShapingProcessor):
    """Base of third-party processors."""

    reads = Reads.PROMPT_AND_GENERATED
    wraps_third_party = True
    Args = ProcessorArgs

    def shown_ids(self) -> list[int]:
        """Prompt and answer in a new list, as engines call with: it may be kept, and written to."""
        return list(self._tokens)


class ThirdPartyProcessor(ThirdPartyShaping):
    """A third-party processor of one choice.

    Args:
        make: Factory of instances in the state before the first token. Called at least twice;
            pickled.
        name: Name in receipts and errors; that of the third-party class by default.
        stage: Position in the order law.
        version: Version of the third-party processor.
        stateful: False promises that a call depends on its arguments only: no state is saved or
            replayed.
        takes_device: ``make`` takes ``device``, that of the logits; the CPU before the first row.

    Raises:
        TypeError: ``make`` returns something that cannot be called or, if stateful, copied.
    """

    stage = Stage.SOFT
    observes_logits = True

    def __init__(
        self,
        make: Callable[..., Any],
        *,
        name: str | None = None,
        stage: Stage = Stage.SOFT,
        version: int = 1,
        stateful: bool = True,
        takes_device: bool = False,
    ) -> None:
        self._make = make
        self._device = torch.device("cpu") if takes_device else None
        self._wrapped = _checked(self._fresh(), stateful)
        self._before: dict[int, Any] = {}  # number of generated tokens at a call -> state before it, ascending
        self._forgotten = -1  # newest call whose state has been dropped
        name = name or name_of(self._wrapped)
        # Class attributes of other processors are instance attributes here: one wrapper serves many
        # processors.
        vars(self).update(name=name, stage=stage, version=version, observes_logits=stateful)

    @abstractmethod
    def call(self, wrapped: Any, row: torch.Tensor) -> None:
        """Call ``wrapped`` once on ``row`` (float32 ``[V]``) and leave the result there.

        Raises:
            MalformedEdit: it returned what it was to edit in place.
            TypeError: it returned a value of the wrong type.
            ValueError: it returned another shape or dtype.
        """

    def _fresh(self) -> Any:
        return self._make() if self._device is None else self._make(device=self._device)

    def reset(self) -> None:
        self._wrapped = self._fresh()
        self._before.clear()
        self._forgotten = -1

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        self._drop_calls(self._consumed - self._prompt_length - len(token_ids))
        return True

    def _drop_calls(self, index: int) -> None:
        """Return to the state before the first call after ``index`` generated tokens or more."""
        undone = [called for called in self._before if called >= index]
        if undone:
            self._wrapped = copied(self._before[undone[0]])  # which shares tensors with others
        for called in undone:
            del self._before[called]
        if index <= self._forgotten:
            self.lose(f"the state at generated token {index} is not kept any more")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with the same factory; it shares the saved states, which are never called."""
        made = copy.copy(self)
        made._tokens = list(self._tokens)
        made._before = dict(self._before)
        made._wrapped = copied(self._wrapped)
        return made

    def shape(self, logits: torch.Tensor) -> None:
        if self._device is not None and self._device != logits.device:
            self._device = logits.device  # known from the first row on: requests may be admitted in another process
            self._wrapped = self._fresh()
        if self.observes_logits:
            self._keep(self.num_generated)
        self.call(self._wrapped, logits)

    def _keep(self, index: int) -> None:
        """Keep the state before the call at ``index``, or return to it in a repeated call."""
        kept = self._before.get(index)
        if kept is None:
            newest = next(reversed(self._before.values()), None)
            self._before[index] = copied(self._wrapped, like=newest)
        else:
            self._wrapped = copied(kept)
        if len(self._before) > NUM_KEPT_STATES:
            self._forgotten = next(iter(self._before))
            del self._before[self._forgotten]


class DynamoProcessor(ThirdPartyProcessor):
    """Runs a Dynamo `BaseLogitsProcessor`: ``(input_ids, logits[V]) -> None``, in place."""

    def call(self, wrapped: Any, row: torch.Tensor) -> None:
        shown = row.view(-1)
        check_in_place(wrapped(self.shown_ids(), shown), shown, row)


class ZooProcessor(ThirdPartyProcessor):
    """Runs a TensorRT-LLM logits processor, such as NVIDIA's logits-processor-zoo.

    Called with ``(0, logits[1, 1, V], [ids], None, None)`` on the current stream: with one beam the
    layouts ``[beam, 1, V]`` and ``[1, beam, V]`` coincide.
    """

    def call(self, wrapped: Any, row: torch.Tensor) -> None:
        shown = row.view(1, 1, -1)
        check_in_place(wrapped(0, shown, [self.shown_ids()], None, None), shown, row)


class HuggingFaceProcessor(ThirdPartyProcessor):
    """Runs a transformers `LogitsProcessor`: ``(input_ids [1, n], scores [1, V]) -> scores``."""

    def __init__(self, make: Callable[[], Any], **options: Any) -> None:
        super().__init__(make, **options)
        self._id_tensor = _IdTensor()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = super().__deepcopy__(memo)
        made._id_tensor = _IdTensor()
        return made

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        self._id_tensor.rewind(self._consumed - len(token_ids))
        return super().rewind_state(token_ids)

    def reset(self) -> None:
        super().reset()
        self._id_tensor.rewind(0)

    def call(self, wrapped: Any, row: torch.Tensor) -> None:
        scores = row.unsqueeze(0)
        result = wrapped(self._id_tensor.of(self._tokens, row.device), scores)
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"a Hugging Face logits processor returns scores, got {type(result).__name__}")
        if result.shape != (1, *row.shape) or result.dtype != row.dtype:
            expected, got = _describe(row.unsqueeze(0)), _describe(result)
            raise ValueError(f"a Hugging Face logits processor returns scores {expected}, got {got}")
        if result.data_ptr() != row.data_ptr():
            row.copy_(result[0])


class _IdTensor:
    """A growing list of ids as a tensor; each id is read once."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.int64)
        self._filled = 0

    def rewind(self, length: int) -> None:
        """Drop the ids from ``length`` on."""
        self._filled = min(self._filled, length)

    def of(self, ids: Sequence[int], device: torch.device) -> torch.Tensor:
        """A new int64 ``[1, n]`` on ``device``: it may be kept, and written to."""
        length = len(ids)
        if self._buffer.device != device or len(self._buffer) < length:
            grown = torch.empty(max(64, 2 * length), dtype=torch.int64, device=device)
            grown[: self._filled] = self._buffer[: self._filled]
            self._buffer = grown
        if self._filled < length:
            self._buffer[self._filled : length] = torch.tensor(ids[self._filled :], dtype=torch.int64)
            self._filled = length
        return self._buffer[:length].clone().unsqueeze(0)


def _checked(wrapped: Any, stateful: bool) -> Any:
    if isinstance(wrapped, type) or not callable(wrapped):
        raise TypeError(f"the factory must make a callable, not a class; it made {wrapped!r}")
    if stateful:
        try:
            copied(wrapped)
        except Exception as error:  # the processor boundary: third-party code
            raise TypeError(f"{name_of(wrapped)} has a state that cannot be copied: {error}") from error
    return wrapped


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"
