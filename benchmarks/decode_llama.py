"""llama.cpp in `decode.py` and `quantised.py`, in its own environment: ``python decode_llama.py
CHECKPOINT``.

Converts the checkpoint to GGUF, unless it is a GGUF file, with the same bfloat16 matrices and no
vocabulary, and drives `llama_decode` itself: every row is a sequence, the prompts are prefilled one
after another in batches of up to 1024 tokens, then every step is one batch.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from workload import LONGEST, MOST_ROWS, Reply, Stopwatch, Task, serve

_BATCH = 1024
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Matrix = np.ndarray[Any, Any]


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _say_nothing(level: int, text: bytes, data: Any) -> None:
    """What it says while it loads is long."""


def read_tensors(path: Path) -> dict[str, Matrix]:
    """Tensors of a safetensors file: bfloat16 as uint16, and vectors in float32."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    header = json.loads(bytes(data[8:start]))
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            kind = {"BF16": np.uint16, "F32": np.float32}[entry["dtype"]]
            tensors[name] = data[start + begin : start + end].view(kind).reshape(entry["shape"])
    return tensors


def gguf_name(name: str) -> str:
    """What GGUF calls a tensor."""
    if name in _NAMES:
        return str(_NAMES[name])
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(matrix: Matrix, heads: int) -> Matrix:
    """Rows of a head reordered from halves to pairs, as GGUF's RoPE expects."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def convert(checkpoint: Path, target: Path, dtype: str = "bfloat16") -> None:
    """Write the checkpoint as GGUF, its matrices as bfloat16 or float32."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in read_tensors(checkpoint / "model.safetensors").items():
        if tensor.ndim > 1 and ("q_proj" in name or "k_proj" in name):
            tensor = interleaved(tensor, heads if "q_proj" in name else kv_heads)
        if tensor.dtype == np.float32:
            writer.add_tensor(gguf_name(name), tensor)
            continue
        if tensor.ndim == 1 or dtype == "float32":  # GGUF wants vectors in float32
            writer.add_tensor(gguf_name(name), (tensor.astype(np.uint32) << 16).view(np.float32))
            continue
        whole = np.ascontiguousarray(tensor).view(np.uint8)
        writer.add_tensor(gguf_name(name), whole, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Llama:
    """A loaded model that answers tasks greedily.

    Args:
        path: A GGUF file.
        threads: Number of threads that compute.
        context: Tokens of all sequences together.
        sequences: At a time.
        kv_type: Type of keys and values of the KV cache.
        unified: One sequence may have the whole context, and share cells with others.
    """

    def __init__(
        self,
        path: Path,
        threads: int,
        context: int = MOST_ROWS * LONGEST,
        sequences: int = MOST_ROWS,
        kv_type: int = llama_cpp.GGML_TYPE_F16,
        unified: bool = False,
    ) -> None:
        llama_cpp.llama_log_set(_say_nothing, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = params.n_ubatch = _BATCH
        params.n_seq_max = sequences
        params.kv_unified = unified
        params.type_k = params.type_v = kv_type
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp could not make a context")
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def answer(self, task: Task) -> Reply:
        """One reply; nothing is kept for the next."""
        if task.controls != "greedy":
            raise SystemExit("llama.cpp is asked for greedy answers only")
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        return self.go_on(task, self._prefill(task.prompts()))

    def prefill_long(self, prompt: list[int], most: int) -> list[int]:
        """A first new token behind a prompt of any length, alone in the KV cache.

        Only the first `most` tokens of a longer prompt are computed. The others get copies of their
        keys and values, rotated to their positions: steps behind such a prompt take their time, but
        their tokens mean nothing. Needs a unified context of two sequences, and of `most` tokens
        more.
        """
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, True)
        found: list[int] = []
        for start in range(0, min(len(prompt), most), _BATCH):
            part = list(enumerate(prompt[start : start + _BATCH], start))
            found = self._decode([(token, position, 0, position == part[-1][0]) for position, token in part])
        if len(prompt) > most:
            size = llama_cpp.llama_state_seq_get_size(self._context, 0)
            state = (ctypes.c_uint8 * size)()
            llama_cpp.llama_state_seq_get_data(self._context, state, size, 0)
            for start in range(most, len(prompt), most):
                if llama_cpp.llama_state_seq_set_data(self._context, state, size, 1) != size:
                    raise SystemExit("llama.cpp has no room for a copy of the prompt's beginning")
                llama_cpp.llama_memory_seq_rm(memory, 1, len(prompt) - start, -1)
                llama_cpp.llama_memory_seq_add(memory, 1, 0, -1, start)
                llama_cpp.llama_memory_seq_cp(memory, 1, 0, -1, -1)
                llama_cpp.llama_memory_seq_rm(memory, 1, -1, -1)
            assert llama_cpp.llama_memory_seq_pos_max(memory, 0) == len(prompt) - 1
        return found

    def forget_from(self, position: int) -> None:
        """Takes the tokens from `position` on out of the KV cache."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), -1, position, -1)

    def go_on(self, task: Task, first: list[int]) -> Reply:
        """The reply to a task whose prompts are prefilled and whose first new tokens are known."""
        last = first
        watch = Stopwatch(task.rows)
        watch.tick()
        for step in range(1, task.new):
            position = task.prompt + step - 1
            last = self._decode([(token, position, row, True) for row, token in enumerate(last)])
            watch.tick()
        return watch.fill(Reply(task.rows * task.new, first))

    def _prefill(self, prompts: list[list[int]]) -> list[int]:
        """The first new token of each prompt; whole prompts, as many at a time as a batch takes."""
        found: list[int] = []
        per_batch = max(1, _BATCH // len(prompts[0]))
        for start in range(0, len(prompts), per_batch):
            entries = [
                (token, position, start + row, position == len(prompt) - 1)
                for row, prompt in enumerate(prompts[start : start + per_batch])
                for position, token in enumerate(prompt)
            ]
            found += self._decode(entries)
        return found

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """The argmax after each wanted entry of (token, position, row, wanted)."""
        highest: list[int] = self._run(entries).argmax(-1).tolist()
        return highest

    def logits(self, tokens: list[int]) -> Matrix:
        """Logits ``[n, V]`` after each of up to `_BATCH` tokens, until the next call."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        return self._run([(token, position, 0, True) for position, token in enumerate(tokens)])

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> Matrix:
        """Logits after each wanted entry of (token, position, row, wanted), until the next call."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for place, (token, position, row, wanted) in enumerate(entries):
            batch.token[place] = token
            batch.pos[place] = position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = row
            batch.logits[place] = wanted
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise SystemExit(f"llama_decode said {code}")
        wanted_rows = sum(entry[3] for entry in entries)
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(wanted_rows, self._vocabulary))


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"

        def start() -> Callable[[Task], Reply]:
            given, threads = Path(sys.argv[1]), int(os.environ["OMP_NUM_THREADS"])
            if given.suffix == ".gguf":
                return Llama(given, threads).answer
            convert(given, path)
            return Llama(path, threads).answer

        serve(start)


if __name__ == "__main__":
    main()
