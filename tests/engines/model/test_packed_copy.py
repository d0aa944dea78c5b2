"""A packed copy gives the same model as the checkpoint, or is not used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_runs import last_logits
from model_runs import load_native as load
from transformers import AutoModelForCausalLM

from worker.engines.embedded import native
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import HfModel, loading, packed_copy, transformers_checkpoint
from worker.engines.embedded.model.linear import Projection
from worker.engines.embedded.model.packed_copy import PackedCopy, provenance_of
from worker.engines.embedded.native import PackedWeight
from worker.errors import StartupError
from worker.models import beside
from worker.quantize.output import write_quantised

DTYPES = [each for each in ("float32", "bfloat16") if native.unavailable(getattr(torch, each)) is None]
LLAMAS = ("llama", "mistral", "qwen2", "qwen3")
MODULES = os.pathsep.join(str(folder) for folder in Path(__file__).parents[:3])
"""Where other processes find what this one imports of the tests."""

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.native,
]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is there when the model is loaded."""
    monkeypatch.setattr(PackedCopy, "write_beside", PackedCopy.write)


@pytest.fixture
def checkpoint(every_checkpoint: dict[str, Path], tmp_path: Path) -> Path:
    return copied(every_checkpoint["qwen3"], tmp_path / "model")


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns(beside.DIRECTORY)))


def logits(model: HfModel) -> torch.Tensor:
    """Of a prompt in three chunks, and its keys and values."""
    rows = last_logits(model, (0, 60, 89, 90)).flatten()
    return torch.cat([rows, *(tensor[[2, 0]].flatten().float() for tensor in model.kv_store.tensors)])


def known(model: HfModel) -> tuple[object, ...]:
    """What the engine tells of a model."""
    return (
        *(model.dtype, model.vocab_size, model.context_length, model.eos_token_ids, model.undecodable_ids),
        *(model.numerics, model.made_by, model.kernels, model.kv_bytes_per_token),
    )


def copies(path: Path) -> list[Path]:
    return sorted(path.glob(f"{beside.DIRECTORY}/*.safetensors"))


def loads_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled with a name whenever a checkpoint is read, not a packed copy."""
    calls: list[str] = []
    made = transformers_checkpoint.facts_of

    def facts_of(*arguments: Any) -> Any:
        calls.append("checkpoint")
        return made(*arguments)

    monkeypatch.setattr(transformers_checkpoint, "facts_of", facts_of)
    return calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", LLAMAS)
def test_it_is_the_same_model(
    arch: str, dtype: str, every_checkpoint: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, four = copied(every_checkpoint[arch], tmp_path / "dense"), tmp_path / "four"
    write_quantised(dense, "int4", four)
    settings = [
        *({"model": dense, "quantization": each} for each in ("auto", "int8", "int4")),
        *({"model": dense, "quantization": each, "activation_dtype": "int8"} for each in ("int8", "int4")),
        {"model": four},
        {"model": four, "quantization": "none"},
        {"model": four, "activation_dtype": "int8", "kv_cache_dtype": "int8"},
    ]
    calls = loads_the_checkpoint(monkeypatch)
    for number, options in enumerate(settings, 1):
        given = {name: value for name, value in options.items() if name != "model"} | {"dtype": dtype}
        expected = load(options["model"], **given)
        assert len(calls) == number, options
        found = load(options["model"], **given)
        assert len(calls) == number, options
        assert known(found) == known(expected)
        assert torch.equal(logits(found), logits(expected))
        assert found._network._native is not None
    assert not list(tmp_path.glob("**/partial-*"))
    assert [len(copies(path)) for path in (dense, four)] == [5, 3]


def test_untied_embeddings_and_biases_are_in_it(tmp_path: Path) -> None:
    from random_checkpoints import write

    for arch, is_tied in product(("qwen2", "llama"), (True, False)):
        path = tmp_path / f"{arch}{is_tied}"
        write(path, arch, {"tie_word_embeddings": is_tied, "attention_bias": True})
        for options in ({}, {"quantization": "int8"}):
            one, other = load(path, **options), load(path, **options)
            assert torch.equal(logits(one), logits(other))
        quantised = tmp_path / f"{arch}{is_tied}-quantised"
        write_quantised(path, "int4", quantised)
        one, other = load(quantised), load(quantised)
        assert torch.equal(logits(one), logits(other))
        assert len(copies(quantised)) == 1


@pytest.mark.slow
def test_it_needs_no_transformers(checkpoint: Path) -> None:
    load(checkpoint)
    script = f"""
import sys
from worker.engines.embedded import EmbeddedConfig
from worker.engines.embedded.model import load_model
load_model(EmbeddedConfig(model_path={str(checkpoint)!r}, device="cpu", kernels="native"))
assert "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        *((each, {}) for each in ("gemma2", "gemma3_text", "qwen3_moe")),
        ("llama", {"kernels": "torch"}),
        ("llama", {"packed_copy": "off"}),
    ],
)
def test_there_is_none_where_it_would_not_be_used(
    model_type: str, options: dict[str, str], every_checkpoint: dict[str, Path], tmp_path: Path
) -> None:
    path = copied(every_checkpoint[model_type], tmp_path / "model")
    load(path, **options)
    assert not (path / beside.DIRECTORY).exists()


def test_off_does_not_read_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(checkpoint)
    calls = loads_the_checkpoint(monkeypatch)
    load(checkpoint, packed_copy="off")
    assert calls
    with pytest.raises(StartupError, match="--packed-copy must be auto, off or an absolute path, got 'on'"):
        EmbeddedConfig(model_path=checkpoint, packed_copy="on").check()


def test_packed_copies_in_one_named_directory_do_not_collide(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has a directory of its own there, even if their names are the same."""
    other = copied(checkpoint, tmp_path / "other" / checkpoint.name)
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    found = {}
    for path in (checkpoint, other):
        calls = loads_the_checkpoint(monkeypatch)
        expected = load(path, packed_copy=str(tmp_path / "all"))
        assert len(calls) == 1
        found[path] = load(path, packed_copy=str(tmp_path / "all"))
        assert len(calls) == 1
        assert torch.equal(logits(found[path]), logits(expected))
        assert not (path / beside.DIRECTORY).exists()
    assert len(list((tmp_path / "all").glob("*/*.safetensors"))) == 2


def change_configuration(path: Path) -> None:
    """Keeps the size of the file."""
    config = path / "config.json"
    text = config.read_text()
    changed = text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-02')
    assert changed != text
    config.write_text(changed)


def change_weights(path: Path) -> None:
    """Keeps size and time of modification."""
    [weights] = path.glob("*.safetensors")
    state, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1000] ^= 0x20
    weights.write_bytes(content)
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize("change", [change_configuration, change_weights])
def test_of_another_checkpoint_it_is_made_again(
    change: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(checkpoint)
    change(checkpoint)
    fresh = copied(checkpoint, tmp_path / "fresh")
    calls = loads_the_checkpoint(monkeypatch)
    found = logits(load(checkpoint))
    assert len(calls) == 1
    assert torch.equal(found, logits(load(fresh, packed_copy="off")))
    del calls[:]
    assert torch.equal(found, logits(load(checkpoint)))
    assert not calls


@pytest.mark.parametrize("copy", ["auto", "off"])
@pytest.mark.parametrize("replaces", [True, False])
def test_one_that_changes_while_it_is_read_is_not_served(
    copy: str, replaces: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it may be of the one and a part of the other."""
    facts_of = transformers_checkpoint.facts_of

    def changed(*arguments: Any) -> Any:
        monkeypatch.undo()
        if replaces:
            other = copied(checkpoint, tmp_path / "other")
            (other / "model.safetensors").replace(checkpoint / "model.safetensors")
        else:
            change_configuration(checkpoint)
        return facts_of(*arguments)

    monkeypatch.setattr(transformers_checkpoint, "facts_of", changed)
    with pytest.raises(StartupError, match="its files have changed while they were read; start again"):
        load(checkpoint, packed_copy=copy)
    assert not copies(checkpoint)
    load(checkpoint, packed_copy=copy)


def test_of_a_checkpoint_that_was_copied_it_is_used(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files have other inodes and times, so their SHA-256 counts."""
    load(checkpoint)
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    calls = loads_the_checkpoint(monkeypatch)
    assert torch.equal(logits(load(other)), logits(load(checkpoint)))
    assert not calls


def test_of_another_version_it_is_made_again(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(checkpoint)
    calls = loads_the_checkpoint(monkeypatch)
    monkeypatch.setattr(packed_copy, "FORMAT", packed_copy.FORMAT + 1)
    load(checkpoint)
    assert len(calls) == 1
    load(checkpoint)
    assert len(calls) == 1


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_one_is_made_again(data: st.DataObject, checkpoint: Path) -> None:
    expected = logits(load(checkpoint, packed_copy="off"))
    load(checkpoint)
    [path] = copies(checkpoint)
    whole = path.read_bytes()
    damage = data.draw(st.sampled_from(["cut", "flip", "flip in the header", "other"]))
    if damage == "cut":
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    elif damage == "other":
        path.write_bytes(data.draw(st.binary(max_size=64)))
    else:
        header = 8 + int.from_bytes(whole[:8], "little")
        place = data.draw(st.integers(0, header - 1 if "header" in damage else len(whole) - 1))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << data.draw(st.integers(0, 7))]) + whole[place + 1 :])
    assert torch.equal(logits(load(checkpoint)), expected)
    assert torch.equal(logits(load(checkpoint)), expected)
    assert path.stat().st_size == len(whole)


def test_one_whose_weights_do_not_fit_each_other_is_made_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However well it is sealed: the kernels would read outside of them."""
    model = load(checkpoint)
    expected = logits(model)
    facts, weights = model._facts, model._network.packed()
    assert weights is not None
    first, *others = weights.layers

    def made(**changes: Any) -> loading.PackedModel:
        return loading.PackedModel(facts, replace(weights, **changes))

    def sized(**sizes: int) -> loading.PackedModel:
        return loading.PackedModel(replace(facts, geometry=replace(facts.geometry, **sizes)), weights)

    def like(projection: Projection) -> Projection:
        panels = projection.weight.panels.clone()
        return Projection(PackedWeight(panels, projection.weight.columns), projection.bias)

    swapped = replace(first, gate=like(first.down))
    halved = replace(weights.rope, frequencies=weights.rope.frequencies[:-2])
    wrong = [
        made(layers=(swapped, *others)),
        made(layers=()),
        made(layers=(first,)),
        made(layers=tuple(reversed(weights.layers))),
        made(rope=halved),
        made(norm=replace(weights.norm, weight=weights.norm.weight[:-2])),
        made(norm=replace(weights.norm, weight=weights.norm.weight.half())),
        made(head=like(first.gate)),
        made(embedding=weights.norm.weight[None].clone()),
        made(layers=(replace(first, qkv=replace(first.qkv, bias=torch.zeros(3))), *others)),
        sized(vocab_size=facts.vocab_size + 32),
        sized(num_attention_heads=2 * facts.heads),
        sized(num_hidden_layers=facts.num_layers + 1),
        sized(intermediate_size=facts.geometry.intermediate_size // 2),
        made(layers=(replace(first, attention=replace(first.attention, window=-10)), *others)),
        made(embedding=None, is_tied=False),
    ]
    calls = loads_the_checkpoint(monkeypatch)
    for number, each in enumerate(wrong, 1):
        [path] = copies(checkpoint)
        PackedCopy(path.parent, provenance_of(checkpoint, path.parent), path.stem, loading._KINDS).write(each)
        assert torch.equal(logits(load(checkpoint)), expected)
        assert len(calls) == number


def test_where_none_can_be_written_the_model_is_served(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    expected = logits(load(checkpoint, packed_copy="off"))
    (checkpoint / beside.DIRECTORY).write_text("a file where the directory should be")
    assert torch.equal(logits(load(checkpoint)), expected)
    assert "no packed weights are kept" in caplog.text
    (checkpoint / beside.DIRECTORY).unlink()
    caplog.clear()
    usage = shutil.disk_usage(checkpoint)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert torch.equal(logits(load(checkpoint)), expected)
    assert "would take more than half of what is free" in caplog.text
    assert not copies(checkpoint)


SUMS = """
import hashlib, sys
from test_packed_copy import PackedCopy, load, logits
PackedCopy.write_beside = PackedCopy.write
for _ in range(5):
    print(hashlib.sha256(logits(load(sys.argv[1])).numpy()).hexdigest())
"""


@pytest.mark.slow
def test_processes_that_start_together_share_it(checkpoint: Path) -> None:
    expected = hashlib.sha256(logits(load(checkpoint, packed_copy="off")).numpy()).hexdigest()
    command = [sys.executable, "-c", SUMS, str(checkpoint)]
    environment = {**os.environ, "PYTHONPATH": MODULES, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    assert [process.communicate()[0].split() for process in started] == [5 * [expected]] * 3
    [path] = copies(checkpoint)
    assert path.stat().st_mode == (checkpoint / "config.json").stat().st_mode
    assert not list(path.parent.glob("partial-*"))


ENDS = """
import itertools, sys, time
from test_packed_copy import load, packed_copy
packed_copy._parts = lambda tensor: (memoryview(b"")[: time.sleep(0.01)] for _ in itertools.count())
load(sys.argv[1])
"""


@pytest.mark.slow
def test_a_process_that_ends_gives_it_up(checkpoint: Path) -> None:
    """In order: however long it would take, without a complaint, and nothing is left."""
    environment = {**os.environ, "PYTHONPATH": MODULES}
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, str(checkpoint)], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0
    assert "Error" not in ended.stderr
    assert not copies(checkpoint)
    assert not list(checkpoint.glob(f"{beside.DIRECTORY}/partial-*"))


KILLED = """
import os, signal, sys
from test_packed_copy import PackedCopy, load
from worker.models import sealed_tensors
def write(file, *arguments):
    file.write(b"a part")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
PackedCopy.write_beside = PackedCopy.write
assert sealed_tensors.write_safetensors
sealed_tensors.write_safetensors = write
load(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.campaign
def test_what_killed_processes_left_goes_away(checkpoint: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": MODULES}
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", KILLED, str(checkpoint)], env=environment, check=False)
        assert killed.returncode == -signal.SIGKILL
        assert not copies(checkpoint)
        assert len(list(checkpoint.glob(f"{beside.DIRECTORY}/partial-*/*"))) == 1
    expected = logits(load(checkpoint, packed_copy="off"))
    assert torch.equal(logits(load(checkpoint)), expected)
    left = {path.name for path in (checkpoint / beside.DIRECTORY).iterdir()} - {"digests.json", "digests.lock"}
    assert sorted(Path(name).suffix for name in left) == [".lock", ".safetensors"]


def test_a_start_does_not_wait_for_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    threads: list[threading.Thread] = []
    go_on, write = threading.Event(), PackedCopy.write
    made = PackedCopy.write_beside
    monkeypatch.setattr(PackedCopy, "write", lambda copy, *given: (go_on.wait(60), write(copy, *given)))
    monkeypatch.setattr(PackedCopy, "write_beside", lambda copy, value: threads.append(made(copy, value)))
    model = load(checkpoint)
    expected = logits(model)
    assert not copies(checkpoint)
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(copies(checkpoint)) == 1
    assert torch.equal(logits(load(checkpoint)), expected)


def test_a_start_needs_no_thread_for_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    caplog.set_level("INFO")
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "packed-copy":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    model = load(checkpoint)
    assert not copies(checkpoint)
    assert "no packed weights are kept in" in caplog.text
    monkeypatch.undo()
    assert torch.equal(logits(model), logits(load(checkpoint, packed_copy="off")))


ENDS = """
import concurrent.futures.thread as pools, time
from worker.engines.embedded.model.packed_copy import PackedCopy

def write(copy, *given):
    while not pools._shutdown:
        time.sleep(0.01)
    pools.ThreadPoolExecutor(1).submit(print)  # as the digest of a file does

PackedCopy.write = write
pools.ThreadPoolExecutor(1).submit(time.sleep, 1)  # for which the main thread waits when it ends
object.__new__(PackedCopy).write_beside(None)
"""


def test_a_process_that_ends_meanwhile_says_nothing() -> None:
    ran = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=100, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_one_that_another_process_wrote_meanwhile_stays(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(checkpoint)
    [path] = copies(checkpoint)
    path.rename(tmp_path / "written")
    provenance = provenance_of(checkpoint, path.parent)
    copy = PackedCopy(path.parent, provenance, path.stem, loading._KINDS)
    (tmp_path / "written").rename(path)
    before = path.stat()
    copy.write(loading.PackedModel(load(checkpoint)._facts, load(checkpoint)._network.packed()))
    assert path.stat().st_ino == before.st_ino


def test_files_that_nobody_can_read_are_left_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkpoint / ".#model.safetensors").symlink_to("me@elsewhere")
    (checkpoint / "b.safetensors").mkdir()
    os.mkfifo(checkpoint / "generation_config.safetensors")
    expected = logits(load(checkpoint))
    calls = loads_the_checkpoint(monkeypatch)
    assert torch.equal(logits(load(checkpoint)), expected)
    assert not calls


def test_there_is_none_of_weights_elsewhere(every_checkpoint: dict[str, Path], tmp_path: Path) -> None:
    path = copied(every_checkpoint["llama"], tmp_path / "model")
    network = AutoModelForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    network.save_pretrained(path, max_shard_size="60KB")
    load(path)
    assert len(copies(path)) == 1
    shutil.rmtree(path / beside.DIRECTORY)
    index = path / "model.safetensors.index.json"
    first = sorted(path.glob("*.safetensors"))[0]
    (path / "inside").mkdir()
    first.rename(path / "inside" / first.name)
    index.write_text(index.read_text().replace(first.name, f"inside/{first.name}"))
    load(path)
    assert not copies(path)


def test_it_does_not_stay_mapped(checkpoint: Path) -> None:
    load(checkpoint)
    model = load(checkpoint)
    assert str(checkpoint) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("size", [0, 1, 1000, beside._PART_BYTES, beside._PART_BYTES + 1])
def test_the_digest_of_a_file_depends_on_every_part(size: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    digest = beside.file_digest(path)
    assert beside.file_digest(path) == digest
    for place in {0, size // 2, size - 1} if size else ():
        content = bytearray(size)
        content[place] = 1
        path.write_bytes(content)
        assert beside.file_digest(path) != digest
    path.write_bytes(bytes(size + 1))
    assert beside.file_digest(path) != digest


def test_a_file_that_becomes_shorter_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the process if it were mapped."""
    path = tmp_path / "file"
    path.write_bytes(bytes(5 * 2**20))
    read = os.pread

    def shorten(*arguments: int) -> bytes:
        os.truncate(path, 2**20 + 1)
        return read(*arguments)

    monkeypatch.setattr(os, "pread", shorten)
    with pytest.raises(OSError, match=r"file has become shorter meanwhile"):
        beside.file_digest(path)


def test_a_seal_is_of_its_content() -> None:
    seal = beside.sealed({"a": [1, 2.5, None, "x"]})
    assert beside.opened(seal) == {"a": [1, 2.5, None, "x"]}
    for content, digest in ((seal["content"] + " ", seal["sha256"]), (seal["content"], "0" * 64)):
        with pytest.raises(ValueError, match="another SHA-256"):
            beside.opened({"content": content, "sha256": digest})
    assert json.loads(seal["content"]) == {"a": [1, 2.5, None, "x"]}
