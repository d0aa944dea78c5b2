"""`ServedAdapters`: LoRA adapters of a worker, loaded and unloaded while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from worker.engines import EngineInfo, ServingEngine
from worker.engines.lora_adapters import AdapterRefused, LoadsAdapters, UnknownAdapter
from worker.engines.weights import NotSupported
from worker.errors import InvalidRequest, one_line, shown
from worker.lifecycle.whole import WholeChanges

MAX_NAME = 256
"""Characters of an adapter's name."""

Tell = Callable[[str], Awaitable[None]]
"""Tells the runtime of an adapter, by its name."""


async def _nobody(name: str) -> None:
    pass


class ServedAdapters:
    """Loads and unloads the adapters of an engine. One event loop only.

    A runtime offers an adapter as a model only while the engine has it.

    Args:
        engine: Engine of the worker, started.
        info: Description of it.
        model: Served model name, which no adapter may have.

    Attributes:
        publish: Makes the runtime offer an adapter.
        withdraw: Ends that.
    """

    def __init__(self, engine: ServingEngine, info: EngineInfo, model: str) -> None:
        self.publish: Tell = _nobody
        self.withdraw: Tell = _nobody
        self._engine = engine
        self._info = info
        self._model = model
        self._changing = asyncio.Lock()
        self._changes = WholeChanges()  # the engine and the runtime have the same adapters, whoever leaves

    @property
    def are_served(self) -> bool:
        """Whether requests may choose adapters, now or once some are loaded."""
        engine = self._engine
        return bool(self._info.adapters) or (isinstance(engine, LoadsAdapters) and engine.serves_adapters)

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the adapters by name."""
        return dict(self._info.adapters)

    async def load(self, name: str, path: str, *, replaces: bool = False) -> str:
        """Load an adapter from a directory on this machine; returns its digest.

        Requests that compute with an adapter that is replaced go on with it.

        Raises:
            InvalidRequest: the name is taken or no name; the path is none.
            AdapterRefused: it cannot be read, not be served, or not be registered.
            NotSupported: this engine loads none while it serves.
        """
        engine = self._loading
        if not name or len(name) > MAX_NAME or not name.isprintable() or name == self._model:
            raise InvalidRequest("lora_name", f"must be a name of its own, of 1 to {MAX_NAME} characters")
        if not Path(path).is_absolute():
            raise InvalidRequest("lora_path", f"must be the absolute path of a directory, got {shown(path)}")
        return await self._changes.made(self._load(engine, name, path, replaces=replaces))

    async def _load(self, engine: LoadsAdapters, name: str, path: str, *, replaces: bool) -> str:
        async with self._changing:
            is_new = name not in self._info.adapters
            if not is_new and not replaces:
                raise InvalidRequest("lora_name", f"the LoRA adapter {shown(name)} has already been loaded")
            digest = await engine.load_adapter(name, Path(path))
            if is_new:
                try:
                    await self.publish(name)
                except Exception as error:  # the runtime's
                    await engine.unload_adapter(name)
                    raise AdapterRefused(name, f"the runtime does not register it: {one_line(error)}") from error
            return digest

    async def unload(self, name: str) -> None:
        """Unload an adapter; requests that compute with it go on.

        Raises:
            UnknownAdapter: there is none of this name.
            AdapterRefused: the runtime cannot unregister it.
            NotSupported: this engine unloads none while it serves.
        """
        await self._changes.made(self._unload(self._loading, name))

    async def _unload(self, engine: LoadsAdapters, name: str) -> None:
        async with self._changing:
            if name not in self._info.adapters:
                raise UnknownAdapter(name)
            try:
                await self.withdraw(name)
            except Exception as error:  # the runtime's
                raise AdapterRefused(name, f"the runtime does not unregister it: {one_line(error)}") from error
            await engine.unload_adapter(name)

    @property
    def _loading(self) -> LoadsAdapters:
        if not isinstance(self._engine, LoadsAdapters):
            raise NotSupported(
                f"--engine {self._info.name}: LoRA adapters are those of --lora-modules; they are loaded while serving "
                "with --engine embedded"
            )
        return self._engine
