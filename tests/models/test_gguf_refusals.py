"""What a GGUF file cannot be served for is said by name, in one line."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf_files import F32, Source

from worker.arguments import parse_arguments
from worker.build import check_model, with_checkpoint
from worker.errors import StartupError
from worker.models import convert_gguf, find_gguf
from worker.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source") / "llama")


def complaint(path: Path) -> str:
    with pytest.raises(StartupError) as refused:
        convert_gguf(path, path.parent / "cache", lambda line: None)
    message = str(refused.value)
    assert message.startswith(f"--model-path {path}: ")
    assert "\n" not in message
    assert not list(path.parent.glob("cache/*/*"))  # nothing that looks like a checkpoint
    return message.removeprefix(f"--model-path {path}: ")


def metadata(key: str, value: object) -> Callable[[Source], None]:
    def change(source: Source) -> None:
        if value is None:
            del source.metadata[key]
        else:
            source.metadata[key] = value

    return change


def tensor(name: str, value: np.ndarray | None) -> Callable[[Source], None]:
    def change(source: Source) -> None:
        if value is None:
            del source.tensors[name]
        else:
            source.tensors[name] = (value.astype(np.float32), F32)

    return change


def both(*changes: Callable[[Source], None]) -> Callable[[Source], None]:
    def change(source: Source) -> None:
        for each in changes:
            each(source)

    return change


def scores(values: list[object]) -> Callable[[Source], None]:
    """A SentencePiece vocabulary with these scores."""

    def change(source: Source) -> None:
        source.metadata["tokenizer.ggml.model"] = "llama"
        source.metadata["tokenizer.ggml.scores"] = values

    return change


def odd_bos(text: str) -> Callable[[Source], None]:
    def change(source: Source) -> None:
        source.metadata["tokenizer.ggml.tokens"][source.metadata["tokenizer.ggml.bos_token_id"]] = text
        source.metadata["tokenizer.ggml.add_bos_token"] = True

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (metadata("llama.attention.scale", 0.5), "llama.attention.scale is not supported"),
        (metadata("llama.expert_count", 8), "it lacks llama.expert_used_count"),
        (metadata("llama.expert_count", "8"), "llama.expert_count must be an integer of at least 0 and at most 16384"),
        (metadata("llama.rope.dimension_count", 8), "llama.rope.dimension_count other than the width of a head"),
        (metadata("llama.rope.scaling.type", "longrope"), "llama.rope.scaling.type 'longrope' is not supported"),
        (metadata("llama.block_count", None), "it lacks llama.block_count"),
        (metadata("llama.attention.head_count", "many"), "llama.attention.head_count must be an integer of at least 1"),
        (
            metadata("llama.rope.freq_base", -1.0),
            "llama.rope.freq_base must be a number above 0 and at most 1e+30, got -1.0",
        ),
        (metadata("split.count", 3), "split.count: it is one of 3 parts, and its name must end with -00001-of"),
        (metadata("general.alignment", 0), "general.alignment must be an integer of at least 1 and at"),
        (metadata("tokenizer.ggml.model", "bert"), "tokenizer.ggml.model 'bert' is not supported, only gpt2, llama"),
        (
            metadata("tokenizer.ggml.pre", "viking"),
            "tokenizer.ggml.pre 'viking' is not supported, only chatglm-bpe, dbrx, d",
        ),
        (metadata("tokenizer.ggml.merges", None), "it lacks tokenizer.ggml.merges"),
        (metadata("tokenizer.ggml.merges", ["a"]), "tokenizer.ggml.merges: 'a' is not two pieces"),
        (metadata("tokenizer.ggml.merges", ["xyz qrs"]), "its tokenizer is damaged"),
        (metadata("tokenizer.ggml.token_type", [1, 1]), "tokenizer.ggml.token_type has another length"),
        (metadata("tokenizer.ggml.eos_token_id", 99_999), "tokenizer.ggml.eos_token_id must be the id of a token"),
        (metadata("llama.attention.head_count_kv", 3), "llama.attention.head_count must be a multiple of llama.attent"),
        (metadata("llama.attention.key_length", 15), "llama.attention.key_length, the width of a head, must be even"),
        (metadata("llama.block_count", 2**31), "llama.block_count must be an integer of at least 1 and at most 1024"),
        (metadata("llama.context_length", 0), "llama.context_length must be an integer of at least 2 and at most"),
        (
            metadata("llama.attention.layer_norm_rms_epsilon", float("nan")),
            "llama.attention.layer_norm_rms_epsilon must",
        ),
        (metadata("llama.rope.scaling.type", 3), "llama.rope.scaling.type must be a string, got 3"),
        (metadata("split.count", "three"), "split.count must be an integer of at least 0, got 'three'"),
        (metadata("tokenizer.ggml.model", ["gpt2"]), "tokenizer.ggml.model must be a string, got ['gpt2']"),
        (metadata("tokenizer.ggml.pre", ["gpt-2"]), "tokenizer.ggml.pre must be a string, got ['gpt-2']"),
        (metadata("tokenizer.ggml.merges", [1, 2]), "tokenizer.ggml.merges[0] must be one of strings, got 1"),
        (metadata("tokenizer.ggml.tokens", [1, 2]), "tokenizer.ggml.tokens[0] must be one of strings, got 1"),
        (
            metadata("tokenizer.ggml.tokens", ["x"] * 1025),
            "tokenizer.ggml.tokens has 1025 tokens, tensor ",
        ),
        (metadata("tokenizer.ggml.tokens", 7), "tokenizer.ggml.tokens must be a list of strings, got 7"),
        (metadata("tokenizer.ggml.token_type", ["a"]), "tokenizer.ggml.token_type[0] must be one of integers, got 'a'"),
        (
            metadata("tokenizer.ggml.bos_token_id", "1"),
            "tokenizer.ggml.bos_token_id must be the id of a token",
        ),
        (
            metadata("tokenizer.ggml.add_bos_token", "no"),
            "tokenizer.ggml.add_bos_token must be true or false",
        ),
        (metadata("tokenizer.chat_template", 3), "tokenizer.chat_template must be a string, got 3"),
        (scores(["1.0"]), "tokenizer.ggml.scores[0] must be one of finite numbers, got '1.0'"),
        (scores([float("nan")]), "tokenizer.ggml.scores[0] must be one of finite numbers, got nan"),
        (odd_bos("a b"), "tokenizer.ggml.bos_token_id must name a token without spaces and colons, not a variable"),
        (odd_bos("$A"), "tokenizer.ggml.bos_token_id must name a token without spaces and colons, not a variable"),
        (odd_bos("<s:1>"), "tokenizer.ggml.bos_token_id must name a token without spaces and colons, not a variable"),
        (
            tensor("blk.1.ffn_norm.weight", np.full(64, np.inf)),
            "tensor blk.1.ffn_norm.weight holds a number that",
        ),
        (
            tensor("token_embd.weight", np.full((1024, 64), np.nan)),
            "tensor token_embd.weight holds a number that",
        ),
        (tensor("blk.0.attn_q.bias", np.zeros(64)), "tensor blk.0.attn_q.bias has no place in architecture llama"),
        (tensor("blk.1.ffn_down.weight", None), "it lacks tensor blk.1.ffn_down.weight"),
        (tensor("blk.1.ffn_norm.weight", np.zeros(32)), "tensor blk.1.ffn_norm.weight must be of shape [64], got [32]"),
        (tensor("rope_freqs.weight", np.array([1, 1, 2, 3, 4, 4, 4, 8])), "tensor rope_freqs.weight does not scale"),
        (
            both(tensor("rope_freqs.weight", np.ones(8)), metadata("llama.rope.scaling.factor", 4.0)),
            "llama.rope.scaling.type linear is not supported beside tensor rope_freqs.weight",
        ),
        (
            metadata("llama.rope.scaling.factor", 1e-6),
            "llama.rope.scaling.factor must be a number above 0.001 and at most 1000000.0, got",
        ),
    ],
)
def test_what_is_not_supported_or_not_there(
    llama: Path, tmp_path: Path, change: Callable[[Source], None], said: str
) -> None:
    source = Source(llama)
    change(source)
    assert said in complaint(source.write(tmp_path / "model.gguf"))


def test_another_architecture(llama: Path, tmp_path: Path) -> None:
    path = Source(llama).write(tmp_path / "model.gguf", arch="gemma3n")
    assert complaint(path).startswith("general.architecture 'gemma3n' is not supported, only llama, qwen2, qwen3, ")


@pytest.mark.parametrize(("number", "named"), [(26, "type I32, which cannot be read"), (999, "unknown type 999")])
def test_another_type_of_tensor(llama: Path, tmp_path: Path, number: int, named: str) -> None:
    path = Source(llama).write(tmp_path / "model.gguf")
    content = bytearray(path.read_bytes())
    name = b"blk.0.ffn_norm.weight"
    at = content.index(name) + len(name) + 4 + 8  # after the number of dimensions and the only one
    assert struct.unpack_from("<I", content, at) == (GGMLQuantizationType.F32,)
    struct.pack_into("<I", content, at, number)
    path.write_bytes(content)
    assert complaint(path) == f"tensor blk.0.ffn_norm.weight is of {named}"


@pytest.mark.parametrize("part", [0.0, 0.00001, 0.001, 0.05, 0.5, 0.999])
def test_a_file_that_is_cut_off(llama: Path, tmp_path: Path, part: float) -> None:
    path = Source(llama).write(tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))] or b"GGML")
    assert "cut off" in complaint(path) or part == 0.0


def twice(content: bytes, name: bytes) -> bytes:
    """Another entry of the same length is renamed to `name`, which is there already."""
    other = {b"general.architecture": b"tokenizer.ggml.model", b"blk.0.attn_k.weight": b"blk.0.attn_q.weight"}[name]
    assert content.count(name) == content.count(other) == 1
    return content.replace(other, name)


def test_an_entry_that_is_there_twice(llama: Path, tmp_path: Path) -> None:
    path = Source(llama).write(tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(twice(content, b"general.architecture"))
    assert complaint(path) == "its metadata hold 'general.architecture' twice"
    path.write_bytes(twice(content, b"blk.0.attn_k.weight"))
    assert complaint(path) == "it holds tensor 'blk.0.attn_k.weight' twice"


def test_absurd_counts_end_at_once(llama: Path, tmp_path: Path) -> None:
    path = Source(llama).write(tmp_path / "model.gguf")
    content = path.read_bytes()
    for at, what in ((8, "tensors"), (16, "keys")):
        damaged = bytearray(content)
        struct.pack_into("<Q", damaged, at, 2**60)
        path.write_bytes(damaged)
        said = f"its header is damaged: it says that there are {2**60} {what}, 1048576 at most are read"
        assert complaint(path) == said
    name = b"tokenizer.ggml.tokens"
    damaged = bytearray(content)
    struct.pack_into("<Q", damaged, content.index(name) + len(name) + 8, 2**62)
    path.write_bytes(damaged)
    assert complaint(path).startswith(f"its header is damaged: it says that there are {2**62} items of 'tokenizer.ggml")


def test_a_damaged_count(llama: Path, tmp_path: Path) -> None:
    path = Source(llama).write(tmp_path / "model.gguf")
    content = bytearray(path.read_bytes())
    struct.pack_into("<Q", content, 16, 2**60)  # number of keys
    path.write_bytes(content)
    assert "its header is damaged" in complaint(path)


def test_other_files_and_versions(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert complaint(path) == "not a GGUF file: it does not begin with GGUF"
    content = bytearray(Source(llama).write(path).read_bytes())
    struct.pack_into("<I", content, 4, 1)
    path.write_bytes(content)
    assert complaint(path) == "GGUF version 1 is not supported, only 2 and 3"


def test_a_directory_with_one_file_or_several(llama: Path, tmp_path: Path) -> None:
    first = Source(llama).write(tmp_path / "one.gguf")
    assert find_gguf(tmp_path) == find_gguf(first) == first
    assert find_gguf(llama) is None
    (tmp_path / "two.GGUF").touch()
    with pytest.raises(StartupError, match=r"2 GGUF files \(one\.gguf, two\.GGUF\); name one of them"):
        find_gguf(tmp_path)
    (tmp_path / "config.json").touch()
    assert find_gguf(tmp_path) is None


def test_the_worker_serves_a_file_as_its_checkpoint(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = Source(llama).write(tmp_path / "mine.gguf")
    arguments = parse_arguments(["--model-path", str(path)], {})
    assert arguments.served_model_name == "mine"
    check_model(arguments)
    served = with_checkpoint(arguments)
    assert (Path(served.model_path) / "config.json").is_file()
    assert Path(served.model_path).is_relative_to(tmp_path / "cache" / "dynamo-logits-worker")
    assert (served.served_model_name, served.given) == ("mine", arguments.given)
    assert "worker: converting mine ..." in capsys.readouterr().err
    plain = parse_arguments(["--model-path", str(llama)], {})
    assert with_checkpoint(plain) is plain
