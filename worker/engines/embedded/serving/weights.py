"""`WeightControl`: pauses, updates of the weights, and sleep of an asynchronous engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.host import in_own_thread
from worker.engines.embedded.host import memory as host_memory
from worker.engines.embedded.kv_cache.budget import is_out_of_memory
from worker.engines.embedded.model import HfModel, reload_network
from worker.engines.embedded.model.checkpoint_files import first_line
from worker.engines.embedded.model.network import Network
from worker.engines.embedded.model.stored_weights import Weight, read_weights
from worker.engines.embedded.model.updates import updates_of
from worker.engines.embedded.model.weight_update import Given
from worker.engines.embedded.serving.step_thread import Call
from worker.engines.embedded.serving.streams import Streams
from worker.engines.embedded.step import Stepper
from worker.engines.embedded.transfer import fingerprint_beside
from worker.engines.weights import (
    REASONS,
    NotSupported,
    PauseMode,
    State,
    TensorKind,
    Updated,
    WeightsRefused,
    WeightVersion,
    WrongState,
    digest_of_update,
    exclusive,
)
from worker.errors import EngineBroken, ServingError, StartupError
from worker.models.problems import ModelFileError

logger = logging.getLogger(__name__)

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

T = TypeVar("T")


class WeightControl:
    """Implements `worker.engines.weights.UpdatesWeights`.

    Args:
        stepper: The step thread's; the weights of its model change between two steps.
        model: Model whose weights change.
        streams: Unfinished requests.
        config: Settings of the engine.
        base: Version of the weights that the engine has started with.
    """

    def __init__(
        self, stepper: Stepper, model: HfModel, streams: Streams, config: EmbeddedConfig, base: WeightVersion
    ) -> None:
        self._stepper = stepper
        self._model = model
        self._streams = streams
        self._config = config
        self._base = self._version = base
        self._digests: dict[str, str] = {}  # of the tensors that were given since the start
        self._lock = asyncio.Lock()
        self._is_paused = False
        self._level = 0  # of its sleep
        self._updates = updates_of(config, model)
        self._calls: set[asyncio.Future[object]] = set()
        self._failure: ServingError | None = None

    @property
    def weight_version(self) -> WeightVersion:
        """The version that the next step computes with."""
        return self._version

    @property
    def weights_state(self) -> State:
        """Whether it serves, pauses, sleeps, or waits for weights."""
        if self._level:
            return "asleep"
        if not self._model.has_network:
            return "needs_weights"
        return "paused" if self._is_paused else "serving"

    def weight_tensors(self) -> Mapping[str, TensorKind]:
        """The tensors that an update may hold, by name."""
        dtype = _NAMES[self._model.dtype]
        return {name: TensorKind(shape, dtype) for name, shape in self._updates.shapes.items()}

    async def update_weights(self, source: Path | memoryview, name: str | None, mode: PauseMode) -> Updated:
        """See `UpdatesWeights.update_weights`."""
        async with exclusive(self._lock):
            if self._level:
                raise WrongState("the engine sleeps; wake it first")
            with _refusing_out_of_memory():
                weights = [await asyncio.to_thread(_read, source, self._updates.ignored)]
                began_s = time.perf_counter()
                # popped, so that what was read is freed before the old weights are
                given = await asyncio.to_thread(in_own_thread, lambda: self._updates.check(weights.pop()))
                version = self._next_version(given, name)
                made = [await self._made(given)] if self._updates.is_beside else []
            try:
                await self._settle(mode)
                with _refusing_out_of_memory():
                    network = made.pop() if made else await self._made(given)
                await self._call(lambda stepper: self._change(stepper, network, given, version))
                if not self._updates.is_beside:
                    await asyncio.to_thread(host_memory.free_cycles)  # the old network
            finally:
                await self._let_go()
            seconds = time.perf_counter() - began_s
            formats = dict(sorted(Counter(given.formats.values()).items()))
            rounded = "".join(f"; {count} quantised ones are now in {format}" for format, count in formats.items())
            logger.info(
                "weights: version %s, update %d, of %d tensors in %.2f s%s",
                *(version.name, version.number, len(given.weights), seconds, rounded),
            )
            return Updated(version, len(given.weights), seconds, formats)

    async def pause(self, mode: PauseMode) -> None:
        """See `UpdatesWeights.pause`; ``abort`` also ends the wait of a pause before it, and what
        waits in one, or in a sleep.
        """
        if mode == "abort" and self._lock.locked():
            self._streams.abort_all()
        async with exclusive(self._lock, waits=mode == "abort"):
            try:
                await self._settle(mode)
                self._is_paused = True
            finally:
                await self._let_go()  # unless it pauses now

    async def resume(self) -> None:
        """See `UpdatesWeights.resume`."""
        async with exclusive(self._lock):
            if self.weights_state in ("asleep", "needs_weights"):
                raise WrongState(REASONS[self.weights_state])
            self._is_paused = False
            await self._let_go()

    async def abort_all(self) -> None:
        """See `UpdatesWeights.abort_all`."""
        self._streams.abort_all()

    async def flush_cache(self) -> None:
        """See `UpdatesWeights.flush_cache`; requests in flight compute their KV again."""
        await self._call(Stepper.drop_kv)

    async def sleep(self, level: int) -> None:
        """See `UpdatesWeights.sleep`; requests in flight go on when it wakes."""
        async with exclusive(self._lock):
            if self._config.role != "aggregated":
                raise NotSupported("a worker of disaggregated serving cannot sleep: others read its memory")
            if self._level or not self._model.has_network:
                raise WrongState(REASONS[self.weights_state])
            drop = self._updates.drop if level == 2 else None
            try:
                if not self._is_paused:
                    await self._hold("keep")
                await self._call(lambda stepper: self._fall_asleep(stepper, level, drop))
            finally:
                await self._let_go()  # unless it sleeps now
            await asyncio.to_thread(host_memory.give_back_freed)

    async def wake(self) -> None:
        """See `UpdatesWeights.wake`; weights that were dropped are read from the checkpoint again,
        unless an update has changed them, or somebody the checkpoint.
        """
        async with exclusive(self._lock):
            if not self._level:
                raise WrongState("the engine does not sleep")
            lacking = await self._lacking()
            if lacking is not None:
                await self._call(lambda stepper: _give_kv_back(stepper, self._model))
                await asyncio.to_thread(host_memory.give_back_freed)
                raise WrongState(f"the engine cannot wake: no memory for its {lacking}")
            self._level = 0
            await self._let_go()

    def fail(self, failure: ServingError) -> None:
        """The step thread has ended: whoever waits for it is told."""
        self._failure = failure
        for call in self._calls:
            if not call.done():
                call.set_exception(failure)

    async def _lacking(self) -> str | None:
        """Have the KV cache and the weights again; what there is no memory for, None if all is
        there.
        """
        try:
            await self._call(lambda stepper: _take_kv_back(stepper, self._model))
        except RuntimeError as error:
            return f"KV cache ({first_line(error)})"
        if self._model.has_network or self._version.number:
            return None
        try:
            network = await _in_thread(self._reloaded)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return f"weights ({first_line(error)})"
        if network is not None:
            await self._call(lambda stepper: self._model.replace_network(network))
        return None

    async def _made(self, given: Given) -> Network:
        return await _in_thread(lambda: in_own_thread(lambda: self._updates.network(given)))

    def _reloaded(self) -> Network | None:
        """The network of the checkpoint; None if its files cannot be read any more, or are others
        than at the start: tokens of theirs would name the digest of the weights that were there
        then.
        """
        config = self._config
        try:
            network = reload_network(config, self._model)
            if self._base.digest in ("", fingerprint_beside(config.model_path, config.packed_copy).result()):
                return network
            reason = f"the files in {config.model_path} have changed since the start"
        except StartupError as error:
            reason = str(error)
        logger.warning("weights: %s: an update must come", reason)
        return None

    def _change(self, stepper: Stepper, network: Network, given: Given, version: WeightVersion) -> None:
        """Change the weights and their version, whatever becomes of the caller."""
        stepper.change_weights(lambda: self._model.replace_network(network), version)
        self._digests.update(given.digests)
        self._version = version

    def _fall_asleep(self, stepper: Stepper, level: int, drop: Callable[[], None] | None) -> None:
        _fall_asleep(stepper, self._model, drop)
        self._level = level

    def _next_version(self, given: Given, name: str | None) -> WeightVersion:
        digests = self._digests | dict(given.digests)
        is_whole = digests.keys() >= self._updates.shapes.keys()
        digest = digest_of_update("" if is_whole else self._base.digest, digests.items())
        return self._version.following(digest, name)

    async def _settle(self, mode: PauseMode) -> None:
        """Compute nothing, once what `mode` says has become of requests in flight, those that a
        pause has kept among them.
        """
        state = self.weights_state
        if state == "serving" or (state == "paused" and mode == "finish"):
            await self._hold(mode)
        elif mode == "abort":
            self._streams.abort_all()

    async def _hold(self, mode: PauseMode) -> None:
        """Compute nothing, once what `mode` says has become of requests in flight."""
        if mode != "keep":
            await self._call(Stepper.shut_gate)
            if mode == "abort":
                self._streams.abort_all()
        await self._call(_stop_computing, when_drained=mode != "keep")

    async def _let_go(self) -> None:
        """Compute again, unless something stands against it once the calls before are made."""
        await self._call(self._compute_if_serving)

    def _compute_if_serving(self, stepper: Stepper) -> None:
        if self.weights_state == "serving":
            stepper.open_gate()
        else:
            _stop_computing(stepper)

    async def _call(self, work: Callable[[Stepper], T], *, when_drained: bool = False) -> T:
        """Result of `work`, called by the step thread between two steps; not before every request
        that was taken in has ended, if that is asked for.
        """
        if self._failure is not None:
            raise self._failure
        thread = self._streams.thread
        if thread is None:
            raise EngineBroken("the engine has been stopped")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.add(done)  # type: ignore[arg-type]
        thread.tell(Call(work, done, when_drained))
        try:
            return await done
        finally:
            self._calls.discard(done)


def weights_digest(config: EmbeddedConfig, model: HfModel) -> str:
    """The digest of an update with all weights of the model's own checkpoint.

    Args:
        config: Settings that the model was loaded with.
        model: The model.

    Raises:
        WeightsRefused: the checkpoint cannot be read.
    """
    updates = updates_of(config, model)
    weights = updates.named(_read(Path(config.model_path), updates.ignored))
    given = updates.check({name: weight for name, weight in weights.items() if name in updates.shapes})
    return digest_of_update("", given.digests.items())


def _read(source: Path | memoryview, ignored: Collection[str]) -> Mapping[str, Weight]:
    try:
        return read_weights(source, ignored)
    except ModelFileError as error:
        raise WeightsRefused(str(error)) from None


@contextlib.contextmanager
def _refusing_out_of_memory() -> Iterator[None]:
    """A failed allocation is the refusal of the update that it was for."""
    try:
        yield
        return
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        problem = first_line(error)
    raise WeightsRefused(f"there is no memory for the new weights beside those that serve ({problem})")


async def _in_thread(load: Callable[[], T]) -> T:
    """The result of `load`, called in a thread. A caller that is cancelled waits for the end of it:
    transformers sets global state while it loads, so that nothing may compute, or load, beside it.
    """
    loading = asyncio.create_task(asyncio.to_thread(load))
    try:
        return await asyncio.shield(loading)
    finally:
        await asyncio.wait({loading})


def _stop_computing(stepper: Stepper) -> None:
    stepper.is_paused = True


def _fall_asleep(stepper: Stepper, model: HfModel, drop: Callable[[], None] | None) -> None:
    stepper.drop_kv()
    if stepper.draft_model is not None:
        stepper.draft_model.drop_drafts()
    _give_kv_back(stepper, model)
    if drop is not None:
        drop()


def _give_kv_back(stepper: Stepper, model: HfModel) -> None:
    for each in _models(stepper, model):
        each.give_kv_back()


def _take_kv_back(stepper: Stepper, model: HfModel) -> None:
    """Raises `RuntimeError` if the memory is not there."""
    for each in _models(stepper, model):
        each.take_kv_back()


def _models(stepper: Stepper, model: HfModel) -> list[HfModel]:
    """The model, and the draft model if there is one."""
    draft = None if stepper.draft_model is None else stepper.draft_model.model
    return [model, draft] if isinstance(draft, HfModel) else [model]
