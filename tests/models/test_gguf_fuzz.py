"""Any GGUF file is refused in one line, or its model is served as transformers computes it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from gguf import GGMLQuantizationType
from gguf_files import F32, Source
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served_checkpoint import served_or_refused

from worker.errors import StartupError
from worker.models import convert_gguf
from worker.tiny_model import write_tiny_model

ARCHITECTURES = ("llama", "qwen2", "qwen3")
KINDS = (F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0)

VALUES: list[Any] = [
    *(0, 1, 2, 3, 4, 8, 15, 16, 17, 64, 1000, 1024, 2**31, 2**32 - 1, True, False),
    *(0.0, 1.0, -1.0, 1e-6, 1e30, 3e38, float("nan"), float("inf"), 10_000.0),
    *("", "x", "llama", "none", "linear", "yarn", "gpt2", "qwen2", "smollm", "a\nb", "$A", "a:b"),
    *([1], [1, 2, 3], ["x"], ["a b"], [0.5], [""], ["x"] * 1024, [1] * 1024, [0.5] * 1024),
]
MORE_KEYS = (
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.dimension_count"),
    *("attention.value_length", "expert_count", "expert_used_count", "vocab_size"),
)
GENERAL_KEYS = (
    *("general.alignment", "split.count", "tokenizer.ggml.scores", "tokenizer.ggml.add_space_prefix"),
    *("tokenizer.ggml.unknown_token_id", "tokenizer.ggml.eot_token_id"),
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {arch: write_tiny_model(root / arch, arch=arch) for arch in ARCHITECTURES}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which one file after another is converted."""
    return tmp_path_factory.mktemp("fuzz") / "work"


def check(file: Path, keeps_blocks: bool) -> str | None:
    """The refusal, if the file is refused."""
    try:
        checkpoint = convert_gguf(file, file.parent / "cache", lambda line: None, keeps_blocks)
    except StartupError as error:
        said = str(error)
        assert said.startswith(f"--model-path {file}: "), said
        assert "\n" not in said
        assert len(said) < 1000
        return said.removeprefix(f"--model-path {file}: ")
    return served_or_refused(checkpoint, compares=not keeps_blocks)


@settings(max_examples=examples(250), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_metadata_are_refused_by_key_or_served(
    sources: dict[str, Path], directory: Path, data: st.DataObject
) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    arch = data.draw(st.sampled_from(ARCHITECTURES))
    source = Source(sources[arch], data.draw(st.sampled_from(KINDS)))
    keys = sorted({*source.metadata, *(f"{arch}.{key}" for key in MORE_KEYS), *GENERAL_KEYS})
    changed = data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True))
    for key in changed:
        value = data.draw(st.sampled_from([*VALUES, None]))
        if value is None:
            source.metadata.pop(key, None)
        else:
            source.metadata[key] = value
    said = check(source.write(directory / "model.gguf"), data.draw(st.booleans()))
    # what is served in two parts is refused for another key than that which was changed
    assert said is None or any(word in said for word in (*changed, f"{arch}.", "tokenizer", "tensor", "first forward"))


@settings(max_examples=examples(250), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_bytes_of_a_header_are_refused_or_served(
    sources: dict[str, Path], directory: Path, data: st.DataObject
) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    file = Source(sources["llama"]).write(directory / "model.gguf")
    content = bytearray(file.read_bytes())
    end = content.index(b"output_norm.weight") + 60
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 400) | st.integers(0, end) | st.integers(end - 2000, end))
        content[at] = data.draw(st.integers(0, 255) | st.sampled_from([0, 1, 8, 9, 255]))
    file.write_bytes(content[: data.draw(st.sampled_from([len(content)] * 5 + [len(content) - 1, end, 30]))])
    check(file, keeps_blocks=False)
