"""The interface of engines whose weights change while they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from worker.errors import ServingError

PauseMode = Literal["abort", "finish", "keep"]
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "finish", "keep")
"""Modes of a pause: requests in flight end with their tokens so far, finish first, or stop and go
on.
"""

ABORTED = "the request was aborted, for its engine's weights change"
"""Reason of the error that requests end with in mode ``abort`` whose clients do not get token ids,
and so could not go on.
"""

State = Literal["serving", "paused", "asleep", "needs_weights"]

REASONS: Mapping[State, str] = {
    "serving": "the engine serves",
    "paused": "the engine pauses",
    "asleep": "the engine sleeps",
    "needs_weights": "the engine has no weights since its sleep: an update must bring all of them",
}
"""States as reasons why something cannot be done."""


class WeightsRefused(ServingError):
    """An update that cannot be taken; the weights are as they were."""


class WrongState(ServingError):
    """The engine's state does not allow what was asked: it sleeps, or an update is under way."""


class NotSupported(ServingError):
    """The engine, or its model on its kernels, cannot do what was asked."""


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Identity of the weights that an engine computes with.

    Attributes:
        number: Number of updates since the start.
        name: Name that the trainer gave, or `number` as text.
        digest: 128 bits over the base model and every tensor given since, as hexadecimal digits:
            equal on two workers if and only if they compute with the same weights. Empty where the
            base model has no digest.
        is_named: Whether the trainer gave `name`.
    """

    number: int = 0
    name: str = "0"
    digest: str = ""
    is_named: bool = False

    @property
    def updated_digest(self) -> str:
        """The digest, but empty for the weights of the start."""
        return self.digest if self.number else ""

    def following(self, digest: str, name: str | None) -> WeightVersion:
        """The version after an update, which the trainer may have given a name."""
        number = self.number + 1
        return WeightVersion(number, str(number) if name is None else name, digest, name is not None)


def exclusive(lock: asyncio.Lock, *, waits: bool = False) -> asyncio.Lock:
    """``lock``, for an update or a pause.

    Raises:
        WrongState: it is taken, unless the caller ``waits`` for it.
    """
    if lock.locked() and not waits:
        raise WrongState("an update or a pause is under way")
    return lock


def digest_of_update(base: str, digests: Iterable[tuple[str, str]]) -> str:
    """`WeightVersion.digest` of updated weights.

    Args:
        base: Digest of the base model, empty where all of its tensors have been given since.
        digests: Names and digests of the tensors that have been given.
    """
    digest = blake2b(base.encode(), digest_size=16)
    for name, found in sorted(digests):
        digest.update(f"{name}\0{found}\0".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Shape and data type, in safetensors' word, of a tensor that an update may hold."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Updated:
    """Result of an update.

    Attributes:
        version: The new version.
        num_tensors: Tensors that were given.
        seconds: Time from the end of reading to the first step with the new weights.
        formats: Number of float tensors that replace quantised ones of the checkpoint, by the
            format that they are served in: that of the checkpoint where it can be rounded to.
    """

    version: WeightVersion
    num_tensors: int
    seconds: float
    formats: Mapping[str, int] = field(default_factory=dict)


class UpdatesWeights(Protocol):
    """Changes the weights of an engine that serves. All methods are called in its event loop."""

    @property
    def weight_version(self) -> WeightVersion:
        """The version that the next step computes with."""

    @property
    def weights_state(self) -> State:
        """Whether it serves, pauses, sleeps, or waits for weights."""

    def weight_tensors(self) -> Mapping[str, TensorKind]:
        """The tensors that an update may hold, by name. Raises `NotSupported`."""

    async def update_weights(self, source: Path | memoryview, name: str | None, mode: PauseMode) -> Updated:
        """Replace the weights, all at once or not at all.

        Args:
            source: Directory of safetensors files, or one such file; or safetensors in memory,
                which must not change meanwhile.
            name: Name of the new version, None for its number.
            mode: Treatment of requests in flight, those that a pause has kept among them.

        Raises:
            WeightsRefused: a tensor cannot be taken.
            WrongState: an update is under way, or the engine sleeps.
            NotSupported: this engine cannot.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Compute nothing until `resume`; ``abort`` ends what waits in a pause or a sleep, too.

        Raises `WrongState` while an update is under way.
        """

    async def resume(self) -> None:
        """Compute again. Raises `WrongState` where it sleeps or has no weights."""

    async def abort_all(self) -> None:
        """End every request; their streams end as ``abort``, behind what has been sampled."""

    async def flush_cache(self) -> None:
        """Drop the prefix cache. Raises `WrongState` where requests in flight keep it."""

    async def sleep(self, level: int) -> None:
        """Pause, and give memory back: level 1 that of the KV cache, 2 that of the weights too."""

    async def wake(self) -> None:
        """End the sleep, and go on as before it."""

    def fail(self, failure: ServingError) -> None:
        """The engine has ended: whoever waits for one of these methods is told."""


@runtime_checkable
class ChangesWeights(Protocol):
    """An engine whose weights may change while it serves.

    Attributes:
        weights: Changes them; None before the engine has started, and where that is not wanted.
    """

    weights: UpdatesWeights | None
