"""A Hugging Face causal language model over packed batches and a paged KV cache."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM

from worker.engines.embedded.attention import AttentionBackend, AttentionSizes
from worker.engines.embedded.config import EmbeddedConfig, resolve_device, resolve_dtype
from worker.engines.embedded.host import in_own_thread
from worker.engines.embedded.host import memory as host_memory
from worker.engines.embedded.kv_cache import Int8Rows, KvStore, row_shape
from worker.engines.embedded.model import llama, transformers_network
from worker.engines.embedded.model.batch_packing import pack
from worker.engines.embedded.model.kernels import KernelBackend, choose_kernels
from worker.engines.embedded.model.linear import linears
from worker.engines.embedded.model.llama import LlamaNetwork
from worker.engines.embedded.model.numerics import choose
from worker.engines.embedded.model.quantisation import FORMATS
from worker.engines.embedded.model.quantised_checkpoint import UNREADABLE, QuantisedCheckpoint, is_quantised_here
from worker.engines.embedded.model.transformers_network import TransformersNetwork
from worker.engines.embedded.plan import Plan
from worker.errors import StartupError

logger = logging.getLogger(__name__)

MODEL_TYPES = (*llama.MODEL_TYPES, *transformers_network.MODEL_TYPES)
"""Architectures that are tested; others may have attention variants that no backend computes."""

_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}

_LARGE_BYTES = 64 * 2**20
"""Weights of this size do not stay in the processor's caches from step to step."""


class HfModel:
    """Implements `Model`; `load_model` makes it from a checkpoint.

    Args:
        network: transformers' causal language model, on its device; of no use afterwards.
        eos_token_ids: Ids that end an answer.
        undecodable_ids: Ids that the tokenizer does not have.
        numerics: One of `config.NUMERICS`.
        kernels: What it computes with.
        weights: What its weights are held in, for people; None for its data type.
        kv_cache_dtype: One of `config.KV_CACHE_DTYPES`.

    Attributes:
        kernels: See `KernelBackend.name`.
        numerics: ``exact`` or ``fast``; known once there is a KV store, as are the following ones.
        made_by: See `Numerics.made_by`; and what quantised weights and a quantised KV cache are
            held in, and what activations are rounded to.
        wants_dense_kv: See `AttentionBackend.wants_dense_pages`.
    """

    def __init__(
        self,
        network: Any,
        eos_token_ids: tuple[int, ...],
        undecodable_ids: tuple[int, ...],
        numerics: str,
        kernels: KernelBackend,
        weights: str | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        config = network.config
        self.device: torch.device = network.device
        self.dtype: torch.dtype = network.dtype
        self.vocab_size = int(config.vocab_size)
        self.context_length = int(config.max_position_embeddings)
        self.eos_token_ids = eos_token_ids
        self.undecodable_ids = undecodable_ids
        self._layers = int(config.num_hidden_layers)
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._head_dim = int(network.model.layers[0].self_attn.head_dim)
        self._softcap = config.attn_logit_softcapping if config.model_type == "gemma2" else None
        self._int8_rows = Int8Rows(self._head_dim, self.dtype) if kv_cache_dtype == "int8" else None
        self._row_width, self._row_dtype = row_shape(self._head_dim, self.dtype, self._int8_rows)
        self.kv_bytes_per_token = 2 * self._layers * self._kv_heads * self._row_width * self._row_dtype.itemsize
        self._kernels = kernels
        self._weights = weights
        self.kernels = self._kernels.name
        self._network = (LlamaNetwork if llama.serves(config) else TransformersNetwork)(network, self._kernels)
        self._store = KvStore([], [])
        self._page_size = 0
        self._attention: AttentionBackend  # chosen by the page size, too
        self._wanted_numerics = numerics
        self._row_step = 1
        self._tile = 0
        self.numerics = self.made_by = "fast"
        self.wants_dense_kv = True

    def allocate_kv(self, num_pages: int, page_size: int) -> None:
        """Allocate the KV store. Raises `StartupError` if the memory is not there."""
        in_own_thread(lambda: self._allocate_kv(num_pages, page_size))

    def _allocate_kv(self, num_pages: int, page_size: int) -> None:
        shape = (num_pages, self._kv_heads, page_size, self._row_width)
        try:
            tensors = host_memory.zeros(2 * self._layers, shape, self._row_dtype, self.device)
        except RuntimeError as error:  # out of memory, on either device
            raise StartupError(
                f"--kv-blocks: no memory for the KV of {num_pages * page_size} tokens ({first_line(error)})"
            ) from error
        self._store = KvStore(tensors[: self._layers], tensors[self._layers :], self._int8_rows)
        self._page_size = page_size
        self._choose_numerics()
        if self.device.type == "cpu" and sum(layer.num_bytes for layer in linears(self._network)) >= _LARGE_BYTES:
            host_memory.collapse_resident()
            host_memory.keep_freed()

    @torch.inference_mode()
    def _choose_numerics(self) -> None:
        sizes = AttentionSizes(
            *(self._heads, self._kv_heads, self._head_dim, self._softcap, self._page_size),
            *(self.dtype, self.device, self._int8_rows),
        )
        layers = list(linears(self._network))
        chosen = choose(self._wanted_numerics, layers, self._kernels.attention(sizes), sizes)
        for layer in layers:
            layer.settle(chosen.tilings[layer.shape])
        self._row_step = min((layer.tiling.step for layer in layers), default=1)
        self._tile = max((layer.tiling.most or 0 for layer in layers), default=0)
        self._attention = chosen.attention
        self.numerics = chosen.name
        self.made_by = chosen.made_by + (f", {self._weights} weights" if self._weights else "")
        self.made_by += ", int8 activations" if self._kernels.rounds_rows else ""
        self.made_by += ", int8 KV cache" if self._int8_rows else ""
        dtype = str(self.dtype).removeprefix("torch.")
        logger.info(
            "numerics: %s; kernels: %s; weights: %s; KV cache: %s",
            *(chosen.made_by, self.kernels, self._weights or dtype, str(self._row_dtype).removeprefix("torch.")),
        )
        self.wants_dense_kv = chosen.attention.wants_dense_pages

    def _padding(self, count: int) -> int:
        """Rows of padding behind `count` rows.

        They are what every GEMM needs; or, where the last tile is nearly full, the rest of it,
        since each GEMM would otherwise pad its own input (see `GemmTiling`).
        """
        tile = self._tile
        is_nearly_full = tile and count > tile and -count % tile < tile // 4
        return -count % (tile if is_nearly_full else self._row_step)

    @property
    def kv_store(self) -> KvStore:
        """Its keys and values; empty before `allocate_kv`."""
        return self._store

    @torch.inference_mode()
    def forward(self, plan: Plan) -> torch.Tensor:
        """Logits in float32; see `Model.forward`."""
        batch = pack(plan, self._page_size)
        self._store.copy(plan.copies)
        self._store.zero(batch.new_pages)
        tensors = torch.tensor([batch.ids, batch.positions, batch.pages, batch.slots])
        tensors = tensors.to(self.device, non_blocking=True)
        step = self._attention.plan(self._store, batch.sequences, tensors[2:])
        padding = self._padding(len(batch.ids))
        ids, positions = functional.pad(tensors[:2], (0, padding)) if padding else tensors[:2]
        hidden = self._network.hidden(ids, positions, step)
        if plan.scored:
            plan.show_scored(hidden, self._network.logits)
        if plan.chunks:
            hidden = hidden[torch.tensor(plan.logit_rows(), dtype=torch.long, device=self.device)]
        elif padding:
            hidden = hidden[: len(batch.ids)]
        return self._network.logits(hidden)


def load_model(config: EmbeddedConfig) -> HfModel:
    """Load the checkpoint in ``config.model_path``.

    Raises:
        StartupError: it is missing, unreadable, incomplete or of an architecture that is not
            served; or the kernels that were asked for cannot compute here.
    """
    return in_own_thread(lambda: _load_model(config))


def _load_model(config: EmbeddedConfig) -> HfModel:
    directory = Path(config.model_path)
    settings = _read_settings(directory)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device, _checkpoint_dtype(settings))
    quantisation = config.quantization if config.quantization in FORMATS else None
    checkpoint = QuantisedCheckpoint(directory, settings) if is_quantised_here(settings) else None
    if checkpoint is not None and quantisation is not None:
        reason = f"{directory} is quantised already ({checkpoint.format}); use auto or none"
        raise StartupError(f"--quantization {quantisation}: {reason}")
    rounds_rows = config.activation_dtype == "int8"
    if rounds_rows and quantisation is None and (checkpoint is None or config.quantization == "none"):
        raise StartupError("--activation-dtype int8 needs quantised weights: a quantised model, or --quantization int8")
    kernels = choose_kernels(config.kernels, device, dtype, quantisation, rounds_rows)
    weights = quantisation
    if checkpoint is None:
        network = _load_network(directory, dtype)
    else:
        keeps = config.quantization == "auto" and kernels.reads_quantised
        if config.quantization == "auto" and not keeps:
            logger.info("weights in %s are dequantised: %s kernels do not read them", checkpoint.format, kernels.name)
        network = checkpoint.network(dtype, keeps)
        weights = checkpoint.format if keeps else None
    network = network.to(device).eval()
    vocab_size = int(network.config.vocab_size)
    eos_token_ids = tuple(token for token in _eos_token_ids(directory, settings) if token < vocab_size)
    undecodable_ids = _undecodable_ids(directory, vocab_size)
    return HfModel(network, eos_token_ids, undecodable_ids, config.numerics, kernels, weights, config.kv_cache_dtype)


def _read_settings(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise StartupError(f"--model-path {directory}: no such directory")
    settings = _read_json(directory / "config.json")
    if settings is None:
        raise StartupError(f"--model-path {directory}: it has no config.json")
    kind = settings.get("model_type")
    if kind not in MODEL_TYPES:
        raise StartupError(
            f"--model-path {directory}: model type {kind!r} is not served by the embedded engine, "
            f"which knows {', '.join(MODEL_TYPES)}"
        )
    if settings.get("quantization_config") and not is_quantised_here(settings):
        raise StartupError(
            f"--model-path {directory}: checkpoints that other programs quantised are not served by the embedded engine"
        )
    length_dependent = _rope_types(settings) & _LENGTH_DEPENDENT_ROPE
    if length_dependent:
        raise StartupError(
            f"--model-path {directory}: rope type {min(length_dependent)!r} depends on the longest sequence of a batch "
            "and is not served by the embedded engine"
        )
    if not any(directory.glob("*.safetensors")):
        raise StartupError(f"--model-path {directory}: it has no safetensors weights")
    return settings


def _rope_types(settings: dict[str, Any]) -> set[str]:
    """RoPE types; Gemma-3 has one for each kind of layer."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    found = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return {str(each.get("rope_type", each.get("type"))) for each in found}


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StartupError(f"--model-path: cannot read {path}: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise StartupError(f"--model-path: {path} does not hold a JSON object")
    return content


def _checkpoint_dtype(settings: dict[str, Any]) -> torch.dtype:
    name = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _load_network(directory: Path, dtype: torch.dtype) -> Any:
    loader: Any = AutoModelForCausalLM
    try:
        network, report = loader.from_pretrained(
            directory,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except UNREADABLE as error:
        raise StartupError(f"--model-path {directory}: cannot load it: {first_line(error)}") from error
    for problem in ("missing_keys", "mismatched_keys"):
        if report.get(problem):
            names = sorted(str(name) for name in report[problem])
            raise StartupError(f"--model-path {directory}: weights are incomplete, {problem}: {', '.join(names[:3])}")
    return network


def _eos_token_ids(directory: Path, settings: dict[str, Any]) -> tuple[int, ...]:
    generation = _read_json(directory / "generation_config.json") or {}
    found = generation.get("eos_token_id", settings.get("eos_token_id"))
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def _undecodable_ids(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Ids that the tokenizer does not have; none without a ``tokenizer.json``."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return ()
    try:
        known = set(Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values())
    except Exception as error:  # the tokenizers library raises bare Exception
        raise StartupError(f"--model-path: cannot read {path}: {first_line(error)}") from error
    return tuple(token for token in range(vocab_size) if token not in known)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
