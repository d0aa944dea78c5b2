"""`VllmWeights`: pauses and updates of the weights of vLLM, which loads them again in place."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker.engines.request_table import RequestTable
from worker.engines.vllm.core_calls import CoreCalls
from worker.engines.vllm.owned_directory import OwnedDirectory
from worker.engines.vllm.requests import RunningRequest
from worker.engines.vllm.settings import VllmConfig
from worker.engines.weights import (
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
from worker.errors import EngineBroken, ServingError, one_line
from worker.models.problems import ModelFileError
from worker.models.regular_files import read_regular, unchanged
from worker.models.weight_files import SINGLE, WeightFiles

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_VLLM_MODES = {"keep": "keep", "finish": "wait", "abort": "abort"}
_FLOATS = ("F32", "BF16", "F16", "F64")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_SLEEP = (
    "--engine vllm: vLLM's CPU build ignores its own sleep, and gives no memory back; pause the worker, or stop it and "
    "start it again"
)


class VllmWeights:
    """Implements `worker.engines.weights.UpdatesWeights`.

    vLLM changes its weights in place: so everything is checked before it begins, and where it fails
    all the same the engine is broken, not half updated.

    Args:
        llm: The library's ``AsyncLLM``, with `WorkerExtension`.
        config: Settings of the engine.
        requests: Unfinished requests.
        base: Digest of the checkpoint, empty without one.
        break_down: Called with the reason when an update has failed half-way.
    """

    def __init__(
        self,
        llm: Any,
        config: VllmConfig,
        requests: RequestTable[RunningRequest],
        base: str,
        break_down: Callable[[str], None],
    ) -> None:
        self._llm = llm
        model = llm.vllm_config.model_config
        self._dtype: torch.dtype = model.dtype
        self._is_tied = bool(getattr(model.hf_config, "tie_word_embeddings", False))
        self._tensors = {
            name: one for name, one in WeightFiles(Path(config.model_path)).tensors.items() if one.dtype in _FLOATS
        }
        self._requests = requests
        self._break_down = break_down
        self._version = WeightVersion(digest=base)
        self._lock = asyncio.Lock()
        self._calls = CoreCalls()
        self._is_paused = False
        self._finishing: list[RunningRequest] = []
        self._others_may_begin = asyncio.Event()
        self._others_may_begin.set()

    @property
    def weight_version(self) -> WeightVersion:
        """The version that the next step computes with."""
        return self._version

    @property
    def weights_state(self) -> State:
        """Whether it serves or pauses."""
        return "paused" if self._is_paused else "serving"

    @property
    def is_busy(self) -> bool:
        """Whether vLLM gives no outputs now, for a pause or an update; until answers have finished
        it gives theirs.
        """
        return self._is_paused or (self._lock.locked() and not self._finishing)

    def weight_tensors(self) -> Mapping[str, TensorKind]:
        """The tensors of the checkpoint, all of which an update must have."""
        return {name: TensorKind(one.shape, one.dtype) for name, one in self._tensors.items()}

    async def update_weights(self, source: Path | memoryview, name: str | None, mode: PauseMode) -> Updated:
        """See `UpdatesWeights.update_weights`."""
        async with exclusive(self._lock):
            with _own_copy() as directory:
                await asyncio.to_thread(_copy, source, directory)
                began_s = time.perf_counter()
                field = "model_path" if isinstance(source, Path) else "body"
                digests = await asyncio.to_thread(self._checked, directory, field)
                version = self._version.following(digest_of_update("", digests.items()), name)
                await self._settle(mode)
                await self._load(directory)
                self._version = version
                if not self._is_paused:
                    await self._let_go()
            seconds = time.perf_counter() - began_s
            logger.info("weights: version %s, update %d, in %.2f s", version.name, version.number, seconds)
            return Updated(version, len(digests), seconds)

    async def pause(self, mode: PauseMode) -> None:
        """See `UpdatesWeights.pause`; ``abort`` also ends the wait of a pause before it."""
        if mode == "abort" and self._lock.locked():
            await self.abort_all()
        async with exclusive(self._lock, waits=mode == "abort"):
            await self._settle(mode)
            self._is_paused = True

    async def resume(self) -> None:
        """See `UpdatesWeights.resume`."""
        async with exclusive(self._lock):
            self._is_paused = False
            await self._let_go()

    async def admit(self, request: RunningRequest) -> None:
        """Return when vLLM may be given a request: not while only those before it may finish, for
        vLLM could preempt it, and go on with it after the update.
        """
        if request not in self._finishing:
            await self._others_may_begin.wait()

    async def abort_all(self) -> None:
        """See `UpdatesWeights.abort_all`."""
        for request in self._requests.unfinished:
            request.abort("abort")

    async def flush_cache(self) -> None:
        """See `UpdatesWeights.flush_cache`; vLLM drops nothing while a request holds KV."""
        if not await self._calls.answer(self._llm.reset_prefix_cache(reset_connector=True)):
            raise WrongState("vLLM keeps its prefix cache while requests hold KV; flush it once they have ended")

    async def sleep(self, level: int) -> None:
        """Raises `NotSupported`."""
        raise NotSupported(_SLEEP)

    async def wake(self) -> None:
        """Raises `NotSupported`."""
        raise NotSupported(_SLEEP)

    def fail(self, failure: ServingError) -> None:
        """The engine has ended: whoever waits for vLLM is told."""
        self._calls.fail(failure)

    async def _settle(self, mode: PauseMode) -> None:
        """`_hold`, also of what a pause has kept."""
        if self._is_paused and mode == "finish":
            await self._let_go()
        if not self._is_paused or mode != "keep":
            await self._hold(mode)

    async def _hold(self, mode: PauseMode) -> None:
        """Let vLLM compute nothing, once what `mode` says has become of requests in flight.

        vLLM takes those in its queue for no requests in flight, preempted ones with a part of their
        answer among them: it goes on until all have ended, and is given no others meanwhile.
        """
        if mode == "abort":
            await self.abort_all()
        if mode != "finish":
            await self._pause(mode)
            return
        self._finishing = self._requests.unfinished
        self._others_may_begin.clear()
        try:
            tasks = [request.task for request in self._finishing if request.task is not None]
            if tasks:
                await asyncio.wait(tasks)
            await self._pause(mode)
        finally:
            self._finishing = []
            self._others_may_begin.set()

    async def _pause(self, mode: PauseMode) -> None:
        await self._calls.answer(self._llm.pause_generation(mode=_VLLM_MODES[mode], clear_cache=False))

    async def _let_go(self) -> None:
        await self._calls.answer(self._llm.resume_generation())

    async def _load(self, directory: Path) -> None:
        """Let every process of vLLM load the weights, and drop what the old ones computed: KV, that
        of a connector too, and features of pictures, of which the processes have dropped theirs.
        """
        try:
            answer = self._calls.answer
            await answer(self._llm.collective_rpc("load_weights_from", args=(str(directory / SINGLE),)))
            if not await answer(self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)):
                raise RuntimeError("vLLM keeps its prefix cache")
            await answer(self._llm.reset_encoder_cache())
        except Exception as error:  # weights of two versions, perhaps: nothing may be computed with them
            reason = f"an update of vLLM's weights failed: {one_line(error)}"
            self._break_down(reason)
            raise EngineBroken(reason) from error

    def _checked(self, directory: Path, field: str) -> dict[str, str]:
        """Digests of the tensors of an update, which this field gave. Raises `WeightsRefused`."""
        try:
            with safe_open(directory / SINGLE, framework="pt") as file:
                names = set(file.keys())
                of_both = {_HEAD} if self._is_tied else set()
                unknown = sorted(names - set(self._tensors) - of_both)
                missing = sorted(set(self._tensors) - names - of_both)
                if unknown:
                    raise WeightsRefused(f"tensor {unknown[0][:200]!r}: the model has none of this name")
                if missing:
                    raise WeightsRefused(f"tensor {missing[0]}: is missing; an update of vLLM must have every tensor")
                if of_both & names and not torch.equal(file.get_tensor(_HEAD), file.get_tensor(_EMBEDDING)):
                    raise WeightsRefused(f"tensor {_HEAD}: the model's embeddings are tied; give {_EMBEDDING} alone")
                return {name: self._digest(name, file.get_tensor(name)) for name in sorted(names)}
        except SafetensorError as error:
            raise WeightsRefused(f"{field}: {one_line(error)}") from None

    def _digest(self, name: str, tensor: torch.Tensor) -> str:
        expected = self._tensors.get(name)
        if expected is not None and tuple(tensor.shape) != expected.shape:
            shape, found = list(expected.shape), list(tensor.shape)
            raise WeightsRefused(f"tensor {name}: must be of shape {shape}, as the model's is, got {found}")
        if tensor.dtype not in _DTYPES:
            raise WeightsRefused(f"tensor {name}: must be of type {', '.join(_FLOATS)}, got {tensor.dtype}")
        rounded = tensor.to(self._dtype)
        if not bool(rounded.isfinite().all()):
            raise WeightsRefused(f"tensor {name}: holds a number that is infinite or not a number in {self._dtype}")
        return sha256(rounded.reshape(-1).view(torch.uint8).numpy().data).hexdigest()[:32]  # may have no dimension


@contextmanager
def _own_copy() -> Iterator[Path]:
    """A directory in memory that only this worker's processes read, until the end.

    Raises:
        WeightsRefused: it cannot be made.
    """
    root = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    try:
        directory = OwnedDirectory("dlw-weights-", root)
    except OSError as error:
        raise _no_room(root, error.strerror or str(error)) from None
    try:
        yield directory.path
    finally:
        directory.close()


def _copy(source: Path | memoryview, directory: Path) -> None:
    """One safetensors file of an update, as it is now. Raises `WeightsRefused`."""
    try:
        if isinstance(source, memoryview):
            (directory / SINGLE).write_bytes(source)
            return
        files = [source] if source.is_file() else _checked_files(source)
        with unchanged(files):
            if len(files) == 1:
                shutil.copyfile(files[0], directory / SINGLE)
            else:
                _join(files, directory / SINGLE)
    except OSError as error:
        if isinstance(source, memoryview) or error.errno in _FULL:
            raise _no_room(directory.parent, error.strerror or str(error)) from None
        raise WeightsRefused(f"model_path: {one_line(error)}") from None
    except (ModelFileError, SafetensorError) as error:
        raise WeightsRefused(f"model_path: {one_line(error)}") from None


def _checked_files(directory: Path) -> list[Path]:
    """The files of a checkpoint of floats alone, as an update must be. Raises `WeightsRefused`."""
    found = WeightFiles(directory)
    for name, stored in found.tensors.items():
        if stored.dtype not in _FLOATS:  # safetensors' loader has no word for some types
            raise WeightsRefused(f"tensor {name}: must be of type {', '.join(_FLOATS)}, got {stored.dtype}")
    return [directory / file for file in found.files]


def _no_room(root: Path, problem: str) -> WeightsRefused:
    """The refusal of an update of which no copy can be made for vLLM's processes."""
    cure = "; a container has more with --shm-size" if root == _SHARED_MEMORY else ""
    return WeightsRefused(f"the weights cannot be copied to {root}: {problem}{cure}")


def _join(files: list[Path], target: Path) -> None:
    """Copy the tensors of all files into one. Raises `WeightsRefused` if it cannot be written."""
    from safetensors.torch import load, save_file

    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        tensors |= load(read_regular(path))  # not mapped: a trainer may cut it off meanwhile
    try:
        save_file(tensors, target)
    except SafetensorError as error:  # of the system: the files have been read
        raise _no_room(target.parent.parent, one_line(error)) from None
