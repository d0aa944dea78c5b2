"""LoRA adapters that are loaded and unloaded: the engine and the runtime have the same ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from interruptions import interruptions, nothing_left

from worker.engines import EngineInfo
from worker.engines.lora_adapters import AdapterRefused, UnknownAdapter
from worker.errors import InvalidRequest
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.control import Control
from worker.server.adapters import ServedAdapters

INFO = EngineInfo(
    name="fake",
    version="0",
    context_length=100,
    vocab_size=50,
    eos_token_ids=(2,),
    kv_block_size=4,
    total_kv_blocks=10,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)


class Engine:
    """Loads adapters in a thread, as the disk has them."""

    serves_adapters = True

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}

    async def load_adapter(self, name: str, directory: Path) -> str:
        return await asyncio.get_running_loop().run_in_executor(None, self._load, name)

    def _load(self, name: str) -> str:
        self.adapters[name] = "digest"
        return "digest"

    async def unload_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise UnknownAdapter(name)


class Served:
    """Adapters of a worker, with those that its runtime offers."""

    def __init__(self) -> None:
        self.engine, self.offered = Engine(), set[str]()
        info = cast(Any, INFO)
        object.__setattr__(info, "adapters", self.engine.adapters)
        self.adapters = ServedAdapters(cast(Any, self.engine), info, "model")
        self.adapters.publish, self.adapters.withdraw = self._publish, self._withdraw

    async def _publish(self, name: str) -> None:
        await asyncio.sleep(0)
        self.offered.add(name)
        await asyncio.sleep(0)

    async def _withdraw(self, name: str) -> None:
        await asyncio.sleep(0)
        self.offered.discard(name)
        await asyncio.sleep(0)


@pytest.mark.parametrize("what", ["load", "load again", "unload"])
async def test_a_caller_that_leaves_leaves_nothing_half_done(what: str) -> None:
    for interruption in interruptions():
        served = Served()
        if what != "load":
            await served.adapters.load("a", "/a")
        async with nothing_left(interruption):
            if what == "unload":
                await interruption.ended(served.adapters.unload("a"))
            else:
                await interruption.ended(served.adapters.load("a", "/a", replaces=True))
            async with asyncio.timeout(20):
                while served.adapters._changing.locked():
                    await asyncio.sleep(0)
        assert served.offered == set(served.engine.adapters), interruption
        await served.adapters.load("b", "/b")
        assert "b" in served.offered


async def test_an_adapter_that_the_runtime_does_not_take_is_not_kept() -> None:
    async def fails(name: str) -> None:
        raise OSError("no")

    served = Served()
    served.adapters.publish = fails
    with pytest.raises(AdapterRefused, match="the runtime does not register it: no"):
        await served.adapters.load("a", "/a")
    assert not served.engine.adapters
    served.adapters.publish, served.adapters.withdraw = served._publish, fails
    await served.adapters.load("a", "/a")
    with pytest.raises(AdapterRefused, match="the runtime does not unregister it: no"):
        await served.adapters.unload("a")
    assert served.offered == set(served.engine.adapters) == {"a"}


async def test_an_adapter_that_is_replaced_is_offered_once() -> None:
    served, told = Served(), list[str]()

    async def publish(name: str) -> None:
        told.append(name)

    served.adapters.publish = publish
    for _ in range(2):
        await served.adapters.load("a", "/a", replaces=True)
    assert told == ["a"]


@pytest.mark.parametrize(
    ("name", "path", "field"),
    [("", "/a", "name"), ("a" * 257, "/a", "name"), ("a\n", "/a", "name"), ("model", "/a", "name"), ("a", "a", "path")],
)
async def test_a_wrong_name_or_path_is_named(name: str, path: str, field: str) -> None:
    served = Served()
    with pytest.raises(InvalidRequest, match=f"lora_{field}: must be"):
        await served.adapters.load(name, path)
    assert not served.engine.adapters
    await served.adapters.load("a" * 256, "/a")


async def test_an_adapter_has_its_id_though_its_caller_left() -> None:
    """A call over OpenEngine may be cancelled by its deadline, and be sent again."""
    wanted = wire.LoraAdapter(lora_id=7, lora_name="a", source_path="/a")
    for interruption in interruptions():
        served = Served()
        server: Any = SimpleNamespace(preparation=object(), adapters=served.adapters)
        control = Control(server, cast(Any, None))
        async with nothing_left(interruption):
            await interruption.ended(control.load_lora(wire.LoadLoraRequest(adapter=wanted), cast(Any, None)))
        listed = await control.list_loras(wire.ListLorasRequest(), cast(Any, None))
        assert [*listed.adapters] == [wanted] * len(served.engine.adapters), interruption


async def test_a_refused_load_says_why_over_openengine() -> None:
    served = Served()
    control = Control(cast(Any, SimpleNamespace(preparation=object(), adapters=served.adapters)), cast(Any, None))
    wanted = wire.LoraAdapter(lora_id=7, lora_name="a", source_path="a")
    with pytest.raises(InvalidRequest, match="lora_path: must be the absolute path of a directory, got 'a'"):
        await control.load_lora(wire.LoadLoraRequest(adapter=wanted), cast(Any, None))
    assert not (await control.list_loras(wire.ListLorasRequest(), cast(Any, None))).adapters


async def test_an_unloaded_adapter_has_no_id_though_its_caller_left() -> None:
    wanted = wire.LoraAdapter(lora_id=7, lora_name="a", source_path="/a")
    for interruption in interruptions():
        served = Served()
        control = Control(cast(Any, SimpleNamespace(preparation=object(), adapters=served.adapters)), cast(Any, None))
        await control.load_lora(wire.LoadLoraRequest(adapter=wanted), cast(Any, None))
        async with nothing_left(interruption):
            await interruption.ended(control.unload_lora(wire.UnloadLoraRequest(lora_name="a"), cast(Any, None)))
        if not served.engine.adapters:
            await served.adapters.load("a", "/b")  # by another route, which gives none
            (listed,) = (await control.list_loras(wire.ListLorasRequest(), cast(Any, None))).adapters
            assert listed == wire.LoraAdapter(lora_name="a"), interruption


async def test_a_load_that_is_sent_again_meets_the_first() -> None:
    """A client whose deadline was too short asks again, while the first load goes on."""
    wanted = wire.LoraAdapter(lora_id=7, lora_name="a", source_path="/a")
    served = Served()
    control = Control(cast(Any, SimpleNamespace(preparation=object(), adapters=served.adapters)), cast(Any, None))
    asked = [control.load_lora(wire.LoadLoraRequest(adapter=wanted), cast(Any, None)) for _ in range(3)]
    found = await asyncio.gather(*asked)
    assert [(one.adapter, one.already_loaded) for one in found] == [(wanted, False), (wanted, True), (wanted, True)]
