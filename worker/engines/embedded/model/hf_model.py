"""A Hugging Face causal language model over packed batches and a paged KV cache."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.nn import functional

from adapters.devices import launching_on, upload, upload_ids, whole_numbers
from worker.engines.embedded.adapters import LoadedAdapter
from worker.engines.embedded.attention import AttentionBackend, AttentionSizes, AttentionStep, NativeAttention
from worker.engines.embedded.config import resolve_dtype
from worker.engines.embedded.host import in_own_thread
from worker.engines.embedded.host import memory as host_memory
from worker.engines.embedded.host.memory_ahead import MemoryAhead
from worker.engines.embedded.kv_cache import KvStore, row_shape
from worker.engines.embedded.model import weight_update
from worker.engines.embedded.model.adapter_weights import LayersInUse, load_adapter
from worker.engines.embedded.model.batch_packing import Batch, pack
from worker.engines.embedded.model.checkpoint_files import first_line
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.kv_format import code_rows_of
from worker.engines.embedded.model.layer_trial import LayerTrial, num_trial_pages, trial_ids
from worker.engines.embedded.model.linear import linears
from worker.engines.embedded.model.llama import LlamaNetwork
from worker.engines.embedded.model.llama_weights import LlamaWeights
from worker.engines.embedded.model.model_facts import ModelFacts
from worker.engines.embedded.model.network import Network
from worker.engines.embedded.model.numerics import Numerics, choose, shown_torch, tiling_of
from worker.engines.embedded.model.weight_update import Given
from worker.engines.embedded.native.lora import AdaptedLayers, AdaptedRows
from worker.engines.embedded.plan import Plan, Request
from worker.engines.embedded.scored_rows import show_scored
from worker.engines.weights import NotSupported
from worker.errors import StartupError
from worker.models.geometry import Geometry

if TYPE_CHECKING:
    from worker.engines.embedded.model.cuda_graphs import DecodeGraphs

logger = logging.getLogger(__name__)

NetworkT = TypeVar("NetworkT", bound=Network)

_LARGE_BYTES = 64 * 2**20
"""Weights of this size do not stay in the processor's caches from step to step."""


class HfModel:
    """Implements `Model`; `load_model` makes it from a checkpoint.

    Args:
        network: The network, on its device.
        facts: Description of the model.
        device: Device that computes.
        numerics: One of `config.NUMERICS`.
        kernels: Backends that compute.
        kv_cache_dtype: One of `config.KV_CACHE_DTYPES`.
        is_in_huge_pages: Whether the weights are.

    Raises:
        StartupError: keys and values of `ModelFacts.dtype` are not held in `kv_cache_dtype`.

    Attributes:
        kernels: See `KernelBackend.name`.
        kernel_backend: Backends that compute.
        numerics: ``exact`` or ``fast``; known once there is a KV store, as are the following ones.
        made_by: See `Numerics.made_by`; and what quantised weights and a quantised KV cache are
            held in, what activations are rounded to, torch's version where it computes LayerNorm,
            and the factors of LongRoPE.
        wants_dense_kv: See `AttentionBackend.wants_dense_pages`.
    """

    def __init__(
        self,
        network: Network,
        facts: ModelFacts,
        device: torch.device,
        numerics: str,
        kernels: KernelBackend,
        kv_cache_dtype: str = "auto",
        is_in_huge_pages: bool = False,
    ) -> None:
        self.device = device
        self.dtype = facts.dtype
        self.vocab_size = facts.vocab_size
        self.context_length = facts.context_length
        self.eos_token_ids = facts.eos_token_ids
        self.undecodable_ids = facts.undecodable_ids
        self._facts = facts
        self._is_in_huge_pages = is_in_huge_pages
        sizes = AttentionSizes(
            *(facts.heads, facts.kv_heads, facts.head_dim, facts.softcap, 0),  # pages come with the KV store
            *(self.dtype, device, None, network.has_windows),
        )
        self._sizes = replace(sizes, code_rows=code_rows_of(kv_cache_dtype, sizes, kernels))
        self._row_width, self._row_dtype = row_shape(facts.head_dim, self.dtype, self._sizes.code_rows)
        self.kv_bytes_per_token = 2 * facts.num_layers * facts.kv_heads * self._row_width * self._row_dtype.itemsize
        self.kernel_backend = kernels
        self.kernels = self.kernel_backend.name
        self._network = network
        self._store = KvStore([], [])
        self._last_hidden = torch.empty(0, 0)  # of the last step's tokens
        self._sum = torch.zeros(())  # of all numbers in it: finite if all are, but for an overflow
        self._attention: AttentionBackend  # chosen by the page size, too
        self._wanted_numerics = numerics
        self._chosen: Numerics  # known once there is a KV store
        self._row_step = 1
        self._tile = 0
        self._graphs: DecodeGraphs | None = None
        self._layers_in_use: LayersInUse | None = None  # where LoRA adapters can be loaded
        self.numerics = self.made_by = "fast"
        self.wants_dense_kv = True

    def allocate_kv(self, num_pages: int, page_size: int) -> None:
        """Allocate the KV store. Raises `StartupError` if the memory is not there."""
        in_own_thread(lambda: self._allocate_kv(num_pages, page_size))

    def _allocate_kv(self, num_pages: int, page_size: int) -> None:
        layers = self._facts.num_layers
        shape = (num_pages, self._facts.kv_heads, page_size, self._row_width)
        try:
            tensors = host_memory.zeros(2 * layers, shape, self._row_dtype, self.device)
        except RuntimeError as error:  # out of memory, on either device
            raise StartupError(
                f"--kv-blocks: no memory for the KV of {num_pages * page_size} tokens ({first_line(error)})"
            ) from error
        ahead = MemoryAhead(tensors) if self.device.type == "cpu" else None
        self._store = KvStore(tensors[:layers], tensors[layers:], self._sizes.code_rows, ahead=ahead)
        self._sizes = replace(self._sizes, page_size=page_size)
        with launching_on(self.device):
            self._choose_numerics()
        if self.device.type == "cpu" and sum(layer.num_bytes for layer in linears(self._network)) >= _LARGE_BYTES:
            if not self._is_in_huge_pages:
                host_memory.collapse_resident()
            host_memory.keep_freed()

    @torch.inference_mode()
    def _choose_numerics(self) -> None:
        facts = self._facts
        attention = self.kernel_backend.attention(self._sizes)
        chosen = choose(self._wanted_numerics, linears(self._network), attention, self._sizes)
        self._settle(chosen)
        reason = self._inexact() if chosen.name == "exact" else None
        if reason is not None:
            if self._wanted_numerics == "exact":
                raise StartupError(f"--numerics exact: {reason}; use fast or auto")
            logger.warning("numerics are fast: %s", reason)
            chosen = choose("fast", linears(self._network), attention, self._sizes)
            self._settle(chosen)
        self.numerics = chosen.name
        self.made_by = chosen.made_by + (f", {facts.weights} weights" if facts.weights else "")
        self.made_by += self.kernel_backend.rounding
        self.made_by += (
            f", LayerNorm of {shown_torch()}" if chosen.name == "exact" and self._network.has_layer_norm else ""
        )
        code_rows = self._sizes.code_rows
        self.made_by += f", {code_rows.short_name} KV cache" if code_rows is not None else ""
        factors = self._network.rope_factors  # keys depend on them
        self.made_by += f", RoPE of the {factors} context" if factors else ""
        dtype = str(self.dtype).removeprefix("torch.")
        logger.info(
            "numerics: %s; kernels: %s; weights: %s; KV cache: %s",
            *(chosen.made_by, self.kernels, facts.weights or dtype, str(self._row_dtype).removeprefix("torch.")),
        )
        self.wants_dense_kv = chosen.attention.wants_dense_pages
        self._graphs = self._new_graphs()

    def _new_graphs(self) -> DecodeGraphs | None:
        """CUDA graphs of decode steps; None where kernels other than Triton's attend."""
        if self._attention.kernels != "triton":
            return None
        from worker.engines.embedded.model.cuda_graphs import DecodeGraphs  # triton is there with CUDA alone

        def compute(
            ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep
        ) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self._network.hidden(ids, positions, step)
            return hidden, self._network.logits(hidden)

        return DecodeGraphs(self._store, compute)

    def _settle(self, chosen: Numerics) -> None:
        self._chosen = chosen
        layers = list(linears(self.settled(self._network)))
        self._row_step = min((layer.tiling.step for layer in layers), default=1)
        self._tile = max((layer.tiling.most or 0 for layer in layers), default=0)
        self._attention = chosen.attention
        self._store.is_read_behind = chosen.attention.reads_behind

    def adapter_loader(self, dtype: str = "auto") -> Callable[[str, Path], LoadedAdapter]:
        """Function that loads a LoRA adapter by its name and directory, in one of
        `config.LORA_DTYPES`; it raises `ModelFileError`.

        Raises `NotSupported` unless native kernels compute the model's linear layers.
        """
        layers = self._adapted_layers(self._network)
        if layers is None:
            raise NotSupported(
                f"LoRA adapters are served where native kernels compute a model's linear layers; here {self.kernels} "
                f"kernels compute {self._facts.geometry.model_type}"
            )
        kept_in, in_use = resolve_dtype(dtype, self.dtype), LayersInUse(layers)
        self._layers_in_use = in_use

        def load(name: str, directory: Path) -> LoadedAdapter:
            with in_use.taken() as layers:
                return in_own_thread(lambda: load_adapter(name, directory, layers, kept_in))

        return load

    def _adapted_layers(self, network: Network) -> AdaptedLayers | None:
        is_native = isinstance(self._attention, NativeAttention) or network.adapts_with_any_attention
        return network.adapted_layers if is_native else None

    @property
    def geometry(self) -> Geometry:
        """Sizes of the model."""
        return self._facts.geometry

    @property
    def stored_format(self) -> str | None:
        """Format of a quantised checkpoint whose weights are kept as they are; else None."""
        return None if self.kernel_backend.quantisation else self._facts.weights

    @property
    def has_network(self) -> bool:
        """Whether it has weights."""
        return hasattr(self, "_network")

    def packed_weights(self) -> LlamaWeights | None:
        """The weights that the next step computes with; None where there are none, or other
        kernels than native ones compute a part of the model.
        """
        network = self._network if self.has_network else None
        return network.packed() if isinstance(network, LlamaNetwork) else None

    def updated(self, old: LlamaWeights, given: Given) -> LlamaNetwork:
        """A network with other weights, made beside the one that computes; see `weight_update`.

        Raises:
            WeightsRefused: a tensor cannot be taken.
        """
        weights = weight_update.updated(old, given, self._facts.geometry, self.kernel_backend)
        network = self.settled(LlamaNetwork(weights, self.kernel_backend, self._facts.context_length))
        if self._layers_in_use is not None:
            self._layers_in_use.check(self._adapted_layers(network))
        return network

    @property
    def network(self) -> Network:
        """The network that computes."""
        return self._network

    def settled(self, network: NetworkT) -> NetworkT:
        """`network`, of the same sizes, in the tilings that were chosen for this one. What was
        quantised may be dense now.
        """
        for layer in linears(network):
            layer.settle(tiling_of(layer, self._chosen, self.dtype))
        return network

    def replace_network(self, network: Network) -> None:
        """Compute with another network of the same sizes from the next step on; between steps.

        Raises `WeightsRefused` if LoRA adapters that were loaded meanwhile cannot go on with it.
        """

        def replace() -> None:
            self._network = network

        if self._layers_in_use is None:
            replace()
        else:
            self._layers_in_use.change(self._adapted_layers(network), replace)
        self._graphs = self._new_graphs()

    def drop_network(self) -> None:
        """Drop the weights, and their memory; `replace_network` comes before the next step."""
        self._graphs = None
        del self._network

    def give_kv_back(self) -> None:
        """Give the memory of the KV store back; `take_kv_back` comes before the next step."""
        self._graphs = None  # they read and write where it is, and hold results
        self._store.give_back()

    def take_kv_back(self) -> None:
        """Have the memory of the KV store again. Raises `RuntimeError` if it is not there."""
        self._store.take_back()
        self._graphs = self._new_graphs()

    def _inexact(self) -> str | None:
        """The reason why numerics are not exact although GEMMs and attention are; None for none."""
        if self._network.foreign:
            return f"nothing is known of the bits of {' and '.join(self._network.foreign)}"
        facts = self._facts
        ids = trial_ids(facts.heads * facts.head_dim, facts.context_length, facts.vocab_size)
        shape = (num_trial_pages(ids, self._sizes.page_size), facts.kv_heads, self._sizes.page_size, self._row_width)
        count = self._network.calls_per_layer  # layers share pages, for one is computed at a time; its calls do not
        pages = [torch.zeros(shape, dtype=self._row_dtype, device=self.device) for _ in range(2 * count)]
        keys, values = ([pages[2 * (call % count) + i] for call in range(facts.num_layers)] for i in range(2))
        store = KvStore(keys, values, self._sizes.code_rows)

        def compute(batch: Batch, layer: int) -> torch.Tensor:
            return self._hidden(batch, store, layer)[: len(batch.ids)]

        started_s = time.perf_counter()
        found = LayerTrial(self._network, compute, self._sizes.page_size, ids).difference()
        logger.debug("a prompt of %d tokens was tried in %.3f s", len(ids), time.perf_counter() - started_s)
        return None if found is None else f"{found} has other bits in another batch"

    def _padding(self, count: int) -> int:
        """Rows of padding behind `count` rows.

        They are what every GEMM needs; or, where the last tile is nearly full, the rest of it,
        since each GEMM would otherwise pad its own input (see `GemmTiling`).
        """
        tile = self._tile
        is_nearly_full = tile and count > tile and -count % tile < tile // 4
        return -count % (tile if is_nearly_full else self._row_step)

    @contextmanager
    def spare_store(self) -> Iterator[None]:
        """Computes in a KV store of one page beside its own, whose memory is not touched: the
        system would clear huge pages of every layer, which takes a tenth of a start.
        """
        own, graphs = self._store, self._graphs
        shape = (1, self._facts.kv_heads, self._sizes.page_size, self._row_width)
        keys, values = (
            [torch.zeros(shape, dtype=self._row_dtype, device=self.device) for _ in own.keys] for _ in range(2)
        )
        self._store, self._graphs = KvStore(keys, values, self._sizes.code_rows), None
        try:
            yield
        finally:
            self._store, self._graphs = own, graphs
            if own.ahead is not None:
                own.ahead.begin()

    @property
    def kv_store(self) -> KvStore:
        """Keys and values; empty before `allocate_kv`."""
        return self._store

    @torch.inference_mode()
    def forward(self, plan: Plan) -> torch.Tensor:
        """Logits in float32; see `Model.forward`."""
        with launching_on(self.device):
            return self._forward(plan)

    def _forward(self, plan: Plan) -> torch.Tensor:
        self._store.copy(plan.copies)
        if not plan.num_tokens:
            return torch.empty(0, self.vocab_size, device=self.device)
        batch = pack(plan, self._sizes.page_size)
        self._store.begin(batch.new_pages)
        computed = self._graphs.compute(batch) if self._graphs is not None and not plan.chunks else None
        if computed is not None:
            self._last_hidden, self._sum = computed.hidden, computed.sum
            return computed.logits
        hidden = self._hidden(batch, self._store)
        self._last_hidden = hidden[: len(batch.ids)]
        self._sum = self._last_hidden.sum(dtype=torch.float32)
        if plan.scored:
            show_scored(plan, hidden, self._network.logits)
        if plan.chunks:
            hidden = hidden[upload_ids(plan.logit_rows(), self.device)]
        elif len(hidden) > len(batch.ids):
            hidden = self._last_hidden
        if not plan.unread:
            return self._network.logits(hidden)
        return self._network.logits(hidden[upload_ids([*plan.places()], self.device)])

    @torch.inference_mode()
    def late_logits(self, rows: Sequence[int]) -> torch.Tensor:
        """See `Model.late_logits`."""
        with launching_on(self.device):
            return self._network.logits(self._last_hidden[upload_ids(rows, self.device)])

    @torch.inference_mode()
    def spoiled(self, plan: Plan) -> list[Request]:
        """See `Model.spoiled`."""
        if math.isfinite(self._sum.item()):
            return []
        spoiled = (~self._last_hidden.isfinite().all(-1)).tolist()
        found = {id(request): request for request, bad in zip(plan.owners(), spoiled, strict=True) if bad}
        return list(found.values())

    def _hidden(self, batch: Batch, store: KvStore, only: int | None = None) -> torch.Tensor:
        """Last hidden states, with those of padding behind; of one layer alone if it is given."""
        numbers = whole_numbers(batch.ids + batch.positions + batch.pages + batch.slots)
        tensors = upload(numbers.view(4, -1), self.device)
        step = self._attention.plan(store, batch.sequences, tensors[2:])
        step.read_rows = None if batch.read_rows is None else upload_ids(batch.read_rows, self.device)
        padding = self._padding(len(batch.ids))
        ids, positions = functional.pad(tensors[:2], (0, padding)) if padding else tensors[:2]
        if not batch.adapted:
            return self._network.hidden(ids, positions, step, only)
        runs = [(first, count, adapter.packed) for first, count, adapter in batch.adapted]
        return self._network.hidden(ids, positions, step, only, AdaptedRows(runs, len(ids)))
