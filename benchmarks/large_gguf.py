"""A GGUF file of 1.2 B random parameters, with the tokenizer and the formats of another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

NAME = "random-1.2B"
LAYERS, HIDDEN, INTERMEDIATE, HEAD = 18, 2048, 8192, 64
HEADS, KV_HEADS = HIDDEN // HEAD, 8
SHAPE = {
    "block_count": LAYERS,
    "embedding_length": HIDDEN,
    "feed_forward_length": INTERMEDIATE,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
}
BLOCK = 32
SCALE = 0.02
"""Standard deviation of the weights, as Llamas are initialised."""


def write_large_gguf(source: Path, path: Path) -> Path:
    """Write a Llama of 1.2 B parameters; returns `path`.

    Weights are uniform in each block, with scales that differ by up to a half. Its activations have
    no outliers, which models that were trained have.

    Args:
        source: A Llama's file: its tokenizer is taken, and the formats of its matrices.
        path: The file to write.

    Raises:
        ValueError: a matrix of `source` has another format than Q4_0, Q4_1 and Q8_0.
    """
    reader = GGUFReader(source)
    kinds = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    vocabulary = int(reader.fields["llama.vocab_size"].contents())
    writer = GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = SHAPE.get(key.removeprefix("llama."), field.contents())
        if field.types[0] is GGUFValueType.ARRAY:
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, field.types[0])
    generator = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", *_matrix(generator, vocabulary, HIDDEN, kinds["token_embd.weight"]))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", KV_HEADS * HEAD, HIDDEN),
            ("attn_v", KV_HEADS * HEAD, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", INTERMEDIATE, HIDDEN),
            ("ffn_up", INTERMEDIATE, HIDDEN),
            ("ffn_down", HIDDEN, INTERMEDIATE),
        ):
            packed = _matrix(generator, rows, columns, kinds[f"blk.0.{name}.weight"])
            writer.add_tensor(f"blk.{layer}.{name}.weight", *packed)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _matrix(
    generator: np.random.Generator, rows: int, columns: int, kind: GGMLQuantizationType
) -> tuple[np.ndarray[Any, Any], None, GGMLQuantizationType]:
    """Blocks of random weights, ``[rows, bytes]``, uint8; what `GGUFWriter.add_tensor` takes."""
    blocks = rows * columns // BLOCK
    spread: np.ndarray[Any, Any] = SCALE * generator.uniform(0.75, 1.25, blocks).astype(np.float32)
    if kind is GGMLQuantizationType.Q8_0:
        step = spread / 73  # the deviation of whole numbers that are uniform from -127 to 127
        scales = [step]
        codes = generator.integers(-127, 128, (blocks, BLOCK), np.int8).view(np.uint8)
    elif kind in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1):
        step = spread / 4.6  # likewise, from 0 to 15
        scales = [step] if kind is GGMLQuantizationType.Q4_0 else [step, -7.5 * step]
        codes = generator.integers(0, 256, (blocks, BLOCK // 2), np.uint8)
    else:
        raise ValueError(f"kind must be Q4_0, Q4_1 or Q8_0, got {kind.name}")
    heads = np.stack(scales, axis=1).astype(np.float16).view(np.uint8)
    return np.concatenate([heads, codes], axis=1).reshape(rows, -1), None, kind
