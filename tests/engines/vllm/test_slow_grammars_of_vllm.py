"""Requests with slow grammars wait for vLLM's process before it has them; others never ask."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors.grammar import Regex, grammar_cache
from adapters.vllm import prepared
from adapters.vocabulary import vocabulary_at
from worker.engines.vllm.extension import WorkerExtension
from worker.engines.vllm.grammar_waits import GrammarWaits
from worker.tiny_model import write_tiny_model

END = 2


class Core:
    """A double of ``AsyncLLM`` whose two processes need so many questions to compile a grammar."""

    def __init__(self, num_questions: int) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._left = num_questions

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[bool]:
        assert method == "prepare_grammars_at"
        assert callable(getattr(WorkerExtension, method))
        self.asked.append(args)
        self._left -= 1
        return [True, self._left <= 0]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(directory)
    return Context(vocabulary_at(str(directory), 1088, (END,)), frozenset({END}))


def chain(context: Context, regex: str, cpu_s: float) -> ProcessorChain:
    """A chain whose grammar took so long to compile."""
    (made,) = Regex.build(Regex.Args(pattern=regex), context)
    assert isinstance(made, Regex)
    made._matcher.compiled.cpu_s = cpu_s
    return ProcessorChain([made], context)


async def test_a_fast_grammar_asks_nothing(context: Context) -> None:
    core = Core(1)
    await GrammarWaits(core).wait(chain(context, "fast", 0.01))
    assert core.asked == []


async def test_a_slow_grammar_is_waited_for_each_time(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "POLL_S", 0.0)
    core = Core(3)
    waits, slow = GrammarWaits(core), chain(context, "slow", 0.6)
    await waits.wait(slow)
    assert len(core.asked) == 3
    processor = slow.members[0].processor
    assert isinstance(processor, Regex)
    assert core.asked[0] == (processor.address, [processor.source])
    await waits.wait(chain(context, "slow", 0.6))  # which the process may have dropped since
    assert len(core.asked) == 4


async def test_a_wait_ends(context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(prepared, "WAIT_S", 0.05)
    monkeypatch.setattr(prepared, "POLL_S", 0.01)
    core = Core(10**9)
    await asyncio.wait_for(GrammarWaits(core).wait(chain(context, "endless", 0.6)), 10)
    assert core.asked
    assert "has not compiled a grammar within 0.05 s" in caplog.text


async def test_a_question_that_fails_holds_no_request(context: Context, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Core):
        async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[bool]:
            raise RuntimeError("no such method")

    await GrammarWaits(Broken(1)).wait(chain(context, "broken", 0.6))
    assert "vLLM's process compiled no grammar ahead: no such method" in caplog.text


async def test_vllms_process_compiles_for_the_chains_vocabulary(context: Context) -> None:
    processor = chain(context, "prepared", 0.6).members[0].processor
    assert isinstance(processor, Regex)
    address = processor.address
    assert address is not None
    assert Path(str(address[0])).is_dir()
    source = processor.source.replace("prepared", "unheard")
    extension, cache = WorkerExtension(), grammar_cache(vocabulary_at(*address))
    as_sent = json.loads(json.dumps(address))
    while not extension.prepare_grammars_at(as_sent, [source]):
        await asyncio.sleep(0.01)
    misses = cache.num_misses
    assert cache.request(source).done()
    assert cache.num_misses == misses
