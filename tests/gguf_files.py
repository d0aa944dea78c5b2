"""GGUF files of tiny checkpoints, written with gguf-py's writer as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file

RENAMED = (
    ("model.embed_tokens.", "token_embd."),
    ("model.norm.", "output_norm."),
    ("lm_head.", "output."),
    ("model.layers.", "blk."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".self_attn.q_proj.", ".attn_q."),
    (".self_attn.k_proj.", ".attn_k."),
    (".self_attn.v_proj.", ".attn_v."),
    (".self_attn.o_proj.", ".attn_output."),
    (".self_attn.q_norm.", ".attn_q_norm."),
    (".self_attn.k_norm.", ".attn_k_norm."),
    (".mlp.gate_proj.", ".ffn_gate."),
    (".mlp.up_proj.", ".ffn_up."),
    (".mlp.down_proj.", ".ffn_down."),
)
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
F32 = GGMLQuantizationType.F32


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face weight."""
    for ours, theirs in RENAMED:
        name = name.replace(ours, theirs)
    return name


def permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's ``LlamaModel.permute``."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


class Source:
    """A checkpoint in GGUF's words; a test may change its metadata and tensors before it is
    written.

    Args:
        checkpoint: Of `worker.tiny_model`.
        kind: Type of the matrices; vectors are float32.
    """

    def __init__(self, checkpoint: Path, kind: GGMLQuantizationType = F32) -> None:
        self.kind = kind
        self.config = json.loads((checkpoint / "config.json").read_text())
        self.arch = self.config["model_type"]
        self.weights = {
            name: value.float().numpy() for name, value in load_file(checkpoint / "model.safetensors").items()
        }
        self.metadata: dict[str, Any] = self._architecture() | tokenizer_metadata(checkpoint)
        self.tensors: dict[str, tuple[np.ndarray[Any, Any], GGMLQuantizationType]] = {
            gguf_name(name): (self._stored(name, value), kind if value.ndim > 1 else F32)
            for name, value in self.weights.items()
        }

    def _architecture(self) -> dict[str, Any]:
        config = self.config
        rope = config.get("rope_parameters") or {}
        values = {
            "block_count": config["num_hidden_layers"],
            "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
            "attention.key_length": config["hidden_size"] // config["num_attention_heads"],
            "rope.freq_base": float(config.get("rope_theta") or rope["rope_theta"]),
        }
        return {f"{self.arch}.{key}": value for key, value in values.items()}

    def _stored(self, name: str, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if self.arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = self.config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            return permuted(value, heads)
        return value

    def write(self, path: Path, arch: str | None = None) -> Path:
        """Write the file; returns `path`."""
        writer = GGUFWriter(path, arch or self.arch)
        for key, value in self.metadata.items():
            _add(writer, key, value)
        for name, (value, kind) in self.tensors.items():
            packed = quantize(np.ascontiguousarray(value), kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def tokenizer_metadata(checkpoint: Path) -> dict[str, Any]:
    """The keys of a byte-level tokenizer; its ids above the vocabulary are unused, as llama.cpp
    fills them up.
    """
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    width = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    added = {each["id"]: each for each in tokenizer["added_tokens"]}
    named = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    named |= {number: each["content"] for number, each in added.items()}
    types = [
        UNUSED
        if number not in named
        else NORMAL
        if number not in added
        else CONTROL
        if added[number]["special"]
        else USER_DEFINED
        for number in range(width)
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    ids = {token: number for number, token in named.items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [named.get(number, f"[PAD{number}]") for number in range(width)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": ids[config["bos_token"]],
        "tokenizer.ggml.eos_token_id": ids[config["eos_token"]],
        "tokenizer.ggml.padding_token_id": ids[config["pad_token"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": config["chat_template"],
    }
