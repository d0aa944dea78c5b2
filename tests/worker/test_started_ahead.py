"""What a worker begins before it imports torch is what it would make later, or is dropped."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from prometheus_client import CollectorRegistry

import worker.build
from adapters.processors.grammar import grammar_cache
from adapters.vocabulary import CopiedTokenizer
from worker.arguments import Arguments, parse_arguments
from worker.build import embedded_config, sandbox_ahead, weights_ahead
from worker.engines import EngineInfo
from worker.engines.embedded import native
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.model.llama import LlamaNetwork
from worker.engines.embedded.model.packed_copy import PackedCopy
from worker.engines.embedded.native import PackedWeight
from worker.errors import StartupError
from worker.models.beside import last_used
from worker.models.sealed_tensors import SealedTensors
from worker.models.tokenizer_copy import load_vocabulary
from worker.processors import builder
from worker.processors.builder import make_chain_builder
from worker.processors.sandbox_start import StartingSandbox
from worker.tiny_model import write_tiny_model

SIZE = 1024
INFO = EngineInfo("fake", "0", 100, SIZE, (1,), 4, 10, 4, 64)

has_kernels = pytest.mark.skipif(native.unavailable(torch.float32) is not None, reason="there are no native kernels")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(PackedCopy, "write_beside", PackedCopy.write)
    return write_tiny_model(tmp_path / "model")


def arguments(model: Path, *more: str) -> Arguments:
    given = ["--model-path", str(model), "--device", "cpu", "--kernels", "native", "--dtype", "float32", *more]
    return parse_arguments(given, {})


def weights_of(model: HfModel) -> list[bytes]:
    network = model._network
    assert isinstance(network, LlamaNetwork)
    packed = network.packed()
    assert packed is not None
    found = [layer.qkv.weight for layer in packed.layers]
    return [each.panels.numpy().tobytes() for each in found if isinstance(each, PackedWeight)]


@has_kernels
@pytest.mark.native
def test_the_copy_that_was_used_last_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, rounded = arguments(model), arguments(model, "--quantization", "int8")
    assert weights_ahead(plain) is None
    expected = weights_of(load_model(embedded_config(plain)))
    assert expected
    load_model(embedded_config(rounded))
    copies = last_used(model / ".packed")
    assert copies is not None
    assert "int8" in copies.name

    ahead = weights_ahead(plain)
    assert ahead is not None
    assert "int8" in ahead.path.name  # what it guesses is wrong, and is dropped
    assert weights_of(load_model(embedded_config(plain), ahead)) == expected
    assert not len(ahead._memory)

    taken: list[SealedTensors | None] = []
    read = PackedCopy.read

    def noted(copy: PackedCopy, ahead: SealedTensors | None = None) -> Any:
        taken.append(ahead)
        return read(copy, ahead)

    monkeypatch.setattr(PackedCopy, "read", noted)
    ahead = weights_ahead(plain)
    assert ahead is not None
    assert "int8" not in ahead.path.name
    assert weights_of(load_model(embedded_config(plain), ahead)) == expected
    assert taken == [ahead]
    assert not [thread for thread in threading.enumerate() if thread.name == "packed-copy-ahead"]


@has_kernels
@pytest.mark.native
def test_a_damaged_copy_is_the_engines_to_tell_of(model: Path) -> None:
    plain = arguments(model)
    expected = weights_of(load_model(embedded_config(plain)))
    path = last_used(model / ".packed")
    assert path is not None
    whole = path.read_bytes()
    path.write_bytes(b"{}")
    assert weights_ahead(plain) is None
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    ahead = weights_ahead(plain)
    assert ahead is not None
    assert weights_of(load_model(embedded_config(plain), ahead)) == expected
    assert path.read_bytes() == whole


@has_kernels
@pytest.mark.native
def test_nothing_is_read_for_what_would_not_use_it(model: Path) -> None:
    load_model(embedded_config(arguments(model)))
    used = parse_arguments(["--model-path", str(model)], {})
    ahead = weights_ahead(used)
    assert ahead is not None
    ahead.close()
    assert weights_ahead(replace(used, packed_copy="off")) is None
    assert weights_ahead(replace(used, engine="constant")) is None


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_the_sandbox_that_began_is_the_one_that_serves(model: Path) -> None:
    chosen, before = arguments(model), children()
    assert sandbox_ahead(chosen) is None  # there is no copy of the tokenizer
    load_vocabulary(model, SIZE, (1,))
    ahead = sandbox_ahead(chosen)
    assert ahead is not None
    assert ahead.size == SIZE
    chains = make_chain_builder(chosen, INFO, registry := CollectorRegistry(), ahead=ahead)
    try:
        assert children() - before == {ahead.starting.sandbox.pid}
        assert grammar_cache(chains.vocabulary).sandbox is ahead.starting.sandbox
        assert chains.vocabulary.tokenizer is ahead.tokenizer
        ahead.starting.sandbox.submit('{"grammars": [{"lark_grammar": "start: /a/"}]}').result(60)
        assert registry.get_sample_value("dlw_grammar_seconds_count") == 1
    finally:
        ahead.starting.close()
    assert children() == before


def test_one_with_other_tokens_is_replaced(model: Path) -> None:
    chosen, before = arguments(model), children()
    load_vocabulary(model, SIZE, (1,))
    ahead = sandbox_ahead(chosen)
    assert ahead is not None
    chains = make_chain_builder(chosen, replace(INFO, vocab_size=SIZE + 64), CollectorRegistry(), ahead=ahead)
    sandbox = grammar_cache(chains.vocabulary).sandbox
    assert sandbox is not None
    try:
        assert sandbox is not ahead.starting.sandbox
        assert children() - before == {sandbox.pid}
        assert len(chains.vocabulary.token_bytes) == SIZE + 64
    finally:
        sandbox.close()


@pytest.mark.parametrize(
    "more", [["--packed-copy", "off"], ["--allow-logits-processors", "mine.Processor"], ["--runtime", "nats"]]
)
def test_no_sandbox_begins_without_a_copied_tokenizer(more: list[str], model: Path) -> None:
    load_vocabulary(model, SIZE, (1,))
    assert sandbox_ahead(arguments(model, *more)) is None


@pytest.mark.parametrize(
    "config", ["", "{}", '{"vocab_size": "1024"}', '{"vocab_size": 3}', '{"vocab_size": 1e9}', "[]"]
)
def test_a_size_that_cannot_be_begins_none(config: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_vocabulary(model, SIZE, (1,))
    copied = load_vocabulary(model, SIZE, (1,)).tokenizer
    assert isinstance(copied, CopiedTokenizer)
    monkeypatch.setattr("worker.processors.sandbox_start.copied_tokenizer", lambda *_: copied)
    (model / "config.json").write_text(config)
    assert sandbox_ahead(arguments(model)) is None


def refuse(chosen: Arguments) -> None:
    raise StartupError("no")


def test_a_start_that_fails_leaves_no_process(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_vocabulary(model, SIZE, (1,))
    before, begun = children(), []
    made = StartingSandbox.__init__

    def init(starting: StartingSandbox, timeout_s: float) -> None:
        made(starting, timeout_s)
        begun.append(starting)

    monkeypatch.setattr(StartingSandbox, "__init__", init)
    monkeypatch.setattr(worker.build, "check_default_sampling", refuse)
    with pytest.raises(StartupError):
        worker.build.build(["--model-path", str(model), "--device", "cpu"])
    assert len(begun) == 1
    assert children() == before


@has_kernels
@pytest.mark.native
def test_a_start_that_fails_reads_no_more(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_model(embedded_config(arguments(model)))
    begun: list[SealedTensors] = []
    begin = SealedTensors.begin

    def noted(tensors: SealedTensors) -> None:
        begun.append(tensors)
        begin(tensors)

    monkeypatch.setattr(SealedTensors, "begin", noted)
    monkeypatch.setattr(worker.build, "check_default_sampling", refuse)
    with pytest.raises(StartupError):
        worker.build.build(["--model-path", str(model), "--device", "cpu"])
    assert [len(one._memory) for one in begun] == [0]


def test_what_only_some_need_is_made_behind_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "WARM_UP_AFTER_S", 0.0)
    load_vocabulary(model, SIZE, (1,))
    chains = make_chain_builder(arguments(model), INFO, CollectorRegistry())
    cache, tokenizer = grammar_cache(chains.vocabulary), chains.vocabulary.tokenizer
    assert isinstance(tokenizer, CopiedTokenizer)
    assert cache.sandbox is not None
    try:
        chains._warm_up.join()
        assert cache._tokenizer is not None
        assert tokenizer._read is not None
    finally:
        cache.sandbox.close()
