"""LoRA adapters that an embedded engine has loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.engines.lora_adapters import AdapterRefused, UnknownAdapter
from worker.engines.request import EngineRequest
from worker.errors import InvalidRequest, shown
from worker.models.problems import ModelFileError

logger = logging.getLogger(__name__)

FIELD = "routing.lora_name"


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter that requests compute with; it stays in memory as long as one of them does.

    Attributes:
        name: Name of it as a model.
        digest: Digest of its files and, where it is rounded, of the data type that it is rounded
            to; 128 bits as hexadecimal digits.
        packed: Weights, a `native.lora.PackedAdapter`.
    """

    name: str
    digest: str
    packed: Any


class LoadedAdapters:
    """The adapters that new requests may choose. Any thread may read it.

    Args:
        read: Reads an adapter by its name and directory. Raises `ModelFileError`.

    Attributes:
        digests: Digests by name, always those of now.
    """

    def __init__(self, read: Callable[[str, Path], LoadedAdapter]) -> None:
        self.digests: dict[str, str] = {}
        self._read = read
        self._loaded: dict[str, LoadedAdapter] = {}
        self._replaced: dict[str, LoadedAdapter] = {}  # requests that were prepared before may come yet

    def load(self, name: str, directory: Path) -> str:
        """Read an adapter, in place of one of this name; returns its digest.

        Requests that compute with another one of this name go on with it, and those that meant it
        begin with it until the next one is loaded.

        Raises:
            AdapterRefused: it cannot be read, or not be served.
        """
        started_s = time.perf_counter()
        try:
            adapter = self._read(name, directory)
        except ModelFileError as error:
            raise AdapterRefused(name, str(error)) from None
        before = self._loaded.get(name)
        if before is not None and before.digest != adapter.digest:
            self._replaced[name] = before
        self._loaded[name] = adapter
        self.digests[name] = adapter.digest
        seconds, size = time.perf_counter() - started_s, adapter.packed.nbytes / 2**20
        logger.info("LoRA adapter %s: %s, %.1f MiB, loaded in %.2f s", name, adapter.digest, size, seconds)
        return adapter.digest

    def unload(self, name: str) -> None:
        """Drop an adapter; requests that compute with it go on. Raises `UnknownAdapter`."""
        if self._loaded.pop(name, None) is None:
            raise UnknownAdapter(name)
        self._replaced.pop(name, None)
        del self.digests[name]
        logger.info("LoRA adapter %s: unloaded", name)

    def named(self, name: str) -> LoadedAdapter:
        """The adapter of this name. Raises `InvalidRequest` if there is none."""
        adapter = self._loaded.get(name)
        if adapter is None:
            known = ", ".join(sorted(self._loaded)) or "none"
            raise InvalidRequest(FIELD, f"there is no LoRA adapter {shown(name)}; there is {known}")
        return adapter

    def of(self, request: EngineRequest) -> LoadedAdapter | None:
        """The adapter that a request has chosen, None for the model itself.

        Raises:
            InvalidRequest: there is no such adapter any more, or another one of its name and of the
                one that this has replaced.
        """
        if request.lora_name is None:
            return None
        adapter = self.named(request.lora_name)
        if request.lora_digest in (None, adapter.digest):
            return adapter
        before = self._replaced.get(request.lora_name)
        if before is None or request.lora_digest != before.digest:
            raise InvalidRequest(FIELD, f"the LoRA adapter {request.lora_name} was replaced by another one")
        return before
