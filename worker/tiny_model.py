"""Writes a tiny, random, complete Hugging Face checkpoint, offline and deterministically.

``python -m worker.tiny_model DIR [--arch llama|qwen2|qwen3|mistral] [--seed N]``

The weights are random, so its answers mean nothing; everything around them is real: safetensors, a
byte-level BPE tokenizer that encodes any UTF-8 losslessly, a ChatML-like template, and a row of
logits that is wider than the tokenizer, as in most published checkpoints. On one platform the same
arguments write the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from worker.importing import prepare, uncollected

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")

SPECIAL_TOKENS = ("<|bos|>", "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
THINKING_TOKENS = ("<think>", "</think>")
"""Single ids like the special tokens, but kept in decoded text, as in Qwen3's tokenizer."""

CONTEXT_LENGTH = 2048
SLIDING_WINDOW = 48
"""Mistral's window, shorter than most sequences on purpose."""

_MARKER = "tiny_model.json"
_VOCABULARY = 1000
_HIDDEN, _INTERMEDIATE, _LAYERS, _HEADS, _KV_HEADS = 64, 128, 2, 4, 2
_HEAD_DIM = _HIDDEN // _HEADS
_ROW_MULTIPLE = 64

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
_TIED = {"qwen2", "qwen3"}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_SPLIT = r"[^\S\n]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"

_TEXT = """
Hello world! This is a very small text, and it is here for one purpose: a tokenizer learns its pieces from it.
A worker takes a request, asks an engine for the next token, and sends the answer back as a stream of events.
The user says hello. The assistant says hello, how can I help you today? You can ask a question about anything.
The system message tells the assistant who it is and what it should do; the user message says what is wanted.
A model reads the prompt from the first word to the last, then writes one token after another until it stops.
Every token has a number, and every number below the size of the vocabulary has a token. Bytes come first.
To sample means to draw one token from a distribution: temperature makes it flat or sharp, and truncation cuts
the tail. With no temperature the highest logit wins, and the same question always gets the same answer.
Some letters are rare: quick brown foxes jump over lazy dogs, five boxing wizards jump, pack my box with jugs.
Numbers such as 0, 1, 2, 3, 10, 42, 100 and 2048 are split into digits. Prices look like $9.99 or 12 %.
{"name": "Ada", "age": 36, "tags": ["first", "second"], "address": {"city": "London", "country": "England"}}
{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]}
def add(left: int, right: int) -> int:
    return left + right
for index in range(10):
    print(index, add(index, 1))
if __name__ == "__main__":
    main()
class Queue:
    def __init__(self, size: int) -> None:
        self.items = []
        self.size = size
SELECT name, count(*) FROM requests WHERE status = 'done' GROUP BY name ORDER BY name;
<html><head><title>Title</title></head><body><p class="text">A paragraph.</p></body></html>
Grüße aus Köln, ça va très bien, el niño come piñas, naïve café, smörgåsbord, Ελληνικά, русский язык, 日本語, 中文.
It was a bright cold day in the garden, and the children were playing under the old trees near the river.
She opened the window and looked out over the town; the light was soft, and the streets were still empty.
He thought about the journey that he had made, the people whom he had met, and the letters he had not written.
When the train arrived at the station, nobody was waiting, so they walked home together through the rain.
Yes or no? True or false? Maybe, maybe not. First think, then answer. Let us think about this step by step.
What is the capital of France? The capital of France is Paris. What is two plus two? Two plus two is four.
Please write a short story about a robot who learns to paint. Once upon a time there was a small robot.
Write a function which returns the largest number in a list. Explain your answer in simple words, please.
The weather today is sunny with a light wind from the west; tomorrow there will be clouds and some rain.
Thank you very much for your help! You are welcome. Have a nice day, and see you again soon. Goodbye!
"""


class TinyModelError(Exception):
    """The directory cannot be written; the message is one clear line."""


def write_tiny_model(directory: str | Path, arch: str = "llama", seed: int = 0) -> Path:
    """Write the checkpoint into `directory`, made if needed; writing over an own earlier one is
    fine.

    Args:
        directory: Directory to write.
        arch: One of `ARCHITECTURES`.
        seed: Seed of the weights, 0 to 2**63 - 1. The tokenizer is always the same.

    Returns:
        The directory.

    Raises:
        TinyModelError: `directory` is not a directory, or holds something else than an own earlier
            output.
        ValueError: unknown `arch`, or `seed` out of range.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be between 0 and 2**63 - 1, got {seed}")
    target = Path(directory)
    _check_target(target)
    tokenizer = _train_tokenizer()
    files = {_MARKER: _json({"written_by": "worker.tiny_model", "arch": arch, "seed": seed})}
    files |= _tokenizer_files(tokenizer)
    files |= _model_files(arch, seed, tokenizer)
    try:
        _write_files(target, files)
    except OSError as error:
        raise TinyModelError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def _check_target(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise TinyModelError(f"{target} is not a directory")
    if target.is_dir() and any(target.iterdir()) and not (target / _MARKER).is_file():
        raise TinyModelError(f"{target} is not empty and was not written by worker.tiny_model; name another directory")


def _write_files(target: Path, files: Mapping[str, bytes]) -> None:
    # the marker is the first entry, so that an interrupted run can be repeated
    target.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = target / name
        if path.is_file() and path.read_bytes() == content:
            continue
        partial = target / f"{name}.partial"
        partial.write_bytes(content)
        partial.replace(path)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY - len(THINKING_TOKENS),
        min_frequency=1,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in THINKING_TOKENS])
    return tokenizer


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in (*SPECIAL_TOKENS, *THINKING_TOKENS)
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "tokenizer.json": (tokenizer.to_str(pretty=True) + "\n").encode(),
        "tokenizer_config.json": _json(config),
    }


def _model_files(arch: str, seed: int, tokenizer: Tokenizer) -> dict[str, bytes]:
    from safetensors.torch import save as save_safetensors  # imports torch

    size = tokenizer.get_vocab_size(with_added_tokens=True)
    width = (size // _ROW_MULTIPLE + 1) * _ROW_MULTIPLE  # always some padding
    special = {
        "bos_token_id": tokenizer.token_to_id("<|bos|>"),
        "pad_token_id": tokenizer.token_to_id("<|pad|>"),
        "eos_token_id": [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")],
    }
    return {
        "config.json": _json(_model_config(arch, width) | special),
        "generation_config.json": _json(special),
        "model.safetensors": save_safetensors(_weights(arch, seed, width), metadata={"format": "pt"}),
    }


def _model_config(arch: str, width: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "torch_dtype": "float32",
        "vocab_size": width,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": arch in _TIED,
        "attention_dropout": 0.0,
    }
    if arch == "mistral":
        config["sliding_window"] = SLIDING_WINDOW
    if arch in ("qwen2", "qwen3"):
        config["use_sliding_window"] = False
    return config


def _weights(arch: str, seed: int, width: int) -> dict[str, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def linear(rows: int, columns: int) -> torch.Tensor:
        return normal(rows, columns, scale=1 / math.sqrt(columns))

    # scales chosen for logits with a spread of about 2.5: peaked enough to be worth sampling, with
    # no near ties
    weights = {"model.embed_tokens.weight": normal(width, _HIDDEN, scale=0.3), "model.norm.weight": torch.ones(_HIDDEN)}
    if arch not in _TIED:
        weights["lm_head.weight"] = normal(width, _HIDDEN, scale=0.3)
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = torch.ones(_HIDDEN)
        weights[prefix + "post_attention_layernorm.weight"] = torch.ones(_HIDDEN)
        for name, rows in (("q", _HEADS * _HEAD_DIM), ("k", _KV_HEADS * _HEAD_DIM), ("v", _KV_HEADS * _HEAD_DIM)):
            weights[prefix + f"self_attn.{name}_proj.weight"] = 2 * linear(rows, _HIDDEN)
            if arch == "qwen2":
                weights[prefix + f"self_attn.{name}_proj.bias"] = normal(rows, scale=0.1)
        if arch == "qwen3":
            weights[prefix + "self_attn.q_norm.weight"] = torch.full((_HEAD_DIM,), 2.0)
            weights[prefix + "self_attn.k_norm.weight"] = torch.full((_HEAD_DIM,), 2.0)
        weights[prefix + "self_attn.o_proj.weight"] = linear(_HIDDEN, _HEADS * _HEAD_DIM)
        weights[prefix + "mlp.gate_proj.weight"] = 2 * linear(_INTERMEDIATE, _HIDDEN)
        weights[prefix + "mlp.up_proj.weight"] = linear(_INTERMEDIATE, _HIDDEN)
        weights[prefix + "mlp.down_proj.weight"] = linear(_HIDDEN, _INTERMEDIATE)
    return weights


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m worker.tiny_model", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--arch", choices=ARCHITECTURES, default="llama")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        written = write_tiny_model(options.directory, options.arch, options.seed)
    except (TinyModelError, ValueError) as error:
        print(f"tiny_model: {error}", file=sys.stderr)
        return 1
    print(written)
    return 0


if __name__ == "__main__":
    prepare()
    with uncollected():
        status = main()
    sys.exit(status)
